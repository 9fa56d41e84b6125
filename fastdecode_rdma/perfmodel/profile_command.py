"""`fastdecode profile`: measures, piece by piece, what the performance model is made of."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_rdma import host_facts
from fastdecode_rdma.command_line import messages_on_stderr, split_workers
from fastdecode_rdma.config import kv_dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.model import Network, Overlap
from fastdecode_rdma.perfmodel.profile_file import Measured, MeasuredWorker, write_measured
from fastdecode_rdma.wire.token_file import find_token

if TYPE_CHECKING:
    from fastdecode_rdma.bench.model_times import Effort
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.perfmodel.shapes import ModelShape

WIRE_BYTES = 4.0
"""Rows travel in fp32 from an engine on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a model directory")
    parser.add_argument("--workers", metavar="ADDRESSES", help="comma-separated (one embedded)")
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument("--force", action="store_true", help="also at workers that engines use")
    parser.add_argument(
        "--kv-dtypes", default="fp16", metavar="NAMES", help="comma-separated (%(default)s)"
    )
    parser.add_argument(
        "--batch", default="1,2,4,8,16,32,64,128", metavar="ROWS",
        help="of the dense side, comma-separated (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", default="128,1024", metavar="TOKENS",
        help="of sequences that are attended to, comma-separated (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, help="of everything (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("fastdecode-performance.json"), metavar="FILE",
        help="(%(default)s)",
    )  # fmt: skip


def effort_of(args: argparse.Namespace) -> Effort:
    """Checks the options.

    Raises:
        ConfigError: they cannot be used.
    """
    from fastdecode_rdma.bench.attention import numbers_of
    from fastdecode_rdma.bench.model_times import Effort

    if not 1 <= args.repeats <= 1000:
        raise ConfigError(f"--repeats must be 1 to 1000, got {args.repeats}")
    batches = sorted(set(numbers_of(args.batch, "--batch")))
    lengths = sorted(set(numbers_of(args.lengths, "--lengths")))
    if batches[-1] > 4096:
        raise ConfigError(f"--batch must be at most 4096, got {batches[-1]}")
    if len(lengths) != 2 or lengths[0] < 2 or lengths[1] > 1 << 20:
        raise ConfigError(
            f"--lengths takes two different lengths from 2 to 2^20, got {args.lengths!r}"
        )
    return Effort(tuple(batches), lengths=(lengths[0], lengths[1]), repeats=args.repeats)


def measure(args: argparse.Namespace, effort: Effort, kv_dtypes: list[str]) -> Measured:
    """Loads the model, measures it and its workers, and prints on the way.

    Raises:
        FastDecodeError: the model or a worker cannot be used.
    """
    from fastdecode_rdma.bench.model_times import (
        EMBEDDED_NETWORK,
        DenseSide,
        Workers,
        shape_of_model,
    )
    from fastdecode_rdma.generator import Generator

    workers = None if args.workers is None else split_workers(args.workers)
    with Generator.from_pretrained(
        args.model, workers=workers, token_file=args.token_file, max_num_seqs=256,
        num_mini_batches=1,
    ) as gen:  # fmt: skip
        shape = shape_of_model(gen._parts.model, Path(args.model).resolve().name)
        print(f" {shape.name}, {shape.params / 1e6:.0f} M weights", flush=True)
        dense = DenseSide(gen, effort).measure(_say)
        geometry = gen._parts.backend.geometry
        embedded = None if workers is not None else _embedded(gen, shape, kv_dtypes, effort)
    if workers is None:
        assert embedded is not None
        return Measured(
            shape, dense, (embedded,), EMBEDDED_NETWORK, WIRE_BYTES, Overlap.SHARED, 0.0
        )
    # the generator's sessions are closed: the workers' memory is free for ours
    remote = Workers(
        workers, geometry, token=find_token(args.token_file), force=args.force, effort=effort
    )
    by_dtype = {name: remote.rates(name) for name in kv_dtypes}
    network = remote.network()
    measured = tuple(
        MeasuredWorker(
            remote.places[i], remote.capacities[i],
            {name: rates[i] for name, rates in by_dtype.items()},
        )
        for i in range(len(workers))
    )  # fmt: skip
    overlap = _overlap(remote.planes, remote.threads)
    return Measured(shape, dense, measured, network, WIRE_BYTES, overlap, 0.0)


def _embedded(
    gen: Generator, shape: ModelShape, kv_dtypes: list[str], effort: Effort
) -> MeasuredWorker:
    from fastdecode_rdma.bench.model_times import embedded_rates
    from fastdecode_rdma.worker.attention import select_isa

    info = gen._parts.backend.info(0)
    rates = {
        name: embedded_rates(shape, name, threads=info.num_threads, isa=select_isa(), effort=effort)
        for name in kv_dtypes
    }
    return MeasuredWorker("embedded", info.capacity_bytes, rates)


def _overlap(planes: tuple[str, ...], threads: tuple[int, ...]) -> Overlap:
    """Workers that are reached through memory have their cores on this machine: where these are
    not enough for them and the dense side, nothing overlaps."""
    import torch

    here = sum(n for plane, n in zip(planes, threads, strict=True) if plane == "shm")
    if here and here + torch.get_num_threads() > len(os.sched_getaffinity(0)):
        return Overlap.SHARED
    return Overlap.PIPELINED


def _say(text: str) -> None:
    print(text, flush=True)


def print_workers(measured: Measured) -> None:
    """Prints what was measured of workers and link."""
    for worker in measured.workers:
        for name, (token_s, row_s, exchange_s) in worker.rates.items():
            rate = measured.shape.kv_token_bytes(name) / token_s
            _say(
                f" {worker.address} {name}: R {token_s * 1e9:.2f} ns a token and layer "
                f"({rate / 1e9:.2f} GB/s), {row_s * 1e6:.2f} us a sequence, "
                f"{exchange_s * 1e6:.1f} us an exchange"
            )
    network: Network = measured.network
    if measured.overlap is not Overlap.SHARED or network.round_trip_s:
        upload = network.upload_bytes_per_s or network.bytes_per_s
        _say(
            f" link: {network.round_trip_s * 1e6:.1f} us a round trip, rows "
            f"{network.bytes_per_s / 1e9:.2f} GB/s, K/V {upload / 1e9:.2f} GB/s"
        )
    _say(f" dense side and workers are {measured.overlap.value}")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes the profile.

    Raises:
        FastDecodeError: an option cannot be used, or the model, or a worker.
    """
    effort = effort_of(args)
    kv_dtypes = [kv_dtype_name(name.strip()) for name in args.kv_dtypes.split(",")]
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {args.output.parent}")
    with messages_on_stderr():
        measured = measure(args, effort, kv_dtypes)
    print_workers(measured)
    write_measured(args.output, measured, {"machine": host_facts.machine_facts()})
    print(f" wrote {args.output}: fastdecode plan --profile {args.output}")
    sys.stdout.flush()
    return 0
