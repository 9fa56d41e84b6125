"""Scores given tokens on the dense side: no worker takes part.

Sequences are sorted by their tokens, so that each comes after the one it shares most of its
beginning with, and only what is new of it becomes rows: a context with many continuations is
computed once. Rows of all sequences are packed without padding. One layer's keys and values are
kept of one sequence only, the one that is attending: what the next shares with it stays, the rest
is overwritten. A row's attention reads its own context and nothing else.

A row depends on the tokens before it alone; with `deterministic` its bits do, too, because neither
the GEMM nor attention let them depend on the rows computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.engine.dense_pass import (
    CHUNK_TOKENS,
    attend_rows,
    embed_rows,
    keep_kv,
    run_rows,
)
from fastdecode_rdma.engine.prefill import head_cost, score_rows
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.models import DecoderModel
from fastdecode_rdma.prompt_logprobs import PromptLogprobs

JOB_TOKENS = 8192
"""Rows of one job: full cells even at its end, and hidden states of 128 MiB for 4096 features."""


@dataclass(slots=True, eq=False)
class ScoreItem:
    """One sequence of at least two tokens. Those from `first` (at least 1) on are to be scored:
    the job fills in their places in `logprobs`, which holds the tokens."""

    logprobs: PromptLogprobs
    first: int
    num_shared: int = 0  # tokens it shares with the item before it in the job

    @property
    def inputs(self) -> np.ndarray:
        """What is fed, int64 [L - 1]: nothing follows the last token."""
        return self.logprobs.token_ids[:-1]

    @property
    def is_finite(self) -> bool:
        """Whether all logits were numbers, once the job is over."""
        return not np.isnan(self.logprobs.logprobs[self.first :]).any()


@dataclass(slots=True)
class _Cell:
    """Consecutive rows of a job; pieces are (rows in the cell, start, stop in the sequence)."""

    rows: slice
    pieces: list[tuple[slice, int, int]] = field(default_factory=list)


def split_into_jobs(items: Sequence[ScoreItem], max_tokens: int) -> Iterator[list[ScoreItem]]:
    """Yields the items of each job, up to max_tokens new tokens (a longer sequence goes alone), and
    says in each item what it shares with the one before."""
    # bytes in big-endian order sort as the ids do
    ordered = sorted(items, key=lambda item: item.logprobs.token_ids.astype(">u4").tobytes())
    job: list[ScoreItem] = []
    rows = 0
    for item in ordered:
        inputs = item.inputs
        item.num_shared = _num_shared(job[-1].inputs, inputs) if job else 0
        # an item that adds no row still takes memory for its results
        cost = len(inputs) - item.num_shared + 1
        if job and rows + cost > max_tokens:
            yield job
            job, rows, item.num_shared = [], 0, 0
            cost = len(inputs) + 1
        job.append(item)
        rows += cost
    if job:
        yield job


def _num_shared(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class ScoreJob:
    """Runs the items of `split_into_jobs` through the model and fills in their `logprobs`."""

    def __init__(self, model: DecoderModel, items: list[ScoreItem]) -> None:
        self.model = model
        self.items = items
        self.num_rows = 0
        self.max_len = max(len(item.inputs) for item in items)
        self._wanted: list[np.ndarray] = []  # of each item, the rows whose logits it needs
        spans: list[tuple[int, int, int]] = []  # (first row, start, stop in the sequence)
        path = np.zeros(0, np.int64)  # the row of each token of the item
        for item in items:
            start, stop = item.num_shared, len(item.inputs)
            new = np.arange(self.num_rows, self.num_rows + stop - start)
            path = np.concatenate([path[:start], new])
            self._wanted.append(path[item.first - 1 :].copy())
            if start < stop:
                spans.append((self.num_rows, start, stop))
            self.num_rows += stop - start
        self._cells = _split_into_cells(spans, self.num_rows)
        self._groups = {layer: group for group in model.config.kv_groups for layer in group.layers}

    def cells(self) -> Iterator[int]:
        """Runs the job cell by cell; yields the cost of each in rows of a layer."""
        token_ids = np.concatenate([item.inputs[item.num_shared :] for item in self.items])
        positions = np.concatenate(
            [np.arange(item.num_shared, len(item.inputs)) for item in self.items]
        )
        places = torch.from_numpy(positions)
        hidden = embed_rows(self.model, torch.from_numpy(token_ids), places)
        kv_width = max(group.num_kv_heads * group.head_dim for group in self._groups.values())
        keys, values = torch.empty(2, self.max_len * kv_width)
        for layer in range(len(self._groups)):
            for cell in self._cells:
                self._run_cell(layer, cell, hidden, places, keys, values)
                yield cell.rows.stop - cell.rows.start
        yield from self._score(hidden)

    def _run_cell(
        self,
        layer: int,
        cell: _Cell,
        hidden: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        model, group = self.model, self._groups[layer]
        kv_width = group.num_kv_heads * group.head_dim
        keys = keys[: self.max_len * kv_width].view(self.max_len, kv_width)
        values = values[: self.max_len * kv_width].view(self.max_len, kv_width)

        def attend(qkv: Tensor, out: Tensor) -> None:
            for rows, start, stop in cell.pieces:
                mine = qkv[rows]
                keep_kv(mine, group, keys[start:stop], values[start:stop])
                attend_rows(model, group, layer, mine, keys[:stop], values[:stop], out[rows])

        run_rows(model, group, layer, hidden, positions, cell.rows, attend)

    def _score(self, hidden: Tensor) -> Iterator[int]:
        """Runs the head over the rows that are wanted, as many at once as its memory allows."""
        config = self.model.config
        num_rows = score_rows(config)
        counts = [len(rows) for rows in self._wanted]
        owners = np.repeat(np.arange(len(self.items)), counts)
        places = np.concatenate([np.arange(item.first, len(item.logprobs)) for item in self.items])
        rows, chosen = np.unique(np.concatenate(self._wanted), return_inverse=True)
        batches = chosen // num_rows
        order = np.lexsort((places, owners, batches))
        owners, places, chosen, batches = (
            part[order] for part in (owners, places, chosen, batches)
        )
        edges = np.searchsorted(batches, np.arange(batches[-1] + 2))
        for batch, (begin, end) in enumerate(pairwise(edges)):
            mine = rows[batch * num_rows : (batch + 1) * num_rows]
            logits = self.model.logits(torch.from_numpy(hidden.numpy()[mine])).numpy()
            cuts = [begin, *(begin + 1 + np.flatnonzero(np.diff(owners[begin:end]))), end]
            for start, stop in pairwise(cuts):
                part = slice(start, stop)
                self.items[owners[start]].logprobs.fill_places_(
                    places[part], logits, chosen[part] - batch * num_rows
                )
            yield len(mine) * head_cost(config)


def _split_into_cells(spans: list[tuple[int, int, int]], num_rows: int) -> list[_Cell]:
    """Cuts rows at every CHUNK_TOKENS, and the sequences in them."""
    cells = [
        _Cell(slice(start, min(start + CHUNK_TOKENS, num_rows)))
        for start in range(0, num_rows, CHUNK_TOKENS)
    ]
    for first_row, start, stop in spans:
        while start < stop:
            cell = cells[first_row // CHUNK_TOKENS]
            at = first_row - cell.rows.start
            count = min(stop - start, CHUNK_TOKENS - at)
            cell.pieces.append((slice(at, at + count), start, start + count))
            first_row, start = first_row + count, start + count
    return cells


class ScoringTask:
    """Items on their way, for the engine's thread to work on between steps.

    `future` is set when all are done. Any thread may set `is_cancelled`.
    """

    def __init__(
        self, model: DecoderModel, items: Sequence[ScoreItem], *, max_num_batched_tokens: int
    ) -> None:
        """Between two steps as many rows are run as a prefill may take there."""
        self.future: Future[None] = Future()
        self.is_cancelled = False
        self.num_done = 0  # items, for who shows progress
        self._model = model
        self._jobs = split_into_jobs(items, max(JOB_TOKENS, max_num_batched_tokens))
        self._job: ScoreJob | None = None
        self._cells: Iterator[int] = iter(())
        self._budget = max_num_batched_tokens * model.config.num_layers

    @property
    def holds_memory(self) -> bool:
        """Whether a job is under way: until it is over, no other task should begin one."""
        return self._job is not None

    def advance(self, should_stop: Callable[[], bool]) -> bool:
        """Runs some cells; False when there is nothing left to do. Never raises."""
        try:
            return self._advance(should_stop)
        except Exception as error:  # memory, for example: it ends these items and nothing else
            wrapped = FastDecodeError(f"scoring failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self.stop(wrapped)
            return False

    def _advance(self, should_stop: Callable[[], bool]) -> bool:
        budget = self._budget
        while budget > 0 and not should_stop() and not self.is_cancelled:
            if self._job is None:
                items = next(self._jobs, None)
                if items is None:
                    self.future.set_result(None)
                    return False
                self._job = ScoreJob(self._model, items)
                self._cells = self._job.cells()
            cost = next(self._cells, None)
            if cost is None:
                self.num_done += len(self._job.items)
                self._job = None
                return True  # another task may have its turn
            budget -= cost
        return not self.is_cancelled

    def stop(self, error: FastDecodeError) -> None:
        """Gives up: who waits hears the error. Does nothing when it is over."""
        self._job, self._cells, self._jobs = None, iter(()), iter(())
        if not self.future.done():
            self.future.set_exception(error)
