"""Which instruction set the kernels run: one rule for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastdecode_rdma.errors import ConfigError

ISAS = ("avx2", "baseline")
"""Instruction sets with kernels of their own, best first; avx2 means AVX2, FMA and F16C."""

ISA_VARIABLE = "FASTDECODE_ISA"


def choose_isa(can_run: Callable[[str], bool], requested: str | None = None) -> str:
    """Returns the instruction set to run: `requested`, else FASTDECODE_ISA, else the best there is.

    `can_run` may also choose what it says yes to: the name returned is the last that it accepted.

    Raises:
        ConfigError: the name is unknown, or this CPU cannot run it.
    """
    source = "isa" if requested else ISA_VARIABLE
    name = requested or os.environ.get(ISA_VARIABLE)
    if not name:
        return next(isa for isa in ISAS if can_run(isa))  # the baseline runs everywhere
    if name not in ISAS:
        raise ConfigError(f"{source}={name!r} is unknown; expected one of {ISAS}")
    if not can_run(name):
        usable = tuple(isa for isa in ISAS if can_run(isa))
        raise ConfigError(f"{source}={name!r} cannot run on this CPU; it can run {usable}")
    return name
