"""Tiny GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 32, 96, 2


def block_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, outermost dimension first. head_dim differs from hidden / heads."""
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    if kind == "gemma3":
        shapes |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        shapes |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
    return shapes


def tokens_of(kind: str) -> tuple[str, list[str], list[int], list[float]]:
    """Tokenizer model, tokens, types and scores of a tiny vocabulary."""
    if kind == "llama":
        tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "Ġab"]
        return "gpt2", tokens, [3, 3, 3] + [1] * (len(tokens) - 3), []
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n\n"]
    types = [3, 3, 3, 2, 4]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["ab", "\u2581a", "bc", "abc", *"abc", "\u2581"]
    scores = [-1000.0] * (len(tokens) + 256) + [-float(n) for n in range(len(pieces))]
    return (
        "llama",
        tokens + byte_tokens + pieces,
        types + [6] * 256 + [1] * len(pieces),
        scores,
    )


def metadata_of(kind: str) -> dict[str, Any]:
    """What a file of a tiny model says."""
    model, tokens, types, scores = tokens_of(kind)
    pairs: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 500000.0,
    }
    if kind == "gemma3":
        pairs["attention.sliding_window"] = 16
    pairs = {f"{kind}.{key}": value for key, value in pairs.items()}
    pairs |= {"model": model, "tokens": tokens, "token_type": types}
    if model == "gpt2":
        pairs |= {"pre": "smollm", "merges": ["a b", "Ġ ab"], "bos_token_id": 1, "eos_token_id": 2}
    else:
        pairs |= {"scores": scores, "add_bos_token": True, "add_space_prefix": False}
        pairs |= {"unknown_token_id": 3, "bos_token_id": 2, "eos_token_id": 1}
    named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
    if model == "gpt2":
        named["tokenizer.chat_template"] = "{{ messages[0]['content'] }}"
    return named


def value_type(value: Any) -> gguf.GGUFValueType:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        list: gguf.GGUFValueType.ARRAY,
        int: gguf.GGUFValueType.UINT32,
    }
    kind = kinds[type(value)]
    is_wide = kind is gguf.GGUFValueType.UINT32 and not 0 <= value < 1 << 32
    return gguf.GGUFValueType.INT64 if is_wide else kind


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """make_gguf(kind, drop=(), metadata=…, tensors=…, max_tensors=0) -> (path, stored values).

    `metadata` adds or replaces pairs; None takes one away. `max_tensors` splits the model in parts;
    the path is then that of the first.
    """

    def make(
        kind: str = "llama",
        *,
        drop: tuple[str, ...] = (),
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        max_tensors: int = 0,
    ) -> tuple[Path, dict[str, np.ndarray]]:
        path = tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, kind, split_max_tensors=max_tensors)
        pairs = metadata_of(kind) | (metadata or {})
        rng = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (len(tokens_of(kind)[1]), HIDDEN),
            "output_norm.weight": (HIDDEN,),
        }
        for layer in range(LAYERS):
            for name, shape in block_shapes(kind).items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
        values = {
            name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
        }
        values |= tensors or {}
        for key, value in pairs.items():
            if value is not None:
                writer.add_key_value(key, value, value_type(value))
        for name, value in values.items():
            if name not in drop:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return writer.format_shard_names(path)[0], values

    return make
