"""What every policy must keep, whatever comes: every token once, nobody starves, limits hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.scheduler import POLICIES, Job, SchedulerOptions, check_policy, make_scheduler

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of its arrival
        st.integers(1, 40),  # prompt
        st.integers(1, 30),  # bound
        st.integers(1, 30),  # where it ends by itself
        st.integers(1, 2),  # samples
        st.integers(-1, 1),  # priority
    ),
    min_size=1,
    max_size=20,
)
EVENTS = st.dictionaries(
    st.integers(1, 80), st.tuples(st.booleans(), st.integers(0, 40)), max_size=10
)
"""By step: a sequence is cancelled, or its worker is lost."""


class World:
    """Runs a policy through requests and events, and checks each step."""

    def __init__(self, policy: Any, room: Any, clock: Any, limit: int | None, seats: int) -> None:
        self.policy, self.room, self.clock = policy, room, clock
        self.limit, self.seats = limit, seats
        self.jobs: dict[int, Job] = {}
        self.ends: dict[int, int] = {}
        self.running: set[int] = set()
        self.tokens: dict[int, list[int]] = {}

    def add(self, request: tuple[int, ...]) -> None:
        _, prompt, bound, length, samples, priority = request
        gang = []
        for _ in range(min(samples, self.seats)):
            handle = len(self.jobs)
            job = Job(handle, prompt, prompt, bound, handle, handle % 2 == 1, priority)
            self.jobs[handle], self.ends[handle] = job, prompt + min(bound, length)
            self.tokens[handle] = []
            gang.append(job)
        self.policy.add(gang)

    def end(self, handle: int) -> None:
        self.policy.remove(handle)
        self.room.release(handle)
        self.running.discard(handle)

    def lose(self, handle: int) -> None:
        if handle in self.running:
            self.policy.requeue(handle)
            self.room.release(handle)
            self.running.discard(handle)

    def step(self) -> None:
        plan = self.policy.schedule(self.room)
        self.running -= set(plan.preempted)
        started = [handle for gang in plan.prefill for handle in gang]
        ran = plan.decode + started
        assert len(set(ran)) == len(ran) <= self.seats
        assert set(plan.decode) <= self.running and not set(started) & self.running
        self.running |= set(started)
        assert set(self.room.held) == self.running
        assert sum(self.room.held.values()) <= self.room.capacity
        load = sum(self.jobs[handle].num_tokens for handle in plan.decode)
        assert self.limit is None or load <= self.limit or len(plan.decode) == 1
        assert self.policy.num_running == len(self.running)
        assert self.policy.num_paused == len(self.running) - len(ran)
        self.clock.now_s += 0.01 * (1 + len(started))
        for handle in ran:
            job = self.jobs[handle]
            assert self.room.held[handle] > job.num_tokens
            self.tokens[handle].append(job.num_tokens)
            job.num_tokens += 1
            if job.num_tokens == self.ends[handle]:
                self.end(handle)


@pytest.mark.parametrize("name", POLICIES)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=REQUESTS,
    events=EVENTS,
    capacity=st.integers(150, 400),
    limit=st.none() | st.integers(20, 300),
    seats=st.integers(1, 6),
)
def test_invariants(
    name: str,
    requests: list[tuple[int, ...]],
    events: dict[int, tuple[bool, int]],
    capacity: int,
    limit: int | None,
    seats: int,
    make_room: Callable[[int], Any],
    clock: Any,
) -> None:
    options = SchedulerOptions(seats, 60, limit, clock=clock)
    world = World(make_scheduler(name, options), make_room(capacity), clock, limit, seats)
    cancelled = set()
    for step in range(20_000):
        for request in requests:
            if request[0] == step:
                world.add(request)
        is_cancel, handle = events.get(step, (False, -1))
        if is_cancel and handle in world.jobs:
            world.end(handle)
            cancelled.add(handle)
        elif not is_cancel:
            world.lose(handle)
        if step > 30 and not world.policy.has_work():
            break
        world.step()
    policy = world.policy
    assert not policy.has_work() and not world.room.held
    assert (policy.num_waiting, policy.num_waiting_single, policy.num_running) == (0, 0, 0)
    for handle, job in world.jobs.items():
        assert world.tokens[handle] == list(range(job.prompt_len, job.num_tokens))
        assert handle in cancelled or job.num_tokens == world.ends[handle]


@pytest.mark.parametrize("name", ["fcfs", "skip_join_mlfq", "srpt"])
def test_a_lower_priority_goes_first(name: str, clock: Any, drive: Callable[..., Any]) -> None:
    driver = drive(make_scheduler(name, SchedulerOptions(1, 100, clock=clock)))
    for handle, priority in ((1, 1), (2, 0), (3, -1)):
        driver.add(Job(handle, 5, 5, 3, handle, priority=priority))
    assert list(driver.run()) == [3, 2, 1]


@pytest.mark.parametrize(
    ("name", "seats"), [*((name, 256) for name in POLICIES), ("load_stabilizing", 20_000)]
)
def test_ten_thousand_live_sequences(
    name: str, seats: int, make_room: Callable[[int], Any], clock: Any
) -> None:
    """Processor time of a step, the best of some: other processes disturb. A new job comes with
    each step; every 64th sequence needs a block."""
    room = make_room(1 << 60)
    room.reserve = lambda handle, num_tokens: True
    room.reserve_gang = lambda handles, num_tokens: True
    options = SchedulerOptions(seats, 1 << 40, clock=clock, block_tokens=64)
    policy = make_scheduler(name, options)
    jobs = [Job(i, 100 + i % 64, 100 + i % 64, 1000, i) for i in range(10_000)]
    for job in jobs:
        policy.add([job])
    taken = []
    for _ in range(20):
        start = time.thread_time()
        plan = policy.schedule(room)
        taken.append(time.thread_time() - start)
        policy.options = replace(
            options, max_num_batched_tokens=2048
        )  # the first took all it could
        clock.now_s += 0.03
        for handle in plan.decode + [handle for gang in plan.prefill for handle in gang]:
            jobs[handle].num_tokens += 1
        jobs.append(Job(len(jobs), 100, 100, 1000, len(jobs)))
        policy.add([jobs[-1]])
    assert min(taken) < 2e-3, f"{min(taken) * 1e3:.2f} ms"


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("skip_join_mlfk", {}, "unknown scheduling policy 'skip_join_mlfk': did you mean"),
        (["fcfs"], {}, "unknown scheduling policy"),
        ("fcfs", {"alpha_s": 1}, "'fcfs' has no options, got 'alpha_s'"),
        ("skip_join_mlfq", {"alfa_s": 1}, "has no option 'alfa_s': did you mean 'alpha_s'"),
        ("skip_join_mlfq", {"alpha_s": 0}, "alpha_s must be above 0"),
        ("skip_join_mlfq", {"quantum_s": "x"}, "quantum_s must be"),
        ("skip_join_mlfq", {"num_queues": 65}, "num_queues must be from 1 to 64"),
        ("load_stabilizing", {"interval_steps": 0}, "interval_steps must be at least 1"),
        ("load_stabilizing", {"stagger": 1}, "stagger must be True or False"),
    ],
)
def test_wrong_names_and_settings(name: Any, own: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_policy(name, own)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_load_tokens must be at least 1, got 0"):
        SchedulerOptions(1, 1, 0)
