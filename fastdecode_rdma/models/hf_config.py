"""What the keys of a Hugging Face config.json mean: readers that turn them into our fields.

Nothing but the hf_*.py files and the rows of families.py knows these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.hf_keys import Keys
from fastdecode_rdma.models.hf_layers import LayerKind, full_layers
from fastdecode_rdma.models.hf_rope import FULL, read_rope
from fastdecode_rdma.models.rope import ORIGINAL_LEN, RopeSpec

GATED = ("silu", "gelu_tanh", "gelu")
PLAIN = ("relu", "gelu", "gelu_tanh")
"""Activations of gated and of plain MLPs."""

_FOREIGN: Mapping[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "layer_rope_theta": ([],),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
}
"""Keys that change the arithmetic, and the values that leave it alone, besides null: any other is
an error where a family does not list the key in its defaults."""

Bias = bool | str
"""Whether a family's matrices have biases: always, never, or as the key of that name says."""


@dataclass(frozen=True)
class Family:
    """One architecture: models/<module>.py builds it, `read` turns keys into ModelConfig fields.

    `models`: what people know of it, for the command line. `layers`: windows and rotary positions
    by layer. `norm_order`, `qk_norm`, `unit_offset`, `fused`: as in ModelConfig. `local_theta`,
    `rope_aliases`: see `read_rope`. `activations`: names that the family means in its own way.
    `stretch_max_len`: a rope factor multiplies max_position_embeddings, which states the length
    before it. `renames`, `ignored`: prefixes of tensor names, as in ModelConfig.
    """

    module: str
    model_type: str
    models: str
    read: Callable[[Keys, Family], dict[str, Any]]
    defaults: Mapping[str, Any]
    layers: Callable[[Keys], list[LayerKind]] = full_layers
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: Bias = "attention_bias"
    o_bias: Bias = "attention_bias"
    mlp_bias: Bias = False
    norm_order: str = "before"
    qk_norm: str | None = None
    unit_offset: bool = False
    fused: bool = False
    scale_embeddings: bool = False
    stretch_max_len: bool = True
    local_theta: str | None = None
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


def read_rope_decoder(keys: Keys, family: Family) -> dict[str, Any]:
    """Decoders with RMSNorm, rotary positions and a gated MLP."""
    _refuse_foreign(keys, family)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.optional_integer("head_dim") or divide(hidden, heads)
    kinds = family.layers(keys)
    ropes = {
        kind.rope: read_rope(
            keys,
            head_dim,
            kind.rope,
            local_theta=family.local_theta,
            aliases=family.rope_aliases,
        )
        for kind in kinds
        if kind.rope is not None
    }
    lengths = _lengths(keys, ropes, family)
    longest = lengths["longest_model_len"]
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_q_heads": heads,
        "num_kv_heads": keys.nullable_integer("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "activation": keys.activation(family.activation_key, GATED, family.activations),
        "norm_eps": keys.number("rms_norm_eps"),
        "scale": keys.optional_number("attention_multiplier")
        or (keys.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5,
        # A window that no sequence outgrows is none: its layers share the cache of the others.
        "windows": tuple(
            None if kind.window is None or kind.window >= longest else kind.window for kind in kinds
        ),
        "ropes": tuple(None if kind.rope is None else ropes[kind.rope] for kind in kinds),
        "qkv_bias": _bias(keys, family.qkv_bias),
        "o_bias": _bias(keys, family.o_bias),
        "mlp_bias": _bias(keys, family.mlp_bias),
        "norm_order": family.norm_order,
        "qk_norm": family.qk_norm,
        "unit_offset": family.unit_offset,
        "fused": family.fused,
        "embed_scale": float(hidden) ** 0.5
        if family.scale_embeddings
        else keys.optional_number("embedding_multiplier") or 1.0,
        "residual_scale": keys.optional_number("residual_multiplier") or 1.0,
        "logits_scale": 1.0 / (keys.optional_number("logits_scaling") or 1.0),
        "attn_softcap": _softcap(keys, family, "attn_logit_softcapping"),
        "final_softcap": _softcap(keys, family, "final_logit_softcapping"),
        **lengths,
    }


def read_opt(keys: Keys, family: Family) -> dict[str, Any]:
    """OPT: learned positions, LayerNorm, a plain MLP."""
    _refuse_foreign(keys, family)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim, num_layers = divide(hidden, heads), keys.integer("num_hidden_layers")
    bias, norm_before = keys.flag("enable_bias"), keys.flag("do_layer_norm_before")
    max_len = keys.integer("max_position_embeddings")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("ffn_dim"),
        "num_q_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "max_model_len": max_len,
        "activation": keys.activation(family.activation_key, PLAIN),
        "norm_eps": 1e-5,
        "scale": head_dim**-0.5,
        "windows": (None,) * num_layers,
        "ropes": (None,) * num_layers,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "embed_dim": keys.optional_integer("word_embed_proj_dim"),
        "norm_order": "before" if norm_before else "after_sum",
        "norm_affine": keys.flag("layer_norm_elementwise_affine"),
        "final_norm": norm_before and not keys.flag("_remove_final_layer_norm"),
    }


def _refuse_foreign(keys: Keys, family: Family) -> None:
    for key, neutral in _FOREIGN.items():
        value = keys.get(key)
        if key in family.defaults or value is None:
            continue
        # True and False equal 1 and 0, and are not meant by them.
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        ):
            raise ConfigError(
                f"{key} {value!r} is not supported with model_type {family.model_type!r}"
            )


def _softcap(keys: Keys, family: Family, key: str) -> float | None:
    """A family that has no softcap may be told so by a 0."""
    return keys.nullable_number(key) if key in family.defaults else None


def _bias(keys: Keys, rule: Bias) -> bool:
    return keys.flag(rule) if isinstance(rule, str) else rule


def _lengths(keys: Keys, ropes: Mapping[str, RopeSpec | None], family: Family) -> dict[str, int]:
    """Returns the longest sequence by default, and the longest to be had on request.

    Linear and yarn stretch the length that was trained; a file that states the stretched one
    already is not stretched again. dynamic is plain up to the stated length, and changes all
    positions when asked for more; so more must be asked for.
    """
    stated = keys.integer("max_position_embeddings")
    rope = ropes.get(FULL) or next(filter(None, ropes.values()), None)
    stretched = stated
    if rope is not None and family.stretch_max_len:
        if rope.kind in ("linear", "dynamic"):
            stretched = max(stated, int(stated * rope.param("factor")))
        elif rope.kind == "yarn":
            stretched = max(stated, int(rope.param(ORIGINAL_LEN) * rope.param("factor")))
    is_dynamic = rope is not None and rope.kind == "dynamic"
    return {
        "max_model_len": stated if is_dynamic else stretched,
        "longest_model_len": stretched,
    }


def divide(hidden_size: int, num_heads: int) -> int:
    """Returns hidden_size / num_heads.

    Raises:
        ConfigError: that is no whole number.
    """
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(f"hidden_size {hidden_size} does not divide over {num_heads} heads")
    return hidden_size // num_heads
