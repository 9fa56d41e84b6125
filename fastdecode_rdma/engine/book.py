"""The sequences of an engine: how they come, and how they go in whatever state they are."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.outputs import failed_by
from fastdecode_rdma.engine.prefill_queue import PrefillQueue
from fastdecode_rdma.engine.recovery import Recovery
from fastdecode_rdma.engine.spill import Spiller
from fastdecode_rdma.engine.state import EngineCounters, LiveSequence, Request
from fastdecode_rdma.errors import FastDecodeError, WorkerLostError
from fastdecode_rdma.scheduler import Job, Scheduler

logger = logging.getLogger(__name__)


class SequenceBook(ABC):
    """What an engine holds between two steps. The engine makes the parts that are not set here."""

    backend: AttentionBackend
    spiller: Spiller
    _prefills: PrefillQueue
    _recovery: Recovery

    def __init__(self, placement: CautiousPlacement, scheduler: Scheduler) -> None:
        self.placement = placement
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self._live: dict[int, LiveSequence] = {}
        self._next_handle = 1
        self._outbox: list[Callable[[], None]] = []  # what callers hear once the step is booked

    @abstractmethod
    def _abort_prefill(self) -> list[LiveSequence]:
        """Gives up the running job; its members go back to the queue without cache."""

    def add(self, request: Request) -> None:
        """Queues a validated request."""
        jobs = []
        try:
            detokenizers = [request.make_detokenizer() for _ in range(request.params.n)]
        except Exception as error:
            self.counters.finished["error"] += request.params.n
            request.fail(request.index, failed_by(request, error))
            return
        for sample_index, detokenizer in enumerate(detokenizers):
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            prompt_len = len(request.prompt_ids)
            job = Job(
                handle, prompt_len, prompt_len, request.max_tokens, handle,
                request.is_single, request.priority,
            )  # fmt: skip
            seq = LiveSequence(handle, request, sample_index, job, detokenizer)
            self._live[handle] = seq
            request.sequences.append(seq)
            jobs.append(job)
        self.scheduler.add(jobs)

    def cancel(self, request: Request) -> None:
        """Drops what is left of a request and frees its memory."""
        self._drop(self._living(request, "abort"))

    def _living(self, request: Request, reason: str) -> list[LiveSequence]:
        """Returns what is left of a request that ends for a reason, which is counted."""
        living = [seq for seq in request.sequences if seq.handle in self._live]
        self.counters.finished[reason] += len(living)
        return living

    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences without a seat; any thread may ask."""
        return max(0, len(self._live) - self.scheduler.num_running)

    def _drop(self, sequences: list[LiveSequence]) -> None:
        """Ends sequences in any state and frees what they hold."""
        held = []
        for seq in sequences:
            self._live.pop(seq.handle, None)
            self.scheduler.remove(seq.handle)
            self.spiller.forget(seq.handle)
            if self._prefills.is_under_way(seq):
                seq.cancelled = True  # its rows are under way: freed when the job ends
            else:
                held.append(seq)
        self._free(held)
        if not self._prefills.is_wanted():
            self._abort_prefill()

    def _free(self, sequences: list[LiveSequence]) -> None:
        per_worker: dict[int, list[int]] = {}
        for seq in sequences:
            self.placement.release(seq.handle)
            if seq.worker >= 0:
                per_worker.setdefault(seq.worker, []).append(seq.handle)
        for worker, handles in per_worker.items():
            try:
                self.backend.free(worker, handles)
            except WorkerLostError as lost:
                self._recovery.recover(lost)
        try:
            self.spiller.flush()
        except WorkerLostError as lost:
            self._recovery.recover(lost)

    def _fail_request(self, request: Request, error: FastDecodeError) -> None:
        """Ends one request with an error, the others go on."""
        self._drop(self._living(request, "error"))
        self._outbox.append(partial(request.fail, request.index, error))

    def fail_all(self, error: FastDecodeError) -> None:
        """Ends every request with the same error. Never raises: what cannot be freed now is freed
        with the connections."""
        requests = dict.fromkeys(seq.request for seq in self._live.values())
        self.counters.finished["error"] += len(self._live)
        self._outbox.extend(partial(request.fail, request.index, error) for request in requests)
        try:
            self._abort_prefill()
            self._drop(list(self._live.values()))
        except Exception:
            logger.exception("sequences could not be freed")
            self._live.clear()
        finally:
            self._deliver()

    def _deliver(self) -> None:
        """Tells the callers, when counters and memory are up to date: they may look at once."""
        outbox, self._outbox = self._outbox, []
        for tell in outbox:
            tell()
