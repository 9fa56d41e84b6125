"""Decode steps of several mini-batches at once: workers attend for one, the dense side computes
the other.

A *stage* of the dense side is what follows attention in one layer and what precedes it in the next.
Mini-batches take turns, stage by stage, and all workers serve the same one at a time:

    dense    A0 B0 A1 B1 A2 B2 ...      (A1: after attention of layer 0, before that of layer 1)
    workers     A0 B0 A1 B1 A2 ...

The head runs once, over the rows of all of them: its weights are read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.engine.decode import DecodeBatch, DecodeRunner
from fastdecode_rdma.engine.mini_batches import StepTimes
from fastdecode_rdma.engine.trace import LayerRecorder, Recorder
from fastdecode_rdma.models import DecoderModel


@dataclass(slots=True)
class _Flight:
    """One mini-batch on its way through the layers; its number is that of its decode table."""

    table: int
    positions: Tensor  # int64 [T]
    rows: list[Tensor]  # per layer: [T, row width] to fill
    outs: list[Tensor]  # per layer: [T, out width] as they come back
    x: Tensor = field(init=False)  # [T, H]


@dataclass(frozen=True, slots=True)
class _Calls:
    """What a step does per layer; recorded versions of the same while a trace is taken."""

    pre_attention: Callable[[int, Tensor, Tensor, Tensor], None]
    post_attention: Callable[[int, Tensor, Tensor], Tensor]
    submit: Callable[[int, int], None]
    collect: Callable[[int, int], None]


class PipelineRunner:
    """Runs decode steps of one or more mini-batches.

    `exchange_s`: seconds in sending to and waiting for workers; `model_s`: in the model's layers.
    `times` are those of the last step.
    `recorder` is set while a trace is taken, and only then a layer costs more.
    """

    def __init__(self, model: DecoderModel, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend
        self.single = DecodeRunner(model, backend)
        self.recorder: Recorder | None = None
        self.exchange_s = 0.0
        self.model_s = 0.0
        self.times = StepTimes(0, 0, 0, 0.0, 0.0)
        self._plain = _Calls(
            model.pre_attention, model.post_attention, backend.submit, backend.collect
        )

    def run(self, batches: Sequence[DecodeBatch], step: int) -> tuple[Tensor, list[bool]]:
        """Runs one step; returns logits [sequences of all batches, V] and whether each sequence was
        finite, in the order of the batches. At most one batch per decode table.

        The cache lengths of the sequences are not changed: a step that fails may simply run again,
        in the same mini-batches or in others.

        Raises:
            WorkerLostError, StepError: from the backend; no mini-batch is under way any more.
        """
        start = time.perf_counter()
        recorder = self.recorder
        if len(batches) == 1 and recorder is None:
            before = self.single.exchange_s
            logits, finite = self.single.run(batches[0], 0, step)
            exchanged = self.single.exchange_s - before
        else:
            try:
                logits, finite, exchanged = self._run_several(batches, step, recorder)
            except BaseException:
                for table in range(len(batches)):
                    self.backend.abort(table)
                raise
        self.exchange_s += exchanged
        dense_s = time.perf_counter() - start - exchanged
        self.model_s += dense_s
        self.times = StepTimes(
            len(batches),
            sum(batch.num_rows for batch in batches),
            sum(batch.cached_tokens for batch in batches),
            dense_s,
            exchanged,
        )
        return logits, finite

    def _run_several(
        self, batches: Sequence[DecodeBatch], step: int, recorder: Recorder | None
    ) -> tuple[Tensor, list[bool], float]:
        calls = self._plain
        if recorder is not None:
            layers = LayerRecorder(recorder, self.model, self.backend, step)
            calls = _Calls(
                layers.pre_attention, layers.post_attention, layers.submit, layers.collect
            )
        clock, exchanged = time.perf_counter, 0.0
        flights = []
        for table, batch in enumerate(batches):
            self.backend.begin_step(table, step, batch.assignments)
            views = self.single.row_views(table, batch.num_rows)
            flight = _Flight(table, batch.positions, [r for r, _ in views], [o for _, o in views])
            flight.x = self.model.embed(batch.token_ids, batch.positions)
            if recorder is not None:
                layers.table = table
            calls.pre_attention(0, flight.x, flight.positions, flight.rows[0])
            before = clock()
            calls.submit(table, 0)
            exchanged += clock() - before
            flights.append(flight)
        exchanged += self._run_layers(flights, calls)
        finite = [
            fine
            for flight, batch in zip(flights, batches, strict=True)
            for fine in self.single.finite_sequences(batch, flight.table)
        ]
        before = clock()
        logits = self.model.logits(_last_rows(flights, batches))
        if recorder is not None:
            recorder.dense("head", before, clock(), step=step)
        return logits, finite, exchanged

    def _run_layers(self, flights: Sequence[_Flight], calls: _Calls) -> float:
        """Takes all flights through all layers; returns the seconds in exchange with workers."""
        pre, post, submit, collect = (
            calls.pre_attention,
            calls.post_attention,
            calls.submit,
            calls.collect,
        )
        clock, exchanged = time.perf_counter, 0.0
        last = self.model.config.num_layers - 1
        for layer in range(last):
            for flight in flights:
                before = clock()
                collect(flight.table, layer)
                exchanged += clock() - before
                x = flight.x = post(layer, flight.x, flight.outs[layer])
                pre(layer + 1, x, flight.positions, flight.rows[layer + 1])
                before = clock()
                submit(flight.table, layer + 1)
                exchanged += clock() - before
        for flight in flights:
            before = clock()
            collect(flight.table, last)
            exchanged += clock() - before
            flight.x = post(last, flight.x, flight.outs[last])
        return exchanged


def _last_rows(flights: Sequence[_Flight], batches: Sequence[DecodeBatch]) -> Tensor:
    """Returns the hidden states [sequences, H] that the head is wanted of.

    By numpy: torch would wake threads that then spin beside ours.
    """
    parts = []
    for flight, batch in zip(flights, batches, strict=True):
        x = flight.x.numpy()
        parts.append(x if len(batch.last_rows) == batch.num_rows else x[batch.last_rows])
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
