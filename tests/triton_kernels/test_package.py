"""Who imports Triton, and what is said where it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def run(code: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options
    )


def test_without_triton_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "try:\n    import fastdecode_rdma.triton_kernels\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = run(code)
    assert "pip install 'fastdecode_rdma[gpu]'" in done.stdout, done.stderr


def test_the_checkouts_folder_is_not_the_package() -> None:
    done = run("import triton_kernels", cwd=CHECKOUT)
    assert "import fastdecode_rdma.triton_kernels, not triton_kernels" in done.stderr


def test_the_cpu_path_imports_no_triton() -> None:
    code = (
        "import sys, fastdecode_rdma.generator, fastdecode_rdma.ops, fastdecode_rdma.models\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'triton'])\n"
    )
    done = run(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
