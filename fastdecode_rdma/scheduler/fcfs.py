"""First come, first served: admit in order of arrival; the youngest gives way."""

from __future__ import annotations

from fastdecode_rdma.scheduler.entries import Entry, Rank
from fastdecode_rdma.scheduler.queued import QueuedScheduler


class FcfsScheduler(QueuedScheduler):
    """Continuous batching in order of priority, then of arrival. Nobody is paused but for the load
    limit, and nobody passes by one that waits before it."""

    def _rank(self, entry: Entry) -> Rank:
        return entry.job.priority, entry.job.arrival
