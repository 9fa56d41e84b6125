#!/usr/bin/env python3
"""Checks compiled kernels, extensions or objects, by instruction: `disassembly.py FILE...`

Two questions. Does every instruction set's code hold the instructions it was written for? And is
everything else, and each set's code too, free of instructions that the CPUs it runs on may lack
(fastdecode_rdma/isa.py: who runs what is decided at run time), so that SIGILL is impossible?

A new instruction set: its row in ALLOWED, and rows in EXPECTED that say what its loops are made of.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file
OBJDUMP = {"x86_64": "objdump", "aarch64": "aarch64-linux-gnu-objdump"}

GROUPS: Mapping[str, Mapping[str, str]] = {
    # Instructions that the oldest CPU of an architecture lacks, by name and operands as objdump
    # prints them. The first group that matches is the one an instruction belongs to.
    "x86_64": {
        "beyond AVX-512 F, BW, VL, DQ and VNNI": r"v(pdp(bs|buu|wu|wsu)|dpbf16|cvtne.*bf16"
        r"|pmadd52|permb|perm[it]2b|pmultishift|pshufbitqmb|p(com|ex)press?[bw]|pexpand[bw]|psh[lr]d|popcnt"
        r"|plzcnt|pconflict|p2intersect|gf2p8|aes|pclmul|sha|sm[34]|exp2p|rcp28|rsqrt28|4f)|.*%tmm",
        "avx512": r"v.*(%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7])|k\w+ .*%k[0-7]"
        r"|v(pternlog|permi2|permt2|pmov(us|s)?(q[bwd]|d[bw]|wb)\b|pmov([bwdq]2m|m2)|align[dq]"
        r"|pdp(bus|wss)d|rndscale|getexp|getmant|scalef|fixupimm|reduce|range|pcompress|pexpand|compressp|expandp"
        r"|movdq[ua](8|16|32|64)|p(and|or|xor|andn)[dq]\b|pmullq|psraq|prol|pror|pabsq"
        r"|pm(ax|in)[us]q|(broadcast|extract|insert|shuf)[fi](32|64))",
        "avx": r"v(?!er[rw])",
        "sse4": r"(p?blend|haddp|hsubp|addsubp|movddup|movs[hl]dup|lddqu|fisttp|pshufb|palignr"
        r"|psign|pabs|phadd|phsub|pmulhrsw|pmaddubsw|pmov[sz]x|pinsr[bdq]|pextr[bdq]|extractps"
        r"|insertps|dpp|round[ps][sd]|ptest|pmulld|pmuldq|pm(in|ax)(s[bd]|u[wd])|packusdw|mpsadbw"
        r"|phminpos|movntdqa|pcmp[eg][qt]q|pcmp[ei]str|crc32|popcnt)",
        # tzcnt is not here: it is "rep bsf", which gcc writes where both give the same
        "other": r"(lzcnt|andn\b|bextr|bls(i|r|msk)|bzhi|pdep|pext|rorx|s[ah][lr]x|mulx|ad[co]x"
        r"|movbe|aes|sha(1|256)|pclmul|rdrand|rdseed|rdtscp|cmpxchg16b|xsave|clflushopt|clwb)",
    },
    "aarch64": {
        "sve": r".*\b(z\d+\.[bhsdq]|p\d+/[mz])\b",
        "other": r"([su]dot|usdot|bf(dot|mmla|cvt|mlal)|[su]mmla|fmls?al|sqrdml|fjcvtzs|ldapr"
        r"|crc32|aes|sha\d|(ld|st)(add|clr|eor|set|[su]max|[su]min)a?l?[bh]?\b|swpa?l?[bh]?\b"
        r"|casp?a?l?[bh]?\b|f(add|sub|mul|div|ml[as]|max|min)\w*\s+v\d+\.[48]h)",
    },
}

ALLOWED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # What each set's functions may use; isa_cpu_has() in cython/isa.h asks the CPU for no less.
    "x86_64": {
        "avx512": ("sse4", "avx", "avx512"),
        "avx2": ("sse4", "avx"),
        "baseline": (),
    },
    "aarch64": {"neon": (), "baseline": ()},
}

PREFIX = re.compile(r"(fd_|sample_|dense_)?(base|avx2|avx512|neon)_")
GUARDED = re.compile(r"__aarch64_|get_available_features|__cpu_indicator_init")
"""Compilers' own functions, which ask the CPU before they do what the baseline lacks."""


@dataclass(frozen=True)
class Expected:
    """Functions that a kernel's file must have, by name.

    Each of them holds all of `each`, one or another holds `some`, none holds `never`.
    """

    kernel: str
    functions: str
    each: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    some: tuple[str, ...] = ()


LIBM = r"(call|bl)\s.*<(exp|tanh|pow|fma)f?[@>]"
FUSED = r"fn?m(l[as]|add|sub)\b"
ATTENTION = r"(segment|dot_\w+(?<!INT8)|add_\d_\w+)"  # the inner loops with sums in fp32
INTEGERS = r"(dot|add)_\d_INT[48]"  # those with sums of 16-bit integers' products
EXPECTED: Mapping[str, tuple[Expected, ...]] = {
    "x86_64": (
        Expected("_attention", rf"fd_avx2_{ATTENTION}", (r"vfmadd\w+ps .*%ymm",), (LIBM,)),
        Expected("_attention", r"fd_avx2_(segment|(dot|add)_\w*FP16)", (r"vcvtph2ps .*%ymm",)),
        Expected("_attention", r"fd_avx2_fma_body", (r"vfmadd\w+ps .*%ymm",)),
        Expected("_attention", rf"fd_avx512_{ATTENTION}", (r"vfmadd\w+ps .*%zmm",), (LIBM,)),
        Expected("_attention", r"fd_avx512_(dot|add)_\w*FP16", (r"vcvtph2ps .*%zmm",)),
        Expected("_attention", rf"fd_avx2_{INTEGERS}", (r"vpmaddwd .*%ymm",), (LIBM,)),
        Expected("_attention", rf"fd_avx512_{INTEGERS}", (r"vp(maddwd|dpwssd) .*%zmm",), (LIBM,)),
        Expected("_attention", rf"fd_base_{INTEGERS}", (r"pmaddwd",), (LIBM,)),
        Expected("_attention", rf"fd_base_{ATTENTION}", (r"mulps", r"addps"), (LIBM,)),
        Expected("_dense", r"avx2_\w*tile(\.\w+)*", some=(r"vfmadd\w+ps .*%ymm",)),
        Expected("_dense", r"avx512_\w*tile(\.\w+)*", some=(r"vfmadd\w+ps .*%zmm",)),
        Expected("_dense", r"base_\w*tile(\.\w+)*", some=(r"mulps", r"addps")),
        Expected("_sampling", r"sample_avx2_sum", (r"vfmadd\w+ps .*%ymm",), (LIBM,)),
        Expected("_sampling", r"sample_base_sum", (r"mulps", r"addps"), (LIBM,)),
    ),
    "aarch64": (
        # no fused products in the baseline: its bits are those of x86-64's
        Expected("_attention", rf"fd_base_{ATTENTION}", (r"fmul v.*\.4s",), (FUSED, LIBM)),
        Expected("_attention", rf"fd_neon_{ATTENTION}", (r"fmla v.*\.4s",), (LIBM,)),
        Expected("_attention", r"fd_neon_(dot|add)_\w*FP16", (r"fcvtl v.*\.4s",)),
        Expected("_attention", r"fd_neon_(dot|add)_\w*INT[48]", (r"[su]cvtf v.*\.4s",)),
        Expected("_dense", r"base_\w*tile(\.\w+)*", (), (FUSED,), (r"fmul v.*\.4s",)),
        Expected("_dense", r"neon_\w*tile(\.\w+)*", some=(r"fmla v.*\.4s",)),
        Expected("_sampling", r"sample_base_sum", (r"fmul v.*\.4s",), (FUSED, LIBM)),
    ),
}


@dataclass
class Disassembly:
    """Instructions ("vmovups (%rdi),%ymm0") of each function."""

    kernel: str
    machine: str
    functions: dict[str, list[str]] = field(default_factory=dict)


def parse(kernel: str, machine: str, listing: Iterable[str]) -> Disassembly:
    """Reads what `objdump -d --no-show-raw-insn` prints."""
    found = Disassembly(kernel, machine)
    body: list[str] = []
    for line in listing:
        if line.endswith(">:\n") or line.endswith(">:"):
            name = line[line.index("<") + 1 : line.rindex(">")]
            body = found.functions.setdefault(name, [])
        elif line.startswith(" ") and "\t" in line:
            text = " ".join(line.split("\t", 1)[1].split())
            body.append(re.sub(r"^((rep[nz]*|lock|notrack|bnd|data16|cs|ds) )+", "", text))
    return found


def disassemble(path: Path) -> Disassembly:
    """Returns the instructions of an ELF file."""
    machine = MACHINES[int.from_bytes(path.read_bytes()[18:20], "little")]
    command = [OBJDUMP[machine], "-d", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(path.name.partition(".")[0], machine, listing.splitlines())


def isa_of(function: str) -> str:
    """Returns the instruction set that a function is compiled for, by its name."""
    match = PREFIX.match(function)
    return match[2].replace("base", "baseline") if match else "baseline"


def forbidden(code: Disassembly) -> Iterator[str]:
    """Yields a line for each function that holds what the CPUs that run it may lack."""
    groups = {name: re.compile(text) for name, text in GROUPS[code.machine].items()}
    for function, instructions in code.functions.items():
        if GUARDED.match(function):
            continue
        isa = isa_of(function)
        allowed = ALLOWED[code.machine].get(isa)
        if allowed is None:
            yield f"{function}: {isa} has no place on {code.machine}"
            continue
        for text in instructions:
            group = next((name for name, match in groups.items() if match.match(text)), None)
            if group is not None and group not in allowed:
                yield f"{function}: {text!r} is {group}, which a CPU with {isa} may lack"
                break


def missing(code: Disassembly) -> Iterator[str]:
    """Yields a line for each function of EXPECTED that is not made of what it should be."""
    for expected in EXPECTED[code.machine]:
        if expected.kernel != code.kernel:
            continue
        names = [name for name in code.functions if re.fullmatch(expected.functions, name)]
        if not names:
            yield f"no function is named {expected.functions}: stripped, or the table is old"
        for name in names:
            body = code.functions[name]
            for pattern in expected.each:
                if not any(re.match(pattern, text) for text in body):
                    yield f"{name}: holds no {pattern!r}"
            for pattern in expected.never:
                if text := next((text for text in body if re.match(pattern, text)), None):
                    yield f"{name}: holds {text!r}"
        together = [text for name in names for text in code.functions[name]]
        for pattern in expected.some:
            if names and not any(re.match(pattern, text) for text in together):
                yield f"{expected.functions}: none holds {pattern!r}"


def main(paths: list[str]) -> int:
    """Checks each file; prints a line for each and one for each mistake; 1 if there was one."""
    failed = not paths
    for path in paths:
        code = disassemble(Path(path))
        mistakes = [*forbidden(code), *missing(code)]
        if not code.functions:
            mistakes.append("no functions found")
        counts: dict[str, int] = {}
        for function in code.functions:
            counts[isa_of(function)] = counts.get(isa_of(function), 0) + 1
        summary = ", ".join(f"{count} functions {isa}" for isa, count in sorted(counts.items()))
        print(f"{code.kernel} {code.machine}: {summary}: {'WRONG' if mistakes else 'ok'}")
        for mistake in mistakes:
            print(f"  {mistake}")
        failed = failed or bool(mistakes)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
