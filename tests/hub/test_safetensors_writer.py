"""Rounding and layout against PyTorch and the safetensors package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastdecode_rdma.hub.safetensors_writer import TensorSpec, encode_elements, write_checkpoint

EDGES = np.array(
    [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 1e-45, 3.4e38, -3.4e38, 65504, 1e-7, np.inf, -np.inf],
    np.float32,
)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_rounding_is_pytorchs(dtype, torch_dtype):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    random = bits.view(np.float32)
    values = np.concatenate([EDGES, random[np.isfinite(random)]])
    with np.errstate(over="ignore"):
        encoded = np.frombuffer(encode_elements(values, dtype), np.int16)
    expected = torch.from_numpy(values).to(torch_dtype).view(torch.int16).numpy()
    np.testing.assert_array_equal(encoded, expected)


def test_nan_stays_nan():
    nans = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    encoded = np.frombuffer(encode_elements(nans, "bf16"), np.int16)
    assert torch.from_numpy(encoded.copy()).view(torch.bfloat16).isnan().all()


def test_file_is_read_by_safetensors(tmp_path):
    specs = [
        TensorSpec("a", (3, 5), "fp32"),
        TensorSpec("b", (7,), "bf16"),
        TensorSpec("c", (2, 2), "fp16"),
    ]
    values = {s.name: np.arange(np.prod(s.shape), dtype=np.float32) for s in specs}
    write_checkpoint(
        tmp_path, specs, lambda s: np.array_split(values[s.name], 3), max_shard_bytes=10**9
    )
    tensors = load_file(tmp_path / "model.safetensors")
    for spec in specs:
        assert tuple(tensors[spec.name].shape) == spec.shape
        assert tensors[spec.name].float().flatten().tolist() == values[spec.name].tolist()


def test_too_few_elements_are_noticed(tmp_path):
    with pytest.raises(ValueError, match="a: 8 bytes produced, 12 declared"):
        write_checkpoint(
            tmp_path,
            [TensorSpec("a", (3,), "fp32")],
            lambda s: [np.zeros(2, np.float32)],
            max_shard_bytes=100,
        )
