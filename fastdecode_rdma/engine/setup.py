"""Builds an engine: options checked, model loaded, workers connected, cache sized."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdecode_rdma.attention.backend import AttentionBackend, WorkerLink
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.attention.remote import CONNECT_TIMEOUT_S, RemoteWorker, open_sessions
from fastdecode_rdma.config import AttentionGeometry, dtype_name
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.core import Engine
from fastdecode_rdma.engine.reconnect import Reconnector
from fastdecode_rdma.engine.state import EngineOptions
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import DecoderModel, ModelConfig, load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.scheduler import make_scheduler
from fastdecode_rdma.tokenizer import Tokenizer
from fastdecode_rdma.wire.token_file import find_token
from fastdecode_rdma.worker.kvcache import MemoryBudget
from fastdecode_rdma.worker.limits import default_memory

logger = logging.getLogger(__name__)

REPLAY_ROWS = 64
"""Rows a step has at least, so that a recovered sequence replays many generated tokens per step."""
MAX_WORKER_WAIT_S = 10.0
"""How long the engine waits for a worker to come back when it has none left."""

RENAMED = {
    "model": "path",
    "max_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "torch_dtype": "dtype",
    "max_batch_size": "max_num_seqs",
    "batch_size": "max_num_seqs",
    "device_map": "device",
}
"""Names of other libraries, and ours."""

TEXT_OPTIONS = ("tokenizer", "chat_template", "seed")
"""Arguments of `Generator.from_pretrained`, besides `path`, that do not concern the engine."""


@dataclass(frozen=True)
class GeneratorOptions:
    """The checked keyword arguments of `Generator.from_pretrained` that concern the engine."""

    workers: tuple[str, ...] | None = None
    token_file: str | os.PathLike[str] | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    deterministic: bool = False
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 2, 1 << 27),
            ("max_num_seqs", 1, 1 << 16),
            ("max_num_batched_tokens", 1, 1 << 24),
        ):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if not is_integer(value) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if (
            isinstance(self.timeout_s, bool)
            or not isinstance(self.timeout_s, Real)
            or not 0 < self.timeout_s < math.inf
        ):
            raise ConfigError(f"timeout_s must be a positive number, got {self.timeout_s!r}")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be True or False, got {self.deterministic!r}")
        for name in ("dtype", "kv_cache_dtype"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name} must be a name such as 'auto' or 'float32', got "
                    f"{getattr(self, name)!r}"
                )
        if self.token_file is not None:
            as_path("token_file", self.token_file)
        if self.device not in (None, "cpu"):
            raise ConfigError(
                f"device={self.device!r}: this version runs the dense layers on 'cpu' only"
            )
        if self.dtype != "auto" and dtype_name(self.dtype) != "fp32":
            raise ConfigError(
                f"dtype={self.dtype!r}: a CPU computes in float32 (bf16 weights stay bf16 in "
                "memory all the same); use 'auto' or 'float32'"
            )
        if self.kv_cache_dtype != "auto":
            dtype_name(self.kv_cache_dtype)

    @classmethod
    def checked(cls, unknown: Mapping[str, object], **known: Any) -> GeneratorOptions:
        """Refuses unknown keyword arguments, naming the nearest of ours."""
        if unknown:
            ours = ["path", *(f.name for f in fields(cls)), *TEXT_OPTIONS]
            raise ConfigError("; ".join(_explain_unknown(name, ours) for name in unknown))
        assert {f.name for f in fields(cls)} == set(known)
        return cls(**known)


def _explain_unknown(name: str, ours: list[str]) -> str:
    near = [RENAMED[name]] if name in RENAMED else difflib.get_close_matches(name, ours, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {ours}"
    return f"unknown argument {name!r}; {hint}"


def is_integer(value: object) -> bool:
    """Whether a value can stand for an integer: Python's or numpy's, no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_path(name: str, value: object) -> Path:
    """Returns an argument as a path, `~` expanded.

    Raises:
        ConfigError: it is no path.
    """
    text = value if isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, got {value!r}")
    return Path(os.path.expanduser(text))


@dataclass(slots=True)
class EngineParts:
    """A built engine with what must be closed after it."""

    model: DecoderModel
    engine: Engine
    backend: AttentionBackend
    ops: CpuOps
    options: GeneratorOptions
    reconnector: Reconnector
    notes: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def worker_wait_s(self) -> float:
        """How long the engine waits for a worker when it has none left."""
        return min(self.options.timeout_s, MAX_WORKER_WAIT_S)

    def reconnect(self) -> None:
        """Has lost workers brought back, and takes in those that are. Never waits."""
        for address in self.engine.take_lost():
            if self.options.workers is not None:
                self.reconnector.lost(address)
        for link in self.reconnector.take():
            self.backend.add_worker(link)
            self.engine.placement.add_worker(link.info.capacity_bytes)

    def stats(self) -> dict[str, Any]:
        """Counters of engine and workers; times in seconds."""
        engine, counters = self.engine, self.engine.counters
        workers = self.backend.stats()
        # workers attend at the same time: the busiest one is what the engine waited for
        attention_s = max((worker["kernel_ns"] for worker in workers), default=0) / 1e9
        exchange_s = engine.runner.exchange_s
        return {
            "steps": counters.steps,
            "tokens": counters.tokens,
            "prompt_tokens": counters.prompt_tokens,
            "running": engine.scheduler.num_running,
            "waiting": engine.scheduler.num_waiting,
            "preemptions": counters.preemptions,
            "recoveries": counters.recoveries,
            "dense_s": engine.runner.model_s,
            "attention_s": attention_s,
            "transport_s": max(0.0, exchange_s - attention_s),
            "python_s": max(
                0.0,
                counters.step_s - counters.prefill_s - engine.runner.model_s - exchange_s,
            ),
            "prefill_s": counters.prefill_s,
            "gemm": {
                f"{n}x{k} {dtype}": choice.backend
                for (n, k, dtype), choice in self.ops.gemm_choices.items()
            },
            "isa": self.ops.isa,
            "workers": workers,
            "notes": list(self.notes),
        }

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if not self.closed:
            self.closed = True
            self.reconnector.close()
            self.backend.close()


def resolve_model_dir(path: str | os.PathLike[str]) -> Path:
    """Returns a model directory: `path`, or that name's newest snapshot in the local HF cache.

    Raises:
        ConfigError: neither is there. Nothing is downloaded.
    """
    directory = as_path("path", path)
    if os.path.isdir(directory):  # unlike Path.is_dir, False also for names that are too long
        return directory
    if os.path.isfile(directory):
        raise ConfigError(
            f"{directory} is a file; expected a model directory (`fastdecode convert` makes one "
            "of a GGUF file)"
        )
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    repo = hub / ("models--" + str(path).replace("/", "--"))
    ref = repo / "refs" / "main"
    if os.path.isfile(ref):
        snapshot = repo / "snapshots" / ref.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    raise ConfigError(
        f"no model at {directory}, and none of that name in {hub}; give a directory with "
        "config.json, tokenizer.json and safetensors"
    )


def build_engine(
    directory: Path, options: GeneratorOptions, tokenizer: Tokenizer | None
) -> EngineParts:
    """Loads the model of `directory` and connects its workers.

    Raises:
        ConfigError: the model or an option cannot be used. TransportError: a worker is not there.
    """
    config = ModelConfig.from_hf(directory)
    max_model_len = options.max_model_len or config.max_model_len
    kv_dtype = (
        config.dtype if options.kv_cache_dtype == "auto" else dtype_name(options.kv_cache_dtype)
    )
    geometry = AttentionGeometry(
        groups=config.kv_groups,
        scale=config.scale,
        softcap=config.attn_softcap,
        kv_dtype=kv_dtype,
        max_rows=max(options.max_num_seqs, REPLAY_ROWS),
        max_model_len=max_model_len,
    )
    # workers first: a wrong address is told at once, not after the weights are loaded
    links = _open_workers(options, geometry)
    backend = AttentionBackend(links, geometry, timeout_s=options.timeout_s)
    try:
        ops = CpuOps(deterministic=options.deterministic)
        model = load_model(directory, ops, max_model_len=max_model_len)
        return _assemble(model, ops, backend, options, tokenizer)
    except BaseException:
        backend.close()
        raise


def _open_workers(options: GeneratorOptions, geometry: AttentionGeometry) -> list[WorkerLink]:
    """Opens a session on every worker, or embeds one."""
    if options.workers is None:
        budget = MemoryBudget(default_memory().value)
        return [LocalWorker(geometry, budget, num_threads=torch.get_num_threads())]
    return list(_connect(options.workers, options, geometry))


def _connect(
    addresses: Sequence[str], options: GeneratorOptions, geometry: AttentionGeometry
) -> list[RemoteWorker]:
    token = find_token(options.token_file)
    timeout_s = min(options.timeout_s, CONNECT_TIMEOUT_S)
    return open_sessions(addresses, geometry, token=token, timeout_s=timeout_s)


def _assemble(
    model: DecoderModel,
    ops: CpuOps,
    backend: AttentionBackend,
    options: GeneratorOptions,
    tokenizer: Tokenizer | None,
) -> EngineParts:
    geometry = backend.geometry
    infos = [backend.info(worker) for worker in range(backend.num_workers)]
    placement = CautiousPlacement(geometry, [info.capacity_bytes for info in infos])
    notes: list[str] = []
    max_model_len = geometry.max_model_len
    longest = placement.longest_sequence()
    if longest < max_model_len:
        if options.max_model_len is not None or longest < 2:
            raise ConfigError(
                f"max_model_len={max_model_len} needs {placement.bytes_for(max_model_len)} bytes "
                "of KV-cache on one worker and the largest has "
                f"{placement.largest_capacity()}; lower it to {longest} or give a worker more "
                "--memory"
            )
        notes.append(f"max_model_len lowered from {max_model_len} to {longest}: workers' memory")
        logger.warning(notes[-1])
        max_model_len = longest
    scheduler = make_scheduler(
        "fcfs",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    eos = frozenset(model.config.eos_token_ids)
    if tokenizer is not None:
        eos |= tokenizer.eos_token_ids
    engine = Engine(
        model,
        backend,
        placement,
        scheduler,
        EngineOptions(
            max_model_len=max_model_len,
            max_rows=geometry.max_rows,
            max_num_batched_tokens=options.max_num_batched_tokens,
            deterministic=options.deterministic,
            timeout_s=options.timeout_s,
            eos_token_ids=frozenset(t for t in eos if t < model.config.vocab_size),
            decode_token=None if tokenizer is None else tokenizer.token_text,
        ),
    )
    reconnector = Reconnector(lambda address: _connect([address], options, geometry)[0])
    return EngineParts(model, engine, backend, ops, options, reconnector, notes=notes)
