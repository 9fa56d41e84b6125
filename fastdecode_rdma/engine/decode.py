"""One decode step over one mini-batch: rows out to the workers, attention back, once per layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import ENTRY_DTYPE
from fastdecode_rdma.engine.state import LiveSequence
from fastdecode_rdma.models import DecoderModel

MAX_ROWS_PER_SEQUENCE = 64
"""A window group's ring has room for this many new tokens beside those that its rows still see."""


@dataclass(slots=True)
class DecodeBatch:
    """Sequences of one step in row order (workers own contiguous ranges), and their rows.

    A sequence has one row as a rule; one that replays generated ids has several (`counts`).
    """

    sequences: list[LiveSequence]
    counts: list[int]
    assignments: list[tuple[int, np.ndarray]]
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    last_rows: list[int] = field(default_factory=list)  # of each sequence

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def cached_tokens(self) -> int:
        """Tokens that the workers hold of the sequences, those of this step not counted."""
        return sum(int(entries["kv_len_before"].sum()) for _, entries in self.assignments)


def build_batch(sequences: Sequence[LiveSequence], max_rows: int) -> DecodeBatch:
    """Lays out the rows of a step: one per sequence, the rest of max_rows to those that replay.

    Takes the first max_rows sequences when there are more.
    """
    chosen = sorted(sequences[:max_rows], key=lambda seq: seq.worker)
    spare = max_rows - len(chosen)
    counts, token_ids, positions, last_rows = [], [], [], []
    per_worker: dict[int, list[tuple[int, int, int, int]]] = {}
    for seq in chosen:
        count = min(seq.num_tokens - seq.kv_len, 1 + spare, MAX_ROWS_PER_SEQUENCE)
        spare -= count - 1
        counts.append(count)
        token_ids.extend(seq.pending_ids(count))
        positions.extend(range(seq.kv_len, seq.kv_len + count))
        last_rows.append(len(token_ids) - 1)
        per_worker.setdefault(seq.worker, []).append((seq.handle, seq.kv_len, count, 0))
    return DecodeBatch(
        chosen,
        counts,
        [(worker, np.array(rows, ENTRY_DTYPE)) for worker, rows in per_worker.items()],
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        last_rows,
    )


def worker_loads(batches: Sequence[DecodeBatch]) -> dict[int, int]:
    """Returns the cached tokens that the batches of a step read, by worker."""
    loads: dict[int, int] = {}
    for batch in batches:
        for worker, entries in batch.assignments:
            loads[worker] = loads.get(worker, 0) + int(entries["kv_len_before"].sum())
    return loads


class DecodeRunner:
    """Runs decode batches. Row buffers are the backend's own: nothing is copied on the way out."""

    def __init__(self, model: DecoderModel, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend
        config = model.config
        self._groups = [None] * config.num_layers
        for group in config.kv_groups:
            for layer in group.layers:
                self._groups[layer] = group
        self._views: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.exchange_s = 0.0
        self.model_s = 0.0

    def row_views(self, table: int, num_rows: int) -> list[tuple[Tensor, Tensor]]:
        """Returns per layer the tensor to fill [T, row width] and the one that comes back
        [T, out width]."""
        views = self._views.get((table, num_rows))
        if views is None:
            send = torch.from_numpy(self.backend.send_rows[table].reshape(-1))
            recv = torch.from_numpy(self.backend.recv_rows[table].reshape(-1))
            views = []
            for group in self._groups:
                row, out = group.row_width, group.out_width
                views.append(
                    (
                        send[: num_rows * row].view(num_rows, row),
                        recv[: num_rows * out].view(num_rows, out),
                    )
                )
            if len(self._views) > 1024:
                self._views.clear()
            self._views[(table, num_rows)] = views
        return views

    def run(self, batch: DecodeBatch, table: int, step: int) -> tuple[Tensor, list[bool]]:
        """Runs one step; returns logits [len(sequences), V] and whether each sequence was finite.

        The cache lengths of the sequences are not changed: a step that fails may simply run again.

        Raises:
            WorkerLostError, StepError: from the backend.
        """
        model, exchange, clock = self.model, self.backend.exchange, time.perf_counter
        start = clock()
        exchanged = 0.0
        self.backend.begin_step(table, step, batch.assignments)
        positions = batch.positions
        x = model.embed(batch.token_ids, positions)
        for layer, (rows, out) in enumerate(self.row_views(table, batch.num_rows)):
            model.pre_attention(layer, x, positions, rows)
            before = clock()
            exchange(table, layer)
            exchanged += clock() - before
            x = model.post_attention(layer, x, out)
        finite = self.finite_sequences(batch, table)
        if len(batch.last_rows) != batch.num_rows:
            x = x[batch.last_rows]
        logits = model.logits(x)
        self.exchange_s += exchanged
        self.model_s += clock() - start - exchanged
        return logits, finite

    def finite_sequences(self, batch: DecodeBatch, table: int) -> list[bool]:
        """Says of each sequence whether the rows that came back for it were finite."""
        status = self.backend.row_status[table][: batch.num_rows]
        if not status.any():
            return [True] * len(batch.sequences)
        first = 0
        finite = []
        for last in batch.last_rows:
            finite.append(not status[first : last + 1].any())
            first = last + 1
        return finite
