"""Tests exercise the installed distribution (wheel or editable), never the bare checkout."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != CHECKOUT]
