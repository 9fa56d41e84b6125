"""The check without Python keeps up with the kernel's calls; .ci/kernels runs it."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent


def test_it_compiles_against_the_kernel_as_it_is() -> None:
    compiler = shlex.split(sysconfig.get_config_var("CC"))[0]
    headers = HERE.parents[1] / "cython"
    command = [compiler, "-fsyntax-only", "-Wall", "-Werror=implicit-function-declaration"]
    command += ["-Wno-psabi", "-Wno-unused-function", f"-I{headers}", HERE / "kernel_check.c"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
