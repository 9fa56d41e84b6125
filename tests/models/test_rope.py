"""Rotary tables against transformers', bit for bit, at short and at far positions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.rope import KINDS, RopeSpec, inv_freq, rope_table

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_every_kind_is_compared_here():
    assert ROPES.keys() == KINDS.keys()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_match_transformers(rope, head_dim):
    hf = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=131072,
        rope_parameters=dict(rope),
        architectures=["LlamaForCausalLM"],
    )
    spec = ModelConfig.from_hf(hf.to_dict()).ropes[0]
    rotary = LlamaRotaryEmbedding(hf)
    assert torch.equal(inv_freq(spec), rotary.inv_freq)
    table = rope_table(spec, 60001)
    assert table.cos.shape == (60001, head_dim // 2) and table.cos.is_contiguous()
    for position in (0, 1, 1000, 8192, 60000):
        cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
        # Vectorised cos may differ in the last bit with the length of the row.
        one_ulp = 2 * torch.finfo(torch.float32).eps
        for ours, theirs in ((table.cos, cos), (table.sin, sin)):
            torch.testing.assert_close(
                ours[position], theirs[0, 0, : head_dim // 2], atol=one_ulp, rtol=0
            )


def test_attention_factor_scales_both_tables():
    plain = rope_table(RopeSpec(16), 50)
    scaled = rope_table(RopeSpec(16, attention_factor=1.5), 50)
    assert torch.equal(scaled.cos, plain.cos * 1.5)
    assert torch.equal(scaled.sin, plain.sin * 1.5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rot_dim": 16, "kind": "yarn"}, "rope type 'yarn' is not supported"),
        ({"rot_dim": 15}, "must be even, got 15"),
        ({"rot_dim": 16, "theta": float("nan")}, "rope_theta must be positive"),
        ({"rot_dim": 16, "kind": "linear"}, r"lacks its parameters \['factor'\]"),
        ({"rot_dim": 16, "kind": "linear", "params": (("factor", 0.0),)}, "factor must be pos"),
    ],
)
def test_bad_specs_raise(spec, message):
    with pytest.raises(ConfigError, match=message):
        RopeSpec(**spec)


def test_llama3_needs_its_factors_in_order():
    params = {
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ConfigError, match="low_freq_factor"):
        inv_freq(RopeSpec(16, kind="llama3", params=tuple(params.items())))
