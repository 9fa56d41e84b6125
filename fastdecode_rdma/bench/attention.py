"""Decode attention beside what memory and arithmetic allow, measured in the same run.

Every case decodes one token of each sequence over its whole KV-cache, paged, blocks at random
places. Repetitions of all cases are interleaved; medians count. The roofline of a case is
min(read bandwidth, multiply-adds per second x KV bytes per multiply-add). No loop comes to it where
the two are near each other, so one that only reads and multiplies, as often, is timed as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fastdecode_rdma import _team
from fastdecode_rdma.bench.attention_report import Case, Row, plot, print_rows
from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.huge_pages import HugePageArena
from fastdecode_rdma.isa import ISAS
from fastdecode_rdma.worker import _attention
from fastdecode_rdma.worker.attention import BLOCK_TOKENS, select_isa
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

READ_BYTES = 256 << 20
FMA_PIECES = 500
WORKING_SET = 256 << 20
"""A case has as many layers, attended in turn, as it takes to hold so many bytes of KV: no cache
keeps them."""
Figures = tuple[float, float, float, float, float | None]
MAX_LAYERS = 4096
"""As many as a session serves: the smallest cases stay in caches."""
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Decode:
    """A case's sequences in a session, ready to attend."""

    def __init__(self, case: Case, *, rng: np.random.Generator) -> None:
        self.case = case
        self.num_layers = min(MAX_LAYERS, max(1, -(-WORKING_SET // case.layer_bytes)))
        heads = case.kv_heads * case.group
        group = KVGroup(tuple(range(self.num_layers)), heads, case.kv_heads, case.head_dim)
        geometry = AttentionGeometry(
            (group,), case.head_dim**-0.5, case.dtype, max_rows=case.batch,
            max_model_len=max(case.length, BLOCK_TOKENS),
        )  # fmt: skip
        self._session = AttentionSession(
            geometry, MemoryBudget(1 << 40), case.threads, isa=case.isa
        )
        self._fill(rng)
        lines = [(i, case.length - 1, 1, 0) for i in range(case.batch)]
        self._session.begin_step(0, 1, np.array(lines, ENTRY_DTYPE))
        width = heads * case.head_dim
        self._qkv = rng.standard_normal((case.batch, geometry.row_width(0))).astype(np.float32)
        self._out = np.empty((case.batch, width), np.float32)
        self._status = np.empty(case.batch, np.uint8)
        self._layer = 0

    def _fill(self, rng: np.random.Generator) -> None:
        """Grows all sequences a block at a time in random order: blocks end up at random places."""
        case, cached = self.case, self.case.length - 1
        width = case.kv_heads * case.head_dim
        noise = rng.standard_normal((2, BLOCK_TOKENS, width)).astype(np.float32)
        order = np.repeat(np.arange(case.batch), -(-cached // BLOCK_TOKENS))
        rng.shuffle(order)
        lengths = [0] * case.batch
        for seq in order.tolist():
            start, count = lengths[seq], min(BLOCK_TOKENS, cached - lengths[seq])
            entry = np.array([(seq, start, count, ENTRY_UPLOAD)], ENTRY_DTYPE)
            self._session.begin_step(2, 0, entry)
            for layer in range(self.num_layers):
                self._session.store(2, layer, 0, 0, noise[0, :count], noise[1, :count])
            lengths[seq] += count

    def seconds(self) -> float:
        """Median time of one attend, over all layers or at least three."""
        times = []
        for _ in range(max(3, self.num_layers)):
            start = time.perf_counter()
            self._session.attend(0, self._layer, self._qkv, self._out, self._status)
            times.append(time.perf_counter() - start)
            self._layer = (self._layer + 1) % self.num_layers
        return statistics.median(times)

    def close(self) -> None:
        self._session.close()


class TorchDecode:
    """The same by torch: query heads of a KV head as rows, its fastest form for decoding."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.set_num_threads(case.threads)
        dtype = getattr(torch, TORCH_DTYPES[case.dtype])
        self.copies = max(1, -(-WORKING_SET // case.layer_bytes))
        shape = (self.copies, case.batch, case.kv_heads, case.length, case.head_dim)
        self._k, self._v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        self._q = torch.randn(case.batch, case.kv_heads, case.group, case.head_dim).to(dtype)

    def seconds(self) -> float:
        import torch.nn.functional as F

        times = []
        for i in range(max(3, self.copies)):
            start = time.perf_counter()
            F.scaled_dot_product_attention(
                self._q, self._k[i % self.copies], self._v[i % self.copies]
            )
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Machine:
    """Read bandwidth and multiply-add rate, by threads and instruction set."""

    def __init__(self) -> None:
        _attention.bind_team(_team.address())
        self._buffer = HugePageArena().empty(READ_BYTES, np.uint8)
        self._buffer[:] = 0

    def read_bytes_per_s(self, isa: str, threads: int) -> float:
        address = self._buffer.ctypes.data
        return READ_BYTES / _attention.read_seconds(isa, address, READ_BYTES, threads)

    def fmas_per_s(self, isa: str, threads: int) -> float:
        return float(_attention.multiply_adds_per_s(isa, FMA_PIECES, threads))

    def both_bytes_per_s(self, case: Case) -> float:
        """KV bytes per second of a loop that reads chunks as a block's are, and multiplies."""
        chunk = BLOCK_TOKENS * KV_DTYPES[case.dtype].row_bytes(case.head_dim)
        return float(
            _attention.read_multiplying_bytes_per_s(
                case.isa, self._buffer.ctypes.data, READ_BYTES, chunk, 1 / case.bytes_per_fma,
                case.threads,
            )
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cpus = len(os.sched_getaffinity(0))
    for flag, default, text in (
        ("--dtype", ",".join(KV_DTYPES), "KV dtypes"),
        ("--batch", "32", "sequences"),
        ("--length", "2048", "tokens of each"),
        ("--group", "4", "query heads per KV head"),
        ("--kv-heads", "8", "KV heads"),
        ("--head-dim", "128", "head dimensions"),
        ("--threads", str(cpus), "threads"),
        ("--isa", select_isa(), "instruction sets"),
    ):
        parser.add_argument(flag, default=default, help=f"{text}, comma-separated ({default})")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions (5)")
    parser.add_argument("--torch", action="store_true", help="beside torch's attention")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the roofline into this file (matplotlib)")


def numbers_of(text: str, flag: str) -> list[int]:
    """Returns the positive integers of an option, comma-separated.

    Raises:
        ConfigError: it is something else.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} takes integers between commas, got {text!r}") from None
    if min(values) < 1:
        raise ConfigError(f"{flag} must be at least 1, got {min(values)}")
    return values


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every combination of the options.

    Raises:
        ConfigError: a value is malformed or unknown.
    """
    dtypes, isas = args.dtype.split(","), args.isa.split(",")
    if unknown := [name for name in dtypes if name not in KV_DTYPES]:
        raise ConfigError(f"--dtype {unknown[0]!r} is unknown; expected {', '.join(KV_DTYPES)}")
    if unknown := [name for name in isas if name not in ISAS]:
        raise ConfigError(f"--isa {unknown[0]!r} is unknown; expected {', '.join(ISAS)}")
    for isa in isas:
        select_isa(isa)
    numbers = [
        numbers_of(getattr(args, flag.replace("-", "_")), f"--{flag}")
        for flag in ("batch", "length", "group", "kv-heads", "head-dim", "threads")
    ]
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}")
    return [
        Case(dtype, *values, isa=isa)
        for *values, isa, dtype in itertools.product(*numbers, isas, dtypes)
    ]


def measure(cases: list[Case], repeats: int, *, with_torch: bool) -> list[Row]:
    """Runs all cases `repeats` times in turn, after one warm-up."""
    rng = np.random.default_rng(0)
    machine = Machine()
    rows = []
    for key, some in itertools.groupby(cases, key=lambda c: (c.batch, c.length, c.kv_heads)):
        del key  # cases that need the same memory run interleaved, then give it back
        batch = list(some)
        ours = [Decode(case, rng=rng) for case in batch]
        theirs = [
            TorchDecode(case) if with_torch and case.dtype in TORCH_DTYPES else None
            for case in batch
        ]
        figures: list[list[Figures]] = [[] for _ in batch]
        for turn in range(repeats + 1):
            for i, case in enumerate(batch):
                figure = (
                    machine.read_bytes_per_s(case.isa, case.threads),
                    machine.fmas_per_s(case.isa, case.threads),
                    machine.both_bytes_per_s(case),
                    ours[i].seconds(),
                    _timed(theirs[i]),
                )
                if turn:
                    figures[i].append(figure)
        for case, runs in zip(batch, figures, strict=True):
            rows.append(_row(case, runs))
        for decode in ours:
            decode.close()
    return rows


def _timed(theirs: TorchDecode | None) -> float | None:
    if theirs is None:
        return None
    seconds = theirs.seconds()
    time.sleep(0.2)  # its threads spin for a while
    return seconds


def _row(case: Case, runs: list[Figures]) -> Row:
    reads, fmas, both, seconds, torch = zip(*runs, strict=True)
    others = [value for value in torch if value is not None]
    return Row(
        case,
        statistics.median(seconds),
        statistics.median(reads),
        statistics.median(fmas),
        statistics.median(both),
        statistics.median(others) if others else None,
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        ConfigError: an option is malformed.
    """
    cases = cases_of(args)
    rows = measure(cases, args.repeats, with_torch=args.torch)
    print_rows(rows)
    if args.json is not None:
        rendered = [
            asdict(row) | {"bytes_per_s": row.bytes_per_s, "roofline": row.roofline} for row in rows
        ]
        args.json.write_text(json.dumps({"load": os.getloadavg(), "rows": rendered}, indent=1))
    if args.plot is not None:
        plot(rows, args.plot)
    sys.stdout.flush()
    return 0
