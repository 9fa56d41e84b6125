"""What the pump itself costs: microseconds of its own code per message, with 1, 4 and 16 workers.

    python bench/bench_pump.py [--workers 1,4,16] [--layers 32] [--steps 200] [--json F]

Workers serve in this process over socket pairs, with real sessions of a small model, so that the
wire and the kernel cost next to nothing. Beside our own code ("pump") stand the system calls that
move the bytes ("send + receive") and the same exchange written in Python (one sendmsg and one
recv_into per worker and layer), which is what a pump in C saves.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from pathlib import Path

import numpy as np
from fastdecode_rdma.transport._pump import Pump

from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.transport.base import FrameSizes, plan_slots
from fastdecode_rdma.transport.serve import DataPlane
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

EPOCH = 1
ROWS_PER_WORKER = 4


def geometry_of(num_layers: int, num_workers: int) -> AttentionGeometry:
    group = KVGroup(tuple(range(num_layers)), num_q_heads=4, num_kv_heads=1, head_dim=16)
    return AttentionGeometry((group,), 0.25, "fp16", ROWS_PER_WORKER * num_workers, 4096)


class Rig:
    """A pump and its workers, a thread each."""

    def __init__(self, num_workers: int, num_layers: int) -> None:
        self.geometry = geometry_of(num_layers, num_workers)
        self.pump = Pump(FrameSizes.of(self.geometry), timeout_s=30.0)
        rows = self.geometry.max_rows
        self.buffers = (
            np.zeros((rows, self.geometry.max_row_width), np.float32),
            np.zeros((rows, self.geometry.max_out_width), np.float32),
            np.zeros(rows, np.uint8),
        )
        send, recv, status = (buffer.ctypes.data for buffer in self.buffers)
        self.pump.set_buffers(0, send=send, recv=recv, status=status, owner=self.buffers)
        self.budget = MemoryBudget(1 << 28)
        self.num_workers = num_workers
        slots = plan_slots(self.geometry)
        for index in range(num_workers):
            ours, theirs = socket.socketpair()
            self.pump.add_stream(
                f"worker{index}", ours.detach(), epoch=EPOCH,
                latency_slots=slots.num_latency, bulk_slots=slots.num_bulk,
            )  # fmt: skip
            session = AttentionSession(self.geometry, self.budget, 1)
            plane = DataPlane(theirs.fileno(), EPOCH, slots, session)
            threading.Thread(target=self._serve, args=(plane, theirs, session), daemon=True).start()

    @staticmethod
    def _serve(plane: DataPlane, sock: socket.socket, session: AttentionSession) -> None:
        plane.run()
        sock.close()
        session.close()

    def run(self, steps: int) -> dict[str, float]:
        """Runs decode steps; microseconds per message and per exchange."""
        entries = np.zeros(ROWS_PER_WORKER, ENTRY_DTYPE)
        entries["handle"], entries["q_len"] = np.arange(1, ROWS_PER_WORKER + 1), 1
        before = self._totals()
        exchange_s = 0.0
        for step in range(1, steps + 1):
            entries["kv_len_before"] = step - 1
            self.pump.begin(0, step, [(w, entries) for w in range(self.num_workers)])
            start = time.perf_counter()
            for layer in range(self.geometry.num_layers):
                self.pump.exchange(0, layer)
            exchange_s += time.perf_counter() - start
        after = self._totals()
        messages = after["messages"] - before["messages"]
        return {
            "pump_us": (after["pump_ns"] - before["pump_ns"]) / messages / 1e3,
            "io_us": (after["io_ns"] - before["io_ns"]) / messages / 1e3,
            "exchange_us": exchange_s / steps / self.geometry.num_layers * 1e6,
        }

    def _totals(self) -> dict[str, int]:
        stats = [self.pump.stats(worker) for worker in range(self.num_workers)]
        return {key: sum(s[key] for s in stats) for key in ("messages", "pump_ns", "io_ns")}


def python_exchange_us(num_workers: int, num_layers: int, steps: int) -> float:
    """The same bytes moved by Python: per worker and layer one sendmsg, one recv_into each way."""
    geometry = geometry_of(num_layers, num_workers)
    rows = np.zeros((ROWS_PER_WORKER, geometry.max_row_width), np.float32)
    out = np.zeros(64 + ROWS_PER_WORKER * (geometry.max_out_width * 4 + 1), np.uint8)
    pairs = [socket.socketpair() for _ in range(num_workers)]

    def echo(sock: socket.socket) -> None:
        want, reply = bytearray(64 + rows.nbytes), bytes(out)
        while sock.recv_into(want, 0, socket.MSG_WAITALL):
            sock.sendall(reply)

    for _, theirs in pairs:
        threading.Thread(target=echo, args=(theirs,), daemon=True).start()
    header = bytes(64)
    start = time.perf_counter()
    for _ in range(steps * num_layers):
        for ours, _ in pairs:
            ours.sendmsg([header, rows])
        for ours, _ in pairs:
            ours.recv_into(out, 0, socket.MSG_WAITALL)
    elapsed = time.perf_counter() - start
    for ours, _ in pairs:
        ours.close()
    return elapsed / steps / num_layers * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    results = {}
    heads = ("workers", "pump", "send+recv", "exchange", "in Python")
    print(f"{heads[0]:>7} " + " ".join(f"{head:>10}" for head in heads[1:]) + "   (us)")
    for num_workers in (int(part) for part in args.workers.split(",")):
        rig = Rig(num_workers, args.layers)
        rig.run(args.steps // 10 + 1)
        runs = [rig.run(args.steps) for _ in range(3)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row["python_us"] = python_exchange_us(num_workers, args.layers, args.steps // 4 + 1)
        rig.pump.close()
        results[num_workers] = row
        print(
            f"{num_workers:>7} {row['pump_us']:>10.2f} {row['io_us']:>10.2f} "
            f"{row['exchange_us']:>10.1f} {row['python_us']:>10.1f}",
            flush=True,
        )
    load = os.getloadavg()[0]
    print(f"pump and send+recv per message, exchange per layer; load average {load:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"load": load, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
