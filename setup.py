"""Builds the C extensions; everything declarative lives in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

HEADERS = sorted(str(path) for path in Path("cython").iterdir() if path.suffix in (".h", ".pxi"))


def extension(package: str, stem: str) -> Extension:
    """One `cython/<stem>.pyx` -> `<package>.<stem>`; no -march: the ISA is chosen at run time."""
    return Extension(
        f"{package}.{stem}",
        sources=[f"cython/{stem}.pyx"],
        include_dirs=["cython"],
        depends=HEADERS,
        # multiply-adds are written out where they are meant: the same bits from every compiler
        extra_compile_args=["-O3", "-g0", "-pthread", "-ffp-contract=off"],
        extra_link_args=["-pthread"],
    )


setup(
    options={"build_ext": {"parallel": min(os.cpu_count() or 1, 5)}},  # one compiler per extension
    ext_modules=cythonize(
        [
            extension("fastdecode_rdma", "_dense"),
            extension("fastdecode_rdma", "_sampling"),
            extension("fastdecode_rdma", "_team"),
            extension("fastdecode_rdma.transport", "_pump"),
            extension("fastdecode_rdma.worker", "_attention"),
        ],
        build_dir="build/cython",  # generated C stays out of cython/
        include_path=["cython"],
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False},
    ),
)
