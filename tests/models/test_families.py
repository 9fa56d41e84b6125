"""Every architecture and its options against transformers: fp32, eager, tiny random checkpoints.

A row of FAMILIES is covered by a recipe here: the sizes of a tiny model and its options.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import FAMILIES, load_model
from fastdecode_rdma.models.layers import DecoderModel
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.reference import ReferenceOps, reference_forward

# Logits are of order 1 to 10; fp32 keeps about 1e-6 of that over these few layers.
LOGITS_ATOL = 2e-4
# Float64 on both sides: what is left is the order of the sums.
EXACT_ATOL = 1e-10
VOCAB = 101
WINDOW = 16
PROMPT_LEN, NUM_STEPS = 44, 28  # both cross the window, together a block of the cache

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
    "partial_rotary_factor": 0.75,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 2.0,
}


@dataclass(frozen=True)
class Recipe:
    """A tiny model of one architecture: its config class, sizes of its own, options to try."""

    config: type
    sizes: dict[str, object] = field(default_factory=dict)
    options: dict[str, dict[str, object]] = field(default_factory=dict)


# One option a line; ruff would make four of it.
# fmt: off
RECIPES: dict[str, Recipe] = {
    "LlamaForCausalLM": Recipe(hf.LlamaConfig, {}, {
        "gqa1": {"num_key_value_heads": 4},
        "gqa3_tied": {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": True},
        "gqa7": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
        "head_dim": {"head_dim": 24},
        "attention_bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True},
        "all_tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "gelu": {"hidden_act": "gelu"},
        "eps": {"rms_norm_eps": 1e-2},
        "llama3": {"rope_parameters": LLAMA3},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
        "yarn": {"rope_parameters": YARN},
    }),
    "MistralForCausalLM": Recipe(hf.MistralConfig, {"sliding_window": WINDOW}, {
        "no_window": {"sliding_window": None},
        "window_1": {"sliding_window": 1},
        "head_dim_tied": {"head_dim": 32, "tie_word_embeddings": True},
    }),
    "MinistralForCausalLM": Recipe(
        hf.MinistralConfig, {"sliding_window": WINDOW, "head_dim": 16}, {
        "layer_types": {"layer_types": TYPES},
    }),
    "Qwen2ForCausalLM": Recipe(hf.Qwen2Config, {}, {
        "tied": {"tie_word_embeddings": True},
        "window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "unused_window": {"sliding_window": WINDOW, "max_window_layers": 0},
        "yarn": {"rope_parameters": YARN},
    }),
    "Qwen3ForCausalLM": Recipe(hf.Qwen3Config, {"head_dim": 32}, {
        "attention_bias": {"attention_bias": True},
        "tied": {"tie_word_embeddings": True},
        "layer_types": {
            "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": TYPES,
        },
    }),
    "GemmaForCausalLM": Recipe(hf.GemmaConfig, {"head_dim": 24}, {
        "mqa": {"num_key_value_heads": 1},
        "attention_bias": {"attention_bias": True},
        "gelu": {"hidden_act": "gelu"},
    }),
    "Gemma2ForCausalLM": Recipe(
        hf.Gemma2Config, {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 21}, {
        "low_softcaps": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
        "only_final": {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
        "only_attention": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None},
        "untied_bias": {"tie_word_embeddings": False, "attention_bias": True},
    }),
    "Gemma3ForCausalLM": Recipe(hf.Gemma3TextConfig, {
        "head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 21, "layer_types": TYPES,
    }, {
        "gqa1": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "untied": {"tie_word_embeddings": False},
        "bias": {"attention_bias": True},
        "final_softcap": {"final_logit_softcapping": 3.0},
        "pattern": {"layer_types": None, "num_hidden_layers": 7},
        "global_linear": {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }},
    }),
    "Phi3ForCausalLM": Recipe(hf.Phi3Config, {"original_max_position_embeddings": 512}, {
        "window": {"sliding_window": WINDOW},
        "tied_partial": {"tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        }},
        "short_factors": {"rope_parameters": LONGROPE},
        "long_factors": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40},
    }),
    "SmolLM3ForCausalLM": Recipe(hf.SmolLM3Config, {"no_rope_layer_interval": 2}, {
        "listed": {"no_rope_layers": [0, 1, 0]},
        "window": {"use_sliding_window": True, "sliding_window": WINDOW},
        "untied_biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    }),
    "GraniteForCausalLM": Recipe(hf.GraniteConfig, MULTIPLIERS, {
        "tied": {"tie_word_embeddings": True, "logits_scaling": 6.0},
        "no_multipliers": {name: 1.0 for name in MULTIPLIERS} | {"attention_multiplier": 0.25},
        "biases": {"attention_bias": True, "mlp_bias": True},
    }),
    "Olmo2ForCausalLM": Recipe(hf.Olmo2Config, {}, {
        "mha": {"num_key_value_heads": 4},
        "attention_bias": {"attention_bias": True},
        "tied": {"tie_word_embeddings": True},
    }),
    "Olmo3ForCausalLM": Recipe(
        hf.Olmo3Config, {"sliding_window": WINDOW, "num_hidden_layers": 5}, {
        "yarn": {"num_hidden_layers": 3, "layer_types": TYPES, "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        }},
    }),
    "Exaone4ForCausalLM": Recipe(
        hf.Exaone4Config, {"sliding_window": WINDOW, "num_hidden_layers": 4}, {
        "no_window": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    }),
    "SeedOssForCausalLM": Recipe(hf.SeedOssConfig, {"head_dim": 24}, {
        "all_biases": {"attention_out_bias": True, "mlp_bias": True},
        "no_bias": {"attention_bias": False},
    }),
    "CwmForCausalLM": Recipe(
        hf.CwmConfig, {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 5}, {
        "own_rope": {"rope_parameters": LLAMA3},
    }),
}
# fmt: on
NOT_HERE = {
    "OPTForCausalLM": "test_opt.py",
    "Gemma3ForConditionalGeneration": "test_gemma3.py",
}
"""Architectures with a file of their own."""

CASES = {
    f"{architecture.removesuffix('ForCausalLM')}-{name}": (recipe, changes)
    for architecture, recipe in RECIPES.items()
    for name, changes in ({"plain": {}} | recipe.options).items()
}
PLAIN = [name for name in CASES if name.endswith("-plain")]


def config_of(case: str) -> hf.PreTrainedConfig:
    recipe, changes = CASES[case]
    return recipe.config(**(SIZES | recipe.sizes | changes))


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def assert_contract(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits within the tolerance; ids equal wherever the choice is not a tie within it."""
    torch.testing.assert_close(logits, expected, atol=LOGITS_ATOL, rtol=0)
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 2 * LOGITS_ATOL
    assert clear.float().mean() > 0.95
    assert torch.equal(logits.argmax(1)[clear], expected.argmax(1)[clear])


def test_every_architecture_has_a_recipe() -> None:
    assert RECIPES.keys() | NOT_HERE.keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_row_has_its_file(architecture) -> None:
    module = importlib.import_module(f"fastdecode_rdma.models.{FAMILIES[architecture].module}")
    assert issubclass(module.Model, DecoderModel)


@pytest.mark.parametrize("case", CASES)
def test_prompt_and_decode_logits_are_those_of_transformers(
    case, make_hf, save, hf_logits, decode_path
) -> None:
    model = make_hf(config_of(case))
    ids = prompt(PROMPT_LEN + NUM_STEPS)
    expected = hf_logits(model, ids)
    assert expected.abs().max() > 0.5
    path = decode_path(save(model, shards=case in PLAIN))
    assert_contract(path.logits(ids[:PROMPT_LEN], ids[PROMPT_LEN:]), expected)


@pytest.mark.parametrize("case", PLAIN)
def test_the_default_mode_keeps_the_contract(
    case, make_hf, save, hf_logits, decode_path, two_threads
) -> None:
    """Two threads, and for each shape whichever GEMM library was the fastest."""
    model = make_hf(config_of(case))
    ids = prompt(PROMPT_LEN + 4)
    path = decode_path(save(model), CpuOps())
    assert path.model.ops.num_threads == 2
    logits = path.logits(ids[:PROMPT_LEN], ids[PROMPT_LEN:])
    assert_contract(logits, hf_logits(model, ids))


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("case", ["Mistral-plain", "Gemma2-plain", "Exaone4-plain"])
def test_windows_end_where_transformers_ends_them(
    case, length, make_hf, save, hf_logits, decode_path
) -> None:
    model = make_hf(config_of(case))
    ids = prompt(length + 2)
    path = decode_path(save(model))
    expected = hf_logits(model, ids)
    torch.testing.assert_close(
        path.logits(ids[:length], ids[length:]), expected, atol=LOGITS_ATOL, rtol=0
    )


def test_biases_are_the_familys_own(make_hf, save) -> None:
    """Qwen2 has q/k/v biases without a key that says so; Mistral has none, whatever is stored."""
    name = "model.layers.1.self_attn.k_proj.bias"
    qwen = save(make_hf(config_of("Qwen2-plain")))
    tensors = load_file(qwen / "model.safetensors")
    assert tensors.pop(name).shape == (32,)
    save_file(tensors, qwen / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks 1 tensor: {name}"):
        load_model(qwen, ReferenceOps())
    mistral = save(make_hf(config_of("Mistral-plain")), attention_bias=True)
    tensors = load_file(mistral / "model.safetensors") | {name: torch.ones(32)}
    save_file(tensors, mistral / "model.safetensors")
    with pytest.raises(ConfigError, match=f"MistralForCausalLM does not use: {name}"):
        load_model(mistral, ReferenceOps())


def test_a_fused_checkpoint_of_the_wrong_shape_is_refused(make_hf, save) -> None:
    path = save(make_hf(config_of("Phi3-plain")), num_key_value_heads=4)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(ConfigError, match=rf"{name} .* is \[128, 64\], not \[192, 64\]"):
        load_model(path, ReferenceOps())


FLOAT64 = [
    *PLAIN,
    "Llama-all_tied",
    "Llama-llama3",
    "Gemma2-low_softcaps",
    "Gemma3-global_linear",
    "Phi3-long_factors",
    "Granite-tied",
    "SmolLM3-window",
]


@pytest.mark.parametrize("case", FLOAT64)
def test_float64_matches_transformers_exactly(case, make_hf, save, hf_logits, widen) -> None:
    """What fp32 rounding could hide: here nothing but the order of sums is left."""
    model = make_hf(config_of(case))
    ours = load_model(save(model), ReferenceOps(torch.float64))
    ids = prompt(3 * WINDOW)
    expected = hf_logits(widen(model), ids)
    torch.testing.assert_close(reference_forward(ours, ids), expected, atol=EXACT_ATOL, rtol=0)
