"""config.json from GGUF metadata: what all architectures share, and what only some of them have."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_rope import read_rope_scaling

# Metadata that changes the arithmetic -> the values that do not. A file with another value is
# refused unless its architecture handles the key.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
# What llama.cpp assumes where a file is silent.
_ROPE_THETA = {"gemma3": 1e6}
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
_GEMMA_SOFTCAPS: dict[str, tuple[float | None, float | None]] = {
    "gemma2": (50.0, 30.0),
    "gemma3": (None, None),
}
_GEMMA2_WINDOW = 4096
_GEMMA3_LOCAL_ROPE_THETA = 10000.0
# The 27B models alone scale queries by hidden_size / heads instead of by head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_SMOLLM3_NO_ROPE_EVERY = 4


def read_config(
    file: GGUFFile, *, handled: Collection[str], partial_rotary: bool, longrope: bool
) -> dict[str, Any]:
    """Returns the keys of config.json that every architecture has.

    `handled`: metadata that the caller reads itself. `partial_rotary`, `longrope`: the architecture
    knows them.

    Raises:
        ConfigError: the metadata is incomplete, inconsistent or asks for what is not supported.
    """
    key = file.arch_key
    if any(file.get(key(name), 0) for name in _EXPERTS):
        raise ConfigError(f"{file.path}: mixture-of-experts models are not supported")
    for name, neutral in _NEUTRAL.items():
        if name not in handled and file.get(key(name), neutral[0]) not in neutral:
            raise ConfigError(
                f"{file.path}: {name} {file.get(key(name))!r:.80} is not supported for "
                f"architecture {file.architecture!r}"
            )
    heads = file.count(key("attention.head_count"))
    kv_heads = file.count(key("attention.head_count_kv"), heads)
    hidden_size = file.count(key("embedding_length"))
    head_dim = file.count(key("attention.key_length"), max(1, hidden_size // heads))
    if file.count(key("attention.value_length"), head_dim) != head_dim:
        raise ConfigError(f"{file.path}: keys and values of different width are not supported")
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{file.path}: {heads} heads over {kv_heads} key-value heads of {head_dim} elements "
            "are not supported"
        )
    max_len = file.count(key("context_length"))
    theta = file.number(key("rope.freq_base"), _ROPE_THETA.get(file.architecture, 10000.0))
    rot_dim = file.count(key("rope.dimension_count"), head_dim)
    if rot_dim > head_dim or rot_dim % 2 or (rot_dim != head_dim and not partial_rotary):
        raise ConfigError(
            f"{file.path}: rotary embedding of {rot_dim} of {head_dim} elements is not supported "
            f"for architecture {file.architecture!r}"
        )
    config = {
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.count(key("feed_forward_length")),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": file.number(key("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(
            file, theta=theta, rot_dim=rot_dim, max_len=max_len, has_longrope=longrope
        ),
    }
    if rot_dim != head_dim:
        config["partial_rotary_factor"] = rot_dim / head_dim
    return config


def _num_layers(file: GGUFFile) -> int:
    """Returns block_count, once the tensors bear it out (it bounds what is built per layer)."""
    declared = file.count(file.arch_key("block_count"))
    found = {match[1] for name in file.tensors if (match := re.match(r"blk\.([0-9]+)\.", name))}
    if len(found) != declared:
        raise ConfigError(
            f"{file.path}: tensors of {len(found)} layers, the metadata says {declared}"
        )
    return declared


def window_of_llama(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Mistral is Llama with a sliding window on all layers."""
    window = file.count(file.arch_key("attention.sliding_window"), 0, least=0)
    if not window:
        return {}
    if config["attention_bias"] or config["mlp_bias"]:
        raise ConfigError(f"{file.path}: biases together with a sliding window are not supported")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def gemma_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Windows by layer, softcaps and the scale of queries of Gemma 2 and 3."""
    key, name = file.arch_key, file.architecture
    layers = config["num_hidden_layers"]
    default_window = _GEMMA2_WINDOW if name == "gemma2" else 0
    window = file.count(key("attention.sliding_window"), default_window, least=0)
    wide = config["hidden_size"] // config["num_attention_heads"]
    attention_cap, final_cap = _GEMMA_SOFTCAPS[name]
    read = {
        "query_pre_attn_scalar": wide if layers == _GEMMA_27B_LAYERS[name] else config["head_dim"],
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(file, layers) if window else ["full_attention"] * layers,
        "attn_logit_softcapping": file.number(key("attn_logit_softcapping"), attention_cap),
        "final_logit_softcapping": file.number(key("final_logit_softcapping"), final_cap),
    }
    if name == "gemma3":
        local_theta = file.number(key("rope.freq_base_swa"), _GEMMA3_LOCAL_ROPE_THETA)
        read["rope_local_base_freq"] = local_theta
    return read


def _layer_types(file: GGUFFile, num_layers: int) -> list[str]:
    """Returns which layers have the sliding window: a list says so, or every n-th has not."""
    name = file.arch_key("attention.sliding_window_pattern")
    pattern = file.get(name, _WINDOW_PERIOD[file.architecture])
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(isinstance(flag, bool | int) for flag in pattern):
            raise ConfigError(f"{file.path}: {name} must hold {num_layers} flags")
        local = [bool(flag) for flag in pattern[:num_layers]]
    else:
        period = file.count(name, pattern, least=0)
        local = [period == 0 or (layer + 1) % period != 0 for layer in range(num_layers)]
    return ["sliding_attention" if is_local else "full_attention" for is_local in local]


def olmo_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with sliding windows, on whose layers frequencies are not scaled."""
    window = file.count(file.arch_key("attention.sliding_window"), 0, least=0)
    if not window:
        return {}
    plain = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(file, config["num_hidden_layers"]),
        "rope_parameters": {
            "sliding_attention": plain,
            "full_attention": plain | (config.pop("rope_scaling") or {}),
        },
    }


def phi3_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The sliding window (0: none) and the length before longrope of Phi-3 and Phi-4."""
    key = file.arch_key
    original = file.count(
        key("rope.scaling.original_context_length"), config["max_position_embeddings"]
    )
    return {
        "original_max_position_embeddings": original,
        "sliding_window": file.count(key("attention.sliding_window"), 0, least=0) or None,
    }


def granite_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Granite's multipliers; where the file is silent, llama.cpp's defaults."""
    key = file.arch_key
    if not file.flag(key("rope.scaling.finetuned"), True):
        raise ConfigError(f"{file.path}: Granite without rotary embedding is not supported")
    return {
        "attention_multiplier": file.number(
            key("attention.scale"), 1 / math.sqrt(config["head_dim"])
        ),
        "embedding_multiplier": file.number(key("embedding_scale"), 1.0),
        "residual_multiplier": file.number(key("residual_scale"), 1.0),
        "logits_scaling": file.number(key("logit_scale")),
    }


def smollm3_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rotary embedding; the file does not say so."""
    layers, period = config["num_hidden_layers"], _SMOLLM3_NO_ROPE_EVERY
    return {
        "no_rope_layer_interval": period,
        "no_rope_layers": [int((layer + 1) % period != 0) for layer in range(layers)],
    }
