"""First touch: all of it, told while it lasts, stopped when asked, other pages when some fail."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import pytest

from fastdecode_rdma import pages
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.numa import Node
from fastdecode_rdma.worker import limits, touch
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.touch import PIECE_BYTES, Progress, touch_memory

MIB = 1 << 20


class Touched:
    """What was touched, and by threads that may run where; does not touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.cpus: dict[int, set[frozenset[int]]] = {}
        self.here: dict[int, frozenset[int]] = {}
        self.fails_at: int | None = None
        monkeypatch.setattr(pages, "populate", self.populate)
        monkeypatch.setattr("os.sched_setaffinity", self.bind)

    def bind(self, pid: int, cpus: tuple[int, ...]) -> None:
        assert pid == 0
        self.here[threading.get_ident()] = frozenset(cpus)

    def populate(self, address: int, nbytes: int) -> None:
        time.sleep(0.001)
        if len(self.ranges) == self.fails_at:
            raise OSError(14, "touching: Bad address")
        self.ranges.append((address, nbytes))
        self.cpus.setdefault(address, set()).add(self.here.get(threading.get_ident(), frozenset()))


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    return Touched(monkeypatch)


def test_all_of_it_is_touched_once(touched: Touched) -> None:
    budget = MemoryBudget(5 * PIECE_BYTES + 6 * MIB + 5)
    assert touch_memory(budget, 3)
    ranges = sorted(touched.ranges)
    assert sum(nbytes for _, nbytes in ranges) == 5 * PIECE_BYTES + 6 * MIB == budget.mapped_bytes
    assert [a + n for a, n in ranges[:-1]] == [a for a, _ in ranges[1:]]
    assert all(cpus == {frozenset()} for cpus in touched.cpus.values())  # nobody was bound
    budget.empty()


def test_each_nodes_memory_is_touched_on_its_cpus(touched: Touched) -> None:
    nodes = (Node(0, (0, 2), 0.5), Node(0, (1, 3), 0.5))
    budget = MemoryBudget(8 * PIECE_BYTES, nodes)
    assert touch_memory(budget, 5)
    for index, pool in enumerate(budget.pools):
        start = pool._free[0].address
        mine = [a for a, _ in touched.ranges if start <= a < start + 4 * PIECE_BYTES]
        assert len(mine) == 4
        assert {c for a in mine for c in touched.cpus[a]} == {frozenset(nodes[index].cpus)}
    budget.empty()


def test_the_pages_are_there_afterwards() -> None:
    budget = MemoryBudget(8 * MIB)
    assert touch_memory(budget, 2)
    slab = budget.take(8 * MIB)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(slab.address // 4096 * 8)
        entries = memoryview(pagemap.read(8 * MIB // 4096 * 8)).cast("Q")
    assert all(entry >> 63 for entry in entries)
    budget.give(slab)
    budget.empty()


def test_it_stops_when_asked(touched: Touched) -> None:
    budget = MemoryBudget(100 * PIECE_BYTES)
    assert not touch_memory(budget, 2, is_stopped=lambda: len(touched.ranges) >= 5)
    assert 5 <= len(touched.ranges) <= 7
    budget.empty()


def test_memory_that_is_not_there_is_an_error(touched: Touched) -> None:
    touched.fails_at = 2
    budget = MemoryBudget(4 * PIECE_BYTES)
    with pytest.raises(ConfigError, match=r"does not give 128MiB of memory.*Bad address.*--memory"):
        touch_memory(budget, 2)
    assert budget.mapped_bytes == 0
    budget.give(budget.take(MIB))


def test_reserved_pages_that_fail_are_replaced(
    touched: Touched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = pages.map_pages
    kinds: list[bool] = []

    def map_pages(nbytes: int, *, explicit: bool) -> pages.Mapping:
        kinds.append(explicit)
        mapping = real(nbytes, explicit=False)
        return pages.Mapping(mapping.address, mapping.nbytes, explicit)

    monkeypatch.setattr(pages, "map_pages", map_pages)
    monkeypatch.setattr(limits, "free_huge_bytes", lambda: 4 * PIECE_BYTES)
    budget = MemoryBudget(4 * PIECE_BYTES)
    assert touch_memory(budget, 1)
    assert kinds == [True] and budget.page_kind() == "reserved 2MiB"
    budget.empty()
    touched.fails_at = len(touched.ranges) + 1
    assert not touch_memory(budget, 1, is_stopped=lambda: len(kinds) == 3)
    assert kinds == [True, True, False] and "reserved 2 MiB pages cannot be used" in caplog.text
    budget.empty()


class Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def shown(clock_s: list[float], *, is_terminal: bool) -> str:
    """What is said when a tenth of 100 GiB is done after each of those times."""
    times = iter([0.0, *clock_s])
    stream = Stream(is_terminal=is_terminal)
    clock: Callable[[], float] = lambda: next(times)  # noqa: E731
    progress = Progress(100 << 30, stream, clock)
    for step in range(len(clock_s)):
        progress.show((step + 1) * (10 << 30))
    progress.close()
    return stream.getvalue()


def test_a_second_passes_in_silence() -> None:
    assert shown([0.1, 0.5, 0.99], is_terminal=True) == ""
    assert shown([0.1, 0.5, 0.99], is_terminal=False) == ""


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    text = shown([0.5, 1.5, 5.0, 11.4, 11.6, 13.0], is_terminal=False)
    assert text.splitlines() == [
        "touching KV memory: 20GiB of 100GiB, 6 s left",
        "touching KV memory: 50GiB of 100GiB, 12 s left",
    ]


def test_a_terminal_gets_one_line_that_is_gone_at_the_end() -> None:
    text = shown([1.5, 1.55, 2.0], is_terminal=True)
    parts = text.split("\r")
    assert parts[1:3] == [
        "touching KV memory: 10GiB of 100GiB, 14 s left",
        "touching KV memory: 30GiB of 100GiB, 5 s left".ljust(len(parts[1])),
    ]
    assert "\n" not in text and parts[3].strip() == parts[4] == ""


def test_the_total_is_that_of_all_pools(touched: Touched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch, "QUIET_S", 0.0)
    stream = Stream(is_terminal=False)
    nodes = (Node(0, (0,), 0.5), Node(0, (1,), 0.5))
    budget = MemoryBudget(64 * PIECE_BYTES, nodes)
    assert touch_memory(budget, 2, stream=stream)
    assert " of 2GiB, " in stream.getvalue()
    budget.empty()
