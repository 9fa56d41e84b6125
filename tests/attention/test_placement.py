"""Placement and admission: pure integers."""

from __future__ import annotations

import random

import pytest

from fastdecode_rdma.attention import placement as module
from fastdecode_rdma.attention.placement import Placement, kv_bytes, usable_bytes
from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.worker import attention as kernel
from fastdecode_rdma.worker import kvcache


def one_group(max_model_len=4096):
    return AttentionGeometry((KVGroup((0, 1), 4, 2, 16),), 1.0, "fp16", 8, max_model_len)


BLOCK = 2 * 2 * 64 * 2 * 16 * 2  # K and V, layers, tokens, heads, head_dim, fp16


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4096])
def test_bytes_are_the_workers(new_geometry, num_tokens, kv_dtype):
    base = new_geometry()
    geometry = AttentionGeometry(base.groups, 1.0, kv_dtype, 8, 4096)
    assert kv_bytes(geometry, num_tokens) == kvcache.kv_bytes(geometry, num_tokens)


def test_constants_are_the_workers():
    assert module.BLOCK_TOKENS == kernel.BLOCK_TOKENS
    assert module.RING_SLACK_TOKENS == kernel.RING_SLACK
    assert module.SLAB_BYTES == kvcache.SLAB_BYTES
    assert module.SLAB_SHARE == kvcache.SLAB_SHARE


def test_window_groups_stop_growing():
    window = KVGroup((0,), 1, 1, 8, window=100)
    geometry = AttentionGeometry((window,), 1.0, "fp32", 8, 1 << 20)
    assert kv_bytes(geometry, 1 << 20) == kv_bytes(geometry, 4 * 64) > kv_bytes(geometry, 3 * 64)


def test_several_groups_leave_a_slab_each(new_geometry):
    assert usable_bytes(one_group(), 1 << 20) == 1 << 20
    assert usable_bytes(new_geometry(), 1 << 20) == (1 << 20) - 2 * (1 << 14)
    assert usable_bytes(new_geometry(), 1 << 40) == (1 << 40) - 2 * (64 << 20)


def test_new_sequences_go_to_the_least_full_worker():
    placement = Placement(one_group(), [8 * BLOCK, 4 * BLOCK])
    where = []
    for handle in range(12):
        assert placement.reserve(handle, 64)
        where.append(placement.worker_of(handle))
    assert where == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert not placement.reserve(99, 1)
    placement.release(where.index(1))
    assert placement.reserve(99, 1) and placement.worker_of(99) == 1


def test_growth_stays_on_its_worker_and_fails_without_change():
    placement = Placement(one_group(), [3 * BLOCK, 3 * BLOCK])
    assert placement.reserve(1, 64) and placement.reserve(2, 64)
    assert placement.reserve(1, 65) and placement.used_bytes(0) == 2 * BLOCK
    assert not placement.reserve(1, 4 * 64)
    assert placement.used_bytes(0) == 2 * BLOCK
    assert placement.reserve(1, 60) and placement.used_bytes(0) == BLOCK


def test_gangs_share_a_worker_all_or_none():
    placement = Placement(one_group(), [2 * BLOCK, 3 * BLOCK])
    assert not placement.reserve_gang([1, 2, 3, 4], 64)
    assert placement.reserve_gang([1, 2, 3], 64)
    assert {placement.worker_of(handle) for handle in (1, 2, 3)} == {1}
    assert not placement.reserve_gang([4, 5, 6], 64)
    assert placement.used_bytes(0) == 0


def test_lost_workers_take_nothing_more():
    placement = Placement(one_group(), [9 * BLOCK, 2 * BLOCK])
    placement.reserve(1, 64)
    placement.lose_worker(0)
    assert placement.has_workers() and placement.largest_capacity() == 2 * BLOCK
    placement.release(1)
    placement.release(1)
    assert placement.reserve(2, 64) and placement.worker_of(2) == 1
    assert placement.add_worker(5 * BLOCK) == 2
    assert placement.reserve(3, 64) and placement.worker_of(3) == 2
    placement.lose_worker(1)
    placement.restore_worker(0, 7 * BLOCK)
    assert (placement.num_workers, placement.used_bytes(0)) == (3, 0)
    assert placement.capacity_bytes(0) == placement.largest_capacity() == 7 * BLOCK
    assert placement.reserve(5, 64) and placement.worker_of(5) == 0
    placement.lose_worker(0)
    placement.lose_worker(2)
    assert not placement.has_workers() and not placement.reserve(4, 1)


@pytest.mark.parametrize(("blocks", "longest"), [(0, 0), (1, 64), (3, 192), (1000, 4096)])
def test_longest_sequence(blocks, longest):
    placement = Placement(one_group(), [blocks * BLOCK + 1])
    assert placement.longest_sequence() == longest
    assert placement.can_ever_fit(longest) and (
        longest == 4096 or not placement.can_ever_fit(longest + 1)
    )


@pytest.mark.parametrize("seed", range(20))
def test_books_balance_after_any_order(seed):
    rng = random.Random(seed)
    placement = Placement(one_group(), [rng.randrange(20) * BLOCK for _ in range(3)])
    held = {}
    for _ in range(300):
        handle, tokens = rng.randrange(12), rng.randrange(400)
        if rng.random() < 0.3:
            placement.release(handle)
            held.pop(handle, None)
        elif placement.reserve(handle, tokens):
            held[handle] = placement.bytes_for(tokens)
        assert sum(held.values()) == sum(placement.used_bytes(worker) for worker in range(3))
        for worker in range(3):
            assert placement.used_bytes(worker) <= placement.capacities[worker]
