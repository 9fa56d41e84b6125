"""Shortest remaining processing time first, as if max_tokens were what a job will generate.

The best that any order can do for the mean, and a yardstick for policies that do not know lengths:
a simulator gives true lengths as max_tokens. It may starve the long.
"""

from __future__ import annotations

from typing import Any

from fastdecode_rdma.scheduler.base import SchedulerOptions
from fastdecode_rdma.scheduler.entries import Entry, Rank
from fastdecode_rdma.scheduler.queued import QueuedScheduler


class SrptScheduler(QueuedScheduler):
    """Preempts at any token; ranks by seconds where costs are given, else by tokens."""

    is_preemptive = True

    def __init__(self, options: SchedulerOptions, settings: Any = None) -> None:
        super().__init__(options, settings)
        self._stale: set[Entry] = set()  # have run since they were ranked

    def remaining(self, entry: Entry) -> float:
        """Returns what is left to do for a job, in seconds or tokens."""
        job, costs = entry.job, self.options.costs
        tokens = job.prompt_len + job.max_tokens - job.num_tokens
        if costs is None:
            return tokens
        seconds = tokens * costs.decode_s(1, job.num_tokens)
        if entry.has_cache and not entry.is_prefilling:
            return seconds
        return seconds - costs.decode_s(1, job.num_tokens) + costs.prefill_s(job.num_tokens)

    def _rank(self, entry: Entry) -> Rank:
        return entry.job.priority, self.remaining(entry), entry.job.num_tokens, entry.job.arrival

    def _advance(self, now: float) -> None:
        """Those that ran have less left. While all of them can run, their order is of no use."""
        live = len(self._running) + self.num_waiting
        if live <= self.options.max_num_seqs and self.options.max_load_tokens is None:
            return
        stale = [entry for entry in self._stale if entry.has_cache]
        self._stale.clear()
        for entry in stale:
            self._running.remove(entry)
            entry.rank = (*self._rank(entry), entry.job.handle)
            self._running.add(entry)

    def _after(self, batch: list[Entry], started: list[Entry], now: float) -> None:
        self._stale.update(batch, started)

    def _forget(self, entry: Entry) -> None:
        self._stale.discard(entry)

    def _may_evict(self, entry: Entry, other: Entry) -> bool:
        return entry.rank[:2] < other.rank[:2]
