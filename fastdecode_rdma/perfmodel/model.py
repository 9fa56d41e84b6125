"""The equations: how long a decode step takes with the dense side here and attention elsewhere.

For one layer, mini-batch i and worker w:

    T_i = T(rows_i)                                       dense side, of which there is one
    R_i = max over w of rows·row_s + tokens·token_s + exchange_s
    W_i = rows out and back over the link

Stages of one mini-batch follow each other, and every resource serves one mini-batch at a time, so a
layer of all mini-batches in flight takes

    max(sum T_i, sum R_i, sum W_i, max over i of T_i + W_i + R_i + round trip)

With two equal ones this is the paper's 2·max(T, R, W), plus what it leaves out: the dependency of a
mini-batch on itself. `LOCKSTEP` is the paper's own engine, where both sides wait for each other at
each stage and rows travel in between; `SHARED` is one set of cores for everything.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Protocol

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.shapes import ModelShape


class Overlap(Enum):
    """What runs at the same time."""

    PIPELINED = "pipelined"
    LOCKSTEP = "lockstep"
    SHARED = "shared"


class DenseTimes(Protocol):
    """The dense side."""

    def block_s(self, rows: float) -> float:
        """Returns T(B): seconds of one layer with so many rows."""

    def head_s(self, rows: float) -> float:
        """Returns seconds of what comes once a step: embedding, head, sampling."""

    def causal_s(self, tokens: float) -> float:
        """Returns seconds of one layer's attention within a prompt of so many tokens."""


@dataclass(frozen=True)
class TimeTable:
    """Measured times by rows, piecewise linear; beyond the ends as the nearest piece, but never
    less than at the first point. `points`: (rows, seconds), rows ascending."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.points]
        if not rows or sorted(set(rows)) != rows or rows[0] < 0:
            raise ConfigError(f"a table of times needs ascending rows, got {rows}")
        if not all(math.isfinite(seconds) and seconds >= 0 for _, seconds in self.points):
            raise ConfigError("times of a table must be finite and not negative")

    def at(self, rows: float) -> float:
        """Returns the time of so many rows."""
        points = self.points
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = min(bisect.bisect_left(points, (rows,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1 : index + 1]
        slope = (y1 - y0) / (x1 - x0)
        return max(points[0][1], y0 + slope * (rows - x0))


@dataclass(frozen=True)
class DenseTable:
    """Measured times. causal_token2_s: attention within a prompt, per token squared and layer."""

    block: TimeTable
    head: TimeTable
    causal_token2_s: float = 0.0

    def block_s(self, rows: float) -> float:
        return self.block.at(rows)

    def head_s(self, rows: float) -> float:
        return self.head.at(rows)

    def causal_s(self, tokens: float) -> float:
        return self.causal_token2_s * tokens * tokens


@dataclass(frozen=True)
class Roofline:
    """The larger of reading the weights and multiplying, plus `fixed_s` per layer.

    bytes_per_s, flops_per_s: what is reached, not peaks.
    """

    shape: ModelShape
    weight_bytes: float
    bytes_per_s: float
    flops_per_s: float
    fixed_s: float = 0.0

    def _linear_s(self, params: int, rows: float) -> float:
        reading = params * self.weight_bytes / self.bytes_per_s
        return max(reading, 2 * params * rows / self.flops_per_s)

    def block_s(self, rows: float) -> float:
        return self.fixed_s + self._linear_s(self.shape.block_params, rows)

    def head_s(self, rows: float) -> float:
        return self.fixed_s + self._linear_s(self.shape.head_params, rows)

    def causal_s(self, tokens: float) -> float:
        pairs = tokens * self.shape.seen_tokens(tokens) / 2
        return 4 * self.shape.out_elements() * pairs / self.flops_per_s  # scores, weighted sum


@dataclass(frozen=True)
class WorkerRate:
    """One attention worker.

    token_s: R, seconds per cached token of one layer. row_s: fixed per sequence and layer.
    exchange_s: fixed per mini-batch and layer. capacity_bytes: of its KV-cache.
    """

    token_s: float
    capacity_bytes: float
    row_s: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """bytes_per_s: of the dense side's port each way. worker_bytes_per_s: of each worker's.
    round_trip_s: of an empty message and its reply. upload_bytes_per_s: of prompts' K/V."""

    bytes_per_s: float
    worker_bytes_per_s: float
    round_trip_s: float
    upload_bytes_per_s: float | None = None


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer: sums over mini-batches of each resource, and the layer as a whole."""

    dense_s: float
    attention_s: float
    network_s: float
    cycle_s: float  # of the slowest mini-batch, from one layer to the next
    total_s: float


@dataclass(frozen=True)
class ServingModel:
    """A model on a dense side with workers. It is `scheduler.base.Costs`, too.

    wire_bytes: of one element on the way. num_minibatches: in flight, when nobody says how a batch
    is split. step_s: fixed per step (scheduling, Python). upload_wire_bytes: of one K/V element.
    """

    shape: ModelShape
    dense: DenseTimes
    workers: tuple[WorkerRate, ...]
    network: Network
    kv_dtype: str
    wire_bytes: float = 2.0
    num_minibatches: int = 2
    overlap: Overlap = Overlap.PIPELINED
    fixed_step_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("a serving model needs at least one worker")
        if self.num_minibatches < 1:
            raise ConfigError(f"num_minibatches must be at least 1, got {self.num_minibatches}")

    @cached_property
    def _rates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """token_s, row_s, exchange_s [workers]."""
        rates = [(w.token_s, w.row_s, w.exchange_s) for w in self.workers]
        token_s, row_s, exchange_s = np.array(rates, np.float64).T
        return token_s, row_s, exchange_s

    @cached_property
    def shares(self) -> np.ndarray:
        """[workers], sum 1: how cached tokens are best spread, by speed."""
        speed = 1 / np.maximum(self._rates[0], 1e-30)
        return speed / speed.sum()

    @cached_property
    def _largest_share(self) -> float:
        return float(self.shares.max())

    @property
    def workers_token_s(self) -> float:
        """R/P: seconds per cached token of one layer with all workers evenly at work."""
        return float(1 / (1 / np.maximum(self._rates[0], 1e-30)).sum())

    def with_minibatches(self, count: int) -> ServingModel:
        """Returns the same with another number of mini-batches in flight."""
        return replace(self, num_minibatches=count)

    # one layer

    def attention_s(self, rows: np.ndarray, tokens: np.ndarray) -> float:
        """Returns R of one mini-batch: rows and cached tokens of each worker, [workers]."""
        token_s, row_s, exchange_s = self._rates
        busy = rows > 0
        seen = self._seen(rows, tokens)
        return float(np.max(seen * token_s + rows * row_s + busy * exchange_s, initial=0.0))

    def even_attention_s(self, rows: float, tokens: float) -> float:
        """The same with the sequences spread as well as whole sequences can be."""
        if rows <= 0:
            return 0.0
        spread = self.shares * rows
        if rows < len(self.workers):
            fastest = int(np.argmax(self.shares))
            spread = np.zeros(len(self.workers))
            spread[fastest] = 1.0  # the others have one or none
        elif rows < 4096:  # a whole sequence more or less, which matters while they are few
            spread = np.ceil(spread - 1e-9)
        return self.attention_s(spread, spread * (tokens / rows))

    def _seen(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        shape = self.shape
        if shape.window is None:
            return tokens
        local = shape.num_local_layers / shape.num_layers
        return (1 - local) * tokens + local * np.minimum(tokens, rows * shape.window)

    def network_s(self, rows: float, most_rows: float) -> tuple[float, float]:
        """Returns seconds of rows out, and of outputs back; most_rows: of the busiest worker."""
        rate, worker_rate = self.network.bytes_per_s, self.network.worker_bytes_per_s
        slowest = max(rows / rate, most_rows / worker_rate) * self.wire_bytes
        return slowest * self.shape.row_elements(), slowest * self.shape.out_elements()

    def layer(
        self, rows: Sequence[float], attention_s: Sequence[float], most_rows: Sequence[float]
    ) -> LayerTimes:
        """Returns the times of one layer of mini-batches, given R of each."""
        parts = [(n, r, m) for n, r, m in zip(rows, attention_s, most_rows, strict=True) if n > 0]
        dense = [self.dense.block_s(n) for n, _, _ in parts]
        attention = [r for _, r, _ in parts]
        wires = [self.network_s(n, m) for n, _, m in parts]
        trip = self.network.round_trip_s
        cycles = [t + r + sum(w) + trip for t, r, w in zip(dense, attention, wires, strict=True)]
        network = max(sum(w[0] for w in wires), sum(w[1] for w in wires)) if wires else 0.0
        cycle = max(cycles, default=0.0)
        if self.overlap is Overlap.SHARED or len(parts) < 2:
            total = sum(cycles)
        elif self.overlap is Overlap.LOCKSTEP:
            # each stage: one mini-batch on the dense side while the workers have the one before
            before = attention[-1:] + attention[:-1]
            total = sum(max(t, r) for t, r in zip(dense, before, strict=True))
            total += sum(sum(w) + trip for w in wires)
        else:
            total = max(sum(dense), sum(attention), network, cycle)
        return LayerTimes(sum(dense), sum(attention), network, cycle, total)

    # a step

    def step_s(
        self, rows: Sequence[float], attention_s: Sequence[float], most_rows: Sequence[float]
    ) -> float:
        """Returns the time of one decode step of all mini-batches."""
        return self.whole_step_s(self.layer(rows, attention_s, most_rows), rows)

    def whole_step_s(self, layer: LayerTimes, rows: Sequence[float]) -> float:
        """Returns the time of a step whose layers are all like this one. The head runs once, over
        the rows of all mini-batches."""
        head_s = self.dense.head_s(sum(rows))
        return self.shape.num_layers * layer.total_s + head_s + self.fixed_step_s

    def split(self, num_seqs: float) -> list[float]:
        """Returns the rows of each mini-batch when num_seqs are split evenly."""
        return [num_seqs / self.num_minibatches] * self.num_minibatches

    def even_layer(self, num_seqs: float, cached_tokens: float) -> LayerTimes:
        """Returns the times of one layer, all spread evenly."""
        count = self.num_minibatches
        rows = num_seqs / count
        attention = self.even_attention_s(rows, cached_tokens / count)
        most = max(rows * self._largest_share, min(rows, 1.0))
        return self.layer([rows] * count, [attention] * count, [most] * count)

    def decode_s(self, num_seqs: float, cached_tokens: float) -> float:
        """Returns how long one step of num_seqs sequences takes that have cached_tokens in all."""
        if num_seqs <= 0:
            return 0.0
        layer = self.even_layer(num_seqs, cached_tokens)
        return self.whole_step_s(layer, self.split(num_seqs))

    def prefill_s(self, num_tokens: float) -> float:
        """Returns how long one prompt takes: dense layers and attention within it, its K/V on the
        way to a worker meanwhile, and its first token."""
        return self._prompts_s(num_tokens, self.dense.causal_s(num_tokens), 1)

    def prefill_many_s(self, lengths: Sequence[float]) -> float:
        """Returns how long several prompts take that go through each layer together."""
        return self._prompts_s(sum(lengths), sum(map(self.dense.causal_s, lengths)), len(lengths))

    def prefill_equal_s(self, num_tokens: float, count: int) -> float:
        """The same for prompts of equal length."""
        return self._prompts_s(num_tokens * count, self.dense.causal_s(num_tokens) * count, count)

    def _prompts_s(self, num_tokens: float, causal_s: float, count: int) -> float:
        if num_tokens <= 0:
            return 0.0
        compute = self.dense.block_s(num_tokens) + causal_s
        width = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.wire_bytes
        rate = self.network.upload_bytes_per_s or min(
            self.network.bytes_per_s, self.network.worker_bytes_per_s
        )
        layer = max(compute, num_tokens * width / rate)
        heads = self.dense.head_s(count)
        return self.shape.num_layers * layer + heads + self.network.round_trip_s

    # memory

    @property
    def capacity_bytes(self) -> float:
        """KV-cache of all workers."""
        return sum(worker.capacity_bytes for worker in self.workers)

    def max_seqs(self, mean_tokens: float) -> int:
        """Returns how many sequences of so many cached tokens, on average over time, fit: with the
        speeds' shares no worker holds more than it has."""
        per_seq = self.shape.kv_bytes(mean_tokens, self.kv_dtype)
        capacity = np.array([worker.capacity_bytes for worker in self.workers])
        return int(np.floor(np.min(capacity / self.shares) / per_seq + 1e-9))
