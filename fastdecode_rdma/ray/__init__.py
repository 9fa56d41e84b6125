"""Batch inference on a Ray cluster: attention workers as actors on its CPUs, engines in Ray Data.

`build_processor(FastDecodeProcessorConfig(...), preprocess=, postprocess=)` has the shape of
ray.data.llm's; `fastdecode generate --ray` does the same for files. Needs the extra `ray`.
"""

from __future__ import annotations

from importlib import import_module

_EXPORTS = {
    "FastDecodeProcessor": ".processor",
    "FastDecodeProcessorConfig": ".processor",
    "WorkerPool": ".workers",
    "build_processor": ".processor",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
