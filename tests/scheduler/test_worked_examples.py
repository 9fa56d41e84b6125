"""FastServe's example, to the second: three jobs that take 5, 1 and 2 s for their first token and
1 s for their second, one at a time; and what decides who gives way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastdecode_rdma.scheduler import Job, SchedulerOptions, make_scheduler

FIRST_S = {50: 5.0, 10: 1.0, 20: 2.0}
"""Seconds of the first iteration, by prompt length."""


@pytest.mark.parametrize(
    ("policy", "settings", "finished_s"),
    [
        ("fcfs", {}, [6, 8, 11]),
        ("skip_join_mlfq", {"alpha_s": 1e6, "skip_join": False}, [9, 10, 11]),
        ("skip_join_mlfq", {"alpha_s": 1e6}, [11, 4, 5]),
        ("srpt", {}, [11, 2, 5]),
    ],
    ids=["fcfs", "naive_mlfq", "skip_join_mlfq", "srpt"],
)
def test_three_jobs(
    policy: str,
    settings: dict[str, object],
    finished_s: list[int],
    clock: Any,
    by_table: Callable[..., Any],
    drive: Callable[..., Any],
) -> None:
    """Means of 8.33, 10, 6.67 and 6 s."""
    costs = by_table(FIRST_S)
    options = SchedulerOptions(1, 1000, clock=clock, costs=costs)
    driver = drive(make_scheduler(policy, options, settings), costs=costs)
    for handle, length in enumerate(FIRST_S):
        driver.add(Job(handle, length, length, 2, handle))
    assert [driver.run()[handle] for handle in range(3)] == finished_s
    assert not driver.room.held


def mlfq(clock: Any, costs: Any, seats: int = 1, **settings: object) -> Any:
    options = SchedulerOptions(seats, 1000, clock=clock, costs=costs)
    return make_scheduler("skip_join_mlfq", options, {"alpha_s": 1e6, **settings})


def test_a_paused_job_keeps_its_cache_and_its_place(
    clock: Any, by_table: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    driver = drive(mlfq(clock, by_table()), costs=by_table())
    driver.add(Job(1, 1, 1, 20, 1))
    for _ in range(4):
        driver.step()
    driver.add(Job(2, 1, 1, 1, 2))
    plan = driver.step()
    assert (plan.prefill, plan.decode, plan.preempted) == ([(2,)], [], [])
    assert driver.policy.num_paused == 1 and driver.room.held == {1: driver.jobs[1].num_tokens}
    assert driver.step().decode == [1]


def test_a_starved_job_is_promoted_and_gets_one_extra_quantum(
    clock: Any, by_table: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    """Short jobs keep coming; the long prompt (4 s, a quantum of 1 s at the top) starts when it has
    waited for 10 s, and decodes once more before it falls."""
    costs = by_table()
    driver = drive(mlfq(clock, costs, alpha_s=10.0), costs=costs)
    driver.add(Job(0, 4, 4, 3, 0))
    started_s = None
    for handle in range(1, 40):
        driver.add(Job(handle, 1, 1, 1, handle))
        before_s = clock()
        if (0,) in driver.step().prefill:
            started_s = before_s
            break
    assert started_s is not None and 10.0 <= started_s <= 12.0
    driver.add(Job(99, 1, 1, 1, 99))
    assert driver.step().decode == [0]
    assert driver.step().prefill == [(handle,)]  # it has fallen
    assert driver.run()[0] > 0


def test_expected_time_to_service(clock: Any, by_table: Callable[..., Any]) -> None:
    """Queues of 1, 2, 4, 8 s, two seats. Two jobs in the top queue, one in the third, one in the
    fourth: the third's waits for 2 * (1 + 2) / 2 = 3 s, the fourth's for (2 * (1 + 2 + 4) + 4) / 2
    = 9 s, unless it is promoted before."""
    policy = mlfq(clock, by_table(), seats=2, alpha_s=8.0)
    for handle, length in enumerate((1, 1, 4, 8)):
        policy.add([Job(handle, length, length, 5, handle)])
    entries = policy._waiting.entries
    assert [entry.level for entry in entries] == [0, 0, 2, 3]
    assert policy.enst_s(entries) == [0.0, 0.0, 3.0, 8.0]
    clock.now_s = 6.0
    assert policy.enst_s(entries) == [0.0, 0.0, 2.0, 2.0]
    assert [e.job.handle for e in policy._give_way(entries)][:2] == [3, 2]


def test_memory_of_those_that_run_last_goes_to_a_newcomer(
    clock: Any, by_table: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    driver = drive(mlfq(clock, by_table()), capacity=40, costs=by_table())
    driver.add(Job(1, 8, 8, 20, 1))
    for _ in range(2):
        driver.step()
    driver.add(Job(2, 28, 28, 2, 2))  # does not fit beside it, and starts in a lower queue
    assert driver.step().prefill == []
    driver.add(Job(3, 1, 1, 20, 3))
    driver.step()
    assert set(driver.room.held) == {1, 3}
    driver.add(Job(4, 30, 30, 2, 4, priority=-1))
    plan = driver.step()
    assert plan.preempted == [1] and plan.prefill == [(4,)]
    assert set(driver.run()) == {1, 2, 3, 4}


def test_jobs_that_are_promoted_in_turn_do_not_live_on_each_others_memory(
    clock: Any, by_table: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    """Eight jobs of which two fit, each promoted again and again: every admission computes a prompt
    of 30 anew, so what jobs decode until the next one must be worth it."""
    driver = drive(mlfq(clock, by_table(), alpha_s=5.0), capacity=80, costs=by_table())
    for handle in range(8):
        driver.add(Job(handle, 30, 30, 10, handle))
    admissions = steps = 0
    while driver.policy.has_work():
        admissions += len(driver.step().prefill)
        steps += 1
        assert steps < 1000
    assert admissions <= 16, admissions
