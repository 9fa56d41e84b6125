"""The thread team: every piece of work is done once, whoever takes part, however many call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from fastdecode_rdma import _team
from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget


@pytest.fixture(scope="module")
def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 200), torch.randn(500, 200)
    return x, weight, x.double() @ weight.double().t()


def test_many_threads_may_call_at_once(problem: tuple[torch.Tensor, ...]) -> None:
    """One has the team, the others run alone; all get the same bits."""
    x, weight, expected = problem
    results: list[torch.Tensor] = []

    def work() -> None:
        ops = CpuOps(num_threads=3, deterministic=True)
        packed = ops.pack(weight)
        results.extend(ops.linear(x, packed).clone() for _ in range(60))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 240
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0].double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_threads", [1, 2, 5, 64])
def test_any_number_of_threads_is_served(
    problem: tuple[torch.Tensor, ...], num_threads: int
) -> None:
    x, weight, _ = problem
    one, many = (CpuOps(num_threads=n, deterministic=True) for n in (1, num_threads))
    expected = one.linear(x, one.pack(weight)).clone()
    packed = many.pack(weight)
    for _ in range(50):
        assert torch.equal(many.linear(x, packed), expected)


def test_a_forked_child_starts_a_team_of_its_own(problem: tuple[torch.Tensor, ...]) -> None:
    x, weight, _ = problem
    ops = CpuOps(num_threads=2, deterministic=True)
    packed = ops.pack(weight)
    expected = ops.linear(x, packed).clone()
    child = os.fork()
    if child == 0:  # no pytest in here: it would report twice
        os._exit(0 if torch.equal(ops.linear(x, packed), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ops.linear(x, packed), expected)


ONE_TEAM = """
import os, numpy as np, torch
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

before = len(os.listdir('/proc/self/task'))
ops = CpuOps(num_threads=2, deterministic=True)
ops.linear(torch.randn(64, 512), ops.pack(torch.randn(512, 512)))
geometry = AttentionGeometry((KVGroup((0,), 8, 8, 64),), 0.1, 'fp32', 64, 4096)
session = AttentionSession(geometry, MemoryBudget(1 << 28), 2)
rows = np.zeros((64, geometry.row_width(0)), np.float32)
out, status = np.zeros((64, geometry.out_width(0)), np.float32), np.zeros(64, np.uint8)
for step in range(64):
    entries = np.array([(h, step, 1, 0) for h in range(1, 65)], ENTRY_DTYPE)
    session.begin_step(0, step, entries)
    session.attend(0, 0, rows, out, status)
print(len(os.listdir('/proc/self/task')) - before)
"""


def test_dense_layers_and_the_embedded_kernel_share_one_team() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_TEAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "1"  # one helper beside the caller, for both


def test_a_session_computes_the_same_while_the_team_is_busy() -> None:
    """Two engines of one worker attend at the same time: one gets the team, one runs alone."""
    import numpy as np

    from fastdecode_rdma.config import ENTRY_DTYPE

    geometry = AttentionGeometry((KVGroup((0,), 8, 2, 32),), 0.2, "fp32", 8, 4096)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, geometry.row_width(0))).astype(np.float32)
    results: list[bytes] = []

    def work() -> None:
        with AttentionSession(geometry, MemoryBudget(1 << 26), 3) as session:
            out = np.zeros((8, geometry.out_width(0)), np.float32)
            status = np.zeros(8, np.uint8)
            for step in range(100):
                entries = np.array([(h, step, 1, 0) for h in range(1, 9)], ENTRY_DTYPE)
                session.begin_step(0, step, entries)
                session.attend(0, 0, rows, out, status)
            results.append(out.tobytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 4 and len(set(results)) == 1


def test_helpers_that_sleep_at_once_compute_the_same(problem: tuple[torch.Tensor, ...]) -> None:
    x, weight, _ = problem
    ops = CpuOps(num_threads=4, deterministic=True)
    packed = ops.pack(weight)
    expected = ops.linear(x, packed).clone()
    _team.set_spin_ns(0)
    try:
        for _ in range(100):
            assert torch.equal(ops.linear(x, packed), expected)
    finally:
        _team.set_spin_ns(100_000)
    with pytest.raises(ValueError, match="at least 0"):
        _team.set_spin_ns(-1)
