"""Model files: GGUF conversion and the demo models. Imported only by the commands that need it."""

from __future__ import annotations
