"""What all policies share: two queues in order of rank, seats, the token budget, the load limit,
and who gives way when memory runs out. A policy says how jobs rank."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastdecode_rdma.scheduler.base import (
    CacheRoom,
    Job,
    Scheduler,
    SchedulerOptions,
    StepPlan,
)
from fastdecode_rdma.scheduler.entries import Entry, LoadLimit, Rank, Ranked

MAX_PRUNED = 64
"""Of those who are to give way, so many are looked at twice: whether it helps without them."""


@dataclass(frozen=True)
class NoSettings:
    """For a policy that has none of its own."""


@dataclass(slots=True)
class _Step:
    """A step that is being planned."""

    room: CacheRoom
    seats: int
    load: LoadLimit
    plan: StepPlan = field(default_factory=StepPlan)
    batch: list[Entry] = field(default_factory=list)  # they decode
    forced: set[Entry] = field(default_factory=set)  # of them, those that are being prefilled
    evicted: set[Entry] = field(default_factory=set)
    num_prompt_tokens: int = 0


class QueuedScheduler(Scheduler):
    """Runs entries in order of rank.

    If `is_preemptive`, one that waits goes before running ones of a higher rank, which are paused:
    max_num_seqs then bounds those of one step, and memory alone those that hold cache. If not, all
    that run go first, those that wait are admitted behind them.
    """

    is_preemptive: ClassVar[bool] = False
    Settings: ClassVar[type] = NoSettings

    def __init__(self, options: SchedulerOptions, settings: Any = None) -> None:
        """`settings`: of the policy's own type `Settings`; None has its defaults."""
        super().__init__(options)
        self.settings = self.Settings() if settings is None else settings
        self._waiting = Ranked()
        self._running = Ranked()
        self._entries: dict[int, Entry] = {}  # by handle
        self._num_waiting = self._num_waiting_single = 0
        self._num_paused = self._num_paused_total = 0
        self._step_number = 0
        self._due: set[Entry] = set()  # need room before they decode again
        self._due_at: dict[int, list[Entry]] = {}  # by step: may need it then
        self._prefilling: dict[Entry, None] = {}

    # -- what a policy decides

    @abstractmethod
    def _rank(self, entry: Entry) -> Rank:
        """Returns the rank of a new entry, without the handle at its end."""

    def _advance(self, now: float) -> None:
        """Is called before each step: ranks may change."""
        del now

    def _may_start(self, gang: Entry, step: _Step) -> bool:
        """Whether a gang that has a seat may be admitted now."""
        del gang, step
        return True

    def _may_evict(self, entry: Entry, other: Entry) -> bool:
        """Whether a waiting `entry` may take the memory of a paused one that ranks behind it."""
        del entry, other
        return False

    def _give_way(self, candidates: list[Entry]) -> list[Entry]:
        """Returns entries in the order in which they give up their memory."""
        return candidates[::-1]

    def _after(self, batch: list[Entry], started: list[Entry], now: float) -> None:
        """Hears who decodes and who starts in the step."""
        del batch, started, now

    def _forget(self, entry: Entry) -> None:
        """Hears that an entry has gone: finished, dropped, or a gang split into its jobs."""
        del entry

    def _new_entry(self, jobs: tuple[Job, ...]) -> Entry:
        return Entry(jobs)

    # -- jobs come and go

    def add(self, gang: Sequence[Job]) -> None:
        entry = self._new_entry(tuple(gang))
        entry.rank = (*self._rank(entry), entry.job.handle)
        self._entries.update(dict.fromkeys(entry.handles, entry))
        self._wait(entry)

    def remove(self, handle: int) -> None:
        entry = self._entries.pop(handle, None)
        if entry is None:
            return
        if entry.has_cache:
            self._stop(entry)
            self._forget(entry)
            return
        self._leave(entry)
        rest = tuple(job for job in entry.jobs if job.handle != handle)
        if rest:
            entry.jobs = rest
            self._wait(entry)
        else:
            self._forget(entry)

    def requeue(self, handle: int) -> None:
        entry = self._entries.get(handle)
        if entry is not None and entry.has_cache:
            self._stop(entry)
            self._wait(entry)

    def _wait(self, entry: Entry) -> None:
        self._waiting.add(entry)
        self._num_waiting += len(entry.jobs)
        self._num_waiting_single += len(entry.jobs) * entry.job.is_single

    def _leave(self, entry: Entry) -> None:
        self._waiting.remove(entry)
        self._num_waiting -= len(entry.jobs)
        self._num_waiting_single -= len(entry.jobs) * entry.job.is_single

    def _stop(self, entry: Entry) -> None:
        """Takes the cache from an entry."""
        self._running.remove(entry)
        self._due.discard(entry)
        self._prefilling.pop(entry, None)
        entry.has_cache = False

    def has_work(self) -> bool:
        return bool(self._entries)

    def giving_way(self) -> list[int]:
        return [entry.job.handle for entry in self._give_way(self._running.entries[:])]

    def first_waiting(self, count: int) -> list[int]:
        return [entry.job.handle for entry in self._waiting.entries[:count]]

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_waiting_single(self) -> int:
        return self._num_waiting_single

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_paused(self) -> int:
        return self._num_paused

    @property
    def num_paused_total(self) -> int:
        return self._num_paused_total

    # -- one step

    def schedule(self, room: CacheRoom) -> StepPlan:
        self._step_number += 1
        now = self.options.clock()
        self._advance(now)
        self._due.update(
            entry for entry in self._due_at.pop(self._step_number, ()) if entry.has_cache
        )
        step = _Step(room, self.options.max_num_seqs, LoadLimit(self.options.max_load_tokens))
        started: list[Entry] = []
        running, ranks, done = self._running.entries[:], self._running.ranks[:], 0
        self._run_prefilling(step)
        if not self.is_preemptive:
            self._run(running, step)
            done = len(running)
        while self._waiting.entries:
            gang = self._waiting.entries[0]
            if self.is_preemptive:
                before = bisect_left(ranks, gang.rank, lo=done)
                self._run(running[done:before], step)
                done = before
            if not self._start(gang, step, started):
                break
        self._run(running[done:], step)
        step.plan.decode = [entry.jobs[0].handle for entry in step.batch]
        self._num_paused = len(self._running) - len(step.batch) - len(started)
        self._num_paused_total += self._num_paused
        self._after(step.batch, started, now)
        return step.plan

    def _run_prefilling(self, step: _Step) -> None:
        """A prefill under way cannot be paused: those jobs keep their seats. Where nobody is
        paused to make room there is nothing to do."""
        if not self.is_preemptive or not self._prefilling:
            return
        for entry in list(self._prefilling):
            if not entry.is_prefilling:
                del self._prefilling[entry]
        forced = list(self._prefilling)
        forced = forced[: step.load.take_prefix(forced)]
        step.forced.update(forced)
        step.seats -= len(forced)
        step.batch.extend(forced)

    def _run(self, entries: list[Entry], step: _Step) -> None:
        """Lets the first of some running entries decode, as many as seats and load allow."""
        if step.forced:
            entries = [entry for entry in entries if entry not in step.forced]
        if step.evicted:
            entries = [entry for entry in entries if entry.has_cache]
        chosen = entries if len(entries) <= step.seats else entries[: max(0, step.seats)]
        count = step.load.take_prefix(chosen)
        if count < len(chosen):
            chosen = chosen[:count]
            step.seats = 0  # those behind would pass by one that ranks before them
        if self._due and chosen:
            first, last = chosen[0].rank, chosen[-1].rank
            due = [entry for entry in self._due if first <= entry.rank <= last]
            due.sort(key=lambda entry: entry.rank)
            for entry in due:
                if entry.has_cache and entry not in step.forced:
                    self._grow(entry, step)
            if step.evicted:
                chosen = [entry for entry in chosen if entry.has_cache]
        step.batch.extend(chosen)
        step.seats -= len(chosen)

    def _grow(self, entry: Entry, step: _Step) -> None:
        """Reserves the next token of an entry; those that rank behind it give way, or itself."""
        job = entry.job
        self._due.discard(entry)
        if job.num_tokens < entry.reserved:
            self._book(entry)
            return
        if not step.room.reserve(job.handle, job.num_tokens + 1):
            place = bisect_left(self._running.ranks, entry.rank) + 1
            behind = self._running.entries[place:]
            if not self._make_room(behind, [job.handle], job.num_tokens + 1, step):
                self._evict(entry, step)
                return
            reserved = step.room.reserve(job.handle, job.num_tokens + 1)
            assert reserved
        entry.reserved = self._round_up(job.num_tokens + 1)
        self._book(entry)

    def _round_up(self, num_tokens: int) -> int:
        block = self.options.block_tokens
        return -(-num_tokens // block) * block

    def _book(self, entry: Entry) -> None:
        """Notes when an entry may need more room. A step adds a token, or two with the last part of
        a prefill; room is for one more than are cached."""
        steps = max(1, entry.reserved - entry.job.num_tokens - 1)
        self._due_at.setdefault(self._step_number + steps, []).append(entry)

    def _make_room(
        self, candidates: list[Entry], handles: list[int], num_tokens: int, step: _Step
    ) -> bool:
        """Evicts as few of the candidates as it takes; False, and nobody, if all are too few."""
        fits_after = step.room.fits_after
        candidates = [entry for entry in candidates if entry not in step.forced]
        if not fits_after([entry.job.handle for entry in candidates], handles, num_tokens):
            return False
        victims = self._give_way(candidates)
        released = [entry.job.handle for entry in victims]
        count = bisect_left(
            range(len(victims)), True, key=lambda n: fits_after(released[:n], handles, num_tokens)
        )
        victims = victims[:count]
        for victim in victims[:-1][:MAX_PRUNED]:  # some are on another worker
            rest = [entry for entry in victims if entry is not victim]
            if fits_after([entry.job.handle for entry in rest], handles, num_tokens):
                victims = rest
        for victim in victims:
            self._evict(victim, step)
        return True

    def _evict(self, entry: Entry, step: _Step) -> None:
        self._stop(entry)
        self._wait(entry)
        step.room.release(entry.job.handle)
        step.plan.preempted.append(entry.job.handle)
        step.evicted.add(entry)

    def _start(self, gang: Entry, step: _Step, started: list[Entry]) -> bool:
        """Admits a gang, if seats, the token budget, the load, the policy and memory allow."""
        # One that was just preempted would be admitted again at once: wait a step.
        if gang in step.evicted or (step.evicted and not self.is_preemptive):
            return False
        prompt, count = gang.job.num_tokens, len(gang.jobs)
        tokens = step.num_prompt_tokens + prompt
        if count > step.seats:
            return False
        if step.num_prompt_tokens and tokens > self.options.max_num_batched_tokens:
            return False
        # room for the first generated token too, so that the step after the prefill can run
        load = count * (prompt + 1)
        if not step.load.fits(load) or not self._may_start(gang, step):
            return False
        handles = gang.handles
        if not step.room.reserve_gang(handles, prompt + 1):
            batch = set(step.batch)
            paused = [
                entry
                for entry in self._running.entries[bisect_left(self._running.ranks, gang.rank) :]
                if entry not in batch and entry not in started and self._may_evict(gang, entry)
            ]
            if not paused or not self._make_room(paused, handles, prompt + 1, step):
                return False
            reserved = step.room.reserve_gang(handles, prompt + 1)
            assert reserved
        step.load.take(load)
        step.num_prompt_tokens = tokens
        step.seats -= count
        step.plan.prefill.append(tuple(handles))
        self._admit(gang, started)
        return True

    def _admit(self, gang: Entry, started: list[Entry]) -> None:
        """Every job of a gang becomes an entry of its own."""
        self._leave(gang)
        if len(gang.jobs) > 1:
            self._forget(gang)
        for job in gang.jobs:
            entry = gang if len(gang.jobs) == 1 else gang.of(job)
            entry.has_cache, entry.start_tokens = True, job.num_tokens
            entry.reserved = self._round_up(job.num_tokens + 1)
            self._entries[job.handle] = entry
            self._running.add(entry)
            self._prefilling[entry] = None
            self._book(entry)
            started.append(entry)
