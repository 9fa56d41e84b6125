"""What Gemma 3 alone has: a multi-modal wrapper around its text half, and two spellings."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from fastdecode_rdma.models import load_model
from fastdecode_rdma.reference import ReferenceOps, reference_forward

LOGITS_ATOL = 2e-4
WINDOW = 16


def tiny(**options: object) -> Gemma3TextConfig:
    base = {
        "vocab_size": 103,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return Gemma3TextConfig(**(base | options))


def prompt(length: int) -> torch.Tensor:
    return torch.randint(2, 103, (length,), generator=torch.Generator().manual_seed(length))


def test_layers_group_by_window(make_hf, save):
    model = load_model(save(make_hf(tiny())), ReferenceOps())
    local, full = model.kv_groups()
    assert (local.layers, local.window) == ((0, 2), WINDOW)
    assert (full.layers, full.window) == ((1, 3), None)
    assert model.scale == 16**-0.5


def test_old_checkpoint_spelling_gives_the_same_logits(make_hf, save):
    """sliding_window_pattern, rope_theta, rope_local_base_freq and rope_scaling, as on the Hub."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = make_hf(tiny(rope_parameters=rope, layer_types=None, num_hidden_layers=7))
    new = save(model)
    old = save(
        model,
        layer_types=None,
        sliding_window_pattern=6,
        rope_parameters=None,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    ids = prompt(40)
    got = [reference_forward(load_model(path, ReferenceOps()), ids) for path in (new, old)]
    assert torch.equal(*got)


@pytest.mark.parametrize("layout", ["saved", "hub"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_text_half_of_the_multimodal_model(layout, tied, make_hf, save, hf_logits, decode_path):
    """Vision tensors are left unread; both name layouts that transformers has written load."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = tiny(tie_word_embeddings=tied)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tied
    )
    model = build_multimodal(make_hf, config)
    path = save(model)
    if layout == "hub":
        rename_to_hub_layout(path)
    ours = decode_path(path)
    assert ours.model.config.tie_word_embeddings == tied
    ids = prompt(2 * WINDOW)
    torch.testing.assert_close(
        ours.logits(ids[:20], ids[20:]), hf_logits(model, ids), atol=LOGITS_ATOL, rtol=0
    )


def build_multimodal(make_hf, config):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config).eval()
    text = make_hf(config.text_config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def rename_to_hub_layout(path):
    """The names of google/gemma-3-4b-it: language_model.model.*, vision_tower.*, …"""
    renamed = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "language_model.model.")
        elif name.startswith("lm_head."):
            name = f"language_model.{name}"
        elif name.startswith("model."):
            name = name.removeprefix("model.")
        renamed[name] = tensor.clone()
    save_file(renamed, path / "model.safetensors")
