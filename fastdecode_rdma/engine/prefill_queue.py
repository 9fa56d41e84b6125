"""Admitted gangs on their way through prefill: packed into jobs, run cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.placement import Placement
from fastdecode_rdma.engine.prefill import PrefillItem, PrefillJob
from fastdecode_rdma.engine.state import EngineOptions, LiveSequence, Request, RunningPrefill
from fastdecode_rdma.models import DecoderModel
from fastdecode_rdma.prompt_logprobs import PromptLogprobs


class PrefillQueue:
    """One job runs at a time; gangs admitted meanwhile wait for the next."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        placement: Placement,
        options: EngineOptions,
    ) -> None:
        self._model = model
        self._backend = backend
        self._placement = placement
        self._options = options
        self._gangs: list[tuple[int, ...]] = []
        self._running: RunningPrefill | None = None
        self._rows_run = 0  # rows of one layer, since they were asked for

    def extend(self, gangs: Iterable[tuple[int, ...]]) -> None:
        """Queues gangs in order."""
        self._gangs.extend(gangs)

    def has_work(self) -> bool:
        return bool(self._gangs or self._running)

    def is_under_way(self, seq: LiveSequence) -> bool:
        """Whether the running job computes this sequence."""
        return self._running is not None and seq in self._running.members

    def uses_worker(self, worker: int) -> bool:
        """Whether the running job has prompts on that worker."""
        return self._running is not None and any(s.worker == worker for s in self._running.members)

    def is_wanted(self) -> bool:
        """Whether anybody still waits for the running job; True when there is none."""
        return self._running is None or not all(seq.cancelled for seq in self._running.members)

    def forget(self, handle: int) -> None:
        """Takes a sequence out of a waiting gang; its siblings stay in line."""
        self._gangs = [tuple(h for h in gang if h != handle) for gang in self._gangs]

    def take_gangs_on(self, worker: int, live: Mapping[int, LiveSequence]) -> list[int]:
        """Removes waiting gangs that were placed on a worker; returns their living handles."""
        taken: list[int] = []
        kept: list[tuple[int, ...]] = []
        for gang in self._gangs:
            here = [handle for handle in gang if handle in live]
            if here and self._placement.worker_of(here[0]) == worker:
                taken.extend(here)
            else:
                kept.append(gang)
        self._gangs = kept
        return taken

    def abort(self) -> list[LiveSequence]:
        """Gives up the running job; returns its members, whose cache is worthless."""
        running, self._running = self._running, None
        return [] if running is None else running.members

    def run(
        self,
        live: Mapping[int, LiveSequence],
        next_step: Callable[[], int],
        should_stop: Callable[[], bool],
    ) -> Iterator[RunningPrefill]:
        """Runs cells up to the token budget of a step; yields jobs as they finish.

        Raises: as the backend; the running job must then be aborted.
        """
        budget = self._options.max_num_batched_tokens * self._model.config.num_layers
        while budget > 0 and self.has_work() and not should_stop():
            if self._running is None:
                self._running = self._start(live, next_step)
                continue
            rows = next(self._running.cells, None)
            if rows is None:
                finished, self._running = self._running, None
                yield finished
            else:
                budget -= rows
                self._rows_run += rows

    def take_tokens_run(self) -> int:
        """Returns how many tokens' worth of cells were run since the last call."""
        tokens, self._rows_run = divmod(self._rows_run, self._model.config.num_layers)
        return tokens

    def _start(
        self, live: Mapping[int, LiveSequence], next_step: Callable[[], int]
    ) -> RunningPrefill | None:
        """Packs gangs into a job, up to the token budget (a longer prompt goes alone)."""
        items: list[PrefillItem] = []
        members: list[LiveSequence] = []
        scored: set[Request] = set()  # its samples may be queued one by one, after a lost worker
        tokens = 0
        while self._gangs:
            gang = [live[handle] for handle in self._gangs[0] if handle in live]
            if not gang:
                self._gangs.pop(0)
                continue
            ids = self._ids_of(gang[0])
            if tokens and tokens + len(ids) > self._options.max_num_batched_tokens:
                break
            self._gangs.pop(0)
            tokens += len(ids)
            for seq in gang:
                seq.worker = self._placement.worker_of(seq.handle)
            handles = tuple(seq.handle for seq in gang)
            request = gang[0].request
            logprobs = None if request in scored else self._logprobs_of(request)
            scored.add(request)
            items.append(PrefillItem(handles, gang[0].worker, ids, logprobs))
            members.extend(gang)
        if not items:
            return None
        job = PrefillJob(self._model, self._backend, items)
        return RunningPrefill(job, job.cells(next_step()), members)

    def _logprobs_of(self, request: Request) -> PromptLogprobs | None:
        """What a job is to fill in for a request: nothing once it has been delivered."""
        num_top = request.params.prompt_logprobs
        if num_top is None or request.has_prompt_logprobs:
            return None
        vocab_size = self._model.config.vocab_size
        decode_token = self._options.decode_token if request.params.detokenize else None
        return PromptLogprobs(request.prompt_ids, num_top, vocab_size, decode_token)

    def _ids_of(self, seq: LiveSequence) -> np.ndarray:
        """Everything so far; in deterministic mode the prompt: the rest is replayed."""
        return seq.request.prompt_ids if self._options.deterministic else seq.all_ids()
