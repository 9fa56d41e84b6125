"""Skip-join multi-level feedback queue: young jobs first, long prompts start further down.

Queue k grants q1 * 2^k seconds of service. A job joins the highest queue whose quantum covers its
prefill, falls by one when its quantum is used up, and goes back to the top when it has starved.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, ClassVar

from fastdecode_rdma.param_checks import check_bool, check_int, check_number
from fastdecode_rdma.scheduler import spill
from fastdecode_rdma.scheduler.base import Costs, Job, SchedulerOptions
from fastdecode_rdma.scheduler.costs import LearnedCosts
from fastdecode_rdma.scheduler.entries import Entry, Rank
from fastdecode_rdma.scheduler.queued import QueuedScheduler

FIRST_QUANTUM_S = 0.01
"""The shortest quantum until a step has been measured."""
EPSILON_S = 1e-9
"""A quantum with less left than this is used up: sums of seconds are rounded."""


@dataclass(frozen=True)
class MlfqSettings:
    """alpha_s: a job that has waited as long goes to the top queue. quantum_s: of the top queue;
    None: the shortest decode step. num_queues: the lowest keeps its jobs. skip_join: False lets all
    join the top queue, as in a plain feedback queue."""

    alpha_s: float = 0.3
    quantum_s: float | None = None
    num_queues: int = 20
    skip_join: bool = True

    def __post_init__(self) -> None:
        check_number("alpha_s", self.alpha_s, low=0.0, exclude_low=True)
        if self.quantum_s is not None:
            check_number("quantum_s", self.quantum_s, low=0.0, exclude_low=True)
        check_int("num_queues", self.num_queues, low=1, high=64)
        check_bool("skip_join", self.skip_join)


@dataclass(slots=True, eq=False)
class _Entry(Entry):
    """left_s: of its quantum, while it does not run. expiry_s: what `served_s` will be when it is
    used up, while it does. return_s: what it took from its admission to its next token."""

    level: int = 0
    left_s: float = 0.0
    expiry_s: float = 0.0
    return_s: float = 0.0
    is_in_batch: bool = False


class SkipJoinMlfqScheduler(QueuedScheduler):
    """Preempts at any token and moves no KV: a paused job's cache stays where it is. When memory
    runs out, those give way that are expected to run last."""

    is_preemptive = True
    Settings: ClassVar[type] = MlfqSettings

    def __init__(self, options: SchedulerOptions, settings: Any = None) -> None:
        super().__init__(options, settings)
        self._learned = LearnedCosts(FIRST_QUANTUM_S)
        self._costs: Costs = options.costs or self._learned
        self._next_place = 0
        self._ticket = count()  # breaks ties in the heap
        self._served_s = 0.0  # by decode steps, to every job that was in all of them
        self._expiring: list[tuple[float, int, _Entry]] = []  # heap; stale ones are passed over
        self._batch: set[_Entry] = set()
        self._idle_since: dict[_Entry, float] = {}  # in order of time
        self._observed_s: tuple[float, float] | None = None
        self._last_step_s: float | None = None

    def observe(
        self,
        prefill_tokens: int,
        prefill_s: float,
        num_decoded: int,
        cached_tokens: int,
        decode_s: float,
    ) -> None:
        self._learned.observe(prefill_tokens, prefill_s, num_decoded, decode_s)
        self._observed_s = prefill_s, decode_s

    # -- queues

    def quantum_s(self, level: int) -> float:
        """Returns the seconds that a queue grants, 0 being the top one."""
        first = self.settings.quantum_s
        if first is None:
            learned = self.options.costs is None
            first = self._learned.shortest_decode_s if learned else self._costs.decode_s(1, 1)
        return first * 2.0**level

    def _new_entry(self, jobs: tuple[Job, ...]) -> Entry:
        entry = _Entry(jobs)
        if self.settings.skip_join:
            prefill_s = self._costs.prefill_s(jobs[0].num_tokens)
            while (
                entry.level < self.settings.num_queues - 1
                and self.quantum_s(entry.level) + EPSILON_S < prefill_s
            ):
                entry.level += 1
        entry.left_s = self.quantum_s(entry.level)
        self._idle_since[entry] = self.options.clock()
        return entry

    def _rank(self, entry: Entry) -> Rank:
        """Queues are first in, first out."""
        assert isinstance(entry, _Entry)
        self._next_place += 1
        return entry.job.priority, entry.level, self._next_place

    def _move(self, entry: _Entry, level: int, quantum_s: float) -> None:
        """Puts an entry at the end of a queue, with a new quantum."""
        queue = self._running if entry.has_cache else self._waiting
        queue.remove(entry)
        entry.level = level
        entry.rank = (*self._rank(entry), entry.job.handle)
        queue.add(entry)
        self._grant(entry, quantum_s)

    def _grant(self, entry: _Entry, quantum_s: float) -> None:
        entry.left_s = quantum_s
        if entry.is_in_batch:
            entry.expiry_s = self._served_s + quantum_s
            heapq.heappush(self._expiring, (entry.expiry_s, next(self._ticket), entry))

    def _advance(self, now: float) -> None:
        self._charge(now)
        limit = self._served_s + EPSILON_S
        while self._expiring and self._expiring[0][0] <= limit:
            expiry_s, _, entry = heapq.heappop(self._expiring)
            if entry.is_in_batch and entry.expiry_s == expiry_s:
                self._demote(entry)
        starved = takewhile(
            lambda item: now - item[1] >= self.settings.alpha_s, self._idle_since.items()
        )
        for entry, _ in list(starved):
            self._promote(entry, now)

    def _charge(self, now: float) -> None:
        """Books the last step's time: what was observed of it, or all that has passed."""
        passed_s = 0.0 if self._last_step_s is None else now - self._last_step_s
        prefill_s, decode_s = self._observed_s or (passed_s, passed_s)
        self._observed_s, self._last_step_s = None, now
        self._served_s += decode_s
        for entry in list(self._prefilling):
            assert isinstance(entry, _Entry)
            entry.return_s += passed_s
            if entry.is_in_batch:  # it was not decoding: the prefill's time is what it used
                self._grant(entry, entry.expiry_s - self._served_s + decode_s - prefill_s)
            else:
                entry.left_s -= prefill_s
                if entry.left_s <= EPSILON_S:
                    self._demote(entry)

    def _demote(self, entry: _Entry) -> None:
        level = min(entry.level + 1, self.settings.num_queues - 1)
        self._move(entry, level, self.quantum_s(level))

    def _promote(self, entry: _Entry, now: float) -> None:
        """To the top, its clock reset. If its next iteration is longer than the quantum there, one
        more on top of it: or it would be preempted at once."""
        del self._idle_since[entry]
        self._idle_since[entry] = now
        quantum_s = self.quantum_s(0)
        length = entry.job.num_tokens
        next_s = (
            self._costs.decode_s(1, length) if entry.has_cache else self._costs.prefill_s(length)
        )
        if next_s > quantum_s:
            quantum_s += next_s
        if entry.level:
            self._move(entry, 0, quantum_s)
        else:
            self._grant(entry, max(entry.left_s, quantum_s))

    # -- who runs

    def _after(self, batch: list[Entry], started: list[Entry], now: float) -> None:
        entered = [entry for entry in batch if not entry.is_in_batch]  # type: ignore[attr-defined]
        if len(self._batch) + len(entered) > len(batch):  # some have left
            for entry in self._batch.difference(batch):
                self._batch.discard(entry)
                entry.is_in_batch = False
                entry.left_s = entry.expiry_s - self._served_s
                if entry.job.handle in self._entries:
                    self._idle_since[entry] = now
        for entry in entered:
            assert isinstance(entry, _Entry)
            self._batch.add(entry)
            entry.is_in_batch = True
            self._grant(entry, entry.left_s)
            self._idle_since.pop(entry, None)
        for entry in started:
            assert isinstance(entry, _Entry)
            entry.return_s = 0.0
            self._idle_since.pop(entry, None)

    def _forget(self, entry: Entry) -> None:
        assert isinstance(entry, _Entry)
        entry.is_in_batch = False
        self._batch.discard(entry)
        self._idle_since.pop(entry, None)

    # -- memory

    def _may_evict(self, entry: Entry, other: Entry) -> bool:
        """Those of a lower priority, and those of lower queues once they have decoded for as long
        as it took them to come back. Without that, jobs that are promoted in turn would take each
        other's memory at every token, and nearly all of the time would go into prompts."""
        assert isinstance(other, _Entry)
        if entry.job.priority != other.job.priority:
            return entry.job.priority < other.job.priority
        if entry.level >= other.level:
            return False
        decoded = other.job.num_tokens - other.start_tokens
        return decoded * self._costs.decode_s(1, other.job.num_tokens) >= other.return_s

    def _give_way(self, candidates: list[Entry]) -> list[Entry]:
        """The largest expected time to the next service first; among equals the last in line."""
        served = self.enst_s(candidates)
        order = range(len(candidates))
        return [candidates[i] for i in sorted(order, key=lambda i: (served[i], i), reverse=True)]

    def enst_s(self, entries: list[Entry]) -> list[float]:
        """Returns the estimated next scheduled time of each: seconds until it is promoted, or until
        all of a higher rank have fallen to its queue, whichever comes first."""
        now, alpha_s = self.options.clock(), self.settings.alpha_s
        queues = Counter(rank[:2] for rank in (*self._running.ranks, *self._waiting.ranks))
        quanta_s = [self.quantum_s(level) for level in range(self.settings.num_queues)]
        turns = spill.execute_s(queues, quanta_s, self.options.max_num_seqs)
        found = []
        for entry in entries:
            assert isinstance(entry, _Entry)
            since = self._idle_since.get(entry, now)
            turn_s = turns[entry.job.priority, entry.level]
            found.append(spill.enst_s(alpha_s - (now - since), turn_s))
        return found
