"""The lm-evaluation-harness over a Generator: `FastDecodeLM`, and `fastdecode lm-eval`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FastDecodeLM"]


def __getattr__(name: str) -> Any:
    # lazy: the harness is an extra, and the command line looks into this package without it
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".model", __name__), name)
