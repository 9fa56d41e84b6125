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


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """make_gguf(kind, quantization=F32, drop=(), extra=(), tensors=…) -> (path, stored values)."""

    def make(
        kind: str = "llama",
        *,
        quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        drop: tuple[str, ...] = (),
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
    ) -> tuple[Path, dict[str, np.ndarray]]:
        path = tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, kind)
        model, tokens, types, scores = tokens_of(kind)
        rng = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (len(tokens), HIDDEN),
            "output_norm.weight": (HIDDEN,),
        }
        for layer in range(LAYERS):
            for name, shape in block_shapes(kind).items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
        values = {
            name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
        }
        values |= tensors or {}
        numbers = {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": HIDDEN,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "rope.dimension_count": HEAD_DIM,
            "attention.sliding_window": 16,
        }
        numbers = {f"{kind}.{key}": number for key, number in numbers.items()}
        for key, value in (numbers | (metadata or {})).items():
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key, value)
        writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32(f"{kind}.rope.freq_base", 500000.0)
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if model == "gpt2":
            writer.add_tokenizer_pre("smollm")
            writer.add_token_merges(["a b", "Ġ ab"])
            writer.add_chat_template("{{ messages[0]['content'] }}")
        else:
            writer.add_token_scores(scores)
            writer.add_add_bos_token(True)
            writer.add_add_space_prefix(False)
            writer.add_unk_token_id(3)
        writer.add_bos_token_id(1 if kind == "llama" else 2)
        writer.add_eos_token_id(2 if kind == "llama" else 1)
        for name, value in values.items():
            if name in drop:
                continue
            if value.ndim == 1:
                writer.add_tensor(name, value)
                continue
            packed = gguf.quantize(value, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
            values[name] = gguf.dequantize(packed, quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, values

    return make
