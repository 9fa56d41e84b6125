"""ModelConfig: a decoder model in our own words, read by `ModelConfig.from_hf`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.models.hf_model import read_fields
from fastdecode_rdma.models.rope import RopeSpec

NORM_ORDERS = ("before", "around", "after", "after_sum")
QK_NORMS = (None, "head", "row")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder model in our words. Tuples hold one entry per layer.

    `windows`: tokens a layer sees, None for all. `ropes`: rotary embedding, None for none.
    `max_model_len`: tokens of the longest sequence unless more is asked for, up to
    `longest_model_len`. `dtype`: what the config says of the checkpoint.

    `norm_order`: a block's norm comes "before" it, "around" it (before and after), "after" it, or
    "after_sum" with the residual. `qk_norm`: q and k are normed by "head" or by "row", all heads
    together. `unit_offset`: norm weights are stored less 1. `fused`: q, k, v, and gate and up, are
    one tensor each in the checkpoint. `residual_scale` multiplies what a block adds,
    `logits_scale` the logits before the softcap.
    `embed_dim` differs from `hidden_size` where embeddings are projected.
    `sinks`: a logit per query head, for every layer, and `slopes`: ALiBi's per query head, as in
    `config.KVGroup`; prefill, decode and the reference all take them from `kv_groups`.
    `renames`: checkpoint name prefixes (old, new); `ignored`: prefixes of tensors left unread.
    """

    architecture: str
    module: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    activation: str
    norm_eps: float
    scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec | None, ...]
    dtype: str = "fp32"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    longest_model_len: int | None = None
    norm_order: str = "before"
    qk_norm: str | None = None
    unit_offset: bool = False
    fused: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    embed_dim: int | None = None
    norm_affine: bool = True
    final_norm: bool = True
    attn_softcap: float | None = None
    final_softcap: float | None = None
    sinks: tuple[tuple[float, ...], ...] | None = None
    slopes: tuple[float, ...] | None = None
    eos_token_ids: tuple[int, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.norm_order not in NORM_ORDERS:
            raise ConfigError(f"norm_order must be one of {NORM_ORDERS}, got {self.norm_order!r}")
        if self.qk_norm not in QK_NORMS:
            raise ConfigError(f"qk_norm must be one of {QK_NORMS}, got {self.qk_norm!r}")
        for name in ("windows", "ropes", "sinks"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_layers:
                raise ConfigError(f"{name} has {len(entries)} entries for {self.num_layers} layers")
        for name in (
            "norm_eps",
            "scale",
            "embed_scale",
            "residual_scale",
            "logits_scale",
            "attn_softcap",
            "final_softcap",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be positive, got {value}")
        _ = self.kv_groups  # heads, head_dim and windows that no worker could serve

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers grouped by window, in order of first appearance."""
        layers_of: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            layers_of.setdefault(window, []).append(layer)
        sinks, heads = self.sinks, (self.num_q_heads, self.num_kv_heads, self.head_dim)
        return tuple(
            KVGroup(
                tuple(layers),
                *heads,
                window,
                None if sinks is None else tuple(sinks[layer] for layer in layers),
                self.slopes,
            )
            for window, layers in layers_of.items()
        )

    @property
    def qkv_width(self) -> int:
        """Elements of one [q | k | v] row."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a model directory, a config.json, or its contents.

        End-of-sequence ids of a generation_config.json next to it are added.

        Raises:
            ConfigError: unreadable, or it asks for what this library does not support, by name.
        """
        if isinstance(source, Mapping):
            return cls(**read_fields(source, {}))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        beside = path.parent / "generation_config.json"
        config, generation = read_json(path), read_json(beside) if beside.exists() else {}
        try:
            return cls(**read_fields(config, generation))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
