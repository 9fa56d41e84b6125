"""OPT against transformers: learned positions, LayerNorm before and after, biases or none."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import load_model
from fastdecode_rdma.reference import ReferenceOps, reference_forward

LOGITS_ATOL = 2e-4
EXACT_ATOL = 1e-10

OPTIONS = {
    "plain": {},
    "no_bias": {"enable_bias": False},
    "norm_after": {"do_layer_norm_before": False},
    "norm_after_no_bias": {"do_layer_norm_before": False, "enable_bias": False},
    "projected_350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "projected_before": {"word_embed_proj_dim": 32},
    "untied": {"tie_word_embeddings": False},
    "no_affine_gelu": {"layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "no_final_norm": {"_remove_final_layer_norm": True},
}


def tiny(**options: object) -> OPTConfig:
    base = {
        "vocab_size": 105,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": None,
    }
    return OPTConfig(**(base | options))


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 105, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("shards", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_logits_match_transformers(options, shards, make_hf, save, hf_logits):
    model = make_hf(tiny(**options))
    ours = load_model(save(model, shards=shards), ReferenceOps())
    ids = prompt(64)  # up to the last position there is
    expected = hf_logits(model, ids)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(reference_forward(ours, ids), expected, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_float64_matches_transformers_exactly(options, make_hf, save, hf_logits, widen):
    model = make_hf(tiny(**options))
    ours = load_model(save(model), ReferenceOps(torch.float64))
    ids = prompt(40)
    expected = hf_logits(widen(model), ids)
    torch.testing.assert_close(reference_forward(ours, ids), expected, atol=EXACT_ATOL, rtol=0)


def test_base_model_names_load_too(make_hf, save):
    """Early OPT checkpoints say decoder.* where later ones say model.decoder.*"""
    path = save(make_hf(tiny()))
    ids = prompt(9)
    expected = reference_forward(load_model(path, ReferenceOps()), ids)
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()},
        path / "model.safetensors",
    )
    assert torch.equal(reference_forward(load_model(path, ReferenceOps()), ids), expected)


def test_positions_end_where_the_table_ends(make_hf, save):
    with pytest.raises(ConfigError, match="max_model_len must be from 1 to 64"):
        load_model(save(make_hf(tiny())), ReferenceOps(), max_model_len=65)
