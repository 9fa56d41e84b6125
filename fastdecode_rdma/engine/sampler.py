"""From logits to events: the next token of each sequence of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fastdecode_rdma.engine.outputs import accept_token, failed_by, no_token
from fastdecode_rdma.engine.state import EngineCounters, EngineOptions, LiveSequence, Request
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.sampling import Scratch, sample
from fastdecode_rdma.sequence import TokenEvent


@dataclass(slots=True)
class SampledStep:
    """What sampling made of a step's sequences."""

    events: dict[Request, list[TokenEvent]] = field(default_factory=dict)
    finished: list[LiveSequence] = field(default_factory=list)
    failed: list[tuple[LiveSequence, FastDecodeError]] = field(default_factory=list)


class TokenSampler:
    """Samples and counts tokens."""

    def __init__(self, options: EngineOptions, counters: EngineCounters) -> None:
        self._options = options
        self._counters = counters
        self._scratch = Scratch()

    def run(self, logits: Tensor, sequences: Sequence[LiveSequence]) -> SampledStep:
        """Samples the next token of each sequence from its row of logits [R, V], and takes it."""
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
        step = SampledStep()
        for row, seq in enumerate(sequences):
            if sampled.token_ids[row] < 0:
                step.failed.append((seq, no_token(seq, sampled.errors.get(row))))
                continue
            try:
                event = accept_token(seq, sampled, row, self._options)
            except Exception as error:  # a tokenizer that cannot decode ends its own request only
                step.failed.append((seq, failed_by(seq.request, error)))
                continue
            self._counters.count_token(seq, event.finish_reason, now_s)
            step.events.setdefault(seq.request, []).append(event)
            if event.finish_reason is not None:
                step.finished.append(seq)
        self._counters.sample_s += time.perf_counter() - started
        return step
