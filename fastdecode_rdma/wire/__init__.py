"""The control protocol between engines and workers, sans I/O; see connection.py."""

from __future__ import annotations
