"""Compiles ahead of time, without a GPU, what launchers start: `python aot.py ARCH [CASE …]`.

The launchers run on meta tensors of real models' shapes; each launch is recorded and compiled with
the types, divisibility and options that it has. One line per kernel: its figures.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastdecode_rdma.reference import RopeTable
from fastdecode_rdma.triton_kernels import configs, launch, norms, rows
from fastdecode_rdma.triton_kernels.exchange import Doorbell
from fastdecode_rdma.triton_kernels.head import head_statistics
from fastdecode_rdma.triton_kernels.matmul import matmul
from fastdecode_rdma.triton_kernels.norms import Norm
from fastdecode_rdma.triton_kernels.quantized import QuantizedWeight
from fastdecode_rdma.triton_kernels.rows import HeadNorm

TYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(num: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return empty(num, dtype=dtype)


class Recorder:
    """Stands for launch.launch: keeps every distinct compilation, under the name of its case."""

    def __init__(self) -> None:
        self.case = ""
        self.sources: dict[str, tuple[dict[str, Any], ASTSource, dict[str, int]]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        chosen = {name: options.pop(name) for name in OPTIONS if name in options}
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        assert list(values) == kernel.arg_names, (kernel.__name__, list(values))
        constexprs = {kernel.arg_names[i] for i in kernel.constexprs}
        signature, constants, attributes = {}, {}, {}
        for place, (name, value) in enumerate(values.items()):
            if name in constexprs or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = "*" + TYPE_NAMES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[name] = "i32" if value < 1 << 31 else "i64"
                if value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        key = repr((kernel.__name__, signature, constants, attributes, chosen))
        source = ASTSource(kernel, signature, constants, attributes)
        described = {
            "name": f"{kernel.__name__} {self.case}",
            "types": sorted({t for t in signature.values() if t[0] == "*"}),
            "constants": {name: str(value) for name, value in constants.items()},
            "warps": chosen["num_warps"],
        }
        self.sources.setdefault(key, (described, source, chosen))


def record_norms() -> None:
    """Plain, with bias, with a residual; short, usual and longest rows."""
    for dtype, width in ((torch.bfloat16, 4096), (torch.float16, 640), (torch.float32, 16384)):
        x, weight = empty(4, width, dtype=dtype), empty(width, dtype=torch.float32)
        norms.norm(x, Norm(weight, 1e-5, unit_offset=True))
        norms.norm(x, Norm(weight, 1e-5, bias=weight, is_layer=True), add=x)
    norms.norm(empty(4, 1 << 15), Norm(None, 1e-5))


def doorbell() -> Doorbell:
    return Doorbell(ints(1, torch.int32), ints(1), ints(1), ints(1), ints(1))


def record_rows() -> None:
    """Llama 3.1 8B; Qwen3 with head norms; OLMo 2 with row norms; Phi with partial rotary."""
    for heads, kv_heads, dim, half, norm_kind, dtype in (
        (32, 8, 128, 64, None, torch.bfloat16),
        (32, 8, 128, 64, "head", torch.float16),
        (40, 40, 128, 64, "row", torch.bfloat16),
        (32, 32, 80, 16, None, torch.float16),
        (4, 1, 256, 128, "head", torch.float32),
    ):
        qkv = empty(64, (heads + 2 * kv_heads) * dim, dtype=dtype)
        rope = RopeTable(empty(8, half, dtype=torch.float32), empty(8, half, dtype=torch.float32))
        norm = None
        if norm_kind is not None:
            whole = norm_kind == "row"
            widths = (heads * dim, kv_heads * dim) if whole else (dim, dim)
            norm = HeadNorm(*(empty(w, dtype=torch.float32) for w in widths), 1e-6, whole_row=whole)
        rows.pack_rows(
            qkv, ints(64), ints(64), num_q_heads=heads, num_kv_heads=kv_heads, wire_dtype=dtype,
            bias=empty(qkv.shape[1], dtype=torch.float32) if norm is None else None, norm=norm,
            rope=rope, doorbell=doorbell(),
        )  # fmt: skip
    rows.pack_rows(
        qkv, ints(64), ints(64), num_q_heads=heads, num_kv_heads=kv_heads, wire_dtype=dtype
    )
    rows.gather_rows(ints(64), empty(64, 4096), wire_dtype=torch.bfloat16, doorbell=doorbell())
    rows.gather_rows(ints(64), empty(64, 4096), wire_dtype=torch.float32)


def weight_of(kind: str, num_out: int, num_in: int) -> Tensor | QuantizedWeight:
    if kind == "int8":
        data = empty(num_out, num_in, dtype=torch.int8)
        return QuantizedWeight(data, empty(num_out, dtype=torch.float32))
    if kind == "int4":
        groups = (num_out, num_in // 128)
        scales, zeros = empty(*groups, dtype=torch.float32), empty(*groups, dtype=torch.int8)
        return QuantizedWeight(empty(num_out, num_in // 2, dtype=torch.uint8), scales, zeros, 128)
    dtype = torch.float32 if kind == "single" else torch.bfloat16
    return empty(num_out, num_in, dtype=dtype)


def record_matmuls() -> None:
    """Every configuration of the table; norms before, gates and residuals after."""
    hidden, width = 4096, 14336
    for kind in configs.KINDS:
        gate_up, down = weight_of(kind, 2 * width, hidden), weight_of(kind, hidden, width)
        dtype = torch.float32 if kind == "single" else torch.bfloat16
        norm = Norm(empty(hidden, dtype=torch.float32), 1e-5)
        for row_class in configs.MATMUL[kind]:
            num_rows = min(row_class.max_rows, 1024)
            x, inner = empty(num_rows, hidden, dtype=dtype), empty(num_rows, width, dtype=dtype)
            before = norm if num_rows <= 16 else None
            matmul(x, gate_up, gated=True, activation="silu", norm=before)
            matmul(inner, down, residual=x, out=x)
        matmul(x, gate_up, gated=True, activation="silu", deterministic=True)
        matmul(inner, down, residual=x, out=x, deterministic=True)
    x = empty(16, 2080, dtype=torch.float16)  # no multiple of a step along K
    bias = empty(6000, dtype=torch.float32)
    layer_norm = Norm(x[0].float(), 1e-5, bias=x[0].float(), is_layer=True)
    weight = empty(6000, 2080, dtype=torch.float16)
    matmul(x, weight, bias=bias, activation="gelu", norm=layer_norm)
    matmul(x, weight, bias=bias, gated=True, activation="gelu_tanh")


def record_heads() -> None:
    """A vocabulary of 128256 and one of 262144 with a softcap; few and most candidates."""
    weight, x = empty(128256, 4096), empty(1024, 4096)
    head_statistics(x[:16], weight, count=1)
    head_statistics(x[:16], weight, count=configs.MAX_CANDIDATES, targets=ints(16))
    head_statistics(x, weight, count=configs.MAX_CANDIDATES, targets=ints(1024))
    head_statistics(x, weight, count=20, deterministic=True)
    head_statistics(x.float(), weight.float(), count=20)
    weight = empty(262144, 5376)
    head_statistics(empty(64, 5376), weight, count=8, softcap=30.0)


CASES = {
    "norms": record_norms,
    "rows": record_rows,
    "matmuls": record_matmuls,
    "heads": record_heads,
}


def figures(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers of a thread, bytes of its stack (spills), bytes of a program's shared memory."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return {
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"]) + int(used["LOCAL"]),
        "shared": compiled.metadata.shared,
    }


def main(arch: int, *cases: str) -> None:
    recorder = Recorder()
    launch.launch = recorder
    for name in cases or CASES:
        recorder.case = name
        CASES[name]()
    with tempfile.TemporaryDirectory() as folder:
        for described, source, options in recorder.sources.values():
            target = GPUTarget("cuda", arch, 32)
            started = time.process_time()
            compiled = triton.compile(source, target=target, options=options)
            ptx = compiled.asm["ptx"]
            row = {
                **described,
                "seconds": time.process_time() - started,
                **figures(compiled, Path(folder)),
                "sys_release": "st.release.sys" in ptx,
                "sys_acquire": "ld.acquire.sys" in ptx,
                "sys_arrival": "atom.global.sys.acq_rel" in ptx or "atom.acq_rel.sys" in ptx,
                "wide_stores": "st.global.v4" in ptx,
                "tensor_cores": bool(re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", ptx)),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
