"""The architectures. One is a row of FAMILIES: its file, its reader, and its keys' defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdecode_rdma.config import dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.hf_config import Family, Keys, read_opt, read_rope_decoder

_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_OPT = {
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

_GEMMA3_FAMILY = Family(
    module="gemma3",
    model_type="gemma3_text",
    read=read_rope_decoder,
    defaults=_GEMMA3,
    activation_key="hidden_activation",
    scale_embeddings=True,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        module="llama",
        model_type="llama",
        read=read_rope_decoder,
        defaults=_LLAMA,
        stretch_max_len=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    # The text half of the multi-modal model; both layouts that transformers has saved.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3_FAMILY,
        model_type="gemma3",
        renames=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        ignored=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
    "OPTForCausalLM": Family(
        module="opt",
        model_type="opt",
        read=read_opt,
        defaults=_OPT,
        activation_key="activation_function",
        renames=(("decoder.", "model.decoder."),),
    ),
}
"""Supported architectures by the name that config.json gives them."""


def read_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ModelConfig from a config.json and a generation_config.json.

    Raises:
        ConfigError: a key is missing, malformed, or asks for something unsupported.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must be an object, got {text!r}")
    for part in (config, text):
        quantization = part.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise ConfigError(
                f"quantization_config {method or quantization!r} is not supported; "
                "use a checkpoint in float32, float16 or bfloat16"
            )
    keys = Keys(text, family.defaults)
    outer = Keys(config, {**family.defaults, **keys.raw})
    return family.read(keys, family) | {
        "architecture": architecture,
        "module": family.module,
        "vocab_size": keys.integer("vocab_size"),
        "num_layers": keys.integer("num_hidden_layers"),
        "dtype": _dtype(outer),
        "tie_word_embeddings": outer.flag("tie_word_embeddings"),
        "bos_token_id": outer.optional_integer("bos_token_id"),
        "pad_token_id": outer.optional_integer("pad_token_id"),
        "eos_token_ids": _token_ids(
            config.get("eos_token_id"), text.get("eos_token_id"), generation.get("eos_token_id")
        )
        or _token_ids(family.defaults.get("eos_token_id")),
        "renames": family.renames,
        "ignored": family.ignored,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot read {path}: it is no regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the row's name, from `architectures` or else from `model_type`."""
    names = config.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    if not names:
        raise ConfigError(
            f"model_type {config.get('model_type')!r} is not supported; "
            f"supported architectures: {', '.join(FAMILIES)}"
        )
    if names[0] not in FAMILIES:
        raise ConfigError(
            f"architecture {names[0]!r} is not supported; expected one of {', '.join(FAMILIES)}"
        )
    return names[0]


def _dtype(keys: Keys) -> str:
    name = keys.get("dtype") or keys.get("torch_dtype") or "fp32"
    return dtype_name(str(name).removeprefix("torch."))


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Returns the union of ids given as int, list or None, in order of appearance."""
    ids: list[int] = []
    for value in values:
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ConfigError(f"eos_token_id must be an integer or a list, got {value!r}")
            if token_id not in ids:
                ids.append(token_id)
    return tuple(ids)
