"""Which instruction set the kernels run: one rule for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from fastdecode_rdma.errors import ConfigError

ISAS = ("avx512", "avx2", "neon", "baseline")
"""Instruction sets that kernels are written for, best first. avx512 means AVX-512 F, BW, VL, DQ
and VNNI beside avx2, which means AVX2, FMA and F16C (cython/isa.h)."""

UNPROVEN = frozenset({"neon"})
"""Right on an emulated processor (.ci/kernels), but nobody has run its tests on a real one, or
measured it: never chosen unless asked for by name. avx512 was, on AMD's Zen 5."""

BELOW = {"avx512": "avx2", "avx2": "baseline", "neon": "baseline"}
"""What a kernel that is not written for an instruction set runs instead."""

ISA_VARIABLE = "FASTDECODE_ISA"


def choose_isa(
    can_run: Callable[[str], bool], requested: str | None = None, *, built: Collection[str] = ISAS
) -> str:
    """Returns the instruction set to run: `requested`, else FASTDECODE_ISA, else the best proven.

    `built` are those that this kernel is written for: asked for another one that the CPU can run,
    it takes the next below.

    Raises:
        ConfigError: the name is unknown, or cannot run here.
    """
    source = "isa" if requested else ISA_VARIABLE
    name = requested or os.environ.get(ISA_VARIABLE)
    usable = [isa for isa in ISAS if isa in built and can_run(isa)]  # the baseline runs everywhere
    if not name:
        return next(isa for isa in usable if isa not in UNPROVEN)
    if name not in ISAS:
        raise ConfigError(f"{source}={name!r} is unknown; expected one of {ISAS}")
    if not can_run(name):
        raise ConfigError(
            f"{source}={name!r} cannot run on this CPU with this build; {tuple(usable)} can"
        )
    while name not in built:
        name = BELOW[name]
    return name
