"""What the keys of a Hugging Face config.json mean: readers that turn them into our fields.

Nothing but this file and the rows of families.py knows these names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.rope import KINDS, RopeSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_GATED = ("silu", "gelu_tanh", "gelu")
_PLAIN = ("relu", "gelu", "gelu_tanh")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
# Written beside kinds that do not use it.
_ROPE_TOLERATED = ("original_max_position_embeddings",)

MAX_LAYERS = 4096
"""As many as a worker serves (config.AttentionGeometry); for more, nothing is even built."""


class Keys:
    """Typed look-ups in one config dict, falling back to the family's defaults; null is absent."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.defaults = defaults

    def get(self, key: str) -> Any:
        return self.raw.get(key, self.defaults.get(key))

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{key} is missing")
        return value

    def integer(self, key: str) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be an integer, got {value!r}")
        if key == "num_hidden_layers" and not 1 <= value <= MAX_LAYERS:
            raise ConfigError(f"{key} must be from 1 to {MAX_LAYERS}, got {value}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        return _positive(self.need(key), key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.need(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return value

    def activation(self, key: str, allowed: tuple[str, ...]) -> str:
        name = _ACTIVATIONS.get(str(self.need(key)), "")
        if name not in allowed:
            known = tuple(hf for hf, ours in _ACTIVATIONS.items() if ours in allowed)
            raise ConfigError(
                f"{key} {self.need(key)!r} is not supported here; expected one of {known}"
            )
        return name


@dataclass(frozen=True)
class Family:
    """One architecture: models/<module>.py builds it, `read` turns keys into ModelConfig fields.

    `stretch_max_len`: a linear rope factor multiplies max_position_embeddings.
    `renames`, `ignored`: prefixes of tensor names, as in ModelConfig.
    """

    module: str
    model_type: str
    read: Callable[[Keys, Family], dict[str, Any]]
    defaults: Mapping[str, Any]
    activation_key: str = "hidden_act"
    scale_embeddings: bool = False
    stretch_max_len: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


def read_rope_decoder(keys: Keys, family: Family) -> dict[str, Any]:
    """Decoders with RMSNorm, rotary positions and a gated MLP."""
    for key in ("rope_interleaved", "use_bidirectional_attention"):
        if keys.get(key):
            raise ConfigError(f"{key} is not supported")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.optional_integer("head_dim") or _divide(hidden, heads)
    layer_types = _layer_types(keys)
    ropes = {kind: _rope_spec(keys, head_dim, kind) for kind in sorted(set(layer_types))}
    max_len = keys.integer("max_position_embeddings")
    if family.stretch_max_len and len(ropes) == 1 and (rope := ropes[layer_types[0]]):
        max_len = int(max_len * (rope.param("factor") if rope.kind == "linear" else 1))
    bias = keys.flag("attention_bias")
    scale = keys.optional_number("query_pre_attn_scalar") or head_dim
    windowed = _SLIDING in layer_types
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_q_heads": heads,
        "num_kv_heads": keys.optional_integer("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_model_len": max_len,
        "activation": keys.activation(family.activation_key, _GATED),
        "norm_eps": keys.number("rms_norm_eps"),
        "scale": scale**-0.5,
        "windows": tuple(
            keys.integer("sliding_window") if windowed and kind == _SLIDING else None
            for kind in layer_types
        ),
        "ropes": tuple(ropes[kind] for kind in layer_types),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": keys.flag("mlp_bias"),
        "embed_scale": float(hidden) ** 0.5 if family.scale_embeddings else 1.0,
        "attn_softcap": keys.optional_number("attn_logit_softcapping"),
        "final_softcap": keys.optional_number("final_logit_softcapping"),
    }


def read_opt(keys: Keys, family: Family) -> dict[str, Any]:
    """OPT: learned positions, LayerNorm, a plain MLP."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim, num_layers = _divide(hidden, heads), keys.integer("num_hidden_layers")
    bias, norm_before = keys.flag("enable_bias"), keys.flag("do_layer_norm_before")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("ffn_dim"),
        "num_q_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "max_model_len": keys.integer("max_position_embeddings"),
        "activation": keys.activation(family.activation_key, _PLAIN),
        "norm_eps": 1e-5,
        "scale": head_dim**-0.5,
        "windows": (None,) * num_layers,
        "ropes": (None,) * num_layers,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "embed_dim": keys.optional_integer("word_embed_proj_dim"),
        "norm_before": norm_before,
        "norm_affine": keys.flag("layer_norm_elementwise_affine"),
        "final_norm": norm_before and not keys.flag("_remove_final_layer_norm"),
    }


def _layer_types(keys: Keys) -> tuple[str, ...]:
    num_layers = keys.integer("num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        pattern = keys.optional_integer("sliding_window_pattern")
        if pattern is None:
            return (_FULL,) * num_layers
        if pattern < 1:
            raise ConfigError(f"sliding_window_pattern must be at least 1, got {pattern}")
        return tuple(_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers))
    unknown = sorted({str(kind) for kind in types} - {_FULL, _SLIDING})
    if unknown:
        raise ConfigError(f"layer types {unknown} are not supported")
    return tuple(types)


def _rope_spec(keys: Keys, head_dim: int, layer_type: str) -> RopeSpec | None:
    """Reads either spelling: rope_scaling beside rope_theta, or rope_parameters, nested or flat."""
    legacy, nested = keys.raw.get("rope_scaling"), keys.raw.get("rope_parameters")
    theta_key = "rope_theta"
    if layer_type == _SLIDING and "rope_local_base_freq" in keys.defaults:
        theta_key, legacy = "rope_local_base_freq", None  # rope_scaling is for global layers only
    raw = legacy or nested or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"rope parameters must be an object, got {raw!r}")
    if layer_type in raw:
        if raw[layer_type] is None:
            return None
        raw = raw[layer_type]
    elif _FULL in raw or _SLIDING in raw:
        raise ConfigError(f"rope_parameters has no entry for {layer_type}")
    elif raw is nested and "rope_local_base_freq" in keys.defaults:
        raise ConfigError("rope_parameters must have one entry per layer type")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; expected one of {tuple(KINDS)}")
    required = KINDS[kind].required
    unknown = sorted(set(raw) - {*_ROPE_KEYS, *_ROPE_TOLERATED, *required})
    if unknown:
        raise ConfigError(f"rope parameters {unknown} are not supported with rope type {kind!r}")
    values = dict(raw)
    if "original_max_position_embeddings" in required:
        # A value beside the rope parameters wins over the one among them, as in transformers.
        beside = keys.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = (
            beside
            or values.get("original_max_position_embeddings")
            or keys.integer("max_position_embeddings")
        )
    partial = _positive(
        values.get("partial_rotary_factor", keys.get("partial_rotary_factor") or 1.0),
        "partial_rotary_factor",
    )
    if partial > 1:
        raise ConfigError(f"partial_rotary_factor must be at most 1, got {partial}")
    return RopeSpec(
        rot_dim=int(head_dim * partial),
        theta=_positive(values.get("rope_theta") or keys.need(theta_key), "rope_theta"),
        kind=kind,
        params=tuple((name, _positive(values.get(name), name)) for name in required),
    )


def _divide(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(f"hidden_size {hidden_size} does not divide over {num_heads} heads")
    return hidden_size // num_heads


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{key} must be positive, got {value}")
    return value
