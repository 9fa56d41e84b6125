"""What a GGUF architecture is called in Hugging Face words: config.json and tensor names.

One `Architecture` row per `general.architecture`. Conventions undone here:

* llama: the rows of q and k are stored for interleaved rotary pairs; Hugging Face pairs the halves.
* gemma3: norm weights are stored as 1 + w; Hugging Face stores w and adds the 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What llama.cpp assumes where a file is silent.
_GEMMA3_LOCAL_ROPE_THETA = 10000.0
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face directory.

    `layer_names`: name inside a block without suffix -> name inside a layer.
    `ignored`: tensors that carry configuration, not weights.
    """

    config: Callable[[GGUFFile], dict[str, Any]]
    layer_names: dict[str, str]
    permuted: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    ignored: frozenset[str] = frozenset()

    def hf_name(self, name: str) -> str | None:
        """Returns the Hugging Face name of a GGUF tensor, or None when it is not a weight.

        Raises:
            ConfigError: this architecture has no such tensor.
        """
        if name in self.ignored:
            return None
        if name in GLOBAL_NAMES:
            return GLOBAL_NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in self.layer_names:
            raise ConfigError(f"GGUF tensor {name!r} is not known for this architecture")
        return f"model.layers.{match[1]}.{self.layer_names[match[2]]}.{match[3]}"

    def shape(self, name: str, config: dict[str, Any]) -> tuple[int, ...]:
        """Returns the shape that a GGUF tensor of a model with this config.json must have."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config["head_dim"]
        rows, columns = {
            "token_embd": (config["vocab_size"], hidden),
            "output": (config["vocab_size"], hidden),
            "attn_q": (heads * head_dim, hidden),
            "attn_k": (kv_heads * head_dim, hidden),
            "attn_v": (kv_heads * head_dim, hidden),
            "attn_output": (hidden, heads * head_dim),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
            "attn_q_norm": (head_dim, 0),
            "attn_k_norm": (head_dim, 0),
        }.get(name.split(".")[-2], (hidden, 0))
        is_matrix = columns and name.endswith(".weight")
        return (rows, columns) if is_matrix else (rows,)

    def is_permuted(self, name: str) -> bool:
        """Tells whether the rows of this tensor are in interleaved rotary order."""
        return name.split(".")[-2] in self.permuted

    def offset(self, name: str) -> float:
        """Returns what was added to this tensor when it was stored."""
        return self.norm_offset if name.endswith("norm.weight") else 0.0


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the row of this file's architecture.

    Raises:
        ConfigError: it is not supported.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def rotary_row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Returns the stored row numbers in Hugging Face order, [num_rows].

    Stored: row 2i+c of a head is element i of half c; Hugging Face: row c*D/2+i.
    """
    order = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def _common_config(file: GGUFFile) -> dict[str, Any]:
    for key in ("expert_count", "expert_used_count"):
        if file.arch(key, 0):
            raise ConfigError(f"{file.path}: mixture-of-experts models are not supported")
    heads = file.arch_count("attention.head_count")
    kv_heads = file.arch_count("attention.head_count_kv", heads)
    hidden_size = file.arch_count("embedding_length")
    head_dim = file.arch_count("attention.key_length", max(1, hidden_size // heads))
    if file.arch_count("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: keys and values of different width are not supported")
    return {
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.arch_count("feed_forward_length"),
        "num_hidden_layers": file.arch_count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.arch_count("context_length"),
        "rms_norm_eps": file.arch("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _llama_config(file: GGUFFile) -> dict[str, Any]:
    config = _common_config(file)
    rotary_dim = file.arch("rope.dimension_count", config["head_dim"])
    if rotary_dim != config["head_dim"]:
        raise ConfigError(f"{file.path}: partial rotary ({rotary_dim}) is not a Llama model's")
    theta = file.arch("rope.freq_base", 10000.0)
    config.update(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta=theta, head_dim=config["head_dim"]),
    )
    return config


def _gemma3_config(file: GGUFFile) -> dict[str, Any]:
    config = _common_config(file)
    layers = config["num_hidden_layers"]
    pattern = file.arch("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, list):
        local = [bool(flag) for flag in pattern]
    else:
        local = [(layer + 1) % pattern != 0 for layer in range(layers)]
    # The 27B alone scales queries by hidden_size / heads instead of by head_dim.
    wide = config["hidden_size"] // config["num_attention_heads"]
    config.update(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=wide if layers == _GEMMA3_27B_LAYERS else config["head_dim"],
        sliding_window=file.arch_count("attention.sliding_window"),
        layer_types=["sliding_attention" if is_local else "full_attention" for is_local in local],
        rope_theta=file.arch("rope.freq_base", 1e6),
        rope_local_base_freq=file.arch("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA),
        rope_scaling=_rope_scaling(file, theta=0.0, head_dim=config["head_dim"]),
        attn_logit_softcapping=file.arch("attn_logit_softcapping", None),
        final_logit_softcapping=file.arch("final_logit_softcapping", None),
    )
    return config


def _rope_scaling(file: GGUFFile, *, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, theta=theta, head_dim=head_dim)
    kind = file.arch("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.arch("rope.scaling.factor")}
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(file: GGUFFile, *, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers llama3 scaling from the per-frequency divisors that GGUF keeps in its place.

    Only `factor` differs between the released models; the formula is checked against the file.
    """
    tensor = file.tensor("rope_freqs.weight")
    stored = tensor.dequantize(slice(None)).astype(np.float64).reshape(-1)
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(stored.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / scaling["factor"] + blend)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ConfigError(
            f"{file.path}: rope_freqs.weight does not follow the llama3 rule; "
            "longrope and other frequency tables are not supported"
        )
    return scaling


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        config=_llama_config,
        layer_names=_PROJECTIONS
        | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        permuted=frozenset({"attn_q", "attn_k"}),
        ignored=frozenset({"rope_freqs.weight"}),
    ),
    "gemma3": Architecture(
        config=_gemma3_config,
        layer_names=_PROJECTIONS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
        norm_offset=1.0,
    ),
}
"""Supported values of `general.architecture`."""
