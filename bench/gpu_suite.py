"""The GPU kernels on this machine: their tests, then one table of what they reach.

    python bench/gpu_suite.py [--rows 1,16,64,256,1024] [--dtype bf16] [--seconds 0.2] [--no-tests]

Every kernel is timed at the shapes of an 8B model beside torch eager and torch.compile, which are
given the same inputs. Copy bandwidth and matrix rate are measured in the same run: a kernel's share
is of the one that bounds it, the larger. GB/s count the bytes that must move; weights cycle through
copies, so that the L2 cache holds none of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, VOCAB = 4096, 14336, 128256
NUM_Q, NUM_KV, HEAD_DIM = 32, 8, 128
DEVICE = "cuda"
COLD_BYTES = 512 << 20
"""Weights cycle through at least this much: several times the largest L2 cache."""

TESTS = Path(__file__).resolve().parents[1] / "tests" / "triton_kernels"


@dataclass(frozen=True)
class Case:
    """One line of the table: our kernel, the same in torch, and what it must move and multiply.

    The calls take a weight, or None: one after another of `weights`, of `eager_weights`.
    """

    name: str
    ours: Callable[[Any], Any]
    eager: Callable[[Any], Any]
    nbytes: int
    flops: int = 0
    weights: Sequence[Any] = (None,)
    eager_weights: Sequence[Any] = (None,)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments; exits with 2 on bad ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,16,64,256,1024", help="batch sizes")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement")
    parser.add_argument("--no-tests", action="store_true", help="measure alone")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    args = parser.parse_args(argv)
    try:
        args.rows = [int(part) for part in args.rows.split(",")]
    except ValueError:
        parser.error(f"--rows must be numbers like 1,64,1024, got {args.rows!r}")
    if min(args.rows) < 1 or args.seconds <= 0:
        parser.error("--rows and --seconds must be positive")
    return args


def missing() -> str | None:
    """Says in one line what this machine lacks; None: nothing."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device here: run this on a machine with an NVIDIA GPU and a CUDA PyTorch"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'fastdecode_rdma[gpu]'"
    return None


def run_tests() -> int:
    """Runs the kernels' tests on the GPU; returns pytest's exit status."""
    files = sorted(str(path) for path in TESTS.glob("kernel_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", *files]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["FASTDECODE_TEST_DEVICE"] = "cuda"
    return subprocess.run(command, cwd=TESTS.parents[1], env=env).returncode


def seconds_of(call: Callable[[Any], Any], weights: Sequence[Any], duration_s: float) -> float:
    """Median seconds of a call by the GPU's clock, launches queued back to back."""
    import torch

    for i in range(3):
        call(weights[i % len(weights)])
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call(weights[0])
    end.record()
    torch.cuda.synchronize()
    once_s = max(start.elapsed_time(end) / 1e3, 1e-6)
    batch = max(1, min(int(duration_s / 5 / once_s), 1000))
    times = []
    for _ in range(5):
        start.record()
        for i in range(batch):
            call(weights[i % len(weights)])
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / batch)
    return sorted(times)[2]


def limits(dtype: Any, duration_s: float) -> tuple[float, float]:
    """Bytes/s of a copy (read and written) and flop/s of a large product, measured here and now."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds_of(lambda _: target.copy_(source), (None,), duration_s)
    x = torch.randn(8192, 8192, device=DEVICE, dtype=dtype)
    product = 2 * 8192**3 / seconds_of(lambda _: x @ x, (None,), duration_s)
    return copy, product


def cases(rows: int, dtype: Any) -> Iterator[Case]:
    """The kernels with `rows` rows, at an 8B model's shapes."""
    import torch

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device=DEVICE, dtype=dtype) / 16

    yield from row_cases(rows, dtype, randn)
    yield from matmul_cases(rows, randn)
    yield head_case(rows, randn)


def row_cases(rows: int, dtype: Any, randn: Callable[..., Any]) -> Iterator[Case]:
    """Norm, packing and gathering: what moves bytes."""
    import torch
    from torch.nn import functional

    from fastdecode_rdma.models.rope import RopeSpec, rope_table
    from fastdecode_rdma.reference import RopeTable
    from fastdecode_rdma.triton_kernels.norms import Norm, norm
    from fastdecode_rdma.triton_kernels.rows import gather_rows, pack_rows

    x, y, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    out, how = torch.empty_like(x), Norm(weight, 1e-5)
    yield Case(
        "add + RMSNorm",
        lambda _: norm(x, how, add=y, out=out),
        lambda _: functional.rms_norm(x.add_(y), (HIDDEN,), weight, 1e-5),
        4 * x.nbytes,
    )
    qkv = randn(rows, (NUM_Q + 2 * NUM_KV) * HEAD_DIM)
    slots, table = torch.empty_like(qkv), rope_table(RopeSpec(HEAD_DIM), 8192)
    rope = RopeTable(table.cos.to(DEVICE), table.sin.to(DEVICE))
    positions = torch.arange(rows, device=DEVICE) * 31 % 8192
    addresses = torch.arange(rows, device=DEVICE) * slots.stride(0) * slots.element_size()
    addresses += slots.data_ptr()
    cos, sin = (torch.cat((t, t), 1)[positions][:, None].to(dtype) for t in (rope.cos, rope.sin))

    def eager_pack(_: None) -> None:
        heads = qkv.view(rows, -1, HEAD_DIM)
        turned = heads[:, : NUM_Q + NUM_KV]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-second, first), -1) * sin
        slots.copy_(torch.cat((turned, heads[:, NUM_Q + NUM_KV :]), 1).flatten(1))

    def pack(_: None) -> None:
        pack_rows(
            qkv, addresses, positions, num_q_heads=NUM_Q, num_kv_heads=NUM_KV, wire_dtype=dtype,
            rope=rope,
        )  # fmt: skip

    yield Case("rotary + pack rows", pack, eager_pack, 2 * qkv.nbytes)
    gathered = torch.empty_like(x)
    yield Case(
        "gather rows",
        lambda _: gather_rows(addresses, gathered, wire_dtype=dtype),
        lambda _: gathered.copy_(slots[:, :HIDDEN]),
        2 * x.nbytes,
    )


def matmul_cases(rows: int, randn: Callable[..., Any]) -> Iterator[Case]:
    """Gate/up with SwiGLU, down with the residual, and the same from int8 and int4."""
    from torch.nn import functional

    from fastdecode_rdma.triton_kernels.matmul import matmul
    from fastdecode_rdma.triton_kernels.norms import Norm
    from fastdecode_rdma.triton_kernels.quantized import (
        QuantizedWeight,
        quantize_int4,
        quantize_int8,
    )

    x, inner, how = randn(rows, HIDDEN), randn(rows, WIDTH), Norm(randn(HIDDEN), 1e-5)
    copies = -(-COLD_BYTES // (HIDDEN * WIDTH * x.element_size()))
    ups = [randn(2 * WIDTH, HIDDEN) for _ in range(-(-copies // 2))]
    downs = [randn(HIDDEN, WIDTH) for _ in range(copies)]

    def eager_up(weight: Any, x: Any = x) -> Any:
        gate, up = (x @ weight.T).chunk(2, -1)
        return functional.silu(gate) * up

    def normed_up(weight: Any) -> Any:
        return eager_up(weight, functional.rms_norm(x, (HIDDEN,), how.weight, 1e-5))

    up_flops, down_flops = 4 * rows * WIDTH * HIDDEN, 2 * rows * WIDTH * HIDDEN
    up_bytes = ups[0].nbytes + x.nbytes + inner.nbytes
    silu = {"gated": True, "activation": "silu"}
    yield Case(
        "gate/up + SwiGLU", lambda w: matmul(x, w, **silu), eager_up, up_bytes, up_flops, ups, ups
    )
    if rows <= 16:
        yield Case(
            "norm + gate/up + SwiGLU", lambda w: matmul(x, w, norm=how, **silu), normed_up,
            up_bytes, up_flops, ups, ups,
        )  # fmt: skip
    yield Case(
        "down + residual", lambda w: matmul(inner, w, residual=x), lambda w: x + inner @ w.T,
        downs[0].nbytes + inner.nbytes + 2 * x.nbytes, down_flops, downs, downs,
    )  # fmt: skip
    for name, quantize in (("int8", quantize_int8), ("int4", quantize_int4)):
        first = quantize(downs[0])
        quantized = [
            QuantizedWeight(first.data.clone(), first.scales, first.zeros, first.group)
            for _ in range(-(-COLD_BYTES // first.data.nbytes))
        ]
        yield Case(
            f"down from {name}", lambda w: matmul(inner, w), lambda w: inner @ w.T,
            first.data.nbytes + inner.nbytes + x.nbytes, down_flops, quantized, downs,
        )  # fmt: skip


def head_case(rows: int, randn: Callable[..., Any]) -> Case:
    """The head with eight candidates and the sum of exponentials."""
    from fastdecode_rdma.triton_kernels.head import head_statistics

    x, weight = randn(rows, HIDDEN), randn(VOCAB, HIDDEN)

    def eager(weight: Any) -> Any:
        logits = (x @ weight.T).float()
        return logits.topk(8, -1), logits.logsumexp(-1)

    return Case(
        "head, top 8, log-sum", lambda w: head_statistics(x, w, count=8), eager,
        weight.nbytes, 2 * rows * VOCAB * HIDDEN, (weight,), (weight,),
    )  # fmt: skip


def line_of(case: Case, copy: float, product: float, args: argparse.Namespace) -> str:
    """Measures one case and returns its line."""
    import torch

    ours_s = seconds_of(case.ours, case.weights, args.seconds)
    bound_s = max(case.nbytes / copy, case.flops / product)
    bound = "copy" if case.nbytes / copy >= case.flops / product else "matrix"
    ratios = []
    for compiled in (False, True):
        if compiled and args.no_compile:
            ratios.append("-")
            continue
        call = torch.compile(case.eager, dynamic=False) if compiled else case.eager
        ratios.append(f"{seconds_of(call, case.eager_weights, args.seconds) / ours_s:.2f}x")
    return (
        f"{case.name:26}{ours_s * 1e6:10.1f}{case.nbytes / ours_s / 1e9:10.0f}"
        f"{bound_s / ours_s:8.0%} of {bound:7}{ratios[0]:>8}{ratios[1]:>10}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the tests and prints the table; 0: all passed, 1: tests failed, 2: no GPU here."""
    args = parse_args(argv)
    if reason := missing():
        print(f"gpu_suite: {reason}", file=sys.stderr)
        return 2
    import torch
    import triton

    status = 0 if args.no_tests else run_tests()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    copy, product = limits(dtype, args.seconds)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {args.dtype}")
    print(f"copy {copy / 1e9:.0f} GB/s, matrix product {product / 1e12:.0f} Tflop/s")
    for rows in args.rows:
        print(f"\n{rows} rows{'':19}{'µs':>10}{'GB/s':>10}{'share':>18}{'eager':>9}{'compile':>10}")
        for case in cases(rows, dtype):
            print(line_of(case, copy, product, args), flush=True)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
