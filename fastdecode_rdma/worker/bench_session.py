"""The session of a benchmark: frames are answered, but there is no kernel and no K/V."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fastdecode_rdma import host_facts
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport._pump import null_entry
from fastdecode_rdma.transport.base import NativeEntry


class BenchSession:
    """Takes any step and any rows. What can be exported of it is what this end says of itself."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self.geometry = geometry
        self._fd = -1

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
        """Returns facts of this machine and link and the counters of this end, as JSON."""
        facts: dict[str, Any] = {
            "machine": host_facts.machine_facts(),
            "link": host_facts.link_facts(self._fd),
            "counters": host_facts.counters(self._fd),
        }
        return json.dumps(facts).encode()

    def import_range(self, handle: int, start: int, data: bytes) -> None:
        """Refuses.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a benchmark's session holds no K/V")

    def native(self) -> NativeEntry:
        """Returns entry points that do nothing."""
        return null_entry()

    def stats(self) -> dict[str, object]:
        """Returns that it holds no sequences."""
        return {"sequences": 0}

    def close(self) -> None:
        """Frees nothing; idempotent."""
