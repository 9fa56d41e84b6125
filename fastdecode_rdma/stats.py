"""What a generator says of itself: counters, gauges and latencies, in vLLM's metric words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

FINISH_REASONS = ("stop", "length", "abort", "error")
"""How a sequence ends. "abort": cancelled by its caller; "error": failed."""

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Upper bounds in seconds, vLLM's: dashboards made for it fit."""

PREFIX = "fastdecode_"


class Histogram:
    """Counts observations in buckets. One thread observes, any thread takes snapshots."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, inclusive, ascending; one more takes the rest."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> HistogramStats:
        """Returns the counts as they are now."""
        return HistogramStats(self.bounds, tuple(self.counts), self.total)


@dataclass(frozen=True)
class HistogramStats:
    """Observations by bucket.

    bounds: upper bounds, inclusive, in seconds. counts: observations per bucket (not cumulative);
    the last is of those above all bounds. sum: of all values, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The average in seconds, 0 when nothing was observed."""
        return self.sum / self.count if self.count else 0.0


@dataclass(frozen=True)
class WorkerStats:
    """One attention worker, as this generator sees it. If it was lost and has come back, it has the
    number and the counters that it had.

    worker: its number. address: where it listens, or "embedded". transport: "shm", "rdma", "tcp",
        "loopback". fallback_reason: why it is not a better one, where there was a choice.
    transport_detail: for rdma the ports, GIDs, MTU and queue pairs in use, and the runners-up.
    pinned, gpudirect: whether the engine's GPU reaches the row buffers, and the adapter the GPU's
        memory, directly, or why not.
    is_alive: whether it takes part.
    kv_cache_usage: share (0 to 1) of its KV memory that sequences of this generator hold.
    kv_cache_bytes, kv_cache_capacity_bytes: the same in bytes.
    load_tokens: cached tokens that it attended over in the last decode step.
    messages, bytes_sent, bytes_received: of the data plane, since the start.
    pump_s, io_s, wait_s, kernel_s: seconds in our own message code, in send and receive calls, in
        waiting for the worker (its kernel included), and in the worker's kernel as it measured it.
    """

    worker: int
    address: str
    transport: str
    is_alive: bool
    kv_cache_usage: float
    kv_cache_bytes: int
    kv_cache_capacity_bytes: int
    messages: int
    bytes_sent: int
    bytes_received: int
    pump_s: float
    io_s: float
    wait_s: float
    kernel_s: float
    fallback_reason: str = ""
    transport_detail: str = ""
    pinned: str = ""
    gpudirect: str = ""
    load_tokens: int = 0


@dataclass(frozen=True)
class GeneratorStats:
    """A snapshot of one generator. Totals count from its start.

    It is taken while the engine runs: fields may be a token apart from one another. As in vLLM,
    each of a request's `n` samples counts as a request.

    model_name: the model's path or name, as it was given.
    num_requests_running: hold a seat (KV-cache) now.
    num_requests_waiting: wait for one, preempted ones among them.
    kv_cache_usage: share (0 to 1) of the living workers' KV memory that is held.
    prompt_tokens_total: prompt tokens prefilled, repeats after preemption or loss included.
    generation_tokens_total: tokens sampled.
    num_preemptions_total: sequences that lost their cache to older ones.
    request_success_total: ended sequences by finish reason, one of FINISH_REASONS.
    time_to_first_token_seconds: from submission to the first sampled token.
    inter_token_latency_seconds: from one token of a sequence to the next (time per output token).
    e2e_request_latency_seconds: from submission to the last token, of those that stopped by
        themselves or by length.
    recoveries: workers that were lost and whose sequences went on.
    steps: decode steps. elapsed_s: seconds since the generator was made.
    dense_s, attention_s, transport_s, python_s: seconds of the engine thread in the model's layers,
        in the attention kernel (as the busiest worker reports it), in the rest of the exchange, and
        in scheduling, sampling and bookkeeping; prefill_s: of prompts, whatever in. Where
        mini-batches overlap, attention_s runs beside dense_s and transport_s is what the engine
        waited beyond it, if it did.
    wait_s: seconds of the engine thread in the exchange with workers, their kernels included as far
        as it waited for them. dense_s and wait_s make up the decode steps.
    num_mini_batches: that a decode step is split into now; mini_batch_reason: why.
    scheduler: the policy. max_load_tokens: what a step may attend over in all, 0 is any number.
    kv_spills, kv_restores: sequences copied out ahead of need, and taken back after they had lost
        their cache; kv_recomputes: those computed again.
    spilled_bytes, restored_bytes: moved out and back.
    spill_faults: copies that could not be kept. spill_copy_s: seconds of the engine thread in
        copying out; spill_restore_s: from a sequence's turn until it was back, summed;
        spill_wait_s: of the engine thread, until a disk answered.
    workers: all of them, lost ones too. gemm: which library multiplies which shape. isa: the
        instruction set of our kernels. notes: what was decided at the start and may surprise.
    """

    model_name: str
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    prompt_tokens_total: int
    generation_tokens_total: int
    num_preemptions_total: int
    request_success_total: Mapping[str, int]
    time_to_first_token_seconds: HistogramStats
    inter_token_latency_seconds: HistogramStats
    e2e_request_latency_seconds: HistogramStats
    recoveries: int
    steps: int
    elapsed_s: float
    dense_s: float
    attention_s: float
    transport_s: float
    python_s: float
    prefill_s: float
    workers: tuple[WorkerStats, ...]
    gemm: Mapping[str, str]
    isa: str
    notes: tuple[str, ...]
    wait_s: float = 0.0
    num_mini_batches: int = 1
    mini_batch_reason: str = ""
    scheduler: str = ""
    max_load_tokens: int = 0
    kv_spills: int = 0
    kv_restores: int = 0
    kv_recomputes: int = 0
    spilled_bytes: int = 0
    restored_bytes: int = 0
    spill_faults: int = 0
    spill_copy_s: float = 0.0
    spill_restore_s: float = 0.0
    spill_wait_s: float = 0.0

    @property
    def dense_busy(self) -> float:
        """Share (0 to 1) of the decode steps' time in which the dense layers ran."""
        return self._share(self.dense_s)

    @property
    def attention_busy(self) -> float:
        """Share (0 to 1) of the decode steps' time in which the busiest worker's kernel ran."""
        return self._share(self.attention_s)

    @property
    def bubble(self) -> float:
        """Share (0 to 1) of the decode steps' time that the busier side spent waiting: what perfect
        overlap would save."""
        if not self.dense_s:
            return 0.0
        return 1.0 - max(self.dense_busy, self.attention_busy)

    def _share(self, seconds: float) -> float:
        whole = self.dense_s + self.wait_s
        return min(1.0, seconds / whole) if whole else 0.0

    def to_prometheus(self) -> str:
        """Returns all numbers in Prometheus' text format (version 0.0.4), names as vLLM's with the
        prefix `fastdecode_`."""
        return "\n".join([*_families(self), ""])


# kind, vLLM's name (or one in its manner), help; the field has the name or the one given
_TOTALS = (
    ("gauge", "num_requests_running", "num_requests_running", "Requests that hold a seat."),
    ("gauge", "num_requests_waiting", "num_requests_waiting", "Requests that wait for a seat."),
    (
        "gauge", "kv_cache_usage_perc", "kv_cache_usage",
        "Share of the KV-cache of all workers in use, 1 is all of it.",
    ),
    ("counter", "prompt_tokens_total", "prompt_tokens_total", "Prompt tokens prefilled."),
    ("counter", "generation_tokens_total", "generation_tokens_total", "Tokens generated."),
    (
        "counter", "num_preemptions_total", "num_preemptions_total",
        "Requests that lost their KV-cache to older ones.",
    ),
    ("counter", "recoveries_total", "recoveries", "Workers lost whose requests went on."),
    ("counter", "steps_total", "steps", "Decode steps."),
    ("gauge", "uptime_seconds", "elapsed_s", "Time since the generator was made."),
    ("counter", "dense_seconds_total", "dense_s", "Engine time in the model's layers."),
    ("counter", "attention_seconds_total", "attention_s", "Kernel time of the busiest worker."),
    (
        "counter", "transport_seconds_total", "transport_s",
        "Engine time in the exchange with workers, without the busiest one's kernel.",
    ),
    ("counter", "wait_seconds_total", "wait_s", "Engine time in the exchange with workers."),
    (
        "gauge", "mini_batches", "num_mini_batches",
        "Mini-batches that a decode step is split into.",
    ),
    ("counter", "python_seconds_total", "python_s", "Engine time in scheduling and sampling."),
    ("counter", "prefill_seconds_total", "prefill_s", "Engine time in prompts."),
    ("gauge", "max_load_tokens", "max_load_tokens", "Cached tokens a step may read, 0 is any."),
    ("counter", "kv_spills_total", "kv_spills", "Requests copied out ahead of need."),
    ("counter", "kv_restores_total", "kv_restores", "Requests whose KV-cache was taken back."),
    ("counter", "kv_recomputes_total", "kv_recomputes", "Requests whose lost cache was computed."),
    ("counter", "spilled_bytes_total", "spilled_bytes", "Bytes of KV-cache copied out."),
    ("counter", "restored_bytes_total", "restored_bytes", "Bytes of KV-cache taken back."),
    ("counter", "spill_faults_total", "spill_faults", "Copies that could not be kept."),
    ("counter", "spill_copy_seconds_total", "spill_copy_s", "Engine time in copying out."),
    ("counter", "spill_restore_seconds_total", "spill_restore_s", "Time until caches were back."),
    ("counter", "spill_wait_seconds_total", "spill_wait_s", "Engine time in waiting for a disk."),
)  # fmt: skip
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from submission to the first token."),
    ("inter_token_latency_seconds", "Time from one token of a request to the next."),
    ("e2e_request_latency_seconds", "Time from submission to the last token."),
)
_WORKER_TOTALS = (
    ("gauge", "worker_up", "is_alive", "Whether the worker takes part."),
    (
        "gauge", "worker_kv_cache_usage_perc", "kv_cache_usage",
        "Share of the worker's KV-cache in use by this process, 1 is all of it.",
    ),
    (
        "gauge", "worker_kv_cache_bytes", "kv_cache_bytes",
        "Bytes of the worker's KV-cache in use by this process.",
    ),
    (
        "gauge", "worker_kv_cache_capacity_bytes", "kv_cache_capacity_bytes",
        "Bytes of the worker's KV-cache that may be used.",
    ),
    ("gauge", "worker_load_tokens", "load_tokens", "Cached tokens read by the last step."),
    ("counter", "worker_messages_total", "messages", "Messages of the data plane."),
    ("counter", "worker_sent_bytes_total", "bytes_sent", "Bytes sent to the worker."),
    ("counter", "worker_received_bytes_total", "bytes_received", "Bytes from the worker."),
    ("counter", "worker_pump_seconds_total", "pump_s", "Time in our own message code."),
    ("counter", "worker_io_seconds_total", "io_s", "Time in send and receive calls."),
    (
        "counter", "worker_wait_seconds_total", "wait_s",
        "Time in waiting for the worker, its kernel included.",
    ),
    ("counter", "worker_kernel_seconds_total", "kernel_s", "Time in the worker's kernel."),
)  # fmt: skip


def _families(stats: GeneratorStats) -> Iterator[str]:
    model = {"model_name": stats.model_name}
    for kind, name, attribute, text in _TOTALS:
        yield from _family(kind, name, text, [(model, getattr(stats, attribute))])
    reasons = [
        ({**model, "finished_reason": reason}, count)
        for reason, count in stats.request_success_total.items()
    ]
    yield from _family("counter", "request_success_total", "Requests ended, by reason.", reasons)
    for name, text in _HISTOGRAMS:
        yield from _histogram(name, text, model, getattr(stats, name))
    workers = [
        ({**model, "worker": str(worker.worker), "address": worker.address}, worker)
        for worker in stats.workers
    ]
    for kind, name, attribute, text in _WORKER_TOTALS:
        rows = [(labels, getattr(worker, attribute)) for labels, worker in workers]
        yield from _family(kind, name, text, rows)


def _family(
    kind: str, name: str, text: str, rows: Sequence[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in rows:
        yield _sample(name, labels, value)


def _histogram(
    name: str, text: str, labels: Mapping[str, str], histogram: HistogramStats
) -> Iterator[str]:
    yield from _family("histogram", name, text, [])
    bounds = [*map(repr, map(float, histogram.bounds)), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _sample(f"{name}_sum", labels, histogram.sum)
    yield _sample(f"{name}_count", labels, histogram.count)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{PREFIX}{name}{{{pairs}}} {value if isinstance(value, float) else int(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
