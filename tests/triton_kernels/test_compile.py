"""Every configuration that a launcher can choose compiles for three GPU generations, without one.

Figures are the compiler's: a kernel that spills, or whose tiles do not fit, fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may have, by architecture."""

REGISTERS = 1 << 16
"""Of a multiprocessor: a program's threads together must not need more."""

FRAME_BYTES = {80: 0, 90: 0, 100: 16}
"""Of a thread's stack. The compiler for sm_100 keeps up to 16 bytes there in kernels that use a
quarter of the registers: those are no spills."""

CASES = {90: (), 80: ("matmuls", "heads"), 100: ("matmuls", "heads")}
"""What is compiled; (): everything. Norms and rows do not depend on the generation."""


@pytest.fixture
def figures(request, tmp_path) -> list[dict]:
    """What aot.py says of each kernel, compiled in a process of its own, with an empty cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).resolve().with_name("aot.py")
    done = subprocess.run(
        [sys.executable, str(script), str(request.param), *CASES[request.param]],
        env=kept | settings, cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [{"arch": request.param} | json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("figures", CASES, indirect=True, ids=lambda arch: f"sm_{arch}")
def test_kernels_fit(figures) -> None:
    names = {row["name"].split()[0] for row in figures}
    assert names >= {"_matmul_kernel", "_head_kernel", "_head_merge_kernel"}
    for row in figures:
        where = f"sm_{row['arch']} {row['name']} {row['constants']}"
        assert row["spilled"] <= FRAME_BYTES[row["arch"]], f"{where} spills {row['spilled']} bytes"
        assert row["shared"] <= SHARED_BYTES[row["arch"]], f"{where} needs {row['shared']} bytes"
        assert row["registers"] * row["warps"] * 32 <= REGISTERS, where
        is_single = "*bf16" not in row["types"] and "*fp16" not in row["types"]
        if row["name"].startswith(("_matmul_kernel", "_head_kernel")) and not is_single:
            assert row["tensor_cores"], f"{where} multiplies without tensor cores"
    packers = [row for row in figures if row["name"].startswith("_pack_rows_kernel")]
    gatherers = [row for row in figures if row["name"].startswith("_gather_rows_kernel")]
    for row in packers + gatherers:
        assert row["wide_stores"], f"{row['name']} stores less than 16 bytes at once"
    for row in packers:
        rings = row["constants"]["RINGS"] == "True"
        assert row["sys_arrival"] == row["sys_release"] == rings
    for row in gatherers:
        assert row["sys_acquire"] == (row["constants"]["WAITS"] == "True")
    if not CASES[figures[0]["arch"]]:
        assert packers and gatherers and "_norm_kernel" in names
