"""What a policy keeps of its jobs: entries in order of rank, and the load of those that run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from fastdecode_rdma.scheduler.base import Job

Rank = tuple[Any, ...]
"""Compared with others of the same policy: lower goes first. It ends with a handle, so no two are
equal."""


@dataclass(slots=True, eq=False)
class Entry:
    """A gang that waits, or one job that holds cache. `rank` changes only outside of Ranked.

    reserved: tokens that the job has room for. start_tokens: those it had when it was admitted: it
    is being prefilled until it has more.
    """

    jobs: tuple[Job, ...]
    rank: Rank = ()
    has_cache: bool = False
    reserved: int = 0
    start_tokens: int = 0

    @property
    def job(self) -> Job:
        """The first job: the only one of an entry that holds cache."""
        return self.jobs[0]

    @property
    def handles(self) -> list[int]:
        return [job.handle for job in self.jobs]

    @property
    def is_prefilling(self) -> bool:
        return self.has_cache and self.jobs[0].num_tokens <= self.start_tokens

    def of(self, job: Job) -> Entry:
        """Returns a copy for one of the jobs, in the same place."""
        return replace(self, jobs=(job,), rank=(*self.rank[:-1], job.handle))


class Ranked:
    """Entries in order of rank. Finding one is a binary search; the lists move at memory speed."""

    __slots__ = ("entries", "ranks")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ranks: list[Rank] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Entry) -> None:
        """Puts an entry in its place."""
        place = bisect_left(self.ranks, entry.rank)
        self.ranks.insert(place, entry.rank)
        self.entries.insert(place, entry)

    def remove(self, entry: Entry) -> None:
        """Takes an entry out."""
        place = bisect_left(self.ranks, entry.rank)
        assert self.entries[place] is entry
        del self.ranks[place], self.entries[place]


class LoadLimit:
    """Counts the cached tokens that one step decodes over, against a limit. One that exceeds it by
    itself may go alone."""

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.taken = 0

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens may come on top."""
        return self.limit is None or not self.taken or self.taken + num_tokens <= self.limit

    def take(self, num_tokens: int) -> None:
        """Counts tokens."""
        self.taken += num_tokens

    def take_prefix(self, entries: Sequence[Entry]) -> int:
        """Counts the tokens of the first entries, as many as fit; returns how many those are."""
        if self.limit is None or not entries:
            return len(entries)
        lengths = [entry.jobs[0].num_tokens for entry in entries]
        total = sum(lengths)
        if self.taken + total <= self.limit:
            self.taken += total
            return len(entries)
        sums = list(accumulate(lengths))
        count = bisect_right(sums, self.limit - self.taken)
        if not count and not self.taken:
            count = 1
        self.taken += sums[count - 1] if count else 0
        return count
