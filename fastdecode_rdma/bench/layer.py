"""`fastdecode bench layer`: the traffic of exactly one decode layer, with and without the kernel.

An exchange sends each worker its rows (scatter), waits for the kernels (attend) and takes the
outputs in (gather): the same frames, pump and workers as in a decode step. Without the kernel the
workers reply at once, with K/V and arithmetic out of the way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma import host_facts
from fastdecode_rdma.bench.attention import numbers_of
from fastdecode_rdma.bench.interconnect_arguments import add_workers
from fastdecode_rdma.bench.interconnect_report import check_files, write_json
from fastdecode_rdma.bench.layer_models import LayerShape, add_model_arguments, shape_of
from fastdecode_rdma.bench.layer_session import Exchanges, LayerSession, warm_up
from fastdecode_rdma.command_line import messages_on_stderr, split_workers
from fastdecode_rdma.errors import ConfigError, FastDecodeError, RemoteProtocolError
from fastdecode_rdma.wire.token_file import find_token

WARM_UP_S = 0.1
KERNEL = ("with", "without")
PARTS = ("scatter", "attend", "gather", "total", "skew", "incast")


@dataclass(frozen=True)
class Row:
    """One batch. `parts`: microseconds (p50, p99, max) of each of PARTS."""

    batch: int
    with_kernel: bool
    rows_per_worker: tuple[int, ...]
    parts: dict[str, tuple[float, float, float]]
    out_gbit_per_s: float
    in_gbit_per_s: float
    pump_us: float
    s_part_us: float | None

    @property
    def bubble_us(self) -> float | None:
        """How long the S-Part of one mini-batch waits for the R-Part of the other, per layer."""
        if self.s_part_us is None:
            return None
        return max(0.0, self.parts["total"][0] - self.s_part_us)

    @classmethod
    def of(
        cls, rows: Sequence[int], found: Exchanges, *, with_kernel: bool, s_part_us: float | None
    ) -> Row:
        """Works a row out of many exchanges."""
        attend = found.kernel.max(1)
        gather = np.maximum(
            0, found.total.astype(np.int64) - (found.scatter + attend).astype(np.int64)
        )
        times = {
            "scatter": found.scatter,
            "attend": attend,
            "gather": gather,
            "total": found.total,
            "skew": attend - found.kernel.min(1),
            "incast": found.arrived.max(1) - found.arrived.min(1),
        }
        total_ns = float(np.median(found.total))
        return cls(
            batch=sum(rows),
            with_kernel=with_kernel,
            rows_per_worker=tuple(rows),
            parts={name: _percentiles(times[name]) for name in PARTS},
            out_gbit_per_s=8 * found.bytes_out / total_ns,
            in_gbit_per_s=8 * found.bytes_in / total_ns,
            pump_us=found.pump_ns / 1000,
            s_part_us=s_part_us,
        )

    def json(self) -> dict[str, Any]:
        """Returns the row with units in its keys."""
        figures = {
            f"{name}_usec": dict(zip(("p50", "p99", "max"), values, strict=True))
            for name, values in self.parts.items()
        }
        return {
            "batch": self.batch,
            "with_kernel": self.with_kernel,
            "rows_per_worker": self.rows_per_worker,
            **figures,
            "out_gbit_per_s": self.out_gbit_per_s,
            "in_gbit_per_s": self.in_gbit_per_s,
            "pump_usec_per_message": self.pump_us,
            "s_part_usec": self.s_part_us,
            "bubble_usec": self.bubble_us,
        }


def _percentiles(times_ns: np.ndarray) -> tuple[float, float, float]:
    p50, p99, most = np.percentile(times_ns.astype(np.float64), (50, 99, 100)) / 1000
    return float(p50), float(p99), float(most)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_workers(parser)
    add_model_arguments(parser)
    for flag, default, text in (
        ("--batch", "64,256", "sequences of all workers together, comma-separated"),
        ("--kernel", ",".join(KERNEL), "with, without the kernel, or both"),
    ):
        parser.add_argument(flag, default=default, help=f"{text} (%(default)s)")
    for flag, number, text in (
        ("--length", 512, "tokens of each sequence"),
        ("--layers", 2, "layers taken in turn: with more, no cache keeps their K/V"),
        ("--iters", 200, "exchanges of each batch"),
    ):
        parser.add_argument(flag, type=int, default=number, help=f"{text} (%(default)s)")
    parser.add_argument(
        "--s-time",
        type=float,
        metavar="USEC",
        help="time of the S-Part for one layer of one mini-batch: shows the bubble",
    )
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="(10)")
    parser.add_argument("--force", action="store_true", help="also at workers that engines use")
    parser.add_argument("--token-file", metavar="FILE", help="the workers' token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


@dataclass(frozen=True)
class Settings:
    """What the options say, checked."""

    workers: tuple[str, ...]
    shape: LayerShape
    batches: tuple[int, ...]
    kernel: tuple[str, ...]
    length: int
    num_layers: int
    iters: int
    s_part_us: float | None
    timeout_s: float


def settings_of(args: argparse.Namespace) -> Settings:
    """Checks the options.

    Raises:
        ConfigError: they cannot be used.
    """
    for flag, low, high in (("length", 1, 1 << 20), ("layers", 1, 4096), ("iters", 1, 1 << 24)):
        if not low <= getattr(args, flag) <= high:
            raise ConfigError(f"--{flag} must be {low} to {high}, got {getattr(args, flag)}")
    kernel = tuple(part.strip() for part in args.kernel.split(","))
    if unknown := [part for part in kernel if part not in KERNEL]:
        raise ConfigError(f"--kernel {unknown[0]!r} is unknown; expected {', '.join(KERNEL)}")
    for flag, value in (("--s-time", args.s_time), ("--timeout", args.timeout)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{flag} must be above 0, got {value:g}")
    return Settings(
        workers=tuple(split_workers(args.workers)),
        shape=shape_of(args),
        batches=tuple(numbers_of(args.batch, "--batch")),
        kernel=kernel,
        length=args.length,
        num_layers=args.layers,
        iters=args.iters,
        s_part_us=args.s_time,
        timeout_s=args.timeout,
    )


def measure(args: argparse.Namespace, settings: Settings, kernel: str) -> list[Row]:
    """Measures and prints all batches over one set of sessions.

    Raises:
        FastDecodeError: a worker cannot be reached, has no room, or was lost.
    """
    with_kernel = kernel == "with"
    geometry = settings.shape.geometry(
        kv_dtype=args.kv_dtype, wire_dtype=args.wire_dtype, max_rows=max(settings.batches),
        max_model_len=settings.length, num_layers=settings.num_layers,
    )  # fmt: skip
    session = LayerSession(
        settings.workers, geometry, with_kernel=with_kernel, token=find_token(args.token_file),
        force=args.force, timeout_s=settings.timeout_s,
    )  # fmt: skip
    rows = []
    try:
        planes = ", ".join(f"{w.info.name} over {w.info.transport}" for w in session.workers)
        for batch in settings.batches:
            spread = session.begin(batch, settings.length)
            warm_up(session, spread, WARM_UP_S)
            found = session.exchange(settings.iters, spread)
            rows.append(
                Row.of(spread, found, with_kernel=with_kernel, s_part_us=settings.s_part_us)
            )
            print_row(rows[-1], planes, settings.iters)
    finally:
        session.close()
    return rows


def print_row(row: Row, planes: str, iters: int) -> None:
    """Prints the figures of one batch."""
    print("-" * 72)
    print(f" batch {row.batch}, {'with' if row.with_kernel else 'without'} the kernel; {planes}")
    print(f" {iters} exchanges{'p50[usec]':>14} {'p99[usec]':>12} {'max[usec]':>12}")
    for name in PARTS:
        p50, p99, most = row.parts[name]
        print(f" {name:<12} {p50:>16.1f} {p99:>12.1f} {most:>12.1f}")
    print(
        f" out {row.out_gbit_per_s:.3f} Gb/s, in {row.in_gbit_per_s:.3f} Gb/s; pump "
        f"{row.pump_us:.2f} usec per message"
    )
    if row.s_part_us is not None and row.bubble_us is not None:
        share = row.bubble_us / (row.s_part_us + row.bubble_us)
        print(
            f" beside an S-Part of {row.s_part_us:g} usec: a bubble of {row.bubble_us:.1f} usec, "
            f"{share:.0%} of the layer"
        )
    sys.stdout.flush()


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        FastDecodeError: an option cannot be used, or a worker cannot.
    """
    settings = settings_of(args)
    check_files(args.json)
    shape = settings.shape
    print(
        f" {shape.name}: {shape.num_q_heads} query and {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}, {args.wire_dtype} on the way, KV {args.kv_dtype} of "
        f"{settings.length} tokens"
    )
    print(" skew: slowest kernel less fastest; incast: last reply less first")
    rows: list[Row] = []
    error: str | None = "interrupted"
    try:
        with messages_on_stderr():
            # without first: a worker that still frees sequences would refuse it
            for kernel in sorted(settings.kernel, reverse=True):
                try:
                    rows += measure(args, settings, kernel)
                except RemoteProtocolError as exc:
                    if kernel != "with" or settings.kernel == ("with",):
                        raise
                    print(f" not measured with the kernel: {exc}", flush=True)
        error = None
    except FastDecodeError as exc:
        error = str(exc)
        raise
    finally:
        if args.json is not None:
            content = {
                "model": vars(shape) | {"kv_dtype": args.kv_dtype, "wire_dtype": args.wire_dtype},
                "length_tokens": settings.length,
                "layers_in_turn": settings.num_layers,
                "iterations": settings.iters,
                "workers": settings.workers,
                "client_machine": host_facts.machine_facts(),
                "rows": [row.json() for row in rows],
            }
            write_json(args.json, "layer", content, error)
    return 0
