"""From a config.json and a generation_config.json to the fields of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdecode_rdma.config import dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.families import FAMILIES
from fastdecode_rdma.models.hf_keys import Keys
from fastdecode_rdma.param_checks import eos_ids


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
    sources = (config, text, generation)
    eos_token_ids = [
        token_id for source in sources for token_id in eos_ids(source.get("eos_token_id"))
    ]
    if not any("eos_token_id" in source for source in sources):  # a null says that there is none
        eos_token_ids = eos_ids(family.defaults.get("eos_token_id"))
    keys = Keys(text, family.defaults)
    outer = Keys(config, {**family.defaults, **keys.raw})
    return family.read(keys, family) | {
        "architecture": architecture,
        "module": family.module,
        "vocab_size": keys.integer("vocab_size"),
        "num_layers": keys.integer("num_hidden_layers"),
        "dtype": _dtype(outer),
        "tie_word_embeddings": outer.flag("tie_word_embeddings"),
        "eos_token_ids": tuple(dict.fromkeys(eos_token_ids)),
        "renames": family.renames,
        "ignored": family.ignored,
    }


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the row's name, from `architectures` or else from `model_type`."""
    names = config.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise ConfigError(f"architectures must be a list of names, got {names!r}")
    hint = "`fastdecode models` lists those that are"
    if not names:
        raise ConfigError(f"model_type {config.get('model_type')!r} is not supported; {hint}")
    if str(names[0]) not in FAMILIES:
        raise ConfigError(f"architecture {names[0]!r} is not supported; {hint}")
    return names[0]


def _dtype(keys: Keys) -> str:
    name = keys.get("dtype") or keys.get("torch_dtype") or "fp32"
    return dtype_name(str(name).removeprefix("torch."))
