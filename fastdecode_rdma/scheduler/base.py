"""The scheduling interface: pure arithmetic, for the engine and a simulator alike.

A *job* is one sequence; a *gang* is the jobs of one request, admitted together as they share a
prompt. A job *runs* while it holds cache: it decodes, or it is *paused*, left out of a step's
`decode` with its cache where it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastdecode_rdma.errors import ConfigError


class Costs(Protocol):
    """Predicted seconds, from a measured profile or from a catalogue of hardware."""

    def prefill_s(self, num_tokens: int) -> float:
        """Returns how long the prompt of one job takes, its first token included."""

    def decode_s(self, num_seqs: int, cached_tokens: int) -> float:
        """Returns how long one step of num_seqs jobs takes that have cached_tokens in all."""


@dataclass(frozen=True)
class SchedulerOptions:
    """What every policy obeys.

    max_num_seqs: jobs that run at once. max_num_batched_tokens: prompt tokens admitted per step; a
    prompt that is longer by itself goes alone. max_load_tokens: cached tokens that decode in one
    step, paused jobs not counted (the load limit W_lim); None is no limit; a job that is longer by
    itself goes alone. clock: seconds, from any origin; a simulator passes its own. costs: None lets
    a policy that needs them learn them from what `Scheduler.observe` is told. block_tokens: tokens
    in which the cache is booked: room for one token of a block is room for all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_load_tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    costs: Costs | None = None
    block_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_load_tokens", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(slots=True)
class Job:
    """What a policy may know of a sequence. The engine keeps `num_tokens` up to date.

    handle: the engine's number for the sequence.
    num_tokens: prompt and generated tokens so far, cached or not.
    prompt_len: tokens of the prompt.
    max_tokens: bound on generated tokens.
    arrival: ascending order of submission, kept when a sequence is preempted.
    is_single: its request came by itself, rather than from a list that is submitted bit by bit.
    priority: jobs of a lower one are admitted and run before those of a higher one.
    """

    handle: int
    num_tokens: int
    prompt_len: int
    max_tokens: int
    arrival: int
    is_single: bool = False
    priority: int = 0


@dataclass(slots=True)
class StepPlan:
    """One step: who starts (prefill), who decodes, who must give its memory back first.

    `decode` may be a part of the running jobs: those left out keep their cache.
    """

    prefill: list[tuple[int, ...]] = field(default_factory=list)  # gangs, by handle
    decode: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class CacheRoom(Protocol):
    """KV-cache bookkeeping as a policy sees it. Tokens in, yes or no out."""

    def reserve(self, handle: int, num_tokens: int) -> bool:
        """Makes sure that a sequence may hold num_tokens; False (and no change) if it may not."""

    def reserve_gang(self, handles: Sequence[int], num_tokens: int) -> bool:
        """Like reserve, for new sequences that must share a worker; all or none."""

    def release(self, handle: int) -> None:
        """Gives back all that `handle` had reserved."""

    def fits_after(self, released: Sequence[int], handles: Sequence[int], num_tokens: int) -> bool:
        """Whether `handles` could hold num_tokens each once `released` have given back theirs: one
        that holds cache where it is, new ones together on a worker. Changes nothing."""


class Scheduler(ABC):
    """A policy: whom to admit, whom to run. All methods are called by the engine thread only."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options

    @abstractmethod
    def add(self, gang: Sequence[Job]) -> None:
        """Queues the jobs of one request."""

    @abstractmethod
    def remove(self, handle: int) -> None:
        """Forgets a job in whatever state it is; unknown handles are fine."""

    @abstractmethod
    def requeue(self, handle: int) -> None:
        """Puts a running job whose cache was lost back to the queue, before newer ones."""

    @abstractmethod
    def schedule(self, room: CacheRoom) -> StepPlan:
        """Decides the next step and reserves room for its tokens."""

    def observe(  # noqa: B027  (most policies need no costs)
        self,
        prefill_tokens: int,
        prefill_s: float,
        num_decoded: int,
        cached_tokens: int,
        decode_s: float,
    ) -> None:
        """Hears how long a step took, for a policy that learns costs.

        prefill_tokens prompt tokens took prefill_s; num_decoded jobs with cached_tokens in all took
        decode_s. What was not done is 0.
        """

    def giving_way(self) -> list[int]:
        """Returns the running jobs in the order in which they are to lose their memory when it runs
        out; none where the policy has no such order."""
        return []

    def first_waiting(self, count: int) -> list[int]:
        """Returns the first jobs of those in line, at most that many."""
        del count
        return []

    @abstractmethod
    def has_work(self) -> bool:
        """Whether any job waits or runs."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Jobs that hold no cache."""

    @property
    @abstractmethod
    def num_waiting_single(self) -> int:
        """Those among them whose requests came by themselves."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Jobs that hold cache."""

    @property
    def num_paused(self) -> int:
        """Those among them that the last step left out."""
        return 0

    @property
    def num_paused_total(self) -> int:
        """The same, summed over all steps."""
        return 0
