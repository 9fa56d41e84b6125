"""Slabs from pools: bought and given back, cut from memory mapped ahead, on the pages there are."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise
from pathlib import Path

import pytest

from fastdecode_rdma import pages
from fastdecode_rdma.errors import CacheFullError
from fastdecode_rdma.numa import Node
from fastdecode_rdma.pages import HUGE_BYTES, Mapping
from fastdecode_rdma.worker import limits
from fastdecode_rdma.worker.memory import MemoryBudget, Slab, SlabPool

MIB = 1 << 20


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def write(slab: Slab, value: int) -> None:
    for at in (0, slab.nbytes - 1):
        ctypes.c_ubyte.from_address(slab.address + at).value = value


def read(slab: Slab) -> set[int]:
    return {ctypes.c_ubyte.from_address(slab.address + at).value for at in (0, slab.nbytes - 1)}


def fill(budget: MemoryBudget) -> None:
    for pool in budget.pools:
        pool.fill(explicit=False)


def test_a_slab_goes_back_to_the_system() -> None:
    budget = MemoryBudget(64 * MIB)
    slab = budget.take(5 * MIB + 1)
    assert (budget.used_bytes, budget.mapped_bytes) == (5 * MIB + 1, 6 * MIB)
    write(slab, 7)
    budget.give(slab)
    assert (budget.used_bytes, budget.mapped_bytes) == (0, 0)
    assert not is_mapped(slab.address)


def test_a_slab_that_is_dropped_goes_back_too() -> None:
    budget = MemoryBudget(64 * MIB)
    slab = budget.take(32 * MIB)
    address = slab.address
    assert is_mapped(address)
    del slab
    assert not is_mapped(address)


def test_no_more_than_the_limit() -> None:
    budget = MemoryBudget(8 * MIB)
    slab = budget.take(6 * MIB)
    with pytest.raises(CacheFullError, match="2097152 of 8388608 are free"):
        budget.take(3 * MIB)
    budget.give(slab)
    budget.give(budget.take(8 * MIB))


def test_memory_that_the_system_does_not_give_leaves_the_budget_as_it_was() -> None:
    budget = MemoryBudget(1 << 59)
    with pytest.raises(CacheFullError, match="the system gave no"):
        budget.take(1 << 58)
    assert budget.used_bytes == budget.mapped_bytes == 0


@pytest.mark.parametrize("is_kept", [False, True])
def test_slabs_do_not_overlap_and_stay_in_the_limit(is_kept: bool) -> None:
    rng = random.Random(3)
    limit = 24 * MIB
    budget = MemoryBudget(limit)
    if is_kept:
        fill(budget)
    held: dict[int, Slab] = {}
    full = 0
    for value in range(250):
        if held and rng.random() < 0.4:
            key = rng.choice(list(held))
            assert read(held[key]) == {key}
            budget.give(held.pop(key))
        try:
            slab = budget.take(rng.choice([1, 4097, 100_000, MIB, 2 * MIB, 5 * MIB + 3, 9 * MIB]))
        except CacheFullError:
            full += 1
            continue
        held[value] = slab
        write(slab, value)
        # a 2 MiB page that is partly used cannot be given back
        assert budget.mapped_bytes <= limit + 2 * HUGE_BYTES * (len(held) + 1)
    assert full > 20
    for slab in held.values():
        budget.give(slab)
    assert budget.used_bytes == 0
    assert is_kept or budget.mapped_bytes == 0
    budget.empty()
    assert budget.mapped_bytes == 0


def test_memory_mapped_ahead_is_cut_and_joined_again() -> None:
    budget = MemoryBudget(16 * MIB)
    fill(budget)
    slabs = [budget.take(2 * MIB) for _ in range(8)]
    assert [b.address - a.address for a, b in pairwise(slabs)] == [2 * MIB] * 7
    assert budget.mapped_bytes == 16 * MIB
    for slab in random.Random(1).sample(slabs, 8):
        budget.give(slab)
    assert budget.take(16 * MIB).address == slabs[0].address
    budget.pools[0]._free.clear()


def test_free_memory_in_pieces_serves_a_slab_at_another_address() -> None:
    budget = MemoryBudget(16 * MIB)
    fill(budget)
    slabs = [budget.take(2 * MIB) for _ in range(8)]
    for slab in slabs[::2]:
        budget.give(slab)
    big = budget.take(8 * MIB)  # of 2 MiB each
    write(big, 9)
    assert budget.mapped_bytes == 16 * MIB and not is_mapped(slabs[0].address)
    for slab in [big, *slabs[1::2]]:
        budget.give(slab)
    assert budget.used_bytes == 0 and budget.mapped_bytes == 16 * MIB
    budget.empty()


def test_other_memory_is_made_room_for() -> None:
    budget = MemoryBudget(16 * MIB)
    fill(budget)
    budget.reserve(3 * MIB)
    assert budget.mapped_bytes == 12 * MIB
    budget.release(3 * MIB)
    budget.give(budget.take(16 * MIB))
    assert budget.mapped_bytes == 16 * MIB
    budget.empty()


class Reserved:
    """A system with reserved pages, as far as a pool can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, fails: str) -> None:
        self.attempts = 0
        self.real = pages.map_pages
        self.unmapped: list[int] = []
        monkeypatch.setattr(limits, "free_huge_bytes", lambda: free_bytes)
        monkeypatch.setattr(pages, "map_pages", self.map_pages)
        self.fails = fails
        monkeypatch.setattr(pages, "populate", self.populate)
        self.real_unmap = pages.unmap
        monkeypatch.setattr(pages, "unmap", self.unmap)

    def map_pages(self, nbytes: int, *, explicit: bool) -> Mapping:
        self.attempts += explicit
        if explicit and self.fails == "map":
            raise OSError(12, "mmap of pages: Cannot allocate memory")
        mapping = self.real(nbytes, explicit=False)
        return Mapping(mapping.address, mapping.nbytes, explicit)

    def populate(self, address: int, nbytes: int) -> None:
        if self.fails == "populate":
            raise OSError(14, "touching: Bad address")

    def unmap(self, address: int, nbytes: int) -> None:
        self.unmapped.append(nbytes)
        self.real_unmap(address, nbytes)


@pytest.mark.parametrize("fails", ["", "map", "populate"])
def test_reserved_pages_first_then_others(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    reserved = Reserved(monkeypatch, free_bytes=64 * MIB, fails=fails)
    budget = MemoryBudget(64 * MIB)
    slab = budget.take(5 * MIB)
    assert reserved.attempts == 1
    assert slab.mapping.is_explicit == (not fails)
    assert slab.mapping.nbytes == 6 * MIB
    assert reserved.unmapped.count(6 * MIB) == (fails == "populate")
    assert budget.page_kind() == ("reserved 2MiB" if not fails else limits.page_kind(0))
    budget.give(slab)
    assert budget.mapped_bytes == 0 and not is_mapped(slab.address)


def test_too_few_reserved_pages_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = Reserved(monkeypatch, free_bytes=5 * MIB, fails="")
    budget = MemoryBudget(64 * MIB)
    slabs = [budget.take(5 * MIB), budget.take(MIB)]  # the first ends in a page that is not there
    assert reserved.attempts == 0 and not any(slab.mapping.is_explicit for slab in slabs)
    for slab in slabs:
        budget.give(slab)


def test_nodes_have_their_share_and_others_their_own() -> None:
    nodes = (Node(0, (0,), 0.75), Node(0, (1,), 0.25))
    budget = MemoryBudget(16 * MIB, nodes)
    assert [pool.limit_bytes for pool in budget.pools] == [12 * MIB, 4 * MIB]
    slab = budget.take(3 * MIB, 1)
    assert [budget.free_bytes(node) for node in (0, 1)] == [12 * MIB, MIB]
    budget.reserve(10 * MIB)
    assert [budget.free_bytes(node) for node in (0, 1)] == [3 * MIB, MIB]
    assert budget.free_bytes() == 3 * MIB
    budget.give(slab)
    assert MemoryBudget(16 * MIB, nodes[:1]).nodes == ()


def test_a_node_that_cannot_be_bound_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = SlabPool(8 * MIB, Node(1000, (0,)))
    slabs = [pool.take(2 * MIB) for _ in range(2)]
    assert "Invalid argument" in pool.binding_error
    assert caplog.text.count("not bound to NUMA node 1000") == 1
    for slab in slabs:
        write(slab, 1)
        pool.give(slab)
