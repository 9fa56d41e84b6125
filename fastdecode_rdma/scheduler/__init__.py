"""Scheduling policies. A new one is a file here and a row in POLICIES."""

from __future__ import annotations

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import explain_unknown
from fastdecode_rdma.scheduler.base import (
    CacheRoom,
    Costs,
    Job,
    Scheduler,
    SchedulerOptions,
    StepPlan,
)
from fastdecode_rdma.scheduler.fcfs import FcfsScheduler

__all__ = [
    "POLICIES",
    "CacheRoom",
    "Costs",
    "FcfsScheduler",
    "Job",
    "Scheduler",
    "SchedulerOptions",
    "StepPlan",
    "check_policy",
    "make_scheduler",
]

POLICIES: dict[str, type[Scheduler]] = {"fcfs": FcfsScheduler}


def check_policy(name: object) -> None:
    """Makes sure that there is a policy of that name.

    Raises:
        ConfigError: there is none; names the nearest one.
    """
    if name not in POLICIES:
        unknown = explain_unknown("unknown scheduling policy", name, list(POLICIES), {})
        raise ConfigError(f"{unknown}; expected one of {', '.join(map(repr, POLICIES))}")


def make_scheduler(name: str, options: SchedulerOptions) -> Scheduler:
    """Returns a new scheduler of the policy of that name.

    Raises:
        ConfigError: there is none; names the nearest one.
    """
    check_policy(name)
    return POLICIES[name](options)
