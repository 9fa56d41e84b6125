"""The data planes beside the least that TCP costs: plain C with send and recv, interleaved.

    python bench/compare_interconnect.py [--repeats 7] [--iters 2000] [--json F]

Our figures are those of `fastdecode bench interconnect`: frames with a header, slots and credits.
The two ends of every pair run on CPUs of their own, where there are two. Bars, on the median over
repetitions of the ratio within one: tcp at most 1.2 times plain C's half round trip at 64 B and
64 KiB, at least 0.9 of its bandwidth at 1 MiB; shm's half round trip at most 0.25 of tcp's at
4 KiB. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastdecode_rdma import host_facts
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.bench.interconnect_peer import Measurement, Peer, at_once

SOURCE = Path(__file__).with_name("pingpong.c")
LATENCY_BYTES = (64, 4096, 65536)
STREAM_BYTES = (65536, 1 << 20)
STREAM_TOTAL = 256 << 20
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Bar:
    """One figure over another, and what it may be."""

    text: str
    ratio: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.ratio <= self.limit if self.at_most else self.ratio >= self.limit


class PlainC:
    """The C program: its server, and a client per measurement."""

    def __init__(self, folder: str, cpu: int) -> None:
        self._program = str(Path(folder) / "pingpong")
        subprocess.run(["gcc", "-O2", "-Wall", "-o", self._program, str(SOURCE)], check=True)
        with on_cpu(cpu):
            self._server = subprocess.Popen(
                [self._program, "serve"], stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdout is not None
        self._port = self._server.stdout.readline().strip()

    def run(self, what: str, nbytes: int, count: int, warm_up: int) -> float:
        """Half a round trip in nanoseconds, or bytes per second."""
        command = [self._program, what, self._port, *map(str, (nbytes, count, warm_up))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        return float(done.stdout)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


@contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """Lets this thread, and what it starts meanwhile, run on one CPU only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Ours:
    """A `fastdecode bench serve` and a connection over each plane."""

    def __init__(self, folder: str, cpu: int) -> None:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "fastdecode_rdma.cli", "bench", "serve"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        with on_cpu(cpu):
            self._server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        place = self._server.stdout.readline().split()[1].removeprefix("tcp://")
        self._peers = {
            plane: Peer(
                f"{plane}://{place}", heartbeats=Heartbeats(), max_bytes=max(STREAM_BYTES),
                depth=128, timeout_s=TIMEOUT_S,
            )
            for plane in ("tcp", "shm")
        }  # fmt: skip

    def run(self, plane: str, mode: str, nbytes: int, count: int, warm_up: int) -> float:
        """Half a round trip in nanoseconds, or bytes per second."""
        peer = self._peers[plane]
        depth = peer.num_slots if mode == "stream" else 1
        what = Measurement(mode, nbytes, count, warm_up, depth=depth)
        (found,) = at_once([peer], lambda one: one.measure(what), timeout_s=TIMEOUT_S)
        if mode == "stream":
            return found.done * nbytes / found.elapsed_s
        return float(np.median(found.times_ns)) / 2

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._server.kill()
        self._server.wait()


def measure(ours: Ours, plain: PlainC, repeats: int, iters: int) -> dict[str, list[float]]:
    """Runs everything in turn, so often; figures by name."""
    calls: dict[str, Callable[[], float]] = {}
    for nbytes in LATENCY_BYTES:
        args = (nbytes, iters, iters // 10 + 1)
        calls[f"plain C {nbytes}"] = lambda args=args: plain.run("ping", *args)
        for plane in ("tcp", "shm"):
            calls[f"{plane} {nbytes}"] = lambda p=plane, args=args: ours.run(p, "ping", *args)
    for nbytes in STREAM_BYTES:
        count = STREAM_TOTAL // nbytes
        args = (nbytes, count, count // 10 + 1)
        calls[f"plain C stream {nbytes}"] = lambda args=args: plain.run("stream", *args)
        for plane in ("tcp", "shm"):
            calls[f"{plane} stream {nbytes}"] = lambda p=plane, args=args: ours.run(
                p, "stream", *args
            )
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name, call in calls.items():
            figures[name].append(call())
        print(f"\rrepetition {turn + 1} of {repeats}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def bars_of(figures: dict[str, list[float]]) -> list[Bar]:
    """The figures that must hold."""

    def ratio(name: str, other: str) -> float:
        pairs = zip(figures[name], figures[other], strict=True)
        return statistics.median(one / two for one, two in pairs)

    mib = 1 << 20
    return [
        *(
            Bar(
                f"tcp / plain C, half round trip at {nbytes} B",
                ratio(f"tcp {nbytes}", f"plain C {nbytes}"), 1.2, at_most=True,
            )
            for nbytes in (64, 65536)
        ),
        Bar(
            "tcp / plain C, bandwidth at 1 MiB",
            ratio(f"tcp stream {mib}", f"plain C stream {mib}"), 0.9, at_most=False,
        ),
        Bar(
            "shm / tcp, half round trip at 4096 B", ratio("shm 4096", "tcp 4096"), 0.25,
            at_most=True,
        ),
    ]  # fmt: skip


def print_figures(figures: dict[str, list[float]]) -> None:
    """Median, least and most of each."""
    for name, values in figures.items():
        factor, unit = (8e-9, "Gb/s") if "stream" in name else (1e-3, "usec")
        middle, least, most = (
            f"{value * factor:.2f}"
            for value in (statistics.median(values), min(values), max(values))
        )
        print(f"{name:<24} {middle:>9} {unit}   ({least} to {most})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--iters", type=int, default=2000, help="round trips of each size")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, on_cpu(cpus[0]):
        plain, ours = PlainC(folder, cpus[-1]), Ours(folder, cpus[-1])
        try:
            figures = measure(ours, plain, args.repeats, args.iters)
        finally:
            ours.close()
            plain.close()
    print_figures(figures)
    bars = bars_of(figures)
    for bar in bars:
        sign = "<=" if bar.at_most else ">="
        print(f"{'ok    ' if bar.met else 'MISSED'} {bar.text}: {bar.ratio:.2f} {sign} {bar.limit}")
    load = os.getloadavg()[0]
    print(f"CPUs {cpus[0]} and {cpus[-1]}, load average {load:.2f}: with others about, figures lie")
    if args.json is not None:
        content = {"machine": host_facts.machine_facts(), "figures": figures}
        content["bars"] = [asdict(bar) | {"met": bar.met} for bar in bars]
        args.json.write_text(json.dumps(content, indent=1))
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
