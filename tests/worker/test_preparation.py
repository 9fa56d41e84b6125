"""Whether a worker takes its memory at the start, and which nodes it spreads over."""

from __future__ import annotations

import pytest

from fastdecode_rdma import numa
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.numa import Node
from fastdecode_rdma.worker import limits
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.preparation import find_nodes, prepare_memory, reason_not_to_touch

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """10 GiB free, no reserved pages."""
    monkeypatch.setattr(limits, "free_huge_bytes", lambda: 0)
    monkeypatch.setattr(limits, "free_memory", lambda: limits.Default(10 * GIB, "MemAvailable"))
    return monkeypatch


@pytest.mark.parametrize(
    ("nbytes", "touch", "is_named", "reason"),
    [
        (8 * GIB, None, True, ""),
        (8 * GIB, True, False, ""),
        (10 * GIB, True, True, ""),
        (8 * GIB, None, False, "taken when needed; pass --memory or --touch"),
        (8 * GIB, False, True, "taken when needed"),
        (9 * GIB, None, True, "taken when needed, as MemAvailable is 10GiB"),
    ],
)
def test_memory_that_was_named_and_fits_is_taken(
    machine: pytest.MonkeyPatch, nbytes: int, *, touch: bool | None, is_named: bool, reason: str
) -> None:
    said = reason_not_to_touch(nbytes, touch=touch, is_named=is_named)
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_more_than_is_free_cannot_be_touched(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot touch 11GiB: MemAvailable is 10GiB; lower"):
        reason_not_to_touch(11 * GIB, touch=True, is_named=True)


def test_reserved_pages_are_nobody_elses(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(limits, "free_huge_bytes", lambda: 64 * GIB)
    assert reason_not_to_touch(64 * GIB, touch=None, is_named=True) == ""


def test_where_nothing_is_known_it_must_be_asked_for(machine: pytest.MonkeyPatch) -> None:
    def unknown() -> limits.Default:
        raise ConfigError("cannot find out how much memory is free here")

    machine.setattr(limits, "free_memory", unknown)
    assert "cannot find out" in reason_not_to_touch(GIB, touch=None, is_named=True)
    assert reason_not_to_touch(GIB, touch=True, is_named=True) == ""


def test_it_says_what_the_memory_lies_on() -> None:
    budget = MemoryBudget(4 << 20)
    said = prepare_memory(budget, 1, touch=True, is_named=True, is_stopped=lambda: False)
    assert said.startswith(f"pages {limits.page_kind(0)}: 4MiB touched in 0.")
    assert budget.mapped_bytes == 4 << 20
    budget.empty()
    said = prepare_memory(budget, 1, touch=False, is_named=True, is_stopped=lambda: False)
    assert said.endswith(": taken when needed") and budget.mapped_bytes == 0


def test_it_says_when_the_system_was_short_of_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "has_transparent_huge_pages", lambda root=None: True)

    def said(huge_bytes: int | None) -> str:
        monkeypatch.setattr(limits, "transparent_bytes", lambda: huge_bytes)
        budget = MemoryBudget(8 << 20)
        line = prepare_memory(budget, 1, touch=True, is_named=True, is_stopped=lambda: False)
        budget.empty()
        return line

    assert said(2 << 20).endswith(" s; the system had 2MiB pages for 25% of it")
    assert said(8 << 20).endswith(" s") and said(None).endswith(" s")


@pytest.mark.parametrize(
    ("count", "threads", "said"),
    [
        (1, 4, ""),
        (2, 2, "nodes 2: memory and threads of each NUMA node, CPUs 0-1; 2-3"),
        (3, 2, "nodes 1: 3 NUMA nodes are too many for 2 threads"),
        (33, 64, "nodes 1: 33 NUMA nodes are too many for 64 threads"),
    ],
)
def test_nodes(monkeypatch: pytest.MonkeyPatch, count: int, threads: int, said: str) -> None:
    nodes = tuple(Node(n, (2 * n, 2 * n + 1), 1 / count) for n in range(count))
    monkeypatch.setattr(numa, "find_nodes", lambda: nodes)
    assert find_nodes(threads) == (nodes if count == 2 else (), said)
