"""What an engine does after a lost worker, a refused step, or a long time without progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import StepCode
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.prefill_queue import PrefillQueue
from fastdecode_rdma.engine.state import EngineCounters, LiveSequence, Request
from fastdecode_rdma.errors import CacheFullError, FastDecodeError, StepError, WorkerLostError
from fastdecode_rdma.scheduler import Scheduler

STALL_POLL_S = 0.02
"""How long an engine waits between looks when other engines hold the workers' memory."""


class Recovery:
    """Requeues what a lost worker held, makes room after refusals; touches nothing else.

    `live` is the engine's own mapping. `fail(request, error)` ends a request, `preempt(seq)` takes
    a sequence's cache away, `abort_prefill()` gives up the running prefill, `lose_copies(worker)`
    forgets the spilled copies on a worker.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        placement: CautiousPlacement,
        scheduler: Scheduler,
        prefills: PrefillQueue,
        live: Mapping[int, LiveSequence],
        counters: EngineCounters,
        *,
        timeout_s: float,
        fail: Callable[[Request, FastDecodeError], None],
        preempt: Callable[[LiveSequence], None],
        abort_prefill: Callable[[], object],
        lose_copies: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._placement = placement
        self._scheduler = scheduler
        self._prefills = prefills
        self._live = live
        self._counters = counters
        self._timeout_s = timeout_s
        self._fail = fail
        self._preempt = preempt
        self._abort_prefill = abort_prefill
        self._lose_copies = lose_copies
        self._lost_workers: set[int] = set()
        self._lost_addresses: list[str] = []
        self._stalled_since: float | None = None

    # -- workers

    def take_lost(self) -> list[str]:
        """Returns the addresses of workers lost since the last call, idle ones included."""
        for worker in range(self._backend.num_workers):
            if worker not in self._lost_workers and not self._backend.info(worker).alive:
                name = self._backend.info(worker).name
                self.recover(WorkerLostError(name, "it has gone", worker_index=worker))
        lost, self._lost_addresses = self._lost_addresses, []
        return lost

    def take_back(self, worker: int, capacity_bytes: int) -> None:
        """Takes in a worker that was lost; the backend has given it its number again."""
        self._lost_workers.discard(worker)
        self._placement.restore_worker(worker, capacity_bytes)

    def recover(self, error: FastDecodeError) -> None:
        """After a lost worker or a refused step: requeues what it held.

        Raises:
            WorkerLostError: it names no worker.
        """
        if isinstance(error, StepError):
            self._recover_step(error)
            return
        assert isinstance(error, WorkerLostError)
        worker = error.worker_index
        if worker is None:
            raise error
        if worker not in self._lost_workers:  # freeing what it held may find it lost once more
            self._lost_workers.add(worker)
            self._lost_addresses.append(self._backend.info(worker).name)
            self._counters.recoveries += 1
        self._placement.lose_worker(worker)
        self._lose_copies(worker)
        if self._prefills.uses_worker(worker):
            self._abort_prefill()
        for handle in self._prefills.take_gangs_on(worker, self._live):
            self._scheduler.requeue(handle)
            self._placement.release(handle)
        for seq in list(self._live.values()):
            if seq.worker == worker:
                self._scheduler.requeue(seq.handle)
                self._placement.release(seq.handle)
                seq.lose_cache()

    def _recover_step(self, error: StepError) -> None:
        """After a refused decode step. Without room (other engines use the memory, too), what is
        being prefilled there gives way, else the youngest sequence."""
        worker = error.worker_index
        there = [seq for seq in self._live.values() if seq.worker == worker and seq.ready]
        if error.code != StepCode.CACHE_FULL:
            self.give_up(error, there)
            return
        if self._prefills.uses_worker(worker):
            self._abort_prefill()
        elif there:
            youngest = max(there, key=lambda seq: seq.job.arrival)
            self._scheduler.requeue(youngest.handle)
            self._preempt(youngest)
        self.note_refusal(error)

    def give_up(self, error: StepError, members: list[LiveSequence]) -> None:
        """A worker that failed a step for a reason of its own gets no other: its sequences go on
        elsewhere. The embedded one has no elsewhere: the requests of that step fail."""
        worker = error.worker_index
        if self._backend.is_embedded(worker):
            for seq in members:
                if seq.handle in self._live:
                    self._fail(seq.request, error)
            return
        self._backend.give_up(worker, error.remote_message)
        self.recover(WorkerLostError(error.worker, error.remote_message, worker_index=worker))

    def note_refusal(self, error: StepError) -> None:
        """Lets a worker without room rest."""
        self._placement.refused(error.worker_index)
        self._note_stall(str(error))

    # -- stalls

    def note_progress(self) -> None:
        """Takes note of a new token."""
        self._stalled_since = None

    def watch_stall(self, worked: bool) -> None:
        """Waits a little when nothing could be done."""
        if not self._live:
            self._stalled_since = None
        elif not worked:
            if not self._placement.is_holding():
                self._note_stall("the living workers have no room for it")
            time.sleep(STALL_POLL_S)

    def _note_stall(self, why: str) -> None:
        """Fails the first request in line when there has been no new token for timeout_s."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since > self._timeout_s and self._live:
            seq = next(iter(self._live.values()))
            self._stalled_since = now  # the next in line gets its own time
            needed = self._placement.bytes_for(seq.num_tokens + 1)
            self._fail(
                seq.request,
                CacheFullError(
                    f"request {seq.request.index}: no worker had room for {seq.num_tokens + 1} "
                    f"tokens ({needed} bytes) within {self._timeout_s:g} s: {why}",
                    needed_bytes=needed,
                ),
            )
