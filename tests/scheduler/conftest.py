"""A cache of plain integers, and drivers that run a policy through jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from fastdecode_rdma.scheduler import Job, Scheduler, StepPlan


@dataclass
class TokenRoom:
    """A cache that holds `capacity` tokens in all."""

    capacity: int
    held: dict[int, int] = field(default_factory=dict)

    def reserve(self, handle: int, num_tokens: int) -> bool:
        return self.reserve_gang([handle], num_tokens)

    def reserve_gang(self, handles: Sequence[int], num_tokens: int) -> bool:
        if not self.fits_after([], handles, num_tokens):
            return False
        self.held.update(dict.fromkeys(handles, num_tokens))
        return True

    def fits_after(self, released: Sequence[int], handles: Sequence[int], num_tokens: int) -> bool:
        gone = {*released, *handles}
        others = sum(n for handle, n in self.held.items() if handle not in gone)
        return others + len(handles) * num_tokens <= self.capacity

    def release(self, handle: int) -> None:
        self.held.pop(handle, None)


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class ByTable:
    """Costs: a prompt's seconds by its length, or a second per token; a step of decoding, 1 s."""

    def __init__(self, prefill: dict[int, float] | None = None) -> None:
        self.prefill = prefill or {}

    def prefill_s(self, num_tokens: int) -> float:
        return self.prefill.get(num_tokens, float(num_tokens))

    def decode_s(self, num_seqs: int, cached_tokens: int) -> float:
        return 1.0


@dataclass
class Driver:
    """Runs a policy: every step takes what its costs say, every job that runs gains a token."""

    policy: Scheduler
    room: TokenRoom
    clock: Clock
    costs: ByTable
    jobs: dict[int, Job] = field(default_factory=dict)
    finished_s: dict[int, float] = field(default_factory=dict)

    def add(self, *jobs: Job) -> None:
        """Submits the jobs of one request."""
        self.jobs.update((job.handle, job) for job in jobs)
        self.policy.add(jobs)

    def step(self) -> StepPlan:
        """Plans and runs one step."""
        plan = self.policy.schedule(self.room)
        started = [handle for gang in plan.prefill for handle in gang]
        prefill_s = sum(
            self.costs.prefill_s(self.jobs[gang[0]].num_tokens) for gang in plan.prefill
        )
        decode_s = 1.0 if plan.decode else 0.0
        self.clock.now_s += prefill_s + decode_s
        for handle in plan.decode + started:
            job = self.jobs[handle]
            job.num_tokens += 1
            if job.num_tokens == job.prompt_len + job.max_tokens:
                self.finished_s[handle] = self.clock.now_s
                self.policy.remove(handle)
                self.room.release(handle)
        return plan

    def run(self, max_steps: int = 100_000) -> dict[int, float]:
        """Runs all to their end; returns when each finished."""
        for _ in range(max_steps):
            if not self.policy.has_work():
                return self.finished_s
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


@pytest.fixture(scope="session")  # for hypothesis, which runs a test often with its fixtures once
def make_room() -> Callable[[int], TokenRoom]:
    return TokenRoom


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def by_table() -> Callable[..., ByTable]:
    return ByTable


@pytest.fixture
def drive(clock: Clock) -> Callable[..., Driver]:
    """Builds a driver around a policy that was made with the fixture `clock`."""

    def make(policy: Scheduler, *, capacity: int = 1 << 40, costs: ByTable | None = None) -> Driver:
        return Driver(policy, TokenRoom(capacity), clock, costs or ByTable())

    return make
