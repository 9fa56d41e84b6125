"""Micro-measurements of a loaded model and of its workers, for the performance model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastdecode_rdma.bench.attention import Decode
from fastdecode_rdma.bench.attention_report import Case
from fastdecode_rdma.bench.layer_session import LayerSession, warm_up
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.generator import Generator
from fastdecode_rdma.models import DecoderModel
from fastdecode_rdma.perfmodel.model import DenseTable, Network, TimeTable
from fastdecode_rdma.perfmodel.shapes import ModelShape
from fastdecode_rdma.sequence import SamplingParams

EMBEDDED_NETWORK = Network(1e15, 1e15, 0.0)
"""Rows of an embedded worker stay where they are."""
PROMPT_TOKENS = 8
WARM_UP_S = 0.1
LAYERS_IN_TURN = 2
UPLOAD_BYTES = 32 << 20
MIN_BYTES_PER_S = 1e6
MIN_TOKEN_S = 1e-12


@dataclass(frozen=True)
class Effort:
    """How much is measured. batches: rows of the dense side. Sequences and lengths: of attention,
    per worker. repeats: of everything; medians count. new_tokens: of the engine's own steps."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    sequences: tuple[int, int] = (4, 16)
    lengths: tuple[int, int] = (128, 1024)
    repeats: int = 7
    iters: int = 60
    new_tokens: int = 16


def _median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class DenseSide:
    """T(B) and the rest of a step, without any attention."""

    def __init__(self, gen: Generator, effort: Effort) -> None:
        self._gen, self._effort = gen, effort
        self._model: DecoderModel = gen._parts.model
        config = self._model.config
        most, width = max(effort.batches), config.qkv_width
        self._rows = torch.zeros(most * width)
        self._outs = torch.zeros(most * config.num_q_heads * config.head_dim)
        self._layers = config.num_layers
        self._width, self._out_width = width, config.num_q_heads * config.head_dim

    def _inputs(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(batch) % self._model.config.vocab_size, torch.arange(batch) % 8

    @torch.inference_mode()
    def _layers_s(self, batch: int) -> float:
        model = self._model
        ids, positions = self._inputs(batch)
        rows = self._rows[: batch * self._width].view(batch, self._width)
        outs = self._outs[: batch * self._out_width].view(batch, self._out_width)

        def run() -> None:
            x = model.embed(ids, positions)
            for layer in range(self._layers):
                model.pre_attention(layer, x, positions, rows)
                x = model.post_attention(layer, x, outs)

        return _median_s(run, self._effort.repeats)

    @torch.inference_mode()
    def _head_s(self, batch: int) -> float:
        x = self._model.embed(*self._inputs(batch))
        return _median_s(lambda: self._model.logits(x), self._effort.repeats)

    def engine_s(self, batch: int) -> float:
        """Returns seconds of a step beside model and workers: scheduling, sampling, text."""
        params = SamplingParams(
            max_tokens=self._effort.new_tokens, temperature=0.0, ignore_eos=True
        )
        vocab = self._model.config.vocab_size
        prompts = [
            [(i * 31 + j) % min(vocab, 250) for j in range(PROMPT_TOKENS)] for i in range(batch)
        ]
        before = self._gen.stats()
        self._gen.complete(prompts, params)
        after = self._gen.stats()
        return (after.python_s - before.python_s) / max(1, after.steps - before.steps)

    def causal_token2_s(self, block: TimeTable) -> float:
        """Returns what a prompt's attention takes, per token squared and layer."""
        limit = self._gen._parts.engine.options.max_model_len - 1
        length = min(1024, limit)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = [(7 * j) % min(self._model.config.vocab_size, 250) for j in range(length)]
        times = []
        for _ in range(2):
            before = self._gen.stats().prefill_s
            self._gen.complete([prompt], params)
            times.append(self._gen.stats().prefill_s - before)
        rest = min(times) / self._layers - block.at(length)
        return max(0.0, rest) / length**2

    def measure(self, say: Callable[[str], None]) -> DenseTable:
        """Returns T(B), what comes once a step, and attention within prompts."""
        batches = self._effort.batches
        block = TimeTable(tuple((float(b), self._layers_s(b) / self._layers) for b in batches))
        for rows, seconds in block.points:
            say(f" T({rows:.0f}) {seconds * 1e6:.1f} us a layer")
        few, many = batches[0], min(32, batches[-1])
        self.engine_s(few)
        fixed = self.engine_s(few)
        slope = max(0.0, (self.engine_s(many) - fixed) / max(1, many - few))
        head = TimeTable(
            tuple((float(b), self._head_s(b) + fixed + slope * (b - few)) for b in batches)
        )
        say(f" beside the layers: {head.at(few) * 1e6:.0f} us a step at {few} rows")
        causal = self.causal_token2_s(block)
        return DenseTable(block, head, causal)


def fit_rates(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Returns (token_s, row_s, exchange_s), none negative, that fit (rows, tokens, seconds) best,
    by relative error."""
    table = np.array(samples, np.float64)
    columns = np.stack([table[:, 1], table[:, 0], np.ones(len(table))], 1)
    weight = 1 / table[:, 2]
    free = [0, 1, 2]
    found = np.zeros(3)
    while free:
        solved = np.linalg.lstsq(
            columns[:, free] * weight[:, None], table[:, 2] * weight, rcond=None
        )[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        free = [name for name, value in zip(free, solved, strict=True) if value >= 0]
    token_s, row_s, exchange_s = found.tolist()
    return max(token_s, MIN_TOKEN_S), row_s, exchange_s


def embedded_rates(
    shape: ModelShape, kv_dtype: str, *, threads: int, isa: str, effort: Effort
) -> tuple[float, float, float]:
    """Returns what the kernel in this process takes: token_s, row_s, exchange_s."""
    samples = []
    for length in effort.lengths:
        for batch in effort.sequences:
            case = Case(
                kv_dtype, batch, length, shape.num_q_heads // shape.num_kv_heads,
                shape.num_kv_heads, shape.head_dim, threads, isa,
            )  # fmt: skip
            decode = Decode(case, rng=np.random.default_rng(0))
            seconds = statistics.median(decode.seconds() for _ in range(effort.repeats))
            decode.close()
            samples.append((float(batch), float(batch * length), seconds))
    return fit_rates(samples)


class Workers:
    """Workers behind a network, measured together: those of one host share its memory."""

    def __init__(
        self,
        urls: Sequence[str],
        geometry: AttentionGeometry,
        *,
        token: bytes | None,
        force: bool,
        effort: Effort,
    ) -> None:
        """geometry: of the model; its KV dtype and limits are replaced."""
        self._urls, self._token, self._force = tuple(urls), token, force
        self._geometry, self._effort = geometry, effort
        self.capacities: tuple[int, ...] = ()
        self.threads: tuple[int, ...] = ()
        self.places: tuple[str, ...] = ()
        self.planes: tuple[str, ...] = ()

    def _session(self, kv_dtype: str, *, with_kernel: bool, max_rows: int) -> LayerSession:
        group = self._geometry.groups[0]
        geometry = replace(
            self._geometry, kv_dtype=kv_dtype, max_rows=max_rows,
            max_model_len=max(self._effort.lengths),
            groups=(replace(group, layers=tuple(range(LAYERS_IN_TURN)), window=None, sinks=None),),
        )  # fmt: skip
        return LayerSession(
            self._urls, geometry, with_kernel=with_kernel, token=self._token, force=self._force,
            timeout_s=10.0,
        )  # fmt: skip

    def rates(self, kv_dtype: str) -> list[tuple[float, float, float]]:
        """Returns token_s, row_s, exchange_s of each worker while all are at work.

        Raises:
            FastDecodeError: a worker cannot be reached, has no room, or was lost.
        """
        effort, count = self._effort, len(self._urls)
        samples: list[list[tuple[float, float, float]]] = [[] for _ in range(count)]
        session = self._session(kv_dtype, with_kernel=True, max_rows=max(effort.sequences) * count)
        try:
            infos = [worker.info for worker in session.workers]
            self.capacities = tuple(info.capacity_bytes for info in infos)
            self.threads = tuple(info.num_threads for info in infos)
            self.places = tuple(info.name for info in infos)
            self.planes = tuple(info.transport for info in infos)
            for length in effort.lengths:
                for batch in effort.sequences:
                    spread = session.begin(batch * count, length)
                    warm_up(session, spread, WARM_UP_S)
                    kernel_ns = np.median(session.exchange(effort.iters, spread).kernel, 0)
                    for worker in range(count):
                        samples[worker].append(
                            (float(batch), float(batch * length), float(kernel_ns[worker]) / 1e9)
                        )
        finally:
            session.close()
        return [fit_rates(rows) for rows in samples]

    def network(self) -> Network:
        """Returns round trip and bandwidth of rows, and bandwidth of prompts' K/V.

        Raises:
            FastDecodeError: a worker cannot be reached or was lost.
        """
        count, many = len(self._urls), 64
        session = self._session("fp16", with_kernel=False, max_rows=many * count)
        try:
            times, nbytes = [], []
            for batch in (count, many * count):
                spread = session.begin(batch, 1)
                warm_up(session, spread, WARM_UP_S)
                found = session.exchange(4 * self._effort.iters, spread)
                times.append(float(np.median(found.total)) / 1e9)
                nbytes.append(found.bytes_out + found.bytes_in)
            session.upload_seconds(UPLOAD_BYTES // 8)
            upload_s = statistics.median(session.upload_seconds(UPLOAD_BYTES) for _ in range(3))
        finally:
            session.close()
        grown = max(times[1] - times[0], 1e-9)
        rate = max(MIN_BYTES_PER_S, (nbytes[1] - nbytes[0]) / grown)
        trip = max(0.0, times[0] - nbytes[0] / rate)
        return Network(rate, rate, trip, upload_bytes_per_s=UPLOAD_BYTES / upload_s)


def shape_of_model(model: DecoderModel, name: str) -> ModelShape:
    """Returns the shape of a loaded model.

    Raises:
        ConfigError: its layers differ in heads, which is not modelled.
    """
    config, groups = model.config, model.config.kv_groups
    if len({(g.num_q_heads, g.num_kv_heads, g.head_dim) for g in groups}) != 1:
        raise ConfigError(f"{name}: layers with different heads are not modelled")
    local = [group for group in groups if group.window is not None]
    return ModelShape(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        mlp_matrices=2 if config.module == "opt" else 3,
        tied=config.tie_word_embeddings,
        num_local_layers=sum(len(group.layers) for group in local),
        window=min((group.window for group in local if group.window), default=None),
    )
