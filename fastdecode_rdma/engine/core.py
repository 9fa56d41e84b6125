"""The engine: one step at a time, continuous batching, recovery from lost workers.

All methods are called by one thread. A step never leaves half a state behind: cache lengths and ids
move only after its logits are there, so a failed step is simply run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import NUM_DECODE_TABLES, StepCode
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.book import SequenceBook
from fastdecode_rdma.engine.decode import build_batch, worker_loads
from fastdecode_rdma.engine.mini_batches import MiniBatchChooser, spread
from fastdecode_rdma.engine.outputs import non_finite
from fastdecode_rdma.engine.pipeline import PipelineRunner
from fastdecode_rdma.engine.prefill_queue import PrefillQueue
from fastdecode_rdma.engine.recovery import Recovery
from fastdecode_rdma.engine.sampler import TokenSampler
from fastdecode_rdma.engine.spill import Spiller
from fastdecode_rdma.engine.spill_tiers import SpillTier
from fastdecode_rdma.engine.state import (
    EngineOptions,
    LiveSequence,
    Request,
    RunningPrefill,
)
from fastdecode_rdma.errors import StepError, WorkerLostError
from fastdecode_rdma.models import DecoderModel
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.scheduler import Scheduler


class Engine(SequenceBook):
    """Drives a model and its attention workers through the sequences that the scheduler picks."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        placement: CautiousPlacement,
        scheduler: Scheduler,
        options: EngineOptions,
        tier: SpillTier | None = None,
    ) -> None:
        super().__init__(placement, scheduler)
        self.model = model
        self.backend = backend
        self.options = options
        self.runner = PipelineRunner(model, backend)
        self.chooser = MiniBatchChooser(
            fixed=options.num_mini_batches,
            most=NUM_DECODE_TABLES,
            can_overlap=not all(backend.is_embedded(w) for w in range(backend.num_workers)),
        )
        self._prefills = PrefillQueue(model, backend, placement, options)
        self._sampler = TokenSampler(options, self.counters)
        self.spiller = Spiller(
            backend,
            placement,
            scheduler,
            tier,
            deterministic=options.deterministic,
            recompute=self._prefills.extend,
            requeue=self._requeue_refused,
        )
        self._recovery = Recovery(
            backend,
            placement,
            scheduler,
            self._prefills,
            self._live,
            self.counters,
            timeout_s=options.timeout_s,
            fail=self._fail_request,
            preempt=self._preempt,
            abort_prefill=self._abort_prefill,
            lose_copies=self.spiller.lose_worker,
        )
        self._step = 0
        self.stopping = False  # set by who closes: a long prefill ends between two cells
        self.loads: dict[int, int] = {}  # cached tokens that the last decode step read, by worker

    # -- workers

    def take_lost(self) -> list[str]:
        """Returns the addresses of workers lost since the last call, idle ones included."""
        return self._recovery.take_lost()

    def take_back(self, worker: int, capacity_bytes: int) -> None:
        """Takes in a worker that was lost; the backend has given it its number again."""
        self.chooser.forget()
        self._recovery.take_back(worker, capacity_bytes)

    # -- one step

    def step(self) -> bool:
        """Schedules and runs one step; False if nothing could be done just now."""
        started = time.perf_counter()
        try:
            worked = self._step_once()
        except (WorkerLostError, StepError) as error:
            self.chooser.forget()
            self._recovery.recover(error)
            worked = True
        self.counters.step_s += time.perf_counter() - started
        self._deliver()
        return worked

    def _step_once(self) -> bool:
        if not self.placement.has_workers():
            raise WorkerLostError("(all)", "no attention worker is left")
        self.placement.begin_step()
        plan = self.scheduler.schedule(self.placement)
        for handle in plan.preempted:
            self._preempt(self._live[handle])
        self._prefills.extend(self.spiller.take(plan.prefill, self._live))
        self.spiller.flush()
        started = time.perf_counter()
        worked = self._run_prefill()
        prefilled = time.perf_counter()
        ready = [self._live[h] for h in plan.decode if h in self._live and self._live[h].ready]
        if ready:
            self._decode(ready)
        if worked or ready:
            self._tell_times(started, prefilled, len(ready))
        is_busy = worked or bool(ready)
        is_busy |= self.spiller.advance(self._live, is_idle=not is_busy)
        self._recovery.watch_stall(is_busy)
        return is_busy

    def _tell_times(self, started: float, prefilled: float, num_decoded: int) -> None:
        """Lets the scheduler learn what a step costs, and a trace show its phases."""
        ended = time.perf_counter()
        tokens = self._prefills.take_tokens_run()
        cached_tokens = self.runner.times.cached_tokens if num_decoded else 0
        prefill_s = prefilled - started if tokens else 0.0
        decode_s = ended - prefilled if num_decoded else 0.0
        self.scheduler.observe(tokens, prefill_s, num_decoded, cached_tokens, decode_s)
        self.spiller.observe(tokens, prefill_s, num_decoded, decode_s)
        if (recorder := self.runner.recorder) is not None:
            recorder.engine("prefill", started, prefilled)
            recorder.engine("decode", prefilled, ended)

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

    def _requeue_refused(self, seq: LiveSequence, refusal: StepError) -> None:
        """A worker has no room for a sequence on its way back."""
        self.scheduler.requeue(seq.handle)
        self._preempt(seq)
        self._recovery.note_refusal(refusal)

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
                self._recovery.note_refusal(refusal)  # those that decode go on
            else:
                self._recovery.give_up(refusal, members)
        self.counters.prefill_s += time.perf_counter() - started
        return True

    def _finish_prefill(self, running: RunningPrefill) -> None:
        assert running.job.logits is not None
        self.counters.prompt_tokens += running.job.num_tokens
        self.placement.accepted()
        cancelled, rows, samplers, scored = running.settle()
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
        ready = ready[: self.options.max_rows]
        parts = spread(ready, self.chooser.choose(len(ready)))
        share = self.options.max_rows // len(parts)
        batches = [build_batch(part, max(len(part), share)) for part in parts]
        logits, finite = self.runner.run(batches, self._next_step())
        self.counters.steps += 1
        self.loads = worker_loads(batches)
        self.chooser.observe(self.runner.times)
        rows: list[int] = []
        samplers: list[LiveSequence] = []
        fed = chain.from_iterable(zip(b.sequences, b.counts, strict=True) for b in batches)
        for row, ((seq, count), fine) in enumerate(zip(fed, finite, strict=True)):
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
        sampled = self._sampler.run(logits, sequences)
        if (recorder := self.runner.recorder) is not None:
            recorder.engine("sample", started, time.perf_counter())
        if sampled.events:
            self._recovery.note_progress()
        self._drop(sampled.finished)
        for request, batch in sampled.events.items():
            if request in scored:
                batch[0].prompt_logprobs = scored[request]
                request.has_prompt_logprobs = True
            self._outbox.append(partial(request.deliver, batch))
        for seq, error in sampled.failed:
            if seq.handle in self._live:  # a sibling may have failed the request already
                self._fail_request(seq.request, error)
