"""The engine's side of attention: workers, placement, and the calls of every layer."""

from __future__ import annotations
