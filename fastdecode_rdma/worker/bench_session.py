"""The session of a benchmark: frames are answered, but there is no kernel and no K/V. What would be
imported are commands to its end of a bare queue pair."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy as np

from fastdecode_rdma import host_facts
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.transport._pump import null_entry
from fastdecode_rdma.transport.base import FrameSizes, NativeEntry

BARE_ANSWER = 1
"""Exported under this handle: what the last command to the bare queue pair brought."""


class BenchSession:
    """Takes any step and any rows. What can be exported of it is what this end says of itself."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self.geometry = geometry
        self._fd = -1
        self._bare: Any = None

    def attach(self, fd: int) -> None:
        """Says which data socket this end's counters are of."""
        self._fd = fd

    def begin_step(self, table: int, step: int, entries: np.ndarray) -> None:
        """Holds nothing, so nothing is begun."""

    def free(self, handles: np.ndarray) -> None:
        """Holds nothing, so nothing is freed."""

    def fork(self, src: int, dst: int, length: int) -> None:
        """Holds nothing, so there is nothing to share."""

    def export_range(self, handle: int, start: int, stop: int) -> bytes:
        """Returns facts of this machine and link and the counters of this end, as JSON; under
        BARE_ANSWER what the bare queue pair's last command brought."""
        if handle == BARE_ANSWER and self._bare is not None:
            return bytes(self._bare.answer())
        facts: dict[str, Any] = {
            "machine": host_facts.machine_facts(),
            "link": host_facts.link_facts(self._fd),
            "counters": host_facts.counters(self._fd),
        }
        return json.dumps(facts).encode()

    def import_range(self, handle: int, start: int, data: bytes) -> None:
        """Does what a client asks of a bare queue pair.

        Raises:
            ConfigError, TransportError: it cannot be done here; says why.
        """
        if self._bare is None:  # its room needs RDMA, which most benchmarks do not
            bare = import_module("fastdecode_rdma.transport.rdma_bare")
            self._bare = bare.BareServer(FrameSizes.of(self.geometry).latency_bytes)
        self._bare.command(data)

    def native(self) -> NativeEntry:
        """Returns entry points that do nothing."""
        return null_entry()

    def stats(self) -> dict[str, object]:
        """Returns that it holds no sequences."""
        return {"sequences": 0}

    def close(self) -> None:
        """Ends the bare queue pair; idempotent."""
        if self._bare is not None:
            self._bare.close()
