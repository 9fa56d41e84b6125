"""One connection to a benchmark's peer, and measurements on several of them at once."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastdecode_rdma import host_facts
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.attention.remote import RemoteWorker
from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport._pump import Pump, bench_port, set_spin_ns, stream_fd
from fastdecode_rdma.transport.base import BULK_BYTES, FrameSizes
from fastdecode_rdma.wire.frame import FrameKind, pack_range
from fastdecode_rdma.wire.messages import OpenBench, SlotPlan

if TYPE_CHECKING:
    from fastdecode_rdma.bench.interconnect_bare import BarePeer

ROW_BYTES = 768
"""Of the geometry that stands for messages: one head of 64 elements, q, k and v in fp32."""

MAX_MESSAGE_BYTES = ROW_BYTES << 16
SLOT_MEMORY = 256 << 20
"""Slots of one direction take at most this: fewer of them where messages are long."""

TIMES_KEPT = 1 << 20
POLL_S = 0.02

Result = TypeVar("Result")


def message_geometry(nbytes: int) -> AttentionGeometry:
    """Returns a model whose rows of one layer hold a message of `nbytes`."""
    group = KVGroup((0,), num_q_heads=1, num_kv_heads=1, head_dim=64)
    return AttentionGeometry((group,), 0.125, "fp32", -(-nbytes // ROW_BYTES), 64)


def slots_for(nbytes: int, depth: int) -> int:
    """Returns how many messages of `nbytes` can be under way where `depth` are asked for."""
    return max(2, min(depth, 256, SLOT_MEMORY // nbytes))


@dataclass(frozen=True)
class Measurement:
    """What bench_port is asked for. `mode`: ping, read, stream, pingpong or reads; of a bare queue
    pair latency, bandwidth or both_ways, and what follows `check` means something to it alone."""

    mode: str
    nbytes: int
    iterations: int
    warm_up: int
    duration_s: float = 0.0
    depth: int = 1
    check: bool = False
    kind: str = ""
    post_list: int = 1
    cq_mod: int = 16
    events: bool = False


@dataclass(frozen=True)
class Outcome:
    """`times_ns`: round trips, latency only. `peak`: bytes per second, 0: too short for one.
    `bad_place`: the first wrong byte of the first message that came changed, from 1."""

    done: int
    elapsed_s: float
    peak: float
    times_ns: np.ndarray
    num_bad: int
    bad_place: int


class Peer:
    """A session at a worker, or at `fastdecode bench serve`, and the pump that drives it."""

    def __init__(
        self,
        url: str,
        *,
        heartbeats: Heartbeats,
        max_bytes: int,
        depth: int,
        token: bytes | None = None,
        force: bool = False,
        timeout_s: float,
        events: bool = False,
        bare_kind: str = "",
    ) -> None:
        """`events`: sleep until there is news. `bare_kind`: messages go over a bare queue pair, by
        write, send or read.

        Raises: as RemoteWorker.connect, and as BarePeer.
        """
        bare_depth, depth = depth, 2 if bare_kind else depth
        geometry = message_geometry(max_bytes)
        sizes = FrameSizes.of(geometry)
        self.num_slots = slots_for(max_bytes, depth)
        slots = SlotPlan(self.num_slots, 1, sizes.latency_bytes, BULK_BYTES)
        self.worker = RemoteWorker.connect(
            url,
            geometry,
            heartbeats=heartbeats,
            token=token,
            opening=lambda plane: OpenBench(geometry, slots, plane, force),
        )
        self.name = self.worker.info.name
        self.plane = self.worker.info.transport
        self.pump = Pump(sizes, timeout_s=timeout_s)
        self.port = self.worker.transport.attach(self.pump)
        self.worker.on_lost(lambda reason: self.pump.mark_lost(self.port, reason))
        os.set_blocking(self.fd, True)  # the loops wait in the kernel, without a poll
        self._send = np.zeros(max_bytes, np.uint8)
        self._recv = np.zeros(max_bytes, np.uint8)
        self._timeout_s = timeout_s
        self._given_up = ""
        if events and self.plane == "rdma":
            set_spin_ns(self.pump, self.port, 0)
        self._bare: BarePeer | None = None
        if bare_kind:
            try:
                self._bare = self._open_bare(bare_kind, max_bytes, bare_depth)
            except BaseException:
                self.close()
                raise

    def _open_bare(self, kind: str, max_bytes: int, depth: int) -> BarePeer:
        bare = import_module("fastdecode_rdma.bench.interconnect_bare")
        return bare.BarePeer(
            self.name, self.worker.transport, self.pump, self.port, kind,
            max_bytes=max_bytes, depth=depth,
        )  # fmt: skip

    @property
    def fd(self) -> int:
        """The socket of the data plane."""
        return int(stream_fd(self.pump, self.port))

    def measure(self, what: Measurement) -> Outcome:
        """Warms up, then measures. Blocks without the GIL; mark_lost() from elsewhere ends it.

        Raises:
            WorkerLostError: the connection broke.
        """
        run = self._run if self._bare is None else self._run_bare
        if what.warm_up:
            run(what, iterations=what.warm_up, max_ns=0)
        return run(what, iterations=what.iterations, max_ns=int(what.duration_s * 1e9))

    def _run_bare(self, what: Measurement, *, iterations: int, max_ns: int) -> Outcome:
        bare = import_module("fastdecode_rdma.transport.rdma_bare")
        is_latency = what.mode == "latency"
        kept = min(iterations or TIMES_KEPT, TIMES_KEPT) if is_latency else 1
        times = np.zeros(kept, np.uint64)
        run = bare.BareRun(
            what.kind, what.mode, what.nbytes, iterations, max_ns, what.depth, what.post_list,
            min(what.cq_mod, what.depth), what.events, what.check, int(self._timeout_s * 1e9),
        )  # fmt: skip
        try:
            ours, theirs = self._bare.measure(run, times)
        except TransportError as error:
            if error.errno != errno.ECANCELED:
                raise
            raise TransportError(f"{self.name}: {self._given_up}") from error
        elapsed_s, peak = max(1, ours.elapsed_ns) / 1e9, ours.peak
        if what.mode == "both_ways" and theirs.done:  # each end has timed its own
            rate = ours.done / elapsed_s + theirs.done / max(1, theirs.elapsed_ns) * 1e9
            elapsed_s, peak = 2 * ours.done / rate, (ours.peak + theirs.peak) / 2
        wrong = ours.bad_place or theirs.bad_place
        return Outcome(
            ours.done, elapsed_s, peak * 1e9, times[: min(ours.done, kept)] if is_latency else
            times[:0], int(wrong > 0), wrong,
        )  # fmt: skip

    def _run(self, what: Measurement, *, iterations: int, max_ns: int) -> Outcome:
        is_latency = what.mode in ("ping", "read")
        kept = min(iterations or TIMES_KEPT, TIMES_KEPT) if is_latency else 1
        times = np.zeros(kept, np.uint64)
        run = bench_port(
            self.pump, self.port, mode=what.mode, nbytes=what.nbytes, iterations=iterations,
            max_ns=max_ns, send=self._send.ctypes.data, recv=self._recv.ctypes.data, times=times,
            depth=what.depth, check=what.check,
        )  # fmt: skip
        return Outcome(
            run["done"], max(1, run["elapsed_ns"]) / 1e9, run["peak_bytes_per_ns"] * 1e9,
            times[: min(run["done"], kept)] if is_latency else times[:0], run["bad"],
            run["bad_place"],
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Returns what the peer says of its machine, its link and its counters."""
        return dict(json.loads(self.pump.request(self.port, FrameKind.EXPORT, payload=NO_RANGE)))

    def counters(self) -> dict[str, int]:
        """Returns our own end's."""
        return host_facts.counters(self.fd)

    def progress(self) -> int:
        """Moves whenever bytes do; callable from any thread."""
        stats = self.pump.stats(self.port)
        bare = 0 if self._bare is None else self._bare.progress
        return int(stats["messages"] + stats["bytes_sent"] + stats["bytes_received"]) + bare

    def give_up(self, reason: str) -> None:
        """Ends what runs, from any thread."""
        self._given_up = reason
        if self._bare is not None:
            self._bare.stop()
        self.pump.mark_lost(self.port, reason)

    def close(self) -> None:
        """Ends the session; idempotent."""
        if self._bare is not None:
            self._bare.close()
        self.worker.close()
        self.pump.close()


NO_RANGE = pack_range(0, 0, 0)


class _Job(threading.Thread):
    """One peer's part of what runs at the same time."""

    def __init__(self, peer: Peer, work: Callable[[Peer], Any], start: threading.Barrier) -> None:
        super().__init__(name=f"bench {peer.name}", daemon=True)
        self.peer = peer
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._start_line = start

    def run(self) -> None:
        try:
            self._start_line.wait()
            self.result = self._work(self.peer)
        except BaseException as error:  # raised again by whoever waits
            self.error = error


def at_once(
    peers: Sequence[Peer], work: Callable[[Peer], Result], *, timeout_s: float
) -> list[Result]:
    """Runs `work` on all peers at the same time; returns the results in order.

    Raises:
        WorkerLostError: a peer died, or nothing moved for `timeout_s`.
    """
    start = threading.Barrier(len(peers))
    jobs = [_Job(peer, work, start) for peer in peers]
    try:
        for job in jobs:
            job.start()
        _watch(jobs, timeout_s)
    finally:
        if any(job.is_alive() for job in jobs):
            for job in jobs:
                job.peer.give_up("the benchmark was stopped")
            for job in jobs:
                job.join()
    for job in jobs:
        if job.error is not None:
            raise job.error
    return [job.result for job in jobs]


def _watch(jobs: Sequence[_Job], timeout_s: float) -> None:
    """Waits for all; a peer whose bytes stand still for too long is given up."""
    seen = {job: (job.peer.progress(), time.monotonic()) for job in jobs}
    while running := [job for job in jobs if job.is_alive()]:
        running[0].join(POLL_S)
        now_s = time.monotonic()
        for job in running:
            progress = job.peer.progress()
            if progress != seen[job][0]:
                seen[job] = progress, now_s
            elif now_s - seen[job][1] > timeout_s:
                job.peer.give_up(f"nothing came or went for {timeout_s:g} s")
