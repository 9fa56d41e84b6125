"""What a set of hardware does with a model: the best mini-batch, and what holds it back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.model import Overlap, ServingModel

BLOCK_TOKENS = 64
"""The KV-cache is given out in blocks of so many tokens: the last of a sequence is half empty."""
PREFILL_TOKENS = 2048
"""Prompt tokens that go through a layer together, as `max_num_batched_tokens` has it."""
FLAT = 0.97
"""The smallest batch that reaches this share of the best throughput is taken: a larger one only
adds latency."""
MAX_SEQS = 1 << 17
GPU_SWITCH = 1.0
"""A GPU alone is recommended when it does better than this share of ours."""


@dataclass(frozen=True)
class Workload:
    """Sequences of `length` tokens in all, `prompt_len` of them given.

    stabilised: they start one after the other, so that at any time half of what they grow to is
    cached (else all start together, and memory must hold their ends).
    """

    length: int
    prompt_len: int = 1
    latency_limit_s: float | None = None
    stabilised: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_len < self.length:
            raise ConfigError(
                f"a prompt of {self.prompt_len} tokens must be at least 1 and leave some of the "
                f"{self.length} tokens of a sequence to generate"
            )
        if self.latency_limit_s is not None and not self.latency_limit_s > 0:
            raise ConfigError(f"the latency limit must be above 0, got {self.latency_limit_s:g} s")

    @property
    def new_tokens(self) -> int:
        return self.length - self.prompt_len

    @property
    def mean_cached(self) -> float:
        """Cached tokens of a sequence over the time that it decodes."""
        return self.prompt_len + self.new_tokens / 2

    @property
    def mean_held(self) -> float:
        """Tokens that a sequence's memory must be for, on average over sequences."""
        peak = self.mean_cached if self.stabilised else self.length
        return peak + BLOCK_TOKENS / 2


@dataclass(frozen=True)
class Point:
    """One choice of batch, predicted. Seconds of a stage are per layer, of all mini-batches."""

    num_seqs: int
    num_minibatches: int
    dense_s: float
    attention_s: float
    network_s: float
    cycle_s: float
    layer_s: float
    step_s: float
    prefill_s: float
    tokens_per_s: float
    sequence_s: float

    @property
    def minibatch(self) -> int:
        return -(-self.num_seqs // self.num_minibatches)

    @property
    def binding_resource(self) -> str:
        """Which resource a layer of all mini-batches waits for."""
        named = {
            "dense": self.dense_s, "attention": self.attention_s, "network": self.network_s,
        }  # fmt: skip
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class GpuAlone:
    """The dense device with the KV-cache in its own memory."""

    num_seqs: int
    tokens_per_s: float


@dataclass(frozen=True)
class Plan:
    """The chosen point and its surroundings.

    binds: "dense", "attention", "network", "memory" or "latency limit". workers_needed: P at which
    attention keeps up with the dense side. kv_bytes: of all workers. one_more: tokens/s with
    another worker of the last kind.
    """

    point: Point
    binds: str
    num_workers: int
    workers_needed: float
    kv_bytes: float
    kv_capacity_bytes: float
    max_seqs: int
    one_more: float
    gpu_alone: GpuAlone | None

    @property
    def gpu_alone_is_faster(self) -> bool:
        alone = self.gpu_alone
        return alone is not None and alone.tokens_per_s > GPU_SWITCH * self.point.tokens_per_s


def evaluate(model: ServingModel, work: Workload, num_seqs: int) -> Point:
    """Returns what num_seqs sequences at once give in a steady state, each replaced as it ends."""
    cached = num_seqs * work.mean_cached
    layer = model.even_layer(num_seqs, cached)
    step_s = model.whole_step_s(layer, model.split(num_seqs))
    prefill_s = _prefill_s(model, work)
    # while a sequence generates all its tokens, every other is prefilled once on the dense side
    round_s = work.new_tokens * step_s + num_seqs * prefill_s
    return Point(
        num_seqs=num_seqs,
        num_minibatches=model.num_minibatches,
        dense_s=layer.dense_s,
        attention_s=layer.attention_s,
        network_s=layer.network_s,
        cycle_s=layer.cycle_s,
        layer_s=layer.total_s,
        step_s=step_s,
        prefill_s=prefill_s,
        tokens_per_s=num_seqs * work.new_tokens / round_s,
        sequence_s=round_s,
    )


def _prefill_s(model: ServingModel, work: Workload) -> float:
    """Seconds of one prompt among as many as go through the layers together."""
    together = max(1, PREFILL_TOKENS // work.prompt_len)
    return model.prefill_equal_s(work.prompt_len, together) / together


def _batches(limit: int, num_workers: int = 1) -> list[int]:
    """Batches to try, ascending: in steps of a twelfth of an octave, those that give every worker
    as many sequences of both mini-batches, and the limit."""
    tried = {round(2 ** (step / 12)) for step in range(12 * 18)}
    tried |= {2 * num_workers * each for each in range(1, 33)}
    return sorted({batch for batch in tried if batch < limit} | {limit})


def _points(model: ServingModel, work: Workload, limit: int) -> list[Point]:
    choices = [1] if model.overlap is Overlap.SHARED else [1, 2]
    points = []
    for batch in _batches(limit, len(model.workers)):
        options = [
            evaluate(model.with_minibatches(count), work, batch)
            for count in choices
            if batch >= count
        ]
        points.append(max(options, key=lambda point: point.tokens_per_s))
    return points


def _best(points: list[Point], latency_limit_s: float | None) -> Point | None:
    """The smallest batch whose throughput is nearly the best of those allowed."""
    allowed = [p for p in points if latency_limit_s is None or p.sequence_s <= latency_limit_s]
    if not allowed:
        return None
    enough = FLAT * max(point.tokens_per_s for point in allowed)
    return next(point for point in allowed if point.tokens_per_s >= enough)


def choose(model: ServingModel, work: Workload) -> Point:
    """Returns the point to run at.

    Raises:
        ConfigError: no sequence fits, or none is fast enough.
    """
    limit = min(MAX_SEQS, model.max_seqs(work.mean_held))
    if limit < 1:
        need = model.shape.kv_bytes(work.mean_held, model.kv_dtype)
        raise ConfigError(
            f"no sequence of {work.length} tokens fits: it needs {need / 1e9:.2f} GB of KV-cache"
        )
    points = _points(model, work, limit)
    best = _best(points, work.latency_limit_s)
    if best is None:
        fastest = min(point.sequence_s for point in points)
        raise ConfigError(
            f"the latency limit of {work.latency_limit_s:g} s cannot be kept: one sequence alone "
            f"takes {fastest:.3g} s"
        )
    return best


def _binds(model: ServingModel, work: Workload, point: Point) -> str:
    """Names what would have to grow: memory or time allowed, else the busiest resource."""
    memory_limit = min(MAX_SEQS, model.max_seqs(work.mean_held))
    free = _best(_points(model, work, MAX_SEQS), None)
    within_memory = _best(_points(model, work, memory_limit), None)
    assert free is not None and within_memory is not None  # a batch of one is always allowed
    if point.tokens_per_s < FLAT * within_memory.tokens_per_s:
        return "latency limit"
    if within_memory.tokens_per_s < FLAT * free.tokens_per_s:
        return "memory"
    return point.binding_resource


def make_plan(model: ServingModel, work: Workload, *, gpu_alone: GpuAlone | None = None) -> Plan:
    """Returns the best point and what surrounds it.

    Raises:
        ConfigError: nothing can run.
    """
    point = choose(model, work)
    minibatch = point.num_seqs / point.num_minibatches
    dense_s = model.dense.block_s(minibatch)
    tokens = minibatch * work.mean_cached
    slow_s = model.even_attention_s(minibatch, tokens)
    more = replace(model, workers=(*model.workers, model.workers[-1]))
    one_more = choose(more, work).tokens_per_s
    return Plan(
        point=point,
        binds=_binds(model, work, point),
        num_workers=len(model.workers),
        workers_needed=len(model.workers) * slow_s / dense_s,
        kv_bytes=point.num_seqs * model.shape.kv_bytes(work.mean_held, model.kv_dtype),
        kv_capacity_bytes=model.capacity_bytes,
        max_seqs=model.max_seqs(work.mean_held),
        one_more=one_more,
        gpu_alone=gpu_alone,
    )


def plan_gpu_alone(
    model: ServingModel, work: Workload, *, room_bytes: float, bytes_per_s: float
) -> GpuAlone:
    """Returns what the dense side does alone: KV-cache in the `room_bytes` beside its weights,
    read at `bytes_per_s` in every step."""
    per_seq = model.shape.kv_bytes(work.mean_held, model.kv_dtype)
    limit = min(MAX_SEQS, int(max(0.0, room_bytes) // per_seq))
    if limit < 1:
        return GpuAlone(0, 0.0)
    layers, token_bytes = model.shape.num_layers, model.shape.kv_token_bytes(model.kv_dtype)
    seen = model.shape.seen_tokens(work.mean_cached)
    best = GpuAlone(0, 0.0)
    for batch in _batches(limit):
        layer_s = model.dense.block_s(batch) + batch * seen * token_bytes / bytes_per_s
        step_s = layers * layer_s + model.dense.head_s(batch)
        round_s = work.new_tokens * step_s + batch * _prefill_s(model, work)
        if work.latency_limit_s is not None and round_s > work.latency_limit_s:
            break
        rate = batch * work.new_tokens / round_s
        if rate > best.tokens_per_s:
            best = GpuAlone(batch, rate)
    return GpuAlone(limit, best.tokens_per_s)
