"""Spilling: whose KV is copied out before memory runs out, and when a copy beats computing again.

A token's K/V never change once written, so a sequence is copied out while it still runs, and giving
up its memory then takes no time. Those go first whose estimated next scheduled time (ENST) is the
latest. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fastdecode_rdma.scheduler.base import Costs

EXTEND_TOKENS = 64
"""A copy is extended when it lags behind by as much: a decode step replays about so many tokens at
once, so the rest is cheap to make up for."""

HEADROOM_SHARE = 8
"""One part in so many of a worker's memory can be had at once, at least."""

GUESSED_BYTES_PER_S = 0.5e9
"""Of a spill tier, until one copy was made."""

RECENT = 0.2
"""Weight of the newest copy."""


def execute_s(
    queues: Mapping[tuple[int, int], int], quanta_s: Sequence[float], max_num_seqs: int
) -> dict[tuple[int, int], float]:
    """Returns T_execute by (priority, level): seconds until all jobs that go before one of that
    queue have fallen to it, with max_num_seqs of them served at once.

    queues: jobs by (priority, level), level 0 being the top one; quanta_s: by level. A job of a
    queue above uses up the quanta from its own queue down to the one before.
    """
    sums = [0.0, *accumulate(quanta_s)]
    return {
        (priority, level): sum(
            jobs * max(0.0, sums[level] - sums[upper])
            for (other, upper), jobs in queues.items()
            if other <= priority
        )
        / max_num_seqs
        for priority, level in queues
    }


def enst_s(promote_s: float, execute_s: float) -> float:
    """Returns the seconds until a job is likely to be served next: it is promoted, or its turn
    comes, whichever is first."""
    return min(promote_s, execute_s)


@dataclass(frozen=True)
class Held:
    """A sequence that holds memory. nbytes: of memory; lag_tokens: cached ones not copied out."""

    handle: int
    nbytes: int
    lag_tokens: int
    has_copy: bool


def headroom_bytes(capacity_bytes: int, num_running: int, block_bytes: int, next_bytes: int) -> int:
    """Returns what should be free, or free at once, on a worker: the next block of all that run
    there and what the first in line needs, but a fixed share at least."""
    wanted = max(capacity_bytes // HEADROOM_SHARE, num_running * block_bytes + next_bytes)
    return min(capacity_bytes, wanted)


def copy_ahead(giving_way: Iterable[Held], free_bytes: int, headroom: int) -> list[int]:
    """Returns whose copies are to be made or extended so that `headroom` bytes can be had at once.

    giving_way: the latest ENST first, the order in which they are to lose their memory.
    """
    chosen = []
    for held in giving_way:
        if free_bytes >= headroom:
            break
        free_bytes += held.nbytes
        if held.lag_tokens >= EXTEND_TOKENS or not held.has_copy:
            chosen.append(held.handle)
    return chosen


@dataclass
class SpillCosts:
    """Says whether a copy pays, from what prefill, decode steps and copies were seen to take.

    replays: generated tokens run through decode steps again, `rows` per step, rather than with the
    prompt (deterministic mode).
    """

    costs: Costs
    replays: bool
    rows: int = EXTEND_TOKENS
    _rates: dict[str, float] = field(default_factory=dict)

    def observe(self, way: str, nbytes: int, seconds: float) -> None:
        """Takes in a copy; `way`: "out" or "in"."""
        if nbytes and seconds > 0.0:
            new = nbytes / seconds
            old = self._rates.get(way, new)
            self._rates[way] = old + RECENT * (new - old)

    def copy_s(self, way: str, nbytes: int) -> float:
        """Returns how long a copy takes."""
        return nbytes / self._rates.get(way, GUESSED_BYTES_PER_S)

    def recompute_s(self, prompt_len: int, num_tokens: int) -> float:
        """Returns how long it takes to compute the cache of num_tokens again."""
        if not self.replays:
            return self.costs.prefill_s(num_tokens)
        return self.costs.prefill_s(prompt_len) + self.replay_s(num_tokens - prompt_len)

    def replay_s(self, num_tokens: int) -> float:
        """Returns how long forced tokens take in the decode steps that they need beside others'."""
        return -(-num_tokens // self.rows) * self.costs.decode_s(1, num_tokens)

    def spill_pays(self, prompt_len: int, num_tokens: int, nbytes: int) -> bool:
        """Whether copying out and back is quicker than computing again."""
        copied_s = self.copy_s("out", nbytes) + self.copy_s("in", nbytes)
        return copied_s < self.recompute_s(prompt_len, num_tokens)

    def restore_pays(
        self, prompt_len: int, num_tokens: int, copied_tokens: int, nbytes: int
    ) -> bool:
        """Whether taking a copy back and replaying what it lacks is quicker than computing all."""
        back_s = self.copy_s("in", nbytes) + self.replay_s(num_tokens - copied_tokens)
        return back_s < self.recompute_s(prompt_len, num_tokens)
