"""The scheduling interface: pure integers, for the engine and a simulator alike.

A *job* is one sequence; a *gang* is the jobs of one request, admitted together as they share a
prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Job:
    """What a policy may know of a sequence. The engine keeps `num_tokens` up to date.

    handle: the engine's number for the sequence.
    num_tokens: prompt and generated tokens so far, cached or not.
    prompt_len: tokens of the prompt.
    max_tokens: bound on generated tokens.
    arrival: ascending order of submission, kept when a sequence is preempted.
    is_single: its request came by itself, rather than from a list that is submitted bit by bit.
    """

    handle: int
    num_tokens: int
    prompt_len: int
    max_tokens: int
    arrival: int
    is_single: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step: who starts (prefill), who decodes, who must give its memory back first."""

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


class Scheduler(ABC):
    """A policy: whom to admit, whom to run. All methods are called by the engine thread only."""

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
