"""Builds the C extensions; everything declarative lives in pyproject.toml."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = sorted(str(path) for path in Path("cython").iterdir() if path.suffix in (".h", ".pxi"))

OPTIMIZE, SANITIZE = ["-O3", "-g0"], []
if sanitizers := os.environ.get("FASTDECODE_SANITIZE"):  # "address,undefined": see .ci/sanitize
    OPTIMIZE = ["-O1", "-g1", "-fno-omit-frame-pointer"]
    SANITIZE = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]


class BuildFilesApart(build_ext):
    """A compiler for each CPU, for the files of all extensions in turn; those listed first, first.

    `parallel` alone is a thread for each extension, which compiles one file after the other.
    """

    def build_extensions(self) -> None:
        compile_files = self.compiler.compile

        def compile_apart(sources: list[str], **options: object) -> list[str]:
            jobs = [compilers.submit(compile_files, [source], **options) for source in sources]
            return [name for job in jobs for name in job.result()]

        with ThreadPoolExecutor(os.cpu_count() or 1) as compilers:
            self.compiler.compile = compile_apart
            super().build_extensions()


def extension(
    package: str,
    stem: str,
    *,
    units: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    optional: bool = False,
) -> Extension:
    """One `cython/<stem>.pyx` and C `units` -> `<package>.<stem>`; no -march: the ISA is chosen at
    run time.

    The package does without an `optional` one if it does not build.
    """
    return Extension(
        f"{package}.{stem}",
        sources=[*(f"cython/{unit}.c" for unit in units), f"cython/{stem}.pyx"],
        include_dirs=["cython"],
        define_macros=[("FD_APART", "1")] if units else [],
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


KERNELS = ("attention_avx512", "attention_avx2", "attention_neon", "attention_base")
EXTENSIONS = [  # what takes longest first
    extension("fastdecode_rdma.transport", "_pump"),
    extension("fastdecode_rdma", "_dense"),
    *verbs_extensions(),
    extension("fastdecode_rdma.worker", "_attention", units=KERNELS),
    extension("fastdecode_rdma", "_sampling"),
    extension("fastdecode_rdma.transport", "_rdma"),
    extension("fastdecode_rdma", "_team"),
]

setup(
    options={"build_ext": {"parallel": len(EXTENSIONS)}},
    cmdclass={"build_ext": BuildFilesApart},
    ext_modules=cythonize(
        EXTENSIONS,
        build_dir="build/cython",  # generated C stays out of cython/
        include_path=["cython"],
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False},
    ),
)
