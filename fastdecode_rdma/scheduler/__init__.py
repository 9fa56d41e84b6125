"""Scheduling policies. A new one is a file here and a row in POLICIES."""

from __future__ import annotations

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.scheduler.base import CacheRoom, Job, Scheduler, StepPlan
from fastdecode_rdma.scheduler.fcfs import FcfsScheduler

__all__ = [
    "POLICIES",
    "CacheRoom",
    "FcfsScheduler",
    "Job",
    "Scheduler",
    "StepPlan",
    "make_scheduler",
]

POLICIES: dict[str, type[FcfsScheduler]] = {"fcfs": FcfsScheduler}


def make_scheduler(name: str, *, max_num_seqs: int, max_num_batched_tokens: int) -> Scheduler:
    """Returns the policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"scheduling policy {name!r} is unknown; expected one of {tuple(POLICIES)}"
        )
    return POLICIES[name](max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
