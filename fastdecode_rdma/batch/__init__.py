"""Files of requests, one JSON object a line: read lazily, run together, written as they finish."""

from __future__ import annotations
