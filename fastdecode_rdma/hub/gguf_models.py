"""What a GGUF architecture is called in Hugging Face words: config.json and tensor names.

A supported architecture is a row of ARCHITECTURES. Conventions undone here:

* llama, granite, smollm3: the rows of q and k are stored for interleaved rotary pairs; Hugging Face
  pairs the halves.
* gemma, gemma2, gemma3: norm weights are stored as 1 + w; Hugging Face stores w and adds the 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_config import (
    gemma_config,
    granite_config,
    olmo_config,
    phi3_config,
    smollm3_config,
    window_of_llama,
)
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_rope import ROPE_TENSORS

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]+)\.(weight|bias|scale|input_scale)")


@dataclass(frozen=True)
class Weight:
    """A tensor of the output: its name there, and the names of its dimensions (see `shape`)."""

    name: str
    rows: str
    columns: str = ""


@dataclass(frozen=True)
class Biases:
    """Projections that have biases together. `flag` is the key of config.json that says so; None:
    they always have them. Where a file lacks some of them, those are zero."""

    flag: str | None
    of: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face directory.

    `layer`: name inside a block -> weight inside a layer. `constants`: keys of config.json that do
    not depend on the file; `read(file, config)` gives those that do, and may take others away.
    `handled`: metadata that `read` looks at and that would be refused otherwise. `permuted`: q and
    k are in interleaved rotary order. `norm_offset`: what was added to norm weights.
    `partial_rotary`, `longrope`: the architecture knows them. `strips_after_specials`: in
    SentencePiece vocabularies of it, special tokens take the white space after them.
    """

    model: str
    model_type: str
    layer: Mapping[str, Weight]
    constants: Mapping[str, Any]
    read: Callable[[GGUFFile, dict[str, Any]], dict[str, Any]] | None = None
    handled: frozenset[str] = frozenset()
    permuted: bool = False
    norm_offset: float = 0.0
    biases: tuple[Biases, ...] = ()
    partial_rotary: bool = False
    longrope: bool = False
    strips_after_specials: bool = False
    outside: Mapping[str, Weight] = field(
        default_factory=lambda: {
            "token_embd": Weight("model.embed_tokens", "vocab", "hidden"),
            "output_norm": Weight("model.norm", "hidden"),
            "output": Weight("lm_head", "vocab", "hidden"),
        }
    )

    def find(self, name: str) -> tuple[str, Weight, str, str] | None:
        """Returns prefix, weight, name inside a block, and suffix of a GGUF tensor.

        None: it carries configuration, not weights.

        Raises:
            ConfigError: this architecture has no such tensor.
        """
        if name in ROPE_TENSORS:
            return None
        stem, _, suffix = name.partition(".")
        if stem in self.outside and suffix in ("weight", "scale", "input_scale"):
            return "", self.outside[stem], stem, suffix
        match = _BLOCK.fullmatch(name)
        if match is None or match[2] not in self.layer:
            raise ConfigError(f"GGUF tensor {name[:80]!r} is not known for this architecture")
        return f"model.layers.{match[1]}.", self.layer[match[2]], match[2], match[3]


def shape(weight: Weight, suffix: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape that a tensor of a model with this config.json must have."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim
    lengths = {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "inner": inner,
        "gate_up": 2 * inner,
        "head": head_dim,
        "q": q_width,
        "kv": kv_width,
        "qkv": q_width + 2 * kv_width,
    }
    if suffix == "bias" or not weight.columns:
        return (lengths[weight.rows],)
    return (lengths[weight.rows], lengths[weight.columns])


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the row of this file's architecture.

    Raises:
        ConfigError: it is not supported.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {name!r:.80} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def rotary_row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Returns the stored row numbers in Hugging Face order, [num_rows].

    Stored: row 2i+c of a head is element i of half c; Hugging Face: row c*D/2+i.
    """
    order = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


_ATTENTION = {
    "attn_q": Weight("self_attn.q_proj", "q", "hidden"),
    "attn_k": Weight("self_attn.k_proj", "kv", "hidden"),
    "attn_v": Weight("self_attn.v_proj", "kv", "hidden"),
    "attn_output": Weight("self_attn.o_proj", "hidden", "q"),
}
_MLP = {
    "ffn_gate": Weight("mlp.gate_proj", "inner", "hidden"),
    "ffn_up": Weight("mlp.up_proj", "inner", "hidden"),
    "ffn_down": Weight("mlp.down_proj", "hidden", "inner"),
}
_NORMS = {
    "attn_norm": Weight("input_layernorm", "hidden"),
    "ffn_norm": Weight("post_attention_layernorm", "hidden"),
}
_GEMMA_NORMS = {
    "attn_norm": Weight("input_layernorm", "hidden"),
    "post_attention_norm": Weight("post_attention_layernorm", "hidden"),
    "ffn_norm": Weight("pre_feedforward_layernorm", "hidden"),
    "post_ffw_norm": Weight("post_feedforward_layernorm", "hidden"),
}
_HEAD_NORMS = {
    "attn_q_norm": Weight("self_attn.q_norm", "head"),
    "attn_k_norm": Weight("self_attn.k_norm", "head"),
}
_QKV_BIAS = Biases(None, ("attn_q", "attn_k", "attn_v"))
_ATTENTION_BIAS = Biases("attention_bias", tuple(_ATTENTION))
_MLP_BIAS = Biases("mlp_bias", tuple(_MLP))
_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_KEYS = frozenset(
    {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
)

ARCHITECTURES: dict[str, Architecture] = {
    # Mistral, too: what differs is the sliding window, where the file has one.
    "llama": Architecture(
        model="LlamaForCausalLM",
        model_type="llama",
        layer=_ATTENTION | _MLP | _NORMS,
        constants=_SILU,
        read=window_of_llama,
        handled=frozenset({"attention.sliding_window"}),
        permuted=True,
        biases=(_ATTENTION_BIAS, _MLP_BIAS),
    ),
    "qwen2": Architecture(
        model="Qwen2ForCausalLM",
        model_type="qwen2",
        layer=_ATTENTION | _MLP | _NORMS,
        constants=_SILU | {"use_sliding_window": False},
        biases=(_QKV_BIAS,),
    ),
    "qwen3": Architecture(
        model="Qwen3ForCausalLM",
        model_type="qwen3",
        layer=_ATTENTION | _MLP | _NORMS | _HEAD_NORMS,
        constants=_SILU | {"use_sliding_window": False},
        biases=(_ATTENTION_BIAS,),
    ),
    "gemma": Architecture(
        model="GemmaForCausalLM",
        model_type="gemma",
        layer=_ATTENTION | _MLP | _NORMS,
        constants={"hidden_act": "gelu_pytorch_tanh"},
        norm_offset=1.0,
        biases=(_ATTENTION_BIAS,),
    ),
    "gemma2": Architecture(
        model="Gemma2ForCausalLM",
        model_type="gemma2",
        layer=_ATTENTION | _MLP | _GEMMA_NORMS,
        constants=_GELU,
        read=gemma_config,
        handled=_GEMMA_KEYS,
        norm_offset=1.0,
        biases=(_ATTENTION_BIAS,),
    ),
    "gemma3": Architecture(
        model="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=_ATTENTION | _MLP | _GEMMA_NORMS | _HEAD_NORMS,
        constants=_GELU,
        read=gemma_config,
        handled=_GEMMA_KEYS,
        norm_offset=1.0,
        biases=(_ATTENTION_BIAS,),
    ),
    "phi3": Architecture(
        model="Phi3ForCausalLM",
        model_type="phi3",
        layer=_NORMS
        | {
            "attn_qkv": Weight("self_attn.qkv_proj", "qkv", "hidden"),
            "attn_output": _ATTENTION["attn_output"],
            "ffn_up": Weight("mlp.gate_up_proj", "gate_up", "hidden"),
            "ffn_down": _MLP["ffn_down"],
        },
        constants=_SILU,
        read=phi3_config,
        handled=frozenset({"attention.sliding_window"}),
        partial_rotary=True,
        longrope=True,
        strips_after_specials=True,
    ),
    "granite": Architecture(
        model="GraniteForCausalLM",
        model_type="granite",
        layer=_ATTENTION | _MLP | _NORMS,
        constants=_SILU,
        read=granite_config,
        handled=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
        permuted=True,
        biases=(_ATTENTION_BIAS, _MLP_BIAS),
    ),
    # OLMo 3, too: what differs is sliding windows.
    "olmo2": Architecture(
        model="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=_ATTENTION
        | _MLP
        | {
            "attn_q_norm": Weight("self_attn.q_norm", "q"),
            "attn_k_norm": Weight("self_attn.k_norm", "kv"),
            "post_attention_norm": Weight("post_attention_layernorm", "hidden"),
            "post_ffw_norm": Weight("post_feedforward_layernorm", "hidden"),
        },
        constants=_SILU,
        read=olmo_config,
        handled=frozenset({"attention.sliding_window"}),
        biases=(_ATTENTION_BIAS,),
    ),
    "smollm3": Architecture(
        model="SmolLM3ForCausalLM",
        model_type="smollm3",
        layer=_ATTENTION | _MLP | _NORMS,
        constants=_SILU | {"use_sliding_window": False},
        read=smollm3_config,
        permuted=True,
        biases=(_ATTENTION_BIAS, _MLP_BIAS),
    ),
}
"""Supported values of `general.architecture`."""
