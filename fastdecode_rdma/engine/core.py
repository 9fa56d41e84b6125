"""The engine: one step at a time, continuous batching, recovery from lost workers.

All methods are called by one thread. A step never leaves half a state behind: cache lengths and ids
move only after its logits are there, so a failed step is simply run again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import StepCode
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.decode import DecodeRunner, build_batch
from fastdecode_rdma.engine.outputs import accept_token, failed_by, no_token, non_finite
from fastdecode_rdma.engine.prefill_queue import PrefillQueue
from fastdecode_rdma.engine.state import (
    EngineCounters,
    EngineOptions,
    LiveSequence,
    Request,
    RunningPrefill,
)
from fastdecode_rdma.errors import (
    CacheFullError,
    FastDecodeError,
    StepError,
    WorkerLostError,
)
from fastdecode_rdma.models import DecoderModel
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.sampling import Scratch, sample
from fastdecode_rdma.scheduler import Job, Scheduler
from fastdecode_rdma.sequence import TokenEvent

logger = logging.getLogger(__name__)

DECODE_TABLE = 0
STALL_POLL_S = 0.02
"""How long an engine waits between looks when other engines hold the workers' memory."""


class Engine:
    """Drives a model and its attention workers through the sequences that the scheduler picks."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        placement: CautiousPlacement,
        scheduler: Scheduler,
        options: EngineOptions,
    ) -> None:
        self.model = model
        self.backend = backend
        self.placement = placement
        self.scheduler = scheduler
        self.options = options
        self.counters = EngineCounters()
        self.runner = DecodeRunner(model, backend)
        self._live: dict[int, LiveSequence] = {}
        self._prefills = PrefillQueue(model, backend, placement, options)
        self._scratch = Scratch()
        self._lost_workers: set[int] = set()
        self._lost_addresses: list[str] = []
        self._next_handle = 1
        self._step = 0
        self._stalled_since: float | None = None
        self.stopping = False  # set by who closes: a long prefill ends between two cells
        self._outbox: list[Callable[[], None]] = []  # what callers hear once the step is booked

    # -- requests

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
            job = Job(handle, prompt_len, prompt_len, request.max_tokens, handle, request.is_single)
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

    def take_lost(self) -> list[str]:
        """Returns the addresses of workers lost since the last call, idle ones included."""
        for worker in range(self.backend.num_workers):
            if worker not in self._lost_workers and not self.backend.info(worker).alive:
                name = self.backend.info(worker).name
                self._recover(WorkerLostError(name, "it has gone", worker_index=worker))
        lost, self._lost_addresses = self._lost_addresses, []
        return lost

    def take_back(self, worker: int, capacity_bytes: int) -> None:
        """Takes in a worker that was lost; the backend has given it its number again."""
        self._lost_workers.discard(worker)
        self.placement.restore_worker(worker, capacity_bytes)

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
                self._recover(lost)

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

    # -- one step

    def step(self) -> bool:
        """Schedules and runs one step; False if nothing could be done just now."""
        started = time.perf_counter()
        try:
            worked = self._step_once()
        except (WorkerLostError, StepError) as error:
            self._recover(error)
            worked = True
        self.counters.step_s += time.perf_counter() - started
        self._deliver()
        return worked

    def _deliver(self) -> None:
        """Tells the callers, when counters and memory are up to date: they may look at once."""
        outbox, self._outbox = self._outbox, []
        for tell in outbox:
            tell()

    def _step_once(self) -> bool:
        if not self.placement.has_workers():
            raise WorkerLostError("(all)", "no attention worker is left")
        self.placement.begin_step()
        plan = self.scheduler.schedule(self.placement)
        for handle in plan.preempted:
            self._preempt(self._live[handle])
        self._prefills.extend(plan.prefill)
        worked = self._run_prefill()
        ready = [self._live[h] for h in plan.decode if h in self._live and self._live[h].ready]
        if ready:
            self._decode(ready)
            worked = True
        self._watch_stall(worked)
        return worked

    def _watch_stall(self, worked: bool) -> None:
        """Waits a little when nothing could be done."""
        if not self._live:
            self._stalled_since = None
        elif not worked:
            if not self.placement.is_holding():
                self._note_stall("the living workers have no room for it")
            time.sleep(STALL_POLL_S)

    def _note_stall(self, why: str) -> None:
        """Fails the first request in line when there has been no new token for timeout_s."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since > self.options.timeout_s and self._live:
            seq = next(iter(self._live.values()))
            self._stalled_since = now  # the next in line gets its own time
            needed = self.placement.bytes_for(seq.num_tokens + 1)
            self._fail_request(
                seq.request,
                CacheFullError(
                    f"request {seq.request.index}: no worker had room for {seq.num_tokens + 1} "
                    f"tokens ({needed} bytes) within {self.options.timeout_s:g} s: {why}",
                    needed_bytes=needed,
                ),
            )

    def _next_step(self) -> int:
        self._step = (self._step + 1) & 0xFFFFFFFF
        return self._step

    def _preempt(self, seq: LiveSequence) -> None:
        """Takes a running sequence's cache away; the scheduler has queued it again already."""
        self.counters.preemptions += 1
        if self._prefills.is_under_way(seq):
            self._abort_prefill()
        self._prefills.forget(seq.handle)
        self._free([seq])
        seq.lose_cache()

    # -- prefill

    def _run_prefill(self) -> bool:
        """Runs cells up to the token budget; True if there was any."""
        if not self._prefills.has_work():
            return False
        started = time.perf_counter()
        try:
            for finished in self._prefills.run(self._live, self._next_step, lambda: self.stopping):
                self._finish_prefill(finished)
        except WorkerLostError:
            self._abort_prefill()
            raise
        except StepError as refusal:
            members = self._abort_prefill()
            if refusal.code == StepCode.CACHE_FULL:
                self._note_refusal(refusal)  # those that decode go on
            else:
                self._give_up(refusal, members)
        self.counters.prefill_s += time.perf_counter() - started
        return True

    def _finish_prefill(self, running: RunningPrefill) -> None:
        assert running.job.logits is not None
        self.counters.prompt_tokens += running.job.num_tokens
        self.placement.accepted()
        rows: list[int] = []
        samplers: list[LiveSequence] = []
        scored: dict[Request, PromptLogprobs] = {}
        cancelled = [seq for seq in running.members if seq.cancelled]
        by_handle = {seq.handle: seq for seq in running.members if not seq.cancelled}
        for row, item in enumerate(running.job.items):
            for handle in item.handles:
                seq = by_handle.get(handle)
                if seq is None:
                    continue
                seq.kv_len, seq.ready = len(item.token_ids), True
                if item.logprobs is not None:
                    scored[seq.request] = item.logprobs
                if seq.kv_len == seq.num_tokens:
                    rows.append(row)
                    samplers.append(seq)
        self._free(cancelled)
        for request, logprobs in scored.items():
            if not logprobs.is_finite:
                error = non_finite(request.sequences[0], "logits of the prompt")
                self._fail_request(request, error)
        self._sample_living(running.job.logits, rows, samplers, scored)

    def _abort_prefill(self) -> list[LiveSequence]:
        """Gives up the running job; its members go back to the queue without cache."""
        members = self._prefills.abort()
        for seq in members:
            if not seq.cancelled:
                self.scheduler.requeue(seq.handle)
        self._free(members)
        for seq in members:
            seq.lose_cache()
        return members

    # -- decode

    def _decode(self, ready: list[LiveSequence]) -> None:
        batch = build_batch(ready, self.options.max_rows)
        logits, finite = self.runner.run(batch, DECODE_TABLE, self._next_step())
        self.counters.steps += 1
        rows: list[int] = []
        samplers: list[LiveSequence] = []
        for row, (seq, count, fine) in enumerate(
            zip(batch.sequences, batch.counts, finite, strict=True)
        ):
            if not fine:
                self._fail_request(seq.request, non_finite(seq, "attention inputs or outputs"))
                continue
            seq.kv_len += count
            if seq.kv_len == seq.num_tokens:
                rows.append(row)
                samplers.append(seq)
        self._sample_living(logits, rows, samplers, {})

    def _sample_living(
        self,
        logits: torch.Tensor,
        rows: list[int],
        sequences: list[LiveSequence],
        scored: Mapping[Request, PromptLogprobs],
    ) -> None:
        """Samples for the sequences, of the rows given, whose requests have not failed just now."""
        living = [(r, s) for r, s in zip(rows, sequences, strict=True) if s.handle in self._live]
        if living:
            rows = [row for row, _ in living]
            chosen = logits if rows == list(range(len(logits))) else logits[rows]
            self._sample(chosen, [seq for _, seq in living], scored)

    def _sample(
        self,
        logits: torch.Tensor,
        sequences: list[LiveSequence],
        scored: Mapping[Request, PromptLogprobs],
    ) -> None:
        """Samples the next token of each sequence, delivers the events, ends the finished.

        `scored` goes with the first event of its request.
        """
        started = time.perf_counter()
        sampled = sample(
            logits,
            [seq.request.params for seq in sequences],
            [seq.request.seed for seq in sequences],
            [len(seq.output_ids) for seq in sequences],
            [seq.sample_index for seq in sequences],
            states=[seq.logit_state for seq in sequences],
            scratch=self._scratch,
        )
        now_s = time.perf_counter()
        events: dict[Request, list[TokenEvent]] = {}
        finished: list[LiveSequence] = []
        failed: list[tuple[LiveSequence, FastDecodeError]] = []
        for row, seq in enumerate(sequences):
            if sampled.token_ids[row] < 0:
                failed.append((seq, no_token(seq, sampled.errors.get(row))))
                continue
            try:
                event = accept_token(seq, sampled, row, self.options)
            except Exception as error:  # a tokenizer that cannot decode ends its own request only
                failed.append((seq, failed_by(seq.request, error)))
                continue
            self.counters.count_token(seq, event.finish_reason, now_s)
            self._stalled_since = None
            events.setdefault(seq.request, []).append(event)
            if event.finish_reason is not None:
                finished.append(seq)
        self.counters.sample_s += time.perf_counter() - started
        self._drop(finished)
        for request, batch in events.items():
            if request in scored:
                batch[0].prompt_logprobs = scored[request]
                request.has_prompt_logprobs = True
            self._outbox.append(partial(request.deliver, batch))
        for seq, error in failed:
            if seq.handle in self._live:  # a sibling may have failed the request already
                self._fail_request(seq.request, error)

    # -- failures

    def _recover(self, error: FastDecodeError) -> None:
        """After a lost worker or a refused step: requeues what it held, touches nothing else."""
        if isinstance(error, StepError):
            self._recover_step(error)
            return
        assert isinstance(error, WorkerLostError)
        worker = error.worker_index
        if worker is None:
            raise error
        if worker not in self._lost_workers:  # freeing what it held may find it lost once more
            self._lost_workers.add(worker)
            self._lost_addresses.append(self.backend.info(worker).name)
            self.counters.recoveries += 1
        self.placement.lose_worker(worker)
        if self._prefills.uses_worker(worker):
            self._abort_prefill()
        for handle in self._prefills.take_gangs_on(worker, self._live):
            self.scheduler.requeue(handle)
            self.placement.release(handle)
        for seq in list(self._live.values()):
            if seq.worker == worker:
                self.scheduler.requeue(seq.handle)
                self.placement.release(seq.handle)
                seq.lose_cache()

    def _recover_step(self, error: StepError) -> None:
        """After a refused decode step. Without room (other engines use the memory, too), what is
        being prefilled there gives way, else the youngest sequence."""
        worker = error.worker_index
        there = [seq for seq in self._live.values() if seq.worker == worker and seq.ready]
        if error.code != StepCode.CACHE_FULL:
            self._give_up(error, there)
            return
        if self._prefills.uses_worker(worker):
            self._abort_prefill()
        elif there:
            youngest = max(there, key=lambda seq: seq.job.arrival)
            self.scheduler.requeue(youngest.handle)
            self._preempt(youngest)
        self._note_refusal(error)

    def _give_up(self, error: StepError, members: list[LiveSequence]) -> None:
        """A worker that failed a step for a reason of its own gets no other: its sequences go on
        elsewhere. The embedded one has no elsewhere: the requests of that step fail."""
        worker = error.worker_index
        if self.backend.is_embedded(worker):
            for seq in members:
                if seq.handle in self._live:
                    self._fail_request(seq.request, error)
            return
        self.backend.give_up(worker, error.remote_message)
        self._recover(WorkerLostError(error.worker, error.remote_message, worker_index=worker))

    def _note_refusal(self, error: StepError) -> None:
        """Lets a worker without room rest."""
        self.placement.refused(error.worker_index)
        self._note_stall(str(error))
