"""Sizes of decoder models, for prediction: by name or from a config.json, without torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_rdma.config import KV_ROW_BYTES
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}
"""Bytes of one weight; the scales of int8, one for 256 inputs, are left out."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """What of a dense decoder decides its speed.

    `mlp_matrices`: 3 with a gate, 2 without. `num_local_layers` of the layers see `window` tokens
    only, the rest all. `tied`: the head is the embedding's matrix.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp_matrices: int = 3
    tied: bool = False
    num_local_layers: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads",
            "head_dim", "vocab_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_q_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )

    @property
    def block_params(self) -> int:
        """Weights of one layer: q, k, v and output projections, MLP."""
        attention = self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + self.mlp_matrices * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Weights of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def params(self) -> int:
        """All weights that are kept, embeddings included."""
        heads = self.head_params * (1 if self.tied else 2)
        return self.num_layers * self.block_params + heads

    def row_elements(self) -> int:
        """Elements of [q | k | v] of one token and layer, which go to a worker."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def out_elements(self) -> int:
        """Elements of the attention output, which come back."""
        return self.num_q_heads * self.head_dim

    def kv_token_bytes(self, kv_dtype: str) -> int:
        """Bytes of one cached token in one layer, K and V."""
        return 2 * self.num_kv_heads * KV_ROW_BYTES[kv_dtype](self.head_dim)

    def seen_tokens(self, length: float) -> float:
        """Tokens of a sequence of `length` that a layer attends to, on average over layers."""
        if self.window is None:
            return length
        local = self.num_local_layers / self.num_layers
        return (1 - local) * length + local * min(length, self.window)

    def kv_bytes(self, length: float, kv_dtype: str) -> float:
        """Bytes of the KV-cache of one sequence."""
        return self.num_layers * self.seen_tokens(length) * self.kv_token_bytes(kv_dtype)


def _shape(name: str, *numbers: int, **others: Any) -> ModelShape:
    return ModelShape(name, *numbers, **others)


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
        _shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
        _shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        _shape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        _shape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        _shape("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000),
        _shape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000),
        _shape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064),
        _shape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
        _shape(
            "gemma-2-9b", 42, 3584, 14336, 16, 8, 256, 256000, tied=True, num_local_layers=21,
            window=4096,
        ),
        _shape("opt-13b", 40, 5120, 20480, 40, 40, 128, 50272, mlp_matrices=2, tied=True),
        _shape("opt-175b", 96, 12288, 49152, 96, 96, 128, 50272, mlp_matrices=2, tied=True),
    )
}  # fmt: skip
"""Models by name, from their published config.json (opt-175b: from its paper)."""


def shape_of(model: str) -> ModelShape:
    """Returns the shape of a model named by SHAPES, a directory, or a config.json.

    Raises:
        ConfigError: there is none such; names the nearest.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        near = difflib.get_close_matches(model.lower(), SHAPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(SHAPES)}"
        raise ConfigError(f"--model {model!r} is no file, directory or known name; {hint}")
    return shape_from_config(read_json(path), path)


def shape_from_config(config: Mapping[str, Any], path: Path) -> ModelShape:
    """Returns the shape that a config.json describes.

    Raises:
        ConfigError: a size is missing or wrong, or the model is none that is modelled.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    if experts := [key for key in _EXPERTS if (config.get(key) or 0) not in (0, 1)]:
        raise ConfigError(f"{path} sets {experts[0]}: mixtures of experts are not modelled")
    heads, hidden = _need(config, "num_attention_heads", path), _need(config, "hidden_size", path)
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(f"{path}: hidden_size {hidden} does not divide over {heads} heads")
        head_dim = hidden // heads
    layers = _need(config, "num_hidden_layers", path)
    local, window = _windows(config, layers)
    kind = str(config.get("model_type", ""))
    inner_size = config.get("intermediate_size") or config.get("ffn_dim")
    if inner_size is None:
        raise ConfigError(f"{path} says neither intermediate_size nor ffn_dim")
    try:
        return ModelShape(
            name=path.parent.resolve().name if path.name == "config.json" else path.name,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=inner_size,
            num_q_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=_need(config, "vocab_size", path),
            mlp_matrices=2 if kind in ("opt", "gpt_neox", "starcoder2", "phi") else 3,
            tied=bool(config.get("tie_word_embeddings", kind in ("opt", "gemma3_text", "gemma2"))),
            num_local_layers=local,
            window=window,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _need(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} must be a positive integer, got {value!r}")
    return value


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, int | None]:
    """How many layers have a window, and which."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or not window or config.get("use_sliding_window") is False:
        return 0, None
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        local = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif isinstance(period := config.get("sliding_window_pattern"), int) and period > 0:
        local = layers - layers // period  # every period-th layer sees all
    elif config.get("model_type") in ("gemma2", "gemma3_text"):
        period = 2 if config["model_type"] == "gemma2" else 6
        local = layers - layers // period
    else:
        local = layers
    return (local, window) if local else (0, None)
