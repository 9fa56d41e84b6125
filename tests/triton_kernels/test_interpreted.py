"""Runs every kernel in Triton's interpreter, on CPU tensors, in processes of its own.

Triton decides when it is imported whether it interprets, so what a test process imported before
must not matter: each kernel_*.py here is a run of pytest with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in HERE.glob("kernel_*.py"))


def test_all_kernels_have_a_file() -> None:
    assert len(FILES) == 5


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name, tmp_path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'base'}", str(HERE / name)],
        cwd=HERE.parents[1], env=kept | settings, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
