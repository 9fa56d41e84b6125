"""`fastdecode models`: the architectures that load, and what of each is supported."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from fastdecode_rdma.models.families import FAMILIES
from fastdecode_rdma.models.hf_config import GATED, PLAIN, Family
from fastdecode_rdma.models.hf_layers import (
    TypedLayers,
    full_layers,
    nope_layers,
    one_window,
    upper_layers,
)
from fastdecode_rdma.models.rope import KINDS

_WINDOWS = {
    full_layers: "none",
    one_window: "sliding_window, all layers",
    upper_layers: "use_sliding_window, by layer_types or max_window_layers",
    nope_layers: "use_sliding_window, by layer_types or no_rope_layers",
}
_WIDTH = 100
_DTYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastdecode models`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def describe(architecture: str) -> dict[str, Any]:
    """Returns what is supported of one architecture, by the words of config.json."""
    family = FAMILIES[architecture]
    has_rope = family.module == "decoder"
    return {
        "architecture": architecture,
        "model_type": family.model_type,
        "models": family.models,
        "rope_types": list(KINDS) if has_rope else [],
        "activations": list(GATED if has_rope else PLAIN),
        "sliding_window": _windows(family),
        "biases": {"qkv": family.qkv_bias, "o": family.o_bias, "mlp": family.mlp_bias},
        "qk_norm": family.qk_norm,
        "layers_without_rope": family.layers is nope_layers
        or (isinstance(family.layers, TypedLayers) and family.layers.nope_when_full),
        "softcaps": "attn_logit_softcapping" in family.defaults,
        "multipliers": "residual_multiplier" in family.defaults,
        "tied_by_default": bool(family.defaults["tie_word_embeddings"]),
    }


def _windows(family: Family) -> str:
    if isinstance(family.layers, TypedLayers):
        return "sliding_window, by layer_types"
    return _WINDOWS[family.layers]


def _features(row: dict[str, Any]) -> list[str]:
    """Returns what sets an architecture apart, for one line of text."""
    words = []
    biases = {
        part: "" if rule is True else f" ({rule})" for part, rule in row["biases"].items() if rule
    }
    by_rule: dict[str, list[str]] = {}
    for part, rule in biases.items():
        by_rule.setdefault(rule, []).append(part)
    words += [f"{'/'.join(parts)} bias{rule}" for rule, parts in by_rule.items()]
    if row["qk_norm"]:
        words.append(f"q/k norm by {row['qk_norm']}")
    if row["sliding_window"] != "none":
        words.append(f"windows ({row['sliding_window']})")
    if row["layers_without_rope"]:
        words.append("layers without rope")
    if row["softcaps"]:
        words.append("attention and final softcap")
    if row["multipliers"]:
        words.append("embedding, residual, attention and logits multipliers")
    return words


def format_text(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text: one line per architecture, its features below."""
    width = max(len(row["architecture"]) for row in rows)
    kind = max(len(row["model_type"]) for row in rows)
    lines = []
    for row in rows:
        name, model_type = row["architecture"], row["model_type"]
        lines.append(f"{name:<{width}}  {model_type:<{kind}}  {row['models']}")
        words = "; ".join(_features(row))
        lines += textwrap.wrap(
            words, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(
        [
            *lines,
            "",
            f"rope types (all but OPT): {', '.join(KINDS)}",
            "    in rope_scaling or rope_parameters, flat or by layer type; partial_rotary_factor",
            f"checkpoints: safetensors in {', '.join(_DTYPES)}, whole or in shards",
            "anything else in a config.json that changes the arithmetic is refused by name",
        ]
    )


def run(args: argparse.Namespace) -> int:
    """Prints the list."""
    rows = [describe(architecture) for architecture in FAMILIES]
    print(json.dumps(rows, indent=2) if args.json else format_text(rows))
    return 0
