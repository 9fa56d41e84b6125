"""Sessions on two NUMA nodes, pretended: CPU 0 and CPU 1. Bits, places, threads, overflow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import CacheFullError
from fastdecode_rdma.numa import Node
from fastdecode_rdma.worker.kvcache import block_bytes
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.session import AttentionSession

# In a process of its own, as the team's helpers stay bound: (its nodes) -> JSON on stdout.
DECODE = """
import hashlib, json, os, sys
import numpy as np
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.numa import Node
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.session import AttentionSession

def tasks():
    return {int(task) for task in os.listdir('/proc/self/task')}

nodes, threads = [Node(n, tuple(c), s) for n, c, s in json.loads(sys.argv[1])], int(sys.argv[2])
group = KVGroup((0, 2), 8, 2, 32), KVGroup((1,), 4, 4, 16, 100)
geometry = AttentionGeometry(group, 0.2, 'fp16', max_rows=200, max_model_len=4096)
budget = MemoryBudget(1 << 26, nodes)
rng, digest, before, status = np.random.default_rng(5), hashlib.sha256(), tasks(), []
with AttentionSession(geometry, budget, threads) as session:
    def step(number, entries):
        entries = np.array(entries, ENTRY_DTYPE)
        session.begin_step(0, number, entries)
        rows = int(entries['q_len'].sum())
        for layer in range(3):
            qkv = rng.standard_normal((rows, geometry.row_width(layer))).astype(np.float32)
            out = np.zeros((rows, geometry.out_width(layer)), np.float32)
            row_status = np.zeros(rows, np.uint8)
            session.attend(0, layer, qkv, out, row_status)
            digest.update(out.tobytes() + row_status.tobytes())
    lengths = {handle: 0 for handle in range(1, 9)}
    def advance(number, q_len):
        step(number, [(h, n, q_len(h), 0) for h, n in lengths.items()])
        for handle in lengths:
            lengths[handle] += q_len(handle)
    for number in range(12):  # chunks, some of many vectors; one sequence of two segments
        advance(number, lambda h: 130 if h == 3 else 5)
    session.fork(3, 20, 1540)
    lengths[20] = 1540
    for number in range(12, 60):
        advance(number, lambda h: 1)
    helpers = sorted(sorted(os.sched_getaffinity(t)) for t in tasks() - before)
    used = list(budget._pool_bytes)
print(json.dumps({'digest': digest.hexdigest(), 'helpers': helpers, 'used': used,
                  'left': budget.used_bytes, 'errors': [p.binding_error for p in budget.pools]}))
"""


@pytest.fixture(scope="module")
def decode() -> Callable[..., dict[str, Any]]:
    def run(nodes: list[tuple[int, list[int], float]], threads: int) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", DECODE, json.dumps(nodes), str(threads)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_same_bits_on_any_number_of_nodes(decode: Callable[..., dict[str, Any]]) -> None:
    one = decode([], 1)
    assert one["helpers"] == [] and len(one["used"]) == 1 and one["left"] == 0
    two = decode([(0, [0], 0.5), (0, [1], 0.5)], 2)
    assert two["digest"] == one["digest"]
    assert two["helpers"] == [[1]]  # the caller counts for the first node
    assert min(two["used"]) > 0 and two["left"] == 0 and two["errors"] == ["", ""]
    # the second is not there: not bound, and used all the same
    lame = decode([(0, [0], 0.5), (1000, [1], 0.5)], 4)
    assert lame["digest"] == one["digest"]
    assert lame["helpers"] == [[0], [1], [1]]
    assert min(lame["used"]) > 0
    assert lame["errors"][0] == "" and "Invalid argument" in lame["errors"][1]


GEOMETRY = AttentionGeometry(
    (KVGroup((0,), 2, 2, 64),), 0.1, "fp32", max_rows=64, max_model_len=4096
)
BLOCK = block_bytes(GEOMETRY, GEOMETRY.groups[0])
NODES = (Node(0, (0,), 0.5), Node(0, (1,), 0.5))


def begin(session: AttentionSession, *lines: tuple[int, int, int]) -> None:
    session.begin_step(0, 1, np.array([(h, n, q, 1) for h, n, q in lines], ENTRY_DTYPE))


def session_of(num_blocks: int) -> tuple[AttentionSession, MemoryBudget]:
    """On two nodes with half of the blocks each. One thread: no helper of this process is bound."""
    budget = MemoryBudget(num_blocks * BLOCK, NODES)
    return AttentionSession(GEOMETRY, budget, 1), budget


def test_sequences_go_where_most_is_free() -> None:
    session, budget = session_of(40)
    with session:
        begin(session, (1, 0, 640), (2, 0, 64), (3, 0, 64), (4, 0, 512))
        assert budget._pool_bytes == [10 * BLOCK, 10 * BLOCK]
        session.free(np.array([1], np.uint64))
        assert session.stats()["free_bytes"] == [20 * BLOCK, 10 * BLOCK]
        begin(session, (5, 0, 64))
        assert session.stats()["free_bytes"] == [19 * BLOCK, 10 * BLOCK]
    assert budget.used_bytes == 0 and budget._pool_bytes == [0, 0]


def test_a_fork_stays_with_its_blocks() -> None:
    session, _ = session_of(40)
    with session:
        begin(session, (1, 0, 128), (2, 0, 64))
        for dst in (3, 4, 5):
            session.fork(1, dst, 100)
        begin(session, (3, 100, 1), (4, 100, 1), (5, 100, 1))  # each copies the shared last block
        assert session.stats()["free_bytes"] == [15 * BLOCK, 19 * BLOCK]


def test_a_sequence_may_outgrow_its_node() -> None:
    session, budget = session_of(40)
    with session:
        for length in range(0, 35 * 64, 64):
            begin(session, (1, length, 64))
        assert session.stats()["free_bytes"] == [0, 5 * BLOCK]
        # what is free elsewhere, also inside of slabs, is as good
        begin(session, (1, 35 * 64, 5 * 64))
        assert session.stats()["blocks_used"] == [40]
        with pytest.raises(CacheFullError) as caught:
            begin(session, (1, 40 * 64, 2 * 64))
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (2 * BLOCK, 0)
        begin(session, (1, 64, 64))
        assert session.stats()["blocks_used"] == [2]
    assert budget.used_bytes == 0


def test_the_limit_holds_for_all_nodes_together() -> None:
    session, budget = session_of(40)
    with session:
        budget.reserve(15 * BLOCK)
        begin(session, (1, 0, 12 * 64), (2, 0, 12 * 64))
        with pytest.raises(CacheFullError):
            begin(session, (1, 12 * 64, 64), (2, 12 * 64, 64))
        begin(session, (1, 12 * 64, 64))
        assert budget.free_bytes() == 0
        budget.release(15 * BLOCK)
