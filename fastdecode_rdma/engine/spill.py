"""Copies sequences out of the workers' memory ahead of need, and takes them back.

A few chunks move between any two steps, so decoding goes on meanwhile; a disk is read and written
by a thread of its own. What is copied is K/V in stored form: what comes back is what was there, bit
for bit, and the tokens that a copy lacks are replayed through decode steps.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.placement import BLOCK_TOKENS, Placement
from fastdecode_rdma.config import StepCode
from fastdecode_rdma.engine.spill_tiers import Chunk, SpillError, SpillGone, SpillTier
from fastdecode_rdma.engine.state import LiveSequence, SpillCounters
from fastdecode_rdma.errors import StepError
from fastdecode_rdma.scheduler import Scheduler
from fastdecode_rdma.scheduler.costs import LearnedCosts
from fastdecode_rdma.scheduler.spill import Held, SpillCosts, copy_ahead, headroom_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Of one request to a worker: long enough to hide its cost, short against a step."""
PLAN_STEPS = 8
"""Who is to be copied out is decided anew after so many steps."""
MIN_SHARE_S = 0.001
STEP_SHARE = 0.25
"""Copies may take so much of the time of the step before, at least MIN_SHARE_S."""
IDLE_SHARE_S = 0.05
"""The same when there is nothing else to do."""
RETRY_S = 10.0
"""After a fault of the tier nothing is copied out for so long."""


@dataclass(slots=True)
class _Copy:
    """valid: tokens that can be taken back, those of the last chunk that may end a copy."""

    chunks: list[Chunk] = field(default_factory=list)
    valid: int = 0

    @property
    def stop(self) -> int:
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def nbytes(self) -> int:
        return self.chunks[-1].offset + self.chunks[-1].nbytes if self.chunks else 0


@dataclass(slots=True)
class _Restore:
    seq: LiveSequence
    worker: int
    chunks: list[Chunk]
    started_s: float
    futures: list[Future[bytes]] = field(default_factory=list)
    num_done: int = 0
    moved_s: float = 0.0


class Spiller:
    """Copies of sequences in a tier. Without a tier it does nothing but count what is recomputed.

    `recompute(gang)` queues a prefill in the place that a sequence has already; `requeue(seq)`
    gives up that place.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        placement: Placement,
        scheduler: Scheduler,
        tier: SpillTier | None,
        *,
        deterministic: bool,
        recompute: Callable[[Iterable[tuple[int, ...]]], None],
        requeue: Callable[[LiveSequence, StepError], None],
    ) -> None:
        self.counters = SpillCounters()
        self._backend = backend
        self._placement = placement
        self._scheduler = scheduler
        self._tier = tier
        self._recompute = recompute
        self._requeue = requeue
        self._learned = LearnedCosts(0.01)
        self.costs = SpillCosts(self._learned, replays=deterministic)
        has_window = any(group.window is not None for group in backend.geometry.groups)
        self._any_end = not has_window
        self._copies: dict[int, _Copy] = {}
        self._restores: dict[int, _Restore] = {}
        self._wanted: list[int] = []
        self._countdown = 0
        self._retry_at = 0.0
        self._last_step_s = 0.0
        self._warned = False
        token = -(-placement.bytes_for(BLOCK_TOKENS) // BLOCK_TOKENS)
        self._chunk_tokens = max(1, CHUNK_BYTES // max(1, token))

    def observe(
        self, prefill_tokens: int, prefill_s: float, num_decoded: int, decode_s: float
    ) -> None:
        """Hears how long a step took, as Scheduler.observe does."""
        self._learned.observe(prefill_tokens, prefill_s, num_decoded, decode_s)
        self._last_step_s = prefill_s + decode_s

    # -- sequences come and go

    def take(
        self, gangs: list[tuple[int, ...]], live: Mapping[int, LiveSequence]
    ) -> list[tuple[int, ...]]:
        """Begins to bring back those admitted gangs whose copies pay; returns the others."""
        others = []
        for gang in gangs:
            seq = live.get(gang[0])
            if seq is None or len(gang) > 1 or not seq.had_cache:
                others.append(gang)
                continue
            self._restores.pop(seq.handle, None)
            copy = self._copies.get(seq.handle)
            prompt_len = len(seq.request.prompt_ids)
            if (
                copy is None
                or copy.valid < prompt_len
                or not self.costs.restore_pays(prompt_len, seq.num_tokens, copy.valid, copy.nbytes)
            ):
                self.counters.recomputed += 1
                others.append(gang)
                continue
            seq.worker = self._placement.worker_of(seq.handle)
            chunks = [chunk for chunk in copy.chunks if chunk.stop <= copy.valid]
            self._restores[seq.handle] = _Restore(seq, seq.worker, chunks, time.perf_counter())
        return others

    def forget(self, handle: int) -> None:
        """Drops what there is of a sequence that has ended."""
        self._restores.pop(handle, None)
        self._drop_copy(handle)

    def _drop_copy(self, handle: int) -> None:
        if self._copies.pop(handle, None) is not None and self._tier is not None:
            self._tier.drop(handle)

    def lose_worker(self, worker: int) -> None:
        """Forgets what a lost worker had."""
        if self._tier is not None:
            self._tier.lose_worker(worker)

    def flush(self) -> None:
        """Frees copies that gave way, before the step that needs the room.

        Raises:
            WorkerLostError
        """
        if self._tier is not None:
            self._tier.flush()

    def close(self) -> None:
        """Removes all copies. Idempotent; after the engine's last step."""
        if self._tier is not None:
            self._tier.close()

    # -- between two steps

    def advance(self, live: Mapping[int, LiveSequence], *, is_idle: bool) -> bool:
        """Moves some chunks; True if any sequence is on its way back. `is_idle`: nobody decodes.

        Raises:
            WorkerLostError
        """
        tier = self._tier
        if tier is None:
            return False
        for handle, error in tier.take_failed().items():
            self._copies.pop(handle, None)
            if error is not None:
                self._note_fault(error)
                tier.drop(handle)
        share_s = IDLE_SHARE_S if is_idle else max(MIN_SHARE_S, STEP_SHARE * self._last_step_s)
        until_s = time.perf_counter() + share_s
        was_restoring = bool(self._restores)
        if was_restoring:
            self._bring_back(tier, live, until_s)
        self._copy_out(tier, live, until_s)
        return was_restoring

    def _note_fault(self, error: SpillError) -> None:
        if isinstance(error, SpillGone):
            return
        self.counters.faults += 1
        self._retry_at = time.monotonic() + RETRY_S
        if not self._warned:
            self._warned = True
            logger.warning("spilling fails, sequences are computed again instead: %s", error)

    # -- back

    def _bring_back(
        self, tier: SpillTier, live: Mapping[int, LiveSequence], until_s: float
    ) -> None:
        for handle, restore in list(self._restores.items()):
            seq = restore.seq
            if live.get(handle) is not seq or seq.worker != restore.worker or seq.ready:
                del self._restores[handle]  # it has lost its place meanwhile
                continue
            try:
                while self._import_next(tier, restore, until_s) and time.perf_counter() < until_s:
                    pass
            except SpillError as error:
                self._note_fault(error)
                self._give_up(handle, restore)
            except StepError as error:
                if error.code == StepCode.CACHE_FULL:  # other engines use the memory
                    del self._restores[handle]
                    self._requeue(seq, error)
                else:
                    self._note_fault(SpillError(str(error)))
                    self._give_up(handle, restore)
            if time.perf_counter() >= until_s:
                return

    def _give_up(self, handle: int, restore: _Restore) -> None:
        """Computes again what cannot be brought back, in the same place."""
        self._restores.pop(handle, None)
        self._drop_copy(handle)
        self._backend.free(restore.worker, [handle])
        restore.seq.lose_cache()
        self.counters.recomputed += 1
        self._recompute([(handle,)])

    def _import_next(self, tier: SpillTier, restore: _Restore, until_s: float) -> bool:
        """Imports a chunk if it is there in time; False if not, or if it was the last."""
        handle, chunks = restore.seq.handle, restore.chunks
        first = restore.num_done
        started = time.perf_counter()
        for chunk in chunks[first + len(restore.futures) : first + tier.read_ahead]:
            restore.futures.append(tier.get(handle, chunk))
        if not restore.futures[0].done():
            wait(restore.futures[:1], max(0.0, until_s - started))
            self.counters.wait_s += time.perf_counter() - started
            if not restore.futures[0].done():
                return False
        data = restore.futures.pop(0).result()
        self._backend.import_range(restore.worker, handle, chunks[first].start, data)
        restore.num_done += 1
        seconds = time.perf_counter() - started
        restore.moved_s += seconds
        self.counters.bytes_in += len(data)
        self.costs.observe("in", len(data), seconds)
        if restore.num_done < len(chunks):
            return True
        restore.seq.kv_len, restore.seq.ready = chunks[-1].stop, True
        del self._restores[handle]
        self.counters.restored += 1
        self.counters.restore_s += time.perf_counter() - restore.started_s
        return False

    # -- out

    def _copy_out(self, tier: SpillTier, live: Mapping[int, LiveSequence], until_s: float) -> None:
        self._countdown -= 1
        if self._countdown <= 0:
            self._countdown = PLAN_STEPS
            self._wanted = [] if time.monotonic() < self._retry_at else self._plan(live)
        while self._wanted:
            seq = live.get(self._wanted[0])
            if seq is None or not seq.ready or not self._copy_chunk(tier, seq):
                self._wanted.pop(0)
            if time.perf_counter() >= until_s:
                return

    def _plan(self, live: Mapping[int, LiveSequence]) -> list[int]:
        """Returns whom to copy out, of the workers that are short of memory."""
        placement = self._placement
        running: dict[int, list[LiveSequence]] = {}
        order = [live[handle] for handle in self._scheduler.giving_way() if handle in live]
        for seq in order:
            if seq.worker >= 0:
                running.setdefault(seq.worker, []).append(seq)
        block = placement.bytes_for(BLOCK_TOKENS)
        first = [live[h] for h in self._scheduler.first_waiting(1) if h in live]
        next_bytes = sum(placement.bytes_for(seq.num_tokens + 1) for seq in first)
        wanted: list[int] = []
        for worker, there in running.items():
            capacity = placement.capacity_bytes(worker)
            free = capacity - placement.used_bytes(worker)
            headroom = headroom_bytes(capacity, len(there), block, next_bytes)
            if free < headroom:
                held = [self._held(seq) for seq in there if seq.ready and self._pays(seq)]
                wanted += copy_ahead(held, free, headroom)
        return wanted

    def _held(self, seq: LiveSequence) -> Held:
        copy = self._copies.get(seq.handle)
        nbytes = self._placement.held_bytes(seq.handle)
        if copy is None:
            return Held(seq.handle, nbytes, seq.kv_len, has_copy=False)
        return Held(seq.handle, nbytes, seq.kv_len - copy.valid, has_copy=copy.valid > 0)

    def _pays(self, seq: LiveSequence) -> bool:
        prompt_len = len(seq.request.prompt_ids)
        nbytes = self._placement.bytes_for(seq.kv_len)
        return self.costs.spill_pays(prompt_len, seq.num_tokens, nbytes)

    def _copy_chunk(self, tier: SpillTier, seq: LiveSequence) -> bool:
        """Copies the next chunk of a sequence; False if there is none, or no room for it."""
        copy = self._copies.get(seq.handle) or _Copy()
        start = copy.stop
        stop = min(start + self._chunk_tokens, seq.kv_len)
        if stop == start:
            return False
        if not tier.has_room(seq.handle, seq.worker, stop):
            return False
        started = time.perf_counter()
        try:
            data = self._backend.export_range(seq.worker, seq.handle, start, stop)
            chunk = Chunk(start, stop, copy.nbytes, len(data), zlib.crc32(data))
            tier.put(seq.handle, chunk, data)
        except (SpillError, StepError) as error:
            self._copies[seq.handle] = copy
            self._drop_copy(seq.handle)
            self._note_fault(error if isinstance(error, SpillError) else SpillError(str(error)))
            return False
        seconds = time.perf_counter() - started
        if not copy.chunks:
            self.counters.spilled += 1
            self._copies[seq.handle] = copy
        copy.chunks.append(chunk)
        # A window's ring has only the last tokens: up to here, all that a sequence of this length
        # needs is in the copy only if it has no more.
        if self._any_end or stop == seq.kv_len:
            copy.valid = stop
        elif not tier.keeps_old_rows:
            copy.valid = 0
        self.counters.bytes_out += len(data)
        self.counters.copy_s += seconds
        self.costs.observe("out", len(data), seconds)
        return stop < seq.kv_len
