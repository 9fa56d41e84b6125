"""Arrays from huge pages: apart, aligned, alive as long as they are held."""

import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma.huge_pages import ALIGN_BYTES, CHUNK_BYTES, PAGE_BYTES, HugePageArena
from fastdecode_rdma.ops import CpuOps


def test_arrays_are_aligned_and_do_not_overlap():
    arena = HugePageArena()
    arrays = [
        arena.empty(count, kind)
        for count in (1, 3, 100_000, CHUNK_BYTES, 7)
        for kind in (np.uint16, np.float32)
    ]
    for value, array in enumerate(arrays):
        assert array.ctypes.data % ALIGN_BYTES == 0
        array[:] = value
    for value, array in enumerate(arrays):
        assert (array == value).all()
    assert [a.dtype for a in arrays[:2]] == [np.uint16, np.float32]


def test_first_array_of_a_chunk_starts_a_huge_page():
    assert HugePageArena().empty(5, np.float32).ctypes.data % PAGE_BYTES == 0


def test_an_empty_array_is_fine():
    assert HugePageArena().empty(0, np.float32).size == 0


def test_array_outlives_its_arena_and_memory_returns_with_it():
    arena = HugePageArena()
    array = arena.empty(1000, np.float32)
    array[:] = 3
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    memory = weakref.ref(base)
    del arena
    assert (array == 3).all() and memory() is not None
    del array, base
    assert memory() is None


def test_impossible_sizes_are_memory_errors():
    with pytest.raises(MemoryError, match="memory for weights"):
        HugePageArena().empty(1 << 60, np.uint8)


def test_small_weights_share_one_mapping():
    ops = CpuOps(deterministic=True)
    linears = [ops.pack(torch.ones(64, 64)) for _ in range(8)]
    addresses = [linear.address for linear in linears]
    assert max(addresses) - min(addresses) < PAGE_BYTES
    mapping = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+)", line))
        and int(found[1], 16) <= addresses[0] < int(found[2], 16)
    ]
    assert len(mapping) == 1
