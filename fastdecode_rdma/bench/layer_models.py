"""Shapes of decode layers, read without torch: by name, from a config.json, or number by number."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_rdma.config import AttentionGeometry, KVGroup, dtype_name, kv_dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json


@dataclass(frozen=True)
class LayerShape:
    """Attention of one layer. `name`: of the model."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def geometry(
        self, *, kv_dtype: str, wire_dtype: str, max_rows: int, max_model_len: int, num_layers: int
    ) -> AttentionGeometry:
        """Returns a model of `num_layers` such layers.

        Raises:
            ConfigError: no worker could serve it.
        """
        group = KVGroup(
            tuple(range(num_layers)), self.num_q_heads, self.num_kv_heads, self.head_dim
        )
        return AttentionGeometry(
            (group,),
            scale=self.head_dim**-0.5,
            kv_dtype=kv_dtype,
            wire_dtype=wire_dtype,
            max_rows=max_rows,
            max_model_len=max_model_len,
        )


SHAPES = {
    "smollm2-135m": (9, 3, 64),
    "llama-3.2-1b": (32, 8, 64),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (64, 8, 128),
    "llama-2-7b": (32, 32, 128),
    "mistral-7b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-8b": (32, 8, 128),
    "gemma-2-9b": (16, 8, 256),
}
"""Name -> query heads, KV heads, head dimensions."""

_NUMBERS = ("hidden", "heads", "kv_heads", "head_dim")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which model's layer is meant."""
    parser.add_argument(
        "--model",
        metavar="CONFIG|NAME",
        help=f"a config.json, its directory, or one of {', '.join(SHAPES)}",
    )
    for flag, text in (
        ("--hidden", "hidden size, which the heads divide"),
        ("--heads", "query heads"),
        ("--kv-heads", "KV heads (default: as many as query heads)"),
        ("--head-dim", "elements of a head"),
    ):
        parser.add_argument(flag, type=int, metavar="N", help=f"instead of --model: {text}")
    parser.add_argument("--kv-dtype", default="fp16", help="of the KV-cache (%(default)s)")
    parser.add_argument("--wire-dtype", default="fp32", help="of rows on the way (%(default)s)")


def shape_of(args: argparse.Namespace) -> LayerShape:
    """Returns the layer that the options name.

    Raises:
        ConfigError: they name none, or two.
    """
    kv_dtype_name(args.kv_dtype)
    dtype_name(args.wire_dtype)
    given = [name for name in _NUMBERS if getattr(args, name) is not None]
    if args.model is not None and given:
        raise ConfigError(f"--model says the shape, so --{given[0].replace('_', '-')} cannot")
    if args.model is None:
        return _from_numbers(args)
    if args.model.lower() in SHAPES:
        return LayerShape(args.model.lower(), *SHAPES[args.model.lower()])
    path = Path(args.model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f"--model {args.model!r} is no file and none of {', '.join(SHAPES)}: name a "
            "config.json, or pass --heads, --kv-heads and --head-dim"
        )
    return _from_config(path)


def _from_numbers(args: argparse.Namespace) -> LayerShape:
    if args.heads is None or (args.hidden is None and args.head_dim is None):
        raise ConfigError("pass --model, or --heads and --hidden (or --head-dim)")
    return _shape("numbers", vars(args), ("hidden", "heads", "kv_heads", "head_dim"))


def _from_config(path: Path) -> LayerShape:
    config = read_json(path)
    config = config.get("text_config", config) if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: no model's config")
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    if config.get(keys[1]) is None or config.get(keys[2]) is None:
        raise ConfigError(
            f"{path} does not say {keys[1]} and {keys[2]}: pass --heads, --kv-heads and --head-dim "
            "instead"
        )
    return _shape(path.parent.name or path.name, config, keys)


def _shape(name: str, values: dict[str, Any], keys: tuple[str, ...]) -> LayerShape:
    hidden, heads, kv_heads, head_dim = (values.get(key) for key in keys)
    for key, value in zip(keys, (hidden, heads, kv_heads, head_dim), strict=True):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    if head_dim is None:
        if hidden is None or hidden % heads:
            raise ConfigError(f"{keys[0]} {hidden} does not divide over {heads} heads")
        head_dim = hidden // heads
    if hidden is not None and name == "numbers" and hidden != heads * head_dim:
        raise ConfigError(f"{heads} heads of {head_dim} make {heads * head_dim}, not {hidden}")
    return LayerShape(name, heads, heads if kv_heads is None else kv_heads, head_dim)
