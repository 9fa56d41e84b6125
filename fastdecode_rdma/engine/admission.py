"""Placement that learns from refusals: other engines may hold memory that the ledger counts on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastdecode_rdma.attention.placement import Placement
from fastdecode_rdma.config import AttentionGeometry

REFUSED_HOLD_S = 0.1
"""How long a worker that refused a step gets no new sequences: long enough that the others decode
many steps between two attempts, short against any timeout."""


class CautiousPlacement(Placement):
    """After a refusal the worker gets no new sequences for a moment, and new ones come one by one
    until a prefill has succeeded: one that does not fit must not keep out those packed with it."""

    def __init__(self, geometry: AttentionGeometry, capacities: Sequence[int]) -> None:
        super().__init__(geometry, capacities)
        self._held_until: dict[int, float] = {}
        self._one_by_one = False
        self._num_admitted = 0

    def begin_step(self) -> None:
        """Starts counting the gangs that one step admits."""
        self._num_admitted = 0

    def refused(self, worker: int) -> None:
        """Takes note that a worker had no room."""
        self._held_until[worker] = time.monotonic() + REFUSED_HOLD_S
        self._one_by_one = True

    def accepted(self) -> None:
        """Takes note that a prefill has found room."""
        self._one_by_one = False

    def restore_worker(self, index: int, capacity_bytes: int) -> None:
        """As Placement's; its refusals are forgotten."""
        super().restore_worker(index, capacity_bytes)
        self._held_until.pop(index, None)

    def is_holding(self) -> bool:
        """Says whether some worker gets no new sequences just now."""
        now = time.monotonic()
        self._held_until = {w: until for w, until in self._held_until.items() if until > now}
        return bool(self._held_until)

    def reserve_gang(self, handles: Sequence[int], num_tokens: int) -> bool:
        """As Placement's, on workers that have not just refused."""
        if self._one_by_one and self._num_admitted:
            return False
        with self._held_out():
            placed = super().reserve_gang(handles, num_tokens)
        self._num_admitted += placed
        return placed

    def fits_after(self, released: Sequence[int], handles: Sequence[int], num_tokens: int) -> bool:
        """As Placement's; new ones on workers that have not just refused."""
        if handles[0] in self._holdings:
            return super().fits_after(released, handles, num_tokens)
        if self._one_by_one and self._num_admitted:
            return False
        with self._held_out():
            return super().fits_after(released, handles, num_tokens)

    @contextmanager
    def _held_out(self) -> Iterator[None]:
        """Leaves workers that have just refused out, as if they were lost."""
        held = []
        if self.is_holding():
            held = [self._workers[index] for index in self._held_until]
            held = [worker for worker in held if worker.alive]
        for worker in held:
            worker.alive = False
        try:
            yield
        finally:
            for worker in held:
                worker.alive = True
