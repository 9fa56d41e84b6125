"""What the engine keeps of requests and sequences while they live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fastdecode_rdma.detokenizer import IncrementalDetokenizer
from fastdecode_rdma.engine.prefill import PrefillJob
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.logit_rules import LogitRules, LogitState
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.scheduler.base import Job
from fastdecode_rdma.sequence import SamplingParams, TokenEvent
from fastdecode_rdma.stats import (
    FINISH_REASONS,
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    Histogram,
)


@dataclass(frozen=True)
class EngineOptions:
    """What all requests share.

    max_rows: rows of one decode step. max_num_batched_tokens: prompt tokens (times all layers)
    prefilled between two decode steps. eos_token_ids: any of them ends a sequence.
    num_mini_batches: of a decode step; None: as measured.
    """

    max_model_len: int
    max_rows: int
    max_num_batched_tokens: int
    deterministic: bool
    timeout_s: float
    eos_token_ids: frozenset[int]
    decode_token: Callable[[int], str] | None = None  # for the text of top log-probabilities
    num_mini_batches: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters; `params.n` sequences share it.

    `deliver` is called by the engine thread with the events of one step, `fail` with an error that
    ends this request and no other. Both only queue: they must not block.
    """

    index: int
    text: str | None
    prompt_ids: np.ndarray  # int64 [L]
    params: SamplingParams
    seed: int
    max_tokens: int  # resolved: never more than the room left
    make_detokenizer: Callable[[], IncrementalDetokenizer | None]
    deliver: Callable[[list[TokenEvent]], None]
    fail: Callable[[int, FastDecodeError], None]
    priority: int = 0  # a lower one is run earlier
    is_single: bool = False  # it came by itself: `max_waiting` bounds those
    rules: LogitRules | None = None  # what its parameters do to logits, if anything
    sequences: list[LiveSequence] = field(default_factory=list)
    submitted_s: float = field(default_factory=time.perf_counter)
    has_prompt_logprobs: bool = False  # they have been delivered: no later prefill repeats them


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One sequence between submission and its last token.

    kv_len: tokens in the worker's cache; the ids from there on are still to be fed.
    ready: its prompt is cached, it takes part in decode steps. had_cache: it was, and lost it.
    """

    handle: int
    request: Request
    sample_index: int
    job: Job
    detokenizer: IncrementalDetokenizer | None
    output_ids: list[int] = field(default_factory=list)
    worker: int = -1
    kv_len: int = 0
    ready: bool = False
    had_cache: bool = False
    cancelled: bool = False
    mini_batch: int = -1  # kept from step to step where that leaves them even; -1: none yet
    last_token_s: float | None = None
    logit_state: LogitState | None = None

    def __post_init__(self) -> None:
        rules = self.request.rules
        if rules is not None:
            self.logit_state = rules.start(self.request.prompt_ids, self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    def pending_ids(self, count: int) -> list[int]:
        """The next `count` ids to feed. Only generated ones can be pending."""
        start = self.kv_len - len(self.request.prompt_ids)
        return self.output_ids[start : start + count]

    def all_ids(self) -> np.ndarray:
        """Prompt and output ids, int64."""
        return np.concatenate([self.request.prompt_ids, np.asarray(self.output_ids, np.int64)])

    def lose_cache(self) -> None:
        """Back to the state before the prefill; ids and text stay."""
        self.had_cache |= self.ready
        self.worker, self.kv_len, self.ready = -1, 0, False


@dataclass(slots=True)
class SpillCounters:
    """Sequences copied out at least once, taken back, and computed again instead; bytes both ways;
    copies that a tier could not keep. copy_s: of the engine's thread, in copying out; restore_s:
    from admission to the last chunk, summed; wait_s: of the engine's, until a tier answered."""

    spilled: int = 0
    restored: int = 0
    recomputed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    faults: int = 0
    copy_s: float = 0.0
    restore_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start; seconds are the engine thread's."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    recoveries: int = 0
    step_s: float = 0.0
    prefill_s: float = 0.0
    sample_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    e2e_request_latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))

    def count_token(self, seq: LiveSequence, finish_reason: str | None, now_s: float) -> None:
        """Takes note of a sampled token: a few additions and one search in a short list."""
        self.tokens += 1
        if seq.last_token_s is None:
            self.time_to_first_token.observe(now_s - seq.request.submitted_s)
        else:
            self.inter_token_latency.observe(now_s - seq.last_token_s)
        seq.last_token_s = now_s
        if finish_reason is not None:
            self.finished[finish_reason] += 1
            self.e2e_request_latency.observe(now_s - seq.request.submitted_s)


@dataclass(slots=True)
class RunningPrefill:
    """A prefill job on its way through the layers."""

    job: PrefillJob
    cells: Iterator[int]
    members: list[LiveSequence] = field(default_factory=list)

    def settle(
        self,
    ) -> tuple[list[LiveSequence], list[int], list[LiveSequence], dict[Request, PromptLogprobs]]:
        """After the last cell: makes the members ready, those that were cancelled aside.

        Returns the cancelled ones; rows of the job's logits with the sequences whose next token
        they tell (one whose generated ids are still to be replayed has none); log-probabilities of
        prompts by request.
        """
        rows: list[int] = []
        samplers: list[LiveSequence] = []
        scored: dict[Request, PromptLogprobs] = {}
        cancelled = [seq for seq in self.members if seq.cancelled]
        by_handle = {seq.handle: seq for seq in self.members if not seq.cancelled}
        for row, item in enumerate(self.job.items):
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
        return cancelled, rows, samplers, scored
