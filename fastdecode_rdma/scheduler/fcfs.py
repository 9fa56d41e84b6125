"""First come, first served: admit in order of arrival; the youngest gives way."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from fastdecode_rdma.scheduler.base import (
    CacheRoom,
    Job,
    Scheduler,
    SchedulerOptions,
    StepPlan,
)


class FcfsScheduler(Scheduler):
    """Continuous batching in order of arrival."""

    def __init__(self, options: SchedulerOptions) -> None:
        super().__init__(options)
        self._waiting: list[tuple[Job, ...]] = []  # gangs in order of arrival
        self._num_waiting_single = 0
        self._running: dict[int, Job] = {}  # in order of arrival

    def add(self, gang: Sequence[Job]) -> None:
        bisect.insort(self._waiting, tuple(gang), key=lambda jobs: jobs[0].arrival)
        self._num_waiting_single += len(gang) * gang[0].is_single

    def remove(self, handle: int) -> None:
        if self._running.pop(handle, None) is not None:
            return
        for index, gang in enumerate(self._waiting):
            if any(job.handle == handle for job in gang):
                rest = tuple(job for job in gang if job.handle != handle)
                self._waiting[index : index + 1] = [rest] if rest else []
                self._num_waiting_single -= gang[0].is_single
                return

    def requeue(self, handle: int) -> None:
        job = self._running.pop(handle, None)
        if job is not None:
            self.add((job,))

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def num_waiting_single(self) -> int:
        return self._num_waiting_single

    @property
    def num_running(self) -> int:
        return len(self._running)

    def schedule(self, room: CacheRoom) -> StepPlan:
        plan = StepPlan()
        self._grow_running(room, plan)
        plan.decode.extend(self._running)
        # One that was just preempted would be admitted again at once: wait a step.
        if not plan.preempted:
            for gang in self._admit(room):
                plan.prefill.append(tuple(job.handle for job in gang))
                self._running.update((job.handle, job) for job in gang)
        return plan

    def _grow_running(self, room: CacheRoom, plan: StepPlan) -> None:
        """Reserves the next token of every running job; the youngest running ones give way."""
        by_age = sorted(self._running.values(), key=lambda job: job.arrival)
        while by_age:
            job = by_age[0]
            if room.reserve(job.handle, job.num_tokens + 1):
                by_age.pop(0)
                continue
            victim = by_age.pop()  # the youngest; `job` itself when it is the last one
            room.release(victim.handle)
            self.requeue(victim.handle)
            plan.preempted.append(victim.handle)

    def _admit(self, room: CacheRoom) -> list[tuple[Job, ...]]:
        """Takes gangs off the queue while seats, the token budget and the cache allow."""
        admitted: list[tuple[Job, ...]] = []
        tokens, budget = 0, self.options.max_num_batched_tokens
        seats = self.options.max_num_seqs - len(self._running)
        while self._waiting:
            gang = self._waiting[0]
            prompt = gang[0].num_tokens
            if len(gang) > seats or (tokens and tokens + prompt > budget):
                break
            # room for the first generated token too, so that the step after the prefill can run
            if not room.reserve_gang([job.handle for job in gang], prompt + 1):
                break
            admitted.append(self._waiting.pop(0))
            self._num_waiting_single -= len(gang) * gang[0].is_single
            tokens += prompt
            seats -= len(gang)
        return admitted
