"""The attention worker: KV-cache, kernel and the process that serves them. Numpy, never torch."""

from __future__ import annotations
