"""The way to some workers, measured briefly in both directions: `fastdecode doctor --workers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.bench.interconnect_peer import Measurement, Outcome, Peer, at_once
from fastdecode_rdma.errors import FastDecodeError

SMALL, LARGE = 64, 1 << 20
DEPTH = 8
DURATION_S = 0.2
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Path:
    """How one worker is reached. Half a round trip of 64 bytes; bandwidth at 1 MiB a message, to
    the worker and from it. `error`: why nothing was measured."""

    worker: str
    plane: str = ""
    detail: str = ""
    fallback_reason: str = ""
    latency_usec: float = 0.0
    to_gbit_per_s: float = 0.0
    from_gbit_per_s: float = 0.0
    error: str = ""

    def json(self) -> dict[str, object]:
        return asdict(self)

    def line(self) -> str:
        """Returns what there is to say in a line."""
        if self.error:
            return self.error
        detail = f" ({self.detail})" if self.detail else ""
        reason = f"; {self.fallback_reason}" if self.fallback_reason else ""
        return (
            f"{self.plane}{detail}, {self.latency_usec:.1f} usec, {self.to_gbit_per_s:.2f} Gb/s "
            f"there, {self.from_gbit_per_s:.2f} Gb/s back{reason}"
        )


def measure_paths(workers: Sequence[str], token: bytes | None) -> list[Path]:
    """Returns the paths in order; one that fails says why and holds up no other."""
    heartbeats = Heartbeats()
    return [_measure(worker, token, heartbeats) for worker in workers]


def _measure(worker: str, token: bytes | None, heartbeats: Heartbeats) -> Path:
    try:
        peer = Peer(
            worker, heartbeats=heartbeats, max_bytes=LARGE, depth=DEPTH, token=token,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
    except FastDecodeError as error:
        return Path(worker, error=str(error))
    try:
        pings = _run(peer, "ping", SMALL)
        there, back = (_run(peer, mode, LARGE) for mode in ("stream", "reads"))
    except FastDecodeError as error:
        return Path(worker, error=str(error))
    finally:
        peer.close()
    info = peer.worker.info
    return Path(
        worker,
        plane=peer.plane,
        detail=info.transport_detail,
        fallback_reason=info.fallback_reason,
        latency_usec=float(np.median(pings.times_ns)) / 2e3,
        to_gbit_per_s=8e-9 * LARGE * there.done / there.elapsed_s,
        from_gbit_per_s=8e-9 * LARGE * back.done / back.elapsed_s,
    )


def _run(peer: Peer, mode: str, nbytes: int) -> Outcome:
    what = Measurement(mode, nbytes, 0, 2, DURATION_S, depth=min(DEPTH, peer.num_slots))
    return at_once([peer], lambda one: one.measure(what), timeout_s=TIMEOUT_S)[0]
