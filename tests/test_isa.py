from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdecode_rdma import _dense, _sampling
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.isa import BELOW, ISA_VARIABLE, ISAS, UNPROVEN, choose_isa
from fastdecode_rdma.worker import _attention

PROVEN = [isa for isa in ISAS if isa not in UNPROVEN]


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


def cpu(*isas: str) -> Callable[[str], bool]:
    return lambda isa: isa in (*isas, "baseline")


def test_the_best_that_the_cpu_can_run_is_taken() -> None:
    assert choose_isa(cpu("avx512", "avx2")) == "avx512"
    assert choose_isa(cpu("avx512", "avx2"), built=("baseline", "avx2")) == "avx2"
    assert choose_isa(cpu("avx2")) == "avx2"
    assert choose_isa(cpu()) == "baseline"
    assert choose_isa(cpu("avx2"), built=("baseline",)) == "baseline"


@pytest.mark.parametrize("isa", sorted(UNPROVEN))
def test_what_nobody_has_tried_runs_only_when_it_is_named(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_run = cpu(isa, BELOW[isa])
    assert choose_isa(can_run) == BELOW[isa]
    assert choose_isa(can_run, isa) == isa
    monkeypatch.setenv(ISA_VARIABLE, isa)
    assert choose_isa(can_run) == isa
    assert choose_isa(can_run, "baseline") == "baseline"  # an argument before the environment


def test_a_kernel_that_lacks_the_named_set_takes_the_next_below() -> None:
    can_run = cpu("avx512", "avx2", "neon")
    assert choose_isa(can_run, "avx512", built=("baseline", "avx2")) == "avx2"
    assert choose_isa(can_run, "avx512", built=("baseline",)) == "baseline"
    assert choose_isa(can_run, "neon", built=("baseline",)) == "baseline"


def test_a_set_that_cannot_run_is_refused_with_those_that_can() -> None:
    with pytest.raises(ConfigError, match=r"isa='avx512' cannot run.*\('avx2', 'baseline'\) can"):
        choose_isa(cpu("avx2"), "avx512", built=("baseline", "avx2"))
    with pytest.raises(ConfigError, match=r"isa='sse9' is unknown; expected one of .*'neon'"):
        choose_isa(cpu("avx2"), "sse9")


def test_every_set_leads_down_to_the_baseline_which_is_proven() -> None:
    for isa in ISAS:
        while isa != "baseline":
            assert isa in ISAS
            isa = BELOW[isa]
    assert "baseline" in PROVEN and set(ISAS) >= UNPROVEN


@pytest.mark.parametrize("kernel", [_attention, _dense, _sampling])
def test_kernels_name_their_sets_as_this_rule_does(kernel: object) -> None:
    assert set(kernel.ISA_NAMES) <= set(ISAS) and "baseline" in kernel.ISA_NAMES


def test_all_kernels_ask_the_cpu_the_same_question() -> None:
    for isa in ISAS:
        assert _dense.cpu_has(isa) == _sampling.cpu_has(isa)
        assert _attention.has_isa(isa) == (isa in _attention.ISA_NAMES and _dense.cpu_has(isa))
    assert not _dense.cpu_has("sse9") and _dense.cpu_has("baseline")
