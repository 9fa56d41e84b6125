"""Llama against transformers: fp32, eager, tiny random checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from fastdecode_rdma.models import load_model
from fastdecode_rdma.reference import ReferenceOps, reference_forward

# Logits are of order 1 to 10; fp32 keeps about 1e-6 of that over these few layers.
LOGITS_ATOL = 2e-4
# Float64 on both sides: what is left is the order of the sums.
EXACT_ATOL = 1e-10

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

OPTIONS = {
    "gqa1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa3_smollm2": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 96,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "gqa7": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
    "head_dim": {"head_dim": 24},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "all_biases_tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "gelu": {"hidden_act": "gelu"},
    "eps": {"rms_norm_eps": 1e-2},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
}


def tiny(**options: object) -> LlamaConfig:
    base = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**(base | options))


def prompt(length: int, vocab: int = 101) -> torch.Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("shards", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_logits_match_transformers(options, shards, make_hf, save, hf_logits):
    model = make_hf(tiny(**options))
    ours = load_model(save(model, shards=shards), ReferenceOps())
    ids = prompt(90)  # beyond the original 64 positions of the llama3 case
    expected = hf_logits(model, ids)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(reference_forward(ours, ids), expected, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("name", ["gqa3_smollm2", "head_dim", "all_biases_tied", "llama3"])
def test_float64_matches_transformers_exactly(name, make_hf, save, hf_logits, widen):
    model = make_hf(tiny(**OPTIONS[name]))
    ours = load_model(save(model), ReferenceOps(torch.float64))
    ids = prompt(70)
    expected = hf_logits(widen(model), ids)
    torch.testing.assert_close(reference_forward(ours, ids), expected, atol=EXACT_ATOL, rtol=0)


def test_logits_at_far_positions(make_hf, save, hf_logits):
    """An ignored rope scaling passes short tests and fails at long contexts only."""
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    model = make_hf(tiny(rope_parameters=rope, max_position_embeddings=65536))
    ours = load_model(save(model), ReferenceOps())
    plain = load_model(
        save(model, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        ReferenceOps(),
    )
    ids = prompt(12)
    for first in (0, 1000, 8192, 60000):
        expected = hf_logits(model, ids, first)
        got = reference_forward(ours, ids, first_position=first)
        torch.testing.assert_close(got, expected, atol=LOGITS_ATOL, rtol=0)
    # The scaling matters for relative positions too: the test can fail.
    far = prompt(300)
    difference = reference_forward(ours, far) - reference_forward(plain, far)
    assert difference.abs().max() > 100 * LOGITS_ATOL


def test_old_checkpoint_spelling_gives_the_same_logits(make_hf, save):
    """rope_theta and rope_scaling at the top, as before transformers 5, "type" included."""
    model = make_hf(tiny(rope_parameters=LLAMA3_ROPE))
    new = save(model)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = save(model, rope_parameters=None, rope_scaling=scaling, rope_theta=500000.0)
    ids = prompt(80)
    got = [reference_forward(load_model(path, ReferenceOps()), ids) for path in (new, old)]
    assert torch.equal(*got)
