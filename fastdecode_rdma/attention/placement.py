"""Which worker holds a sequence, and whether one can: bookkeeping of KV bytes. Pure integers.

A worker knows its memory exactly and may refuse a step (other engines share it); this ledger is how
the engine avoids asking for what cannot be. Sums run over KV groups: a group without a window holds
ceil(n / block) blocks of a sequence of n tokens, one with a window never more than its ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastdecode_rdma.config import KV_ROW_BYTES, AttentionGeometry

BLOCK_TOKENS = 64
RING_SLACK_TOKENS = 64
SLAB_BYTES = 64 << 20
SLAB_SHARE = 64
"""As in worker/attention.py and worker/kvcache.py, which an engine does not import; a test keeps
them equal."""


def kv_bytes(geometry: AttentionGeometry, num_tokens: int) -> int:
    """Returns the bytes that one sequence of `num_tokens` tokens holds on a worker."""
    whole = -(-num_tokens // BLOCK_TOKENS)
    total = 0
    for group in geometry.groups:
        blocks = whole
        if group.window is not None:
            blocks = min(whole, -(-(group.window + RING_SLACK_TOKENS) // BLOCK_TOKENS) + 1)
        row_bytes = group.num_kv_heads * KV_ROW_BYTES[geometry.kv_dtype](group.head_dim)
        total += blocks * 2 * len(group.layers) * BLOCK_TOKENS * row_bytes
    return total


def usable_bytes(geometry: AttentionGeometry, capacity_bytes: int) -> int:
    """Returns what may be planned with of a worker's memory.

    Workers buy memory for each KV group in slabs; the free blocks of one group's last slab are of
    no use to the others, and a plan that counts on them would be refused for ever.
    """
    if len(geometry.groups) == 1:
        return capacity_bytes
    slab = min(SLAB_BYTES, capacity_bytes // SLAB_SHARE)
    return capacity_bytes - len(geometry.groups) * slab


@dataclass(slots=True)
class _Worker:
    capacity_bytes: int
    used_bytes: int = 0  # by sequences; copies lie in what is left
    copy_bytes: int = 0
    alive: bool = True

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


@dataclass(slots=True)
class _Holding:
    worker: int
    nbytes: int


@dataclass
class Placement:
    """Reserves KV bytes per sequence. New sequences go to the living worker that is least full in
    proportion to its capacity: a step lasts as long as its busiest worker's attention.

    `capacities`: KV bytes per worker, by worker number; `usable_bytes` of them are planned with.
    """

    geometry: AttentionGeometry
    capacities: Sequence[int]
    _workers: list[_Worker] = field(init=False)
    _holdings: dict[int, _Holding] = field(init=False, default_factory=dict)
    _copies: dict[int, _Holding] = field(init=False, default_factory=dict)
    on_copies_short: Callable[[int, int], None] | None = field(init=False, default=None)
    """`on_copies_short(worker, nbytes)` must release copies of so many bytes there."""

    def __post_init__(self) -> None:
        self._workers = []
        for capacity in self.capacities:
            self.add_worker(capacity)

    # -- what fits

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the bytes that a sequence of that many tokens needs."""
        return kv_bytes(self.geometry, num_tokens)

    def largest_capacity(self) -> int:
        """Returns the usable bytes of the largest living worker, 0 when there is none."""
        return max((worker.capacity_bytes for worker in self._workers if worker.alive), default=0)

    def can_ever_fit(self, num_tokens: int, *, num_sequences: int = 1) -> bool:
        """Says whether some living worker could hold that many such sequences if it were empty."""
        return num_sequences * self.bytes_for(num_tokens) <= self.largest_capacity()

    def longest_sequence(self) -> int:
        """Returns the most tokens that the largest living worker can hold of one sequence, at most
        the geometry's max_model_len."""
        low, high = 0, self.geometry.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.can_ever_fit(middle) else (low, middle - 1)
        return low

    # -- sequences

    def reserve(self, handle: int, num_tokens: int) -> bool:
        """Makes sure that a sequence may hold `num_tokens`; False, and no change, if it may not.
        A sequence stays on its worker; a new one is placed."""
        holding = self._holdings.get(handle)
        if holding is None:
            return self.reserve_gang([handle], num_tokens)
        more = self.bytes_for(num_tokens) - holding.nbytes
        worker = self._workers[holding.worker]
        if more > worker.free_bytes:
            return False
        worker.used_bytes += more
        holding.nbytes += more
        self._squeeze_copies(holding.worker)
        return True

    def reserve_gang(self, handles: Sequence[int], num_tokens: int) -> bool:
        """Places new sequences that share a prompt on one worker; all or none. Blocks they share
        are counted once for each, since every one may come to write its own copy."""
        each = self.bytes_for(num_tokens)
        needed = each * len(handles)
        fitting = [
            index
            for index, worker in enumerate(self._workers)
            if worker.alive and needed <= worker.free_bytes
        ]
        if not fitting:
            return False
        chosen = min(fitting, key=lambda index: (self._fullness(index, needed), index))
        self._workers[chosen].used_bytes += needed
        for handle in handles:
            self._holdings[handle] = _Holding(chosen, each)
        self._squeeze_copies(chosen)
        return True

    def fits_after(self, released: Sequence[int], handles: Sequence[int], num_tokens: int) -> bool:
        """Says whether sequences could hold `num_tokens` each once `released` have given back
        theirs: one that is placed on its worker, new ones together on one. Changes nothing."""
        freed: dict[int, int] = {}
        for handle in released:
            given = self._holdings[handle]
            freed[given.worker] = freed.get(given.worker, 0) + given.nbytes
        each = self.bytes_for(num_tokens)
        holding = self._holdings.get(handles[0])
        if holding is not None:
            worker = self._workers[holding.worker]
            return each - holding.nbytes <= worker.free_bytes + freed.get(holding.worker, 0)
        return any(
            worker.alive and len(handles) * each <= worker.free_bytes + freed.get(index, 0)
            for index, worker in enumerate(self._workers)
        )

    def _fullness(self, index: int, needed: int) -> float:
        worker = self._workers[index]
        return (worker.used_bytes + needed) / max(1, worker.capacity_bytes)

    def release(self, handle: int) -> None:
        """Gives back all that a sequence had; unknown handles are fine."""
        holding = self._holdings.pop(handle, None)
        if holding is not None:
            self._workers[holding.worker].used_bytes -= holding.nbytes

    def worker_of(self, handle: int) -> int:
        """Returns the number of the worker that a sequence was placed on."""
        return self._holdings[handle].worker

    def held_bytes(self, handle: int) -> int:
        """Returns the bytes booked for a sequence."""
        return self._holdings[handle].nbytes

    # -- copies of sequences, in memory that no sequence needs

    def reserve_copy(self, handle: int, num_tokens: int, *, not_on: int) -> bool:
        """Makes sure that the copy of a sequence may hold `num_tokens` on a worker other than
        `not_on`, the one that has most room; False, and no change, if it may not."""
        holding = self._copies.get(handle)
        if holding is None:
            living = [
                (worker.free_bytes - worker.copy_bytes, -index)
                for index, worker in enumerate(self._workers)
                if worker.alive and index != not_on
            ]
            if not living:
                return False
            holding = _Holding(-max(living)[1], 0)
        worker = self._workers[holding.worker]
        more = self.bytes_for(num_tokens) - holding.nbytes
        if holding.worker == not_on or more > worker.free_bytes - worker.copy_bytes:
            return False
        worker.copy_bytes += more
        holding.nbytes += more
        self._copies[handle] = holding
        return True

    def release_copy(self, handle: int) -> int | None:
        """Gives back what a copy had; returns its worker, None if there is no such copy."""
        holding = self._copies.pop(handle, None)
        if holding is None:
            return None
        self._workers[holding.worker].copy_bytes -= holding.nbytes
        return holding.worker

    def copy_on(self, handle: int) -> int | None:
        """Returns the worker that has the copy of a sequence, None if there is none."""
        holding = self._copies.get(handle)
        return None if holding is None else holding.worker

    def _squeeze_copies(self, index: int) -> None:
        worker = self._workers[index]
        short = worker.copy_bytes - worker.free_bytes
        if worker.copy_bytes and short > 0:
            assert self.on_copies_short is not None
            self.on_copies_short(index, short)

    # -- workers

    def has_workers(self) -> bool:
        """Says whether any worker is alive."""
        return any(worker.alive for worker in self._workers)

    def add_worker(self, capacity_bytes: int) -> int:
        """Adds a worker; returns its number."""
        self._workers.append(_Worker(usable_bytes(self.geometry, capacity_bytes)))
        return len(self._workers) - 1

    def lose_worker(self, index: int) -> None:
        """Takes a worker out. What it held stays booked until it is released."""
        self._workers[index].alive = False

    def restore_worker(self, index: int, capacity_bytes: int) -> None:
        """Lets a worker that was lost take part again, empty and with a memory of that size."""
        worker = self._workers[index]
        worker.capacity_bytes = usable_bytes(self.geometry, capacity_bytes)
        worker.alive = True

    @property
    def num_workers(self) -> int:
        """Different workers ever added, lost ones included."""
        return len(self._workers)

    def used_bytes(self, index: int) -> int:
        """Returns the bytes booked on a worker."""
        return self._workers[index].used_bytes

    def capacity_bytes(self, index: int) -> int:
        """Returns the bytes that may be booked on a worker."""
        return self._workers[index].capacity_bytes
