"""Every ggml format that the `gguf` package dequantises, against its own dequantisation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.convert import convert_gguf

Q = gguf.GGMLQuantizationType
# Blocks of the largest formats have 256 elements.
HIDDEN, HEADS, HEAD_DIM, VOCAB = 256, 4, 64, 14
# No values to make a weight from, or formats of temporaries that no file holds.
NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}


def is_dequantised(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DEQUANTISED = [kind for kind in Q if is_dequantised(kind)]
REFUSED = [kind for kind in Q if not is_dequantised(kind)]


@cache
def random_rows(kind: gguf.GGMLQuantizationType, num_rows: int, width: int) -> np.ndarray:
    """Packed rows of random bits, uint8 [num_rows, bytes], whose values are all finite."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    needed = num_rows * width // block_len
    blocks = rng.integers(0, 256, (2 * needed + 64, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, kind)
    blocks = blocks[np.isfinite(values).all(axis=-1)][:needed]
    return blocks.reshape(num_rows, width // block_len * block_bytes)


def write(path: Path, packed: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> None:
    """A llama of one layer; tensors that are not given are fp32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*"abcdefghijklm", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (HIDDEN, HIDDEN) for name in square}
    shapes |= {f"blk.0.attn_{name}.weight": (HEAD_DIM, HIDDEN) for name in "kv"}
    shapes |= {f"blk.0.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for name, shape in shapes.items():
        if name in packed:
            writer.add_tensor(name, packed[name][0], raw_dtype=packed[name][1])
        else:
            writer.add_tensor(name, np.ones(shape, np.float32))
    for name in packed.keys() - shapes.keys():
        writer.add_tensor(name, packed[name][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_values_are_the_packages(kind, tmp_path):
    names = ("blk.0.attn_v.weight", "blk.0.attn_k.weight")
    packed = {name: (random_rows(kind, HEAD_DIM, HIDDEN), kind) for name in names}
    if kind in (Q.F32, Q.F16):  # the writer takes these as numbers
        dtype = np.float32 if kind is Q.F32 else np.float16
        packed = {name: (rows.view(dtype), kind) for name, (rows, _) in packed.items()}
    write(tmp_path / "m.gguf", packed)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    with np.errstate(all="ignore"):
        values = gguf.dequantize(random_rows(kind, HEAD_DIM, HIDDEN), kind)
    assert len(np.unique(values)) > 2
    attention = "model.layers.0.self_attn"
    assert torch.equal(tensors[f"{attention}.v_proj.weight"], torch.from_numpy(values))
    # Rows of k lie in pairs: the same rows, in another order.
    expected = np.concatenate([values[0::2], values[1::2]])
    assert torch.equal(tensors[f"{attention}.k_proj.weight"], torch.from_numpy(expected))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_other_formats_are_named(kind, tmp_path):
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.zeros((HIDDEN, HIDDEN // block_len * block_bytes), np.uint8)
    write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (rows, kind)})
    with pytest.raises(ConfigError, match=f"ffn_up.*type {kind.name}, which the installed"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_of_use_is_refused():
    """A new format of the package that it does not dequantise must be looked at."""
    assert {kind.name for kind in REFUSED} - NOT_WEIGHTS <= {"Q1_0"}


def test_a_scale_beside_a_weight_is_applied(tmp_path):
    """NVFP4 keeps one more factor per tensor; that of the inputs is for 4-bit arithmetic only."""
    rows = random_rows(Q.Q8_0, HIDDEN, HIDDEN)
    write(
        tmp_path / "m.gguf",
        {
            "blk.0.ffn_up.weight": (rows, Q.Q8_0),
            "blk.0.ffn_up.scale": (np.array([0.25], np.float32), Q.F32),
            "blk.0.ffn_up.input_scale": (np.array([3.0], np.float32), Q.F32),
        },
    )
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = torch.from_numpy(gguf.dequantize(rows, Q.Q8_0)) * 0.25
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], expected)


def test_values_that_the_target_cannot_hold_are_named(tmp_path):
    values = np.full((HIDDEN, HIDDEN), 1e5, np.float32)
    write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (values, Q.F32)})
    with pytest.raises(ConfigError, match=r"up_proj.*too large for fp16"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="fp16")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="bf16")
