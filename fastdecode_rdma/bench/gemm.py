"""The dense side's GEMM over packed weights, beside memory bandwidth, torch and numpy.

Decoding multiplies few rows by every weight of a model: memory decides, so the figure is bytes of
packed weights per second, and its share of the read bandwidth measured in the same run. Every
shape has as many copies, multiplied in turn, as it takes for no cache to keep them. Repetitions of
all cases of a shape are interleaved; medians count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastdecode_rdma import _dense, _team
from fastdecode_rdma.bench.attention import Machine, numbers_of
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.huge_pages import HugePageArena
from fastdecode_rdma.isa import choose_isa

if TYPE_CHECKING:
    from torch import Tensor

WORKING_SET = 256 << 20
MIN_CALLS = 3
SPIN_S = 0.2
"""The threads of torch and numpy spin for a while after every call."""
WEIGHT_TYPES = {"fp32": _dense.FP32, "bf16": _dense.BF16, "int8": _dense.INT8}
SHAPES = {
    "smollm2-qkv": (960, 576),
    "smollm2-out": (576, 576),
    "smollm2-gate-up": (3072, 576),
    "smollm2-down": (576, 1536),
    "smollm2-head": (49152, 576),
    "8b-qkv": (6144, 4096),
    "8b-out": (4096, 4096),
    "8b-gate-up": (28672, 4096),
    "8b-down": (4096, 14336),
}
"""Name -> outputs N, inputs K: SmolLM2-135M and a Llama layer of 8B parameters."""


@dataclass(frozen=True)
class Case:
    """One row of the table: [rows, num_in] times [num_out, num_in] transposed."""

    shape: str
    num_out: int
    num_in: int
    rows: int
    weights: str
    threads: int
    isa: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, scales included."""
        panel_bytes = int(_dense.panel_bytes(WEIGHT_TYPES[self.weights], self.num_in))
        return -(-self.num_out // 16) * panel_bytes


class PackedWeights:
    """Copies of one packed weight."""

    def __init__(self, case: Case, weight: np.ndarray) -> None:
        self._type = WEIGHT_TYPES[case.weights]
        self._shape = case.num_out, case.num_in
        self._count = max(1, -(-WORKING_SET // case.weight_bytes))
        arena = HugePageArena()
        self._copies = [arena.empty(case.weight_bytes, np.uint8) for _ in range(self._count)]
        first, row_type, rows = self._copies[0], _dense.FP32, weight
        if self._type == _dense.BF16:
            row_type, rows = _dense.BF16, (weight.view(np.uint32) >> 16).astype(np.uint16)
        first[:] = 0
        _dense.pack(rows.ctypes.data, row_type, *self._shape, 0, self._type, first.ctypes.data)
        for copy in self._copies[1:]:
            copy[:] = first
        self._next = 0

    def seconds(self, case: Case, x: np.ndarray, out: np.ndarray) -> float:
        """Median time of one multiplication, over all copies or at least MIN_CALLS."""
        num_out, num_in = self._shape
        _dense.set_isa(_dense.ISA_NAMES.index(case.isa))

        def multiply() -> None:
            address = self._copies[self._next].ctypes.data
            self._next = (self._next + 1) % self._count
            _dense.gemm(
                x.ctypes.data, num_in, case.rows, address, self._type, num_out, num_in,
                0, out.ctypes.data, num_out, False, case.threads,
            )  # fmt: skip

        return _median(multiply, self._count)


class Libraries:
    """The same by torch, in fp32 and bf16, and by numpy."""

    def __init__(self, weight: np.ndarray, *, with_bf16: bool) -> None:
        import torch

        count = max(1, -(-WORKING_SET // weight.nbytes))
        copies = [weight, *(weight.copy() for _ in range(count - 1))]
        self._fp32 = [torch.from_numpy(copy) for copy in copies]
        self._bf16 = [tensor.bfloat16() for tensor in self._fp32 * 2] if with_bf16 else []

    def seconds(self, num_rows: int, threads: int) -> dict[str, float]:
        """Median times by library; numpy's threads cannot be chosen: only with all CPUs."""
        import torch

        torch.set_num_threads(threads)
        num_out, num_in = self._fp32[0].shape
        x = torch.ones(num_rows, num_in)
        times = {"torch": _torch_seconds(x, self._fp32)}
        if self._bf16:
            times["torch_bf16"] = _torch_seconds(x.bfloat16(), self._bf16)
        if threads == len(os.sched_getaffinity(0)):
            weights = itertools.cycle([tensor.numpy() for tensor in self._fp32])
            rows, out = x.numpy(), np.empty((num_rows, num_out), np.float32)
            times["numpy"] = _median(
                lambda: np.dot(rows, next(weights).T, out=out), len(self._fp32)
            )
            time.sleep(SPIN_S)
        return times


def _torch_seconds(x: Tensor, weights: list[Tensor]) -> float:
    import torch

    out = torch.empty(x.shape[0], weights[0].shape[0], dtype=x.dtype)
    turns = itertools.cycle(weights)
    seconds = _median(lambda: torch.mm(x, next(turns).t(), out=out), len(weights))
    time.sleep(SPIN_S)
    return seconds


def _median(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(max(MIN_CALLS, count)):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True)
class Row:
    """Medians of one case; `libraries`: seconds of torch, torch_bf16 and numpy where measured."""

    case: Case
    seconds: float
    read_bytes_per_s: float
    libraries: dict[str, float]

    @property
    def bytes_per_s(self) -> float:
        return self.case.weight_bytes / self.seconds

    @property
    def fmas_per_s(self) -> float:
        return self.case.rows * self.case.num_out * self.case.num_in / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    isa = choose_isa(_dense.cpu_has, built=_dense.ISA_NAMES)
    for flag, default, text in (
        ("--shape", ",".join(SHAPES), "weights, by name or as NxK (outputs x inputs)"),
        ("--weights", ",".join(WEIGHT_TYPES), "types of packed weights"),
        ("--rows", "1,2,4,8,16", "rows of activations"),
        ("--threads", str(len(os.sched_getaffinity(0))), "threads"),
        ("--isa", isa, "instruction sets"),
    ):
        parser.add_argument(flag, default=default, help=f"{text}, comma-separated ({default})")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions (5)")
    parser.add_argument("--libraries", action="store_true", help="beside torch and numpy")
    parser.add_argument("--json", type=Path, help="also write the figures here")


def shape_of(text: str) -> tuple[int, int]:
    """Returns outputs and inputs of a named shape or of NxK.

    Raises:
        ConfigError: it is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--shape takes NxK or one of {', '.join(SHAPES)}, got {text!r}")
    return int(parts[0]), int(parts[1])


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every combination of the options.

    Raises:
        ConfigError: a value is malformed or unknown.
    """
    weights = args.weights.split(",")
    if unknown := [name for name in weights if name not in WEIGHT_TYPES]:
        expected = ", ".join(WEIGHT_TYPES)
        raise ConfigError(f"--weights {unknown[0]!r} is unknown; expected {expected}")
    isas = [choose_isa(_dense.cpu_has, isa, built=_dense.ISA_NAMES) for isa in args.isa.split(",")]
    rows, threads = numbers_of(args.rows, "--rows"), numbers_of(args.threads, "--threads")
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}")
    shapes = [(name, *shape_of(name)) for name in args.shape.split(",")]
    return [
        Case(*shape, num_rows, kind, num_threads, isa)
        for shape, kind, num_threads, isa, num_rows in itertools.product(
            shapes, weights, threads, isas, rows
        )
    ]


def measure(cases: list[Case], repeats: int, *, with_libraries: bool) -> list[Row]:
    """Runs all cases of a shape `repeats` times in turn, after one warm-up, and prints them."""
    _dense.bind_team(_team.address())
    machine, rng = Machine(), np.random.default_rng(0)
    rows = []
    for (num_out, num_in), some in itertools.groupby(cases, key=lambda c: (c.num_out, c.num_in)):
        batch = list(some)
        weight = rng.standard_normal((num_out, num_in), np.float32)
        packed = {
            c.weights: PackedWeights(c, weight) for c in {c.weights: c for c in batch}.values()
        }
        libraries = None
        if with_libraries:
            libraries = Libraries(weight, with_bf16=any(c.weights == "bf16" for c in batch))
        x = rng.standard_normal((max(c.rows for c in batch), num_in), np.float32)
        out = np.empty((len(x), num_out), np.float32)
        figures: list[list[tuple[float, float, dict[str, float]]]] = [[] for _ in batch]
        for turn in range(repeats + 1):
            beside: dict[tuple[int, int], dict[str, float]] = {}
            for i, case in enumerate(batch):
                read = machine.read_bytes_per_s(case.isa, case.threads)
                seconds = packed[case.weights].seconds(case, x, out)
                size = case.rows, case.threads
                if libraries is not None and size not in beside:
                    beside[size] = libraries.seconds(*size)
                if turn:
                    figures[i].append((read, seconds, beside.get(size, {})))
        rows += [_row(case, runs) for case, runs in zip(batch, figures, strict=True)]
        print_rows(rows[-len(batch) :])
    return rows


def _row(case: Case, runs: list[tuple[float, float, dict[str, float]]]) -> Row:
    reads, seconds, others = zip(*runs, strict=True)
    libraries = {
        name: statistics.median(each[name] for each in others)
        for name in others[0]
        if name != "torch_bf16" or case.weights == "bf16"
    }
    return Row(case, statistics.median(seconds), statistics.median(reads), libraries)


def print_heads() -> None:
    print(
        f"{'shape':<16} {'N':>6} {'K':>6} {'weights':<7} {'rows':>4} {'thr':>3} {'isa':<8} "
        f"{'us':>8} {'GB/s':>6} {'read':>6} {'/ read':>6} {'GFMA/s':>6} "
        f"{'x torch':>7} {'x numpy':>7} {'x bf16':>7}",
        flush=True,
    )


def print_rows(rows: list[Row]) -> None:
    for row in rows:
        case = row.case
        beside = " ".join(
            f"{row.libraries[name] / row.seconds:7.2f}" if name in row.libraries else f"{'-':>7}"
            for name in ("torch", "numpy", "torch_bf16")
        )
        print(
            f"{case.shape:<16} {case.num_out:>6} {case.num_in:>6} {case.weights:<7} "
            f"{case.rows:>4} {case.threads:>3} {case.isa:<8} {row.seconds * 1e6:>8.1f} "
            f"{row.bytes_per_s / 1e9:>6.2f} {row.read_bytes_per_s / 1e9:>6.2f} "
            f"{row.bytes_per_s / row.read_bytes_per_s:>6.2f} {row.fmas_per_s / 1e9:>6.1f} {beside}",
            flush=True,
        )


def print_notes() -> None:
    print("x torch, x numpy: their fp32 time over ours; x bf16: torch's with bf16 weights and rows")
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cpus")


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        ConfigError: an option is malformed.
    """
    cases = cases_of(args)
    print_heads()
    rows = measure(cases, args.repeats, with_libraries=args.libraries)
    print_notes()
    if args.json is not None:
        rendered = [
            asdict(row) | {"bytes_per_s": row.bytes_per_s, "fmas_per_s": row.fmas_per_s}
            for row in rows
        ]
        args.json.write_text(json.dumps({"load": os.getloadavg(), "rows": rendered}, indent=1))
    sys.stdout.flush()
    return 0
