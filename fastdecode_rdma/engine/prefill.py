"""Prefill on the dense side, layer-major, with bounded memory.

For one layer, all chunks of all prompts of the job; that layer's K/V is kept while its chunks
attend, is streamed to the workers, and its memory serves the next layer. So a job holds the hidden
states of its tokens and the K/V of one layer, whatever the depth of the model (`peak_bytes` says
how much). Where a prompt's log-probabilities are wanted, the head runs over its rows at the end, as
many at a time as `score_rows` says: never [L, V] at once.

The unit of work is a *cell*: one layer of one group of chunks. `cells()` yields after each, so the
engine decides how many run between two decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, UPLOAD_TABLE, KVGroup
from fastdecode_rdma.engine.dense_pass import (
    CHUNK_TOKENS,
    attend_rows,
    embed_rows,
    keep_kv,
    run_rows,
)
from fastdecode_rdma.models import DecoderModel, ModelConfig
from fastdecode_rdma.prompt_logprobs import PromptLogprobs

SCORE_ELEMENTS = 1 << 24
"""Prompt logits that exist at once, 64 MiB: 64 rows of the largest vocabularies, enough for nearly
full GEMM speed."""


@dataclass(slots=True)
class PrefillItem:
    """One prompt. `handles[0]` is uploaded; the others (n > 1) are forked from it at the end.

    `logprobs`, where wanted, is filled by the job.
    """

    handles: tuple[int, ...]
    worker: int
    token_ids: np.ndarray  # int64 [L]
    logprobs: PromptLogprobs | None = None
    first_row: int = 0  # place in the job's rows, set by the job
    entry: int = 0  # place in its worker's step table, set by the job


@dataclass(slots=True)
class Cell:
    """Consecutive rows of the job, whole chunks of it: (item, start, stop) in its tokens."""

    first_row: int
    num_rows: int = 0
    pieces: list[tuple[PrefillItem, int, int]] = field(default_factory=list)


def split_into_cells(items: Sequence[PrefillItem]) -> list[Cell]:
    """Cuts the items at multiples of CHUNK_TOKENS and groups neighbours up to as many rows."""
    cells: list[Cell] = []
    for item in items:
        for start in range(0, len(item.token_ids), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(item.token_ids))
            if not cells or cells[-1].num_rows + stop - start > CHUNK_TOKENS:
                cells.append(Cell(item.first_row + start))
            cells[-1].pieces.append((item, start, stop))
            cells[-1].num_rows += stop - start
    return cells


def peak_bytes(num_tokens: int, model: DecoderModel) -> int:
    """Bound on what a job of num_tokens allocates at once, weights aside, in bytes.

    Of all tokens: hidden states, ids, positions, and K and V of one layer. Of one chunk: hidden
    states and norms, rows [q | k | v], attention outputs, and the MLP's activations.
    """
    config, groups = model.config, model.config.kv_groups
    kv_width = max(group.num_kv_heads * group.head_dim for group in groups)
    row_width = max(group.row_width for group in groups)
    per_token = 4 * config.hidden_size + 2 * 8 + 2 * 4 * kv_width
    per_row = 4 * (4 * config.hidden_size + 2 * row_width + 4 * config.intermediate_size)
    return num_tokens * per_token + min(num_tokens, CHUNK_TOKENS) * per_row


def score_rows(config: ModelConfig) -> int:
    """Rows of prompt logits computed at once."""
    return max(1, min(CHUNK_TOKENS, SCORE_ELEMENTS // config.vocab_size))


def head_cost(config: ModelConfig) -> int:
    """Rows of a layer that take about as long as one row of the head."""
    return 1 + config.vocab_size // (3 * config.intermediate_size + config.qkv_width)


def split_into_scores(
    items: Sequence[PrefillItem], num_rows: int
) -> Iterator[list[tuple[PrefillItem, int, int]]]:
    """Yields (item, start, stop) in its tokens, num_rows together, of all that are to be scored.

    Nothing follows a prompt's last token, so its logits are not among them.
    """
    batch: list[tuple[PrefillItem, int, int]] = []
    room = num_rows
    for item in items:
        start, end = 0, 0 if item.logprobs is None else len(item.logprobs) - 1
        while start < end:
            stop = min(start + room, end)
            batch.append((item, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], num_rows
    if batch:
        yield batch


def score_bytes(num_tokens: int, num_top: int, model: DecoderModel) -> int:
    """Bound on what the log-probabilities of num_tokens add to `peak_bytes`, results included.
    Nothing is sized by it: it is stated for who plans memory, and tests hold a job to it."""
    vocab_size, hidden_size = model.config.vocab_size, model.config.hidden_size
    rows = min(num_tokens, score_rows(model.config))
    logits = 4 * rows * (vocab_size + 3 * hidden_size)
    sorting = 16 * vocab_size * torch.get_num_threads()
    return logits + sorting + num_tokens * (16 + 16 * num_top)


class PrefillJob:
    """Runs the prompts of `items` through the model and uploads their K/V.

    After the last cell, `logits` is [num_items, V]: those of each prompt's last token, every handle
    is ready to decode, and the `logprobs` that items have are filled in. Errors of the backend pass
    through; the job is then worthless and may be dropped.
    """

    def __init__(
        self, model: DecoderModel, backend: AttentionBackend, items: list[PrefillItem]
    ) -> None:
        self.model = model
        self.backend = backend
        self.items = sorted(items, key=lambda item: item.worker)  # workers own ranges of the table
        self.num_tokens = 0
        self.logits: Tensor | None = None
        self.hidden: Tensor | None = None
        for item in self.items:
            item.first_row = self.num_tokens
            self.num_tokens += len(item.token_ids)
        self._groups = {layer: group for group in model.config.kv_groups for layer in group.layers}
        self.num_layers = len(self._groups)

    def _begin(self, step: int) -> None:
        """Sends the step table: one upload entry per prompt."""
        assignments = []
        for worker in sorted({item.worker for item in self.items}):
            mine = [item for item in self.items if item.worker == worker]
            entries = np.zeros(len(mine), ENTRY_DTYPE)
            for place, item in enumerate(mine):
                item.entry = place
                entries[place] = (item.handles[0], 0, len(item.token_ids), ENTRY_UPLOAD)
            assignments.append((worker, entries))
        self.backend.begin_step(UPLOAD_TABLE, step, assignments)

    def cells(self, step: int) -> Iterator[int]:
        """Runs the job cell by cell; yields the rows of each finished cell."""
        self._begin(step)
        token_ids = torch.from_numpy(np.concatenate([item.token_ids for item in self.items]))
        positions = torch.cat([torch.arange(len(item.token_ids)) for item in self.items])
        hidden = self.hidden = embed_rows(self.model, token_ids, positions)
        kv_width = max(group.num_kv_heads * group.head_dim for group in self._groups.values())
        keys, values = torch.empty(2, self.num_tokens * kv_width)
        cells = split_into_cells(self.items)
        for layer in range(self.num_layers):
            for cell in cells:
                self._run_cell(layer, cell, hidden, positions, keys, values)
                yield cell.num_rows
        last = [item.first_row + len(item.token_ids) - 1 for item in self.items]
        self.logits = self.model.logits(hidden[last]).clone()
        yield from self._score(hidden)
        for worker in {item.worker for item in self.items}:
            self.backend.wait_ready(worker, UPLOAD_TABLE)
        for item in self.items:
            for copy in item.handles[1:]:
                self.backend.fork(item.worker, item.handles[0], copy, len(item.token_ids))

    def _score(self, hidden: Tensor) -> Iterator[int]:
        """Fills in the log-probabilities that are wanted; yields their cost in rows of a layer."""
        config = self.model.config
        for batch in split_into_scores(self.items, score_rows(config)):
            rows = np.concatenate(
                [np.arange(item.first_row + a, item.first_row + b) for item, a, b in batch]
            )
            logits = self.model.logits(torch.from_numpy(hidden.numpy()[rows])).numpy()
            first = 0
            for item, start, stop in batch:
                assert item.logprobs is not None
                item.logprobs.fill_(start, logits[first : first + stop - start])
                first += stop - start
            yield len(rows) * head_cost(config)

    def _run_cell(
        self,
        layer: int,
        cell: Cell,
        hidden: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """One layer of one cell: hidden rows in place, K/V kept and uploaded."""
        group = self._groups[layer]
        rows = slice(cell.first_row, cell.first_row + cell.num_rows)
        kv_width = group.num_kv_heads * group.head_dim
        keys = keys[: self.num_tokens * kv_width].view(self.num_tokens, kv_width)
        values = values[: self.num_tokens * kv_width].view(self.num_tokens, kv_width)

        def attend(qkv: Tensor, out: Tensor) -> None:
            keep_kv(qkv, group, keys[rows], values[rows])
            for item, start, stop in cell.pieces:
                at = item.first_row + start - cell.first_row
                mine = slice(at, at + stop - start)
                context = slice(item.first_row, item.first_row + stop)
                attend_rows(
                    self.model, group, layer, qkv[mine], keys[context], values[context], out[mine]
                )
                self._upload(layer, group, item, start, stop, keys, values)

        run_rows(self.model, group, layer, hidden, positions, rows, attend)

    def _upload(
        self,
        layer: int,
        group: KVGroup,
        item: PrefillItem,
        start: int,
        stop: int,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Sends K/V of tokens start .. stop; those that no later token can see are left out."""
        if group.window is not None:
            start = max(start, len(item.token_ids) - group.window)
        if start >= stop:
            return
        row = item.first_row + start
        self.backend.store_kv(
            item.worker,
            UPLOAD_TABLE,
            layer,
            item.entry,
            start,
            keys[row].data_ptr(),
            values[row].data_ptr(),
            stop - start,
        )
