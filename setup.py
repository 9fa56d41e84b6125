"""Builds the C extensions; everything declarative lives in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

HEADERS = sorted(str(path) for path in Path("cython").iterdir() if path.suffix in (".h", ".pxi"))

OPTIMIZE, SANITIZE = ["-O3", "-g0"], []
if sanitizers := os.environ.get("FASTDECODE_SANITIZE"):  # "address,undefined": see .ci/sanitize
    OPTIMIZE = ["-O1", "-g1", "-fno-omit-frame-pointer"]
    SANITIZE = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]


def extension(
    package: str, stem: str, *, libraries: tuple[str, ...] = (), optional: bool = False
) -> Extension:
    """One `cython/<stem>.pyx` -> `<package>.<stem>`; no -march: the ISA is chosen at run time.

    The package does without an `optional` one if it does not build.
    """
    return Extension(
        f"{package}.{stem}",
        sources=[f"cython/{stem}.pyx"],
        include_dirs=["cython"],
        depends=HEADERS,
        # multiply-adds are written out where they are meant: the same bits from every compiler
        extra_compile_args=[*OPTIMIZE, *SANITIZE, "-pthread", "-ffp-contract=off"],
        extra_link_args=[*SANITIZE, "-pthread"],
        libraries=list(libraries),
        optional=optional,
    )


def verbs_extensions() -> list[Extension]:
    """Queue pairs below Python, where libibverbs' headers are (Debian's libibverbs-dev)."""
    places = ["/usr/include", "/usr/local/include"]
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        places += os.environ.get(variable, "").split(os.pathsep)
    if not any(place and Path(place, "infiniband/verbs.h").is_file() for place in places):
        return []
    package = "fastdecode_rdma.transport"
    return [extension(package, "_verbs", libraries=("ibverbs",), optional=True)]


setup(
    options={"build_ext": {"parallel": min(os.cpu_count() or 1, 5)}},  # one compiler per extension
    ext_modules=cythonize(
        [
            extension("fastdecode_rdma", "_dense"),
            extension("fastdecode_rdma", "_sampling"),
            extension("fastdecode_rdma", "_team"),
            extension("fastdecode_rdma.transport", "_pump"),
            extension("fastdecode_rdma.transport", "_rdma"),
            extension("fastdecode_rdma.worker", "_attention"),
            *verbs_extensions(),
        ],
        build_dir="build/cython",  # generated C stays out of cython/
        include_path=["cython"],
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False},
    ),
)
