"""Scheduling policies. A new one is a file here and a row in POLICIES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

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
from fastdecode_rdma.scheduler.load_stabilizing import LoadStabilizingScheduler
from fastdecode_rdma.scheduler.queued import QueuedScheduler
from fastdecode_rdma.scheduler.skip_join_mlfq import SkipJoinMlfqScheduler
from fastdecode_rdma.scheduler.srpt import SrptScheduler

__all__ = [
    "POLICIES",
    "CacheRoom",
    "Costs",
    "Job",
    "Scheduler",
    "SchedulerOptions",
    "StepPlan",
    "check_policy",
    "make_scheduler",
]

POLICIES: dict[str, type[QueuedScheduler]] = {
    "fcfs": FcfsScheduler,
    "load_stabilizing": LoadStabilizingScheduler,
    "skip_join_mlfq": SkipJoinMlfqScheduler,
    "srpt": SrptScheduler,
}


def check_policy(name: object, settings: Mapping[str, object] | None = None) -> object:
    """Returns a policy's own settings, checked; those left out have their defaults.

    Raises:
        ConfigError: there is no policy or no setting of that name (the nearest one is named), or a
            value is wrong.
    """
    policy = POLICIES.get(name) if isinstance(name, str) else None
    if policy is None:
        unknown = explain_unknown("unknown scheduling policy", str(name), list(POLICIES), {})
        raise ConfigError(f"{unknown}; expected one of {', '.join(map(repr, POLICIES))}")
    known = [f.name for f in fields(policy.Settings)]
    for key in settings or ():
        if not known:
            raise ConfigError(f"scheduling policy {name!r} has no options, got {key!r}")
        if key not in known:
            raise ConfigError(explain_unknown(f"{name!r} has no option", key, known, {}))
    return policy.Settings(**dict(settings or {}))


def make_scheduler(
    name: str, options: SchedulerOptions, settings: Mapping[str, object] | None = None
) -> Scheduler:
    """Returns a new scheduler of the policy of that name; `settings` are the policy's own.

    Raises:
        ConfigError: as `check_policy`.
    """
    checked = check_policy(name, settings)
    return POLICIES[name](options, checked)
