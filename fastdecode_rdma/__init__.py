"""Decode large language models with the dense layers here and the KV-cache in attention workers."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# An application that configures no logging hears nothing; one that does decides what is shown.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Lazy: a CPU worker imports this package without torch.
_EXPORTS = {
    "Generator": ".generator",
    "RequestHandle": ".handles",
    "AsyncEventStream": ".handles",
    "GeneratorStats": ".stats",
    "SamplingParams": ".sequence",
    "Chat": ".chat",
    "TokenEvent": ".sequence",
    "CompletionOutput": ".sequence",
    "RequestOutput": ".sequence",
    "Logprob": ".sequence",
    "Loglikelihood": ".scoring",
    "FastDecodeError": ".errors",
    "ConfigError": ".errors",
    "SamplingError": ".errors",
    "QueueFullError": ".errors",
    "RequestCancelledError": ".errors",
    "GeneratorClosedError": ".errors",
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
