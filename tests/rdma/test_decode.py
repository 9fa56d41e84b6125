"""A tiny model decodes over RDMA what it decodes over TCP, to the bit and in any batch.

Its dense side is numpy, row by row: torch takes minutes to import in an emulated guest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

HIDDEN, VOCAB, INNER = 48, 101, 96
PROMPTS = {1: [5, 17, 60, 2], 2: [99, 3], 3: [42, 42, 7, 8, 9, 10]}
NUM_TOKENS = 6


def normed(row: np.ndarray) -> np.ndarray:  # [HIDDEN]
    return row / np.sqrt(np.mean(row * row) + np.float32(1e-6))


class TinyModel:
    """A decoder with this geometry's attention: each row is computed alone, so its bits do not
    depend on the others of its batch."""

    def __init__(self, geometry: Any) -> None:
        rng = np.random.default_rng(8)

        def weights(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

        self.geometry = geometry
        layers = range(geometry.num_layers)
        self.embedding = weights(VOCAB, HIDDEN)
        self.qkv = [weights(HIDDEN, geometry.row_width(layer)) for layer in layers]
        self.out = [weights(geometry.out_width(layer), HIDDEN) for layer in layers]
        self.up = [weights(HIDDEN, INNER) for _ in layers]
        self.down = [weights(INNER, HIDDEN) for _ in layers]

    def step(self, driver: Any, placed: Sequence[tuple[int, list[int]]], ids, position):
        """Feeds each handle its next id; returns logits [VOCAB] by handle. All handles are at
        their own positions."""
        backend, handles = driver.backend, [handle for _, some in placed for handle in some]
        driver.step += 1
        tables = []
        for worker, some in placed:
            entries = driver.entries(some, 0)
            entries["kv_len_before"] = [position[handle] for handle in some]
            tables.append((worker, entries))
        backend.begin_step(0, driver.step, tables)
        hidden = {h: self.embedding[ids[h]] + self.embedding[position[h]] for h in handles}
        for layer in range(self.geometry.num_layers):
            rows = np.stack([normed(hidden[handle]) @ self.qkv[layer] for handle in handles])
            backend.send_rows[0].reshape(-1)[: rows.size] = rows.reshape(-1)
            backend.exchange(0, layer)
            width = self.geometry.out_width(layer)
            got = backend.recv_rows[0].reshape(-1)[: len(handles) * width].copy()
            for handle, row in zip(handles, got.reshape(-1, width), strict=True):
                x = hidden[handle] + row @ self.out[layer]
                inner = np.maximum(normed(x) @ self.up[layer], np.float32(0))
                hidden[handle] = x + inner @ self.down[layer]
        return {handle: self.embedding @ normed(hidden[handle]) for handle in handles}

    def decode(self, driver: Any, placed: Sequence[tuple[int, list[int]]]):
        """Greedy ids and their log-probabilities by handle; sequences end one after the other."""
        tokens = {handle: list(PROMPTS[handle]) for _, some in placed for handle in some}
        logprobs: dict[int, list[np.float32]] = {handle: [] for handle in tokens}
        position = dict.fromkeys(tokens, 0)
        while placed := [
            (worker, running)
            for worker, some in placed
            if (running := [h for h in some if len(logprobs[h]) < NUM_TOKENS])
        ]:
            ids = {
                handle: tokens[handle][position[handle]] for _, some in placed for handle in some
            }
            for handle, logits in self.step(driver, placed, ids, position).items():
                position[handle] += 1
                if position[handle] == len(tokens[handle]):
                    best = int(np.argmax(logits))
                    top = logits.max()
                    logprobs[handle].append(logits[best] - top - np.log(np.exp(logits - top).sum()))
                    tokens[handle].append(best)
        return {handle: (tokens[handle], logprobs[handle]) for handle in tokens}


@pytest.mark.parametrize("ours", ["native", "pyverbs", "ibverbs"])
def test_a_batch_over_rdma_is_each_sequence_alone_over_tcp(serve, connect, monkeypatch, ours):
    monkeypatch.setenv("FASTDECODE_VERBS", ours)
    alone = connect([serve().url])
    model = TinyModel(alone.geometry)
    expected: dict[int, Any] = {}
    for handle in PROMPTS:
        expected |= model.decode(alone, [(0, [handle])])
    assert len({tuple(ids[-NUM_TOKENS:]) for ids, _ in expected.values()}) == len(PROMPTS)
    urls = [serve().url.replace("tcp://", "rdma://") for _ in range(2)]
    together = connect(urls)
    assert [info.transport for info in together.backend.infos()] == ["rdma", "rdma"]
    assert model.decode(together, [(0, [1, 3]), (1, [2])]) == expected
