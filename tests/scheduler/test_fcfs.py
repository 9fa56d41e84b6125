"""The first-come-first-served policy, driven by a cache of plain integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.scheduler import (
    CacheRoom,
    FcfsScheduler,
    Job,
    SchedulerOptions,
    StepPlan,
    make_scheduler,
)


def job(handle: int, prompt_len: int = 10, max_tokens: int = 5) -> Job:
    return Job(handle, prompt_len, prompt_len, max_tokens, handle, is_single=handle % 2 == 1)


def scheduler(max_num_seqs: int = 4, max_num_batched_tokens: int = 100) -> FcfsScheduler:
    return FcfsScheduler(SchedulerOptions(max_num_seqs, max_num_batched_tokens))


def test_admits_in_order_of_arrival_while_there_are_seats(
    make_room: Callable[[int], CacheRoom],
) -> None:
    policy, room = scheduler(max_num_seqs=2), make_room(1000)
    for handle in (1, 2, 3):
        policy.add([job(handle)])
    assert policy.schedule(room) == StepPlan(prefill=[(1,), (2,)])
    assert policy.schedule(room) == StepPlan(decode=[1, 2])
    policy.remove(1)
    assert policy.schedule(room) == StepPlan(decode=[2], prefill=[(3,)])
    assert (policy.num_running, policy.num_waiting) == (2, 0)


def test_a_gang_is_admitted_whole_or_waits(make_room: Callable[[int], CacheRoom]) -> None:
    policy, room = scheduler(max_num_seqs=3), make_room(1000)
    policy.add([job(1), job(2)])
    policy.add([job(3), job(4)])
    assert policy.schedule(room).prefill == [(1, 2)]
    assert policy.schedule(room).prefill == []
    policy.remove(2)
    assert policy.schedule(room).prefill == [(3, 4)]


def test_prompts_of_a_step_stay_within_the_token_budget_but_a_long_one_goes_alone(
    make_room: Callable[[int], CacheRoom],
) -> None:
    policy, room = scheduler(max_num_batched_tokens=25), make_room(1000)
    for handle, length in ((1, 10), (2, 10), (3, 300), (4, 10)):
        policy.add([job(handle, length)])
    assert policy.schedule(room).prefill == [(1,), (2,)]
    assert policy.schedule(room).prefill == [(3,)]
    assert policy.schedule(room).prefill == [(4,)]


def test_the_youngest_gives_way_and_comes_back_before_newer_ones(
    make_room: Callable[[int], CacheRoom],
) -> None:
    policy, room = scheduler(), make_room(33)
    jobs = {handle: job(handle) for handle in (1, 2, 3)}
    for each in jobs.values():
        policy.add([each])
    assert policy.schedule(room).prefill == [(1,), (2,), (3,)]  # 3 * 11 tokens
    for each in jobs.values():
        each.num_tokens += 1
    policy.add([job(4)])
    plan = policy.schedule(room)
    assert plan == StepPlan(decode=[1, 2], preempted=[3])
    assert set(room.held) == {1, 2}
    policy.remove(1)
    room.release(1)
    assert policy.schedule(room).prefill == [(3,)]


def test_requeue_puts_a_running_job_back_in_its_place(
    make_room: Callable[[int], CacheRoom],
) -> None:
    policy, room = scheduler(max_num_seqs=2), make_room(1000)
    for handle in (1, 2, 3):
        policy.add([job(handle)])
    policy.schedule(room)
    policy.requeue(1)
    room.release(1)
    assert policy.schedule(room) == StepPlan(decode=[2], prefill=[(1,)])


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "unknown"])
def test_remove_works_in_every_state(make_room: Callable[[int], CacheRoom], state: str) -> None:
    policy, room = scheduler(max_num_seqs=1), make_room(1000)
    policy.add([job(1)])
    policy.add([job(2)])
    policy.schedule(room)
    if state == "preempted":
        policy.requeue(1)
    assert policy.num_waiting_single == (1 if state == "preempted" else 0)
    policy.remove({"waiting": 2, "running": 1, "preempted": 1, "unknown": 99}[state])
    assert policy.num_waiting_single == 0
    assert policy.num_running + policy.num_waiting == (2 if state == "unknown" else 1)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=20),
    capacity=st.integers(75, 300),
    seats=st.integers(1, 6),
)
def test_everything_that_fits_alone_finishes(
    make_room: Callable[[int], CacheRoom], lengths: list[tuple[int, int]], capacity: int, seats: int
) -> None:
    """No deadlock, no over-booking, no job in two places, for any mix that fits one by one."""
    policy, room = scheduler(max_num_seqs=seats), make_room(capacity)
    jobs = {i: job(i, prompt, out) for i, (prompt, out) in enumerate(lengths)}
    for each in jobs.values():
        policy.add([each])
    for _ in range(10_000):
        if not policy.has_work():
            break
        plan = policy.schedule(room)
        assert sum(room.held.values()) <= capacity
        waiting = [each.handle for gang in policy._waiting.entries for each in gang.jobs]
        assert policy.num_waiting_single == sum(handle % 2 for handle in waiting)
        started = [handle for gang in plan.prefill for handle in gang]
        assert not set(started) & set(plan.decode) and len(plan.decode) + len(started) <= seats
        for handle in plan.decode + started:
            jobs[handle].num_tokens += 1
            if jobs[handle].num_tokens == jobs[handle].prompt_len + jobs[handle].max_tokens:
                policy.remove(handle)
                room.release(handle)
    assert not policy.has_work() and not room.held


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheduling policy 'fcsf'.*'fcfs'"):
        make_scheduler("fcsf", SchedulerOptions(1, 1))
