"""The keyword arguments of `Generator.from_pretrained`: checked, and their mistakes explained."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from fastdecode_rdma.config import NUM_DECODE_TABLES, dtype_name, kv_dtype_name, quantization_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import eos_ids, explain_unknown, is_integer
from fastdecode_rdma.scheduler import check_policy
from fastdecode_rdma.transport.address import PLANES, require_plane

RENAMED = {
    "model": "path",
    "pretrained_model_name_or_path": "path",
    "max_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_ctx": "max_model_len",
    "torch_dtype": "dtype",
    "max_batch_size": "max_num_seqs",
    "batch_size": "max_num_seqs",
    "device_map": "device",
    "stop_token_ids": "eos_token_id",
    "timeout": "timeout_s",
    "scheduling_policy": "scheduler",
    "policy": "scheduler",
}
"""Names of other libraries, and ours."""

_WORKERS_DO = "attention runs in workers: see `fastdecode worker --help`, and workers="
_QUANTIZATION = "quantization='int8' rounds the weights as they are loaded; see kv_cache_dtype, too"
_NO_CODE = "no code of a checkpoint is ever run; leave it out"
_LOCAL = "models are local directories; leave it out"
ABSENT = {
    "gpu_memory_utilization": "memory is a worker's: `fastdecode worker --memory`",
    "kv_cache_memory_bytes": "memory is a worker's: `fastdecode worker --memory`",
    "swap_space": "see spill_dir, which has no bound but the disk's, and spill_to",
    "cpu_offload_gb": _WORKERS_DO,
    "block_size": _WORKERS_DO,
    "tensor_parallel_size": _WORKERS_DO,
    "pipeline_parallel_size": _WORKERS_DO,
    "data_parallel_size": _WORKERS_DO,
    "distributed_executor_backend": _WORKERS_DO,
    "attn_implementation": _WORKERS_DO,
    "trust_remote_code": _NO_CODE,
    "quantization_config": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "load_in_8bit": _QUANTIZATION,
    "revision": _LOCAL,
    "cache_dir": _LOCAL,
    "local_files_only": _LOCAL,
    "download_dir": _LOCAL,
    "token": f"{_LOCAL}; the workers' token is token_file",
    "generation_config": "pass SamplingParams to have none of generation_config.json's values",
    "override_generation_config": "pass SamplingParams",
    "logits_processors": "give them to SamplingParams, per request",
    "max_logprobs": "20 per token are given always, more as far as memory allows; leave it out",
    "enforce_eager": "there is nothing to compile; leave it out",
}
"""Names of other libraries for which there is nothing here, and why."""

TEXT_OPTIONS = ("tokenizer", "chat_template", "seed")
"""Arguments of `Generator.from_pretrained`, besides `path`, that do not concern the engine."""


@dataclass(frozen=True)
class GeneratorOptions:
    """The checked keyword arguments of `Generator.from_pretrained` that concern the engine.

    `eos_token_id` is given as None, an id or several, and kept as a tuple.
    """

    workers: tuple[str, ...] | None = None
    token_file: str | os.PathLike[str] | None = None
    require: str | None = None
    profile: str | os.PathLike[str] | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    scheduler: str = "fcfs"
    scheduler_options: Mapping[str, object] | None = None
    max_load_tokens: int | None = None
    num_mini_batches: int | str = "auto"
    deterministic: bool = False
    timeout_s: float = 30.0
    eos_token_id: Sequence[int] = ()
    spill_dir: str | os.PathLike[str] | None = None
    spill_to: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 2, 1 << 27),
            ("max_num_seqs", 1, 1 << 16),
            ("max_num_batched_tokens", 1, 1 << 24),
            ("max_waiting", 1, 1 << 24),
            ("max_load_tokens", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "max_load_tokens"):
                continue
            if not is_integer(value) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
            object.__setattr__(self, name, int(value))
        self._check_mini_batches()
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
            if self.workers is None:
                raise ConfigError(
                    "token_file is for workers: give their addresses, too, or leave it out"
                )
        self._check_scheduler()
        self._check_require()
        self._check_profile()
        self._check_spill()
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
            kv_dtype_name(self.kv_cache_dtype)
        quantization_name(self.quantization)
        object.__setattr__(self, "eos_token_id", _eos_ids(self.eos_token_id))

    def _check_scheduler(self) -> None:
        own = self.scheduler_options
        if own is not None and not isinstance(own, Mapping):
            raise ConfigError(
                f"scheduler_options must be a mapping of names and values, got {type(own).__name__}"
            )
        check_policy(self.scheduler, own)

    def _check_require(self) -> None:
        if self.require is None:
            return
        if self.require not in PLANES:
            known = ", ".join(map(repr, PLANES))
            raise ConfigError(f"require must be None or one of {known}, got {self.require!r}")
        if self.workers is None:
            raise ConfigError(f"require={self.require!r} is for workers: give their addresses, too")
        for url in self.workers:
            require_plane(url, self.require)

    def _check_mini_batches(self) -> None:
        value = self.num_mini_batches
        if value == "auto":
            return
        if not is_integer(value) or not 1 <= value <= NUM_DECODE_TABLES:
            raise ConfigError(
                f"num_mini_batches must be 'auto' or an integer from 1 to {NUM_DECODE_TABLES}, got "
                f"{value!r}"
            )
        object.__setattr__(self, "num_mini_batches", int(value))

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        as_path("profile", self.profile)
        if self.workers is None:
            raise ConfigError("profile is for workers: give their addresses, too")

    def _check_spill(self) -> None:
        if self.spill_to not in (None, "workers"):
            raise ConfigError(f"spill_to must be None or 'workers', got {self.spill_to!r}")
        if self.spill_to is not None and (self.workers is None or len(self.workers) < 2):
            raise ConfigError("spill_to='workers' needs at least two workers: give their addresses")
        if self.spill_dir is None:
            return
        directory = as_path("spill_dir", self.spill_dir)
        if self.spill_to is not None:
            raise ConfigError("spill_dir and spill_to='workers': give one of them")
        if not os.path.isdir(directory):
            raise ConfigError(f"spill_dir {directory} is no directory")

    @classmethod
    def checked(cls, unknown: Mapping[str, object], **known: Any) -> GeneratorOptions:
        """Refuses unknown keyword arguments, naming the nearest of ours."""
        if unknown:
            ours = ["path", *(f.name for f in fields(cls)), *TEXT_OPTIONS]
            hints = {old: f"did you mean {new!r}?" for old, new in RENAMED.items()} | ABSENT
            raise ConfigError(
                "; ".join(explain_unknown("unknown argument", n, ours, hints) for n in unknown)
            )
        assert {f.name for f in fields(cls)} == set(known)
        return cls(**known)


def _eos_ids(value: object) -> tuple[int, ...]:
    ids = eos_ids(value)
    if min(ids, default=0) < 0:  # in files, -1 means none
        raise ConfigError(f"eos_token_id must hold token ids, got {min(ids)}")
    return ids


def as_path(name: str, value: object) -> Path:
    """Returns an argument as a path, `~` expanded.

    Raises:
        ConfigError: it is no path. The text says what it is, never what is in it: a token that was
            given in place of its file stays unseen.
    """
    text = value if isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()
    if not isinstance(text, str):
        raise ConfigError(
            f"{name} must be a path (str or pathlib.Path), got {type(value).__name__}"
        )
    if not text or "\0" in text:
        what = "a text with a NUL character" if text else "an empty text"
        raise ConfigError(f"{name} must be a path, got {what}")
    return Path(os.path.expanduser(text))


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
