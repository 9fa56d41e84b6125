"""Half a round trip between two processes, by data plane: tcp, shm that spins, shm that sleeps.

    python bench/bench_planes.py [--sizes 64,4096,65536,1048576] [--rounds 9] [--seconds 0.2]
                                 [--cores 0,1] [--json F]

The engine's pump exchanges rows of a size with a worker that computes nothing: what is measured is
one whole Pump.exchange, so it holds our own code on both sides and one Python call. The two
processes have a core each (--cores), as spinning makes no sense elsewhere. Planes take turns within
a round, so that whatever else the machine does hits all of them; the figures are medians of rounds.
The bar: shm's half round trip is at most a quarter of tcp's at 4 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from fastdecode_rdma.transport._pump import (
    NULL_ATTEND,
    NULL_STORE,
    FrameServer,
    Pump,
    ShmPlane,
    shm_segment_bytes,
)

from fastdecode_rdma.config import ENTRY_DTYPE
from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.transport.same_host import SPIN_NS
from fastdecode_rdma.transport.shm import make_segment
from fastdecode_rdma.transport.tcp import prepare_socket
from fastdecode_rdma.wire.frame import FrameKind
from fastdecode_rdma.wire.messages import SlotPlan

EPOCH = 1
PLANES = ("tcp", "shm", "shm asleep")
BAR = 0.25
BAR_SIZE = 4096


def sizes_of(nbytes: int) -> FrameSizes:
    """One row of `nbytes` each way; its status byte comes on top."""
    return FrameSizes((nbytes,), (nbytes,), (64,), max_rows=1, max_bulk_bytes=4096)


def slots_of(sizes: FrameSizes) -> SlotPlan:
    return SlotPlan(8, 4, sizes.latency_bytes, sizes.max_bulk_bytes)


def serve(fd: int, segment: int, spin_ns: int, nbytes: int) -> None:
    """The worker's process: arms whatever step begins, and answers."""
    sizes = sizes_of(nbytes)
    plane = None
    if segment >= 0:
        plane = ShmPlane(segment, slots_of(sizes), sizes, is_engine=False, spin_ns=spin_ns)
    server = FrameServer(
        fd, sizes, epoch=EPOCH, latency_slots=8, bulk_slots=4, attend=NULL_ATTEND,
        store=NULL_STORE, ctx=0, plane=plane,
    )  # fmt: skip
    while (received := server.run()) is not None:
        frame, _ = received
        server.arm(frame.table, frame.step)
        server.reply(FrameKind.STEP_READY)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for sock in (ours, theirs):
        prepare_socket(sock)
    return ours, theirs


class Link:
    """An engine here and a worker process on the other core, on one plane, for one size."""

    def __init__(self, plane: str, nbytes: int, core: int | None) -> None:
        sizes, is_shm = sizes_of(nbytes), plane != "tcp"
        spin_ns = SPIN_NS if plane == "shm" else 0
        ours, theirs = socket.socketpair() if is_shm else tcp_pair()
        slots, end, segment = slots_of(sizes), None, -1
        if is_shm:
            segment = make_segment(shm_segment_bytes(slots, sizes))
            end = ShmPlane(segment, slots, sizes, is_engine=True, spin_ns=spin_ns)
        fds = [theirs.fileno(), *([segment] if is_shm else [])]
        values = [theirs.fileno(), segment, spin_ns, nbytes, -1 if core is None else core]
        command = [sys.executable, __file__, "--serve", ",".join(map(str, values))]
        self.worker = subprocess.Popen(command, pass_fds=fds)
        theirs.close()
        if is_shm:
            os.close(segment)
        self.pump = Pump(sizes, timeout_s=30.0)
        self.rows = np.zeros((2, nbytes), np.uint8)
        self.status = np.zeros(1, np.uint8)
        self.pump.set_buffers(
            0, send=self.rows[0].ctypes.data, recv=self.rows[1].ctypes.data,
            status=self.status.ctypes.data, owner=(self.rows, self.status),
        )  # fmt: skip
        self.pump.add_stream(
            plane, ours.detach(), epoch=EPOCH, latency_slots=8, bulk_slots=4, plane=end
        )
        entries = np.zeros(1, ENTRY_DTYPE)
        entries["q_len"] = 1
        self.pump.begin(0, 1, [(0, entries)])
        self.pump.wait_ready(0, 0)

    def half_round_trip_us(self, seconds: float) -> float:
        """The median of short runs, so that a moment of somebody else's load does not count."""
        exchange, times = self.pump.exchange, []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(50):
                exchange(0, 0)
            times.append((time.perf_counter() - start) / 100 * 1e6)
        return statistics.median(times)

    def close(self) -> None:
        self.pump.close()
        self.worker.wait(10)


def measure(nbytes: int, *, rounds: int, seconds: float, core: int | None) -> dict[str, float]:
    links = {plane: Link(plane, nbytes, core) for plane in PLANES}
    found: dict[str, list[float]] = {plane: [] for plane in PLANES}
    try:
        for number in range(rounds + 1):
            for plane, link in links.items():
                us = link.half_round_trip_us(seconds)
                if number:  # the first warms up
                    found[plane].append(us)
    finally:
        for link in links.values():
            link.close()
    return {plane: statistics.median(values) for plane, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64,4096,65536,1048576")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="per plane and round")
    parser.add_argument("--cores", default="0,1", help="engine's and worker's; empty: not pinned")
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        fd, segment, spin_ns, nbytes, core = map(int, args.serve.split(","))
        if core >= 0:
            os.sched_setaffinity(0, {core})
        serve(fd, segment, spin_ns, nbytes)
        return 0
    core = None
    if args.cores:
        own, core = map(int, args.cores.split(","))
        os.sched_setaffinity(0, {own})
    print("half a round trip in us, median")
    print(f"{'bytes':>9} " + " ".join(f"{plane:>10}" for plane in PLANES) + f" {'shm/tcp':>8}")
    results = {}
    for nbytes in map(int, args.sizes.split(",")):
        row = measure(nbytes, rounds=args.rounds, seconds=args.seconds, core=core)
        results[nbytes] = row
        ratio = row["shm"] / row["tcp"]
        bar = f"   bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}" if nbytes == BAR_SIZE else ""
        cells = " ".join(f"{row[plane]:>10.2f}" for plane in PLANES)
        print(f"{nbytes:>9} {cells} {ratio:>8.2f}{bar}", flush=True)
    load = os.getloadavg()[0]
    print(f"load average {load:.2f}, cores {args.cores or 'not pinned'}")
    if args.json:
        Path(args.json).write_text(json.dumps({"load": load, "half_us": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
