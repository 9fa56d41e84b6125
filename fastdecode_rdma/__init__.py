"""Decode large language models with the dense layers here and the KV-cache in attention workers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Lazy: a CPU worker imports this package without torch.
_EXPORTS = {
    "Generator": ".generator",
    "SamplingParams": ".sequence",
    "TokenEvent": ".sequence",
    "CompletionOutput": ".sequence",
    "RequestOutput": ".sequence",
    "Logprob": ".sequence",
    "FastDecodeError": ".errors",
    "ConfigError": ".errors",
    "SamplingError": ".errors",
    "ProtocolError": ".errors",
    "TransportError": ".errors",
    "WorkerError": ".errors",
    "WorkerLostError": ".errors",
    "CacheFullError": ".errors",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
