"""The installed extensions, instruction by instruction; and that the check sees mistakes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastdecode_rdma

CHECK = Path(__file__).with_name("disassembly.py")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disassembly", CHECK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["disassembly"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_no_extension_can_meet_a_cpu_that_lacks_its_instructions() -> None:
    paths = sorted(Path(fastdecode_rdma.__file__).parent.rglob("*.so"))
    stems = {path.name.partition(".")[0] for path in paths}
    assert stems >= {"_team", "_dense", "_sampling", "_pump", "_attention"}
    done = subprocess.run([sys.executable, CHECK, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == len(paths)


@pytest.mark.parametrize(
    ("machine", "function", "instruction", "why"),
    [
        ("x86_64", "fd_attend", "vmovaps %xmm1,%xmm0", "is avx, which a CPU with baseline"),
        ("x86_64", "fd_attend", "pshufb %xmm1,%xmm0", "is sse4"),
        ("x86_64", "fd_attend", "lock cmpxchg16b (%rdi)", "is other"),
        ("x86_64", "sample_base_sum", "popcnt %rax,%rax", "is sse4"),
        ("x86_64", "fd_avx2_segment", "vaddps %zmm1,%zmm0,%zmm0", "is avx512"),
        ("x86_64", "fd_avx2_segment", "vaddps %ymm17,%ymm0,%ymm0", "is avx512"),
        ("x86_64", "fd_avx2_segment", "kmovw %eax,%k1", "is avx512"),
        ("x86_64", "avx2_gemm_body", "vpternlogd $0xff,%ymm0,%ymm0,%ymm0", "is avx512"),
        ("x86_64", "avx2_gemm_body", "shlx %rax,%rbx,%rcx", "is other"),
        ("x86_64", "fd_avx2_segment", "vpdpwssd %ymm1,%ymm0,%ymm2", "is avx512"),
        ("x86_64", "fd_avx512_segment", "vpdpbssd %zmm1,%zmm0,%zmm2", "is beyond AVX-512"),
        ("x86_64", "fd_neon_segment", "ret", "neon has no place on x86_64"),
        ("aarch64", "fd_attend", "ldaddal w0, w1, [x2]", "is other"),
        ("aarch64", "fd_neon_segment", "sdot v0.4s, v1.16b, v2.16b", "is other"),
        ("aarch64", "fd_neon_segment", "fmla z0.s, p0/m, z1.s, z2.s", "is sve"),
    ],
)
def test_what_a_cpu_may_lack_is_found(
    check: ModuleType, machine: str, function: str, instruction: str, why: str
) -> None:
    listing = [f"0000000000001000 <{function}>:", f"    1000:\t{instruction}", "    1007:\tret"]
    (mistake,) = check.forbidden(check.parse("_attention", machine, listing))
    assert mistake.startswith(function) and why in mistake


@pytest.mark.parametrize(
    ("machine", "function", "instruction"),
    [
        ("x86_64", "fd_attend", "repz ret"),
        ("x86_64", "fd_attend", "rep bsf %eax,%eax"),
        ("x86_64", "fd_attend", "pmaxub %xmm1,%xmm0"),
        ("x86_64", "fd_attend", "andnps %xmm0,%xmm8"),
        ("x86_64", "fd_attend", "pinsrw $0x1,%eax,%xmm0"),
        ("x86_64", "get_available_features.constprop.0", "xgetbv"),
        ("x86_64", "fd_avx2_segment.part.0", "vpmovmskb %ymm0,%eax"),
        ("x86_64", "fd_avx2_segment", "vpmovsxbd (%rdi),%ymm0"),
        ("x86_64", "fd_avx2_segment", "vfmadd231ps %ymm1,%ymm2,%ymm15"),
        ("x86_64", "fd_avx512_segment", "vfmadd231ps (%rax){1to16},%zmm2,%zmm31"),
        ("aarch64", "__aarch64_ldadd8_relax", "ldadd x0, x0, [x1]"),
        ("aarch64", "fd_neon_segment", "fmla v0.4s, v1.4s, v2.s[0]"),
        ("aarch64", "fd_attend", "ldaxr w0, [x1]"),
    ],
)
def test_what_every_such_cpu_has_is_not(
    check: ModuleType, machine: str, function: str, instruction: str
) -> None:
    listing = [f"0000000000001000 <{function}>:", f"    1000:\t{instruction}"]
    assert list(check.forbidden(check.parse("_attention", machine, listing))) == []


def test_loops_that_are_not_made_of_their_instructions_are_found(check: ModuleType) -> None:
    def mistakes(*lines: str) -> str:
        return "\n".join(check.missing(check.parse("_sampling", "x86_64", lines)))

    scalar = ("0 <sample_avx2_sum>:", " 0:\tvfmadd231ss %xmm1,%xmm2,%xmm3")
    assert r"sample_avx2_sum: holds no" in mistakes(*scalar)
    assert "no function is named sample_avx2_sum" in mistakes("0 <other>:", " 0:\tret")
    vectors = (*scalar, " 5:\tvfmadd231ps %ymm1,%ymm2,%ymm3")
    assert "sample_avx2_sum" not in mistakes(*vectors)
    assert "holds 'call 0 <expf@plt>'" in mistakes(*vectors, " 9:\tcall   0 <expf@plt>")
