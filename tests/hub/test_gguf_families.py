"""Every architecture: transformers' model -> GGUF as llama.cpp's converter writes it -> back.

The converter's conventions are written down here on their own: names by the `gguf` package's map,
metadata by its writer, rotary rows interleaved, norms of Gemma plus one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.gguf_models import ARCHITECTURES
from fastdecode_rdma.models import load_model
from fastdecode_rdma.reference import ReferenceOps, reference_forward

ARCH = gguf.MODEL_ARCH
# Logits are of order 1 to 10; fp32 keeps about 1e-6 of that over these few layers.
LOGITS_ATOL = 2e-4
# (w + 1) - 1 in fp32, of w around 0.
NORM_ATOL = 2**-23
NUM_IDS = 70

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.5, 5.0, 10.0, 20.0, 40.0],
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A configuration, and what llama.cpp's converter does with models of its class."""

    arch: gguf.MODEL_ARCH
    kind: type
    options: dict[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    norm_plus_one: bool = False
    extra: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    model_class: str | None = None  # what comes back, where it is not what went in


def window(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def window_and_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    window(writer, config)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(local)


def gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    window(writer, config)
    rope = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * 16))
    if "long_factor" in rope:
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        log = math.log(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / log))
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)


def granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


_T = transformers
CASES = {
    "llama3": Case(ARCH.LLAMA, _T.LlamaConfig, {"rope_parameters": LLAMA3}, interleaved=True),
    "llama_biases_tied": Case(
        ARCH.LLAMA,
        _T.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
        interleaved=True,
    ),
    "llama_linear": Case(
        ARCH.LLAMA,
        _T.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20000.0}},
        interleaved=True,
    ),
    "mistral": Case(
        ARCH.LLAMA, _T.MistralConfig, {"sliding_window": 16}, interleaved=True, extra=window
    ),
    # Without a window, Mistral is Llama.
    "mistral_nemo": Case(
        ARCH.LLAMA,
        _T.MistralConfig,
        {"sliding_window": None, "head_dim": 32},
        interleaved=True,
        model_class="LlamaForCausalLM",
    ),
    "qwen2": Case(ARCH.QWEN2, _T.Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": Case(ARCH.QWEN3, _T.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": Case(ARCH.GEMMA, _T.GemmaConfig, {"head_dim": 32}, norm_plus_one=True),
    "gemma2": Case(
        ARCH.GEMMA2,
        _T.Gemma2Config,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
        norm_plus_one=True,
        extra=gemma2,
    ),
    "gemma3": Case(
        ARCH.GEMMA3,
        _T.Gemma3TextConfig,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 15000.0},
            },
        },
        norm_plus_one=True,
        extra=window,
    ),
    "phi3_longrope": Case(
        ARCH.PHI3,
        _T.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        extra=phi3,
    ),
    "phi3_window": Case(
        ARCH.PHI3,
        _T.Phi3Config,
        {
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 128,
        },
        extra=phi3,
    ),
    "granite": Case(
        ARCH.GRANITE,
        _T.GraniteConfig,
        {
            "attention_multiplier": 0.22,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        interleaved=True,
        extra=granite,
    ),
    "olmo2": Case(ARCH.OLMO2, _T.Olmo2Config),
    "olmo3": Case(
        ARCH.OLMO2,
        _T.Olmo3Config,
        {
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        extra=window_and_layers,
    ),
    "smollm3": Case(ARCH.SMOLLM3, _T.SmolLM3Config, {"num_hidden_layers": 5}, interleaved=True),
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's rotary halves -> pairs side by side, as the converter stores them."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def add_parameters(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converter writes for all text models."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if (local := config.rope_parameters.get("sliding_attention")) is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim))


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """The divisor of each frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "Ġab"]
    types = [3, 3, 3] + [1] * (len(tokens) - 3) + [5] * (vocab_size - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(path: Path, model: torch.nn.Module, case: Case) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    add_parameters(writer, config)
    case.extra(writer, config)
    add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(case.arch, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if case.interleaved and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if case.interleaved and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        if case.norm_plus_one and name.endswith("norm.weight"):
            values = values + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_model(case: Case) -> torch.nn.Module:
    """A model whose weights make every part matter: no norm at 1, no bias at 0."""
    torch.manual_seed(0)
    config = case.kind(**(BASE | case.options))
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=0.0 if case.norm_plus_one else 1.0, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.12)
    return model


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def converted(request, tmp_path_factory, one_thread) -> tuple[Case, torch.nn.Module, Path]:
    case = request.param
    path = tmp_path_factory.mktemp("family")
    model = make_model(case)
    write_gguf(path / "model.gguf", model, case)
    convert_gguf(path / "model.gguf", path / "out", dtype="fp32")
    return case, model, path / "out"


def test_every_architecture_has_a_case():
    assert {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()} == set(ARCHITECTURES)


def test_tensors_come_back(converted):
    case, model, out = converted
    tensors = load_file(out / "model.safetensors")
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        is_norm = case.norm_plus_one and name.endswith("norm.weight")
        torch.testing.assert_close(
            tensors[name], values, atol=NORM_ATOL if is_norm else 0.0, rtol=0.0, msg=name
        )


def test_config_comes_back(converted):
    case, model, out = converted
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.architectures == [case.model_class or type(model).__name__]
    actual, expected = config.to_dict(), model.config.to_dict()
    about_the_file = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    if case.model_class is not None:
        about_the_file |= {"model_type", "sliding_window"}
    for key in set(expected) - about_the_file:
        value = expected[key]
        if key == "rope_parameters" and actual[key].get("partial_rotary_factor") == 1.0:
            value = {"partial_rotary_factor": 1.0} | value
        assert actual[key] == value, key


def test_logits_are_the_same(converted):
    """By transformers (from the directory alone) and by this library."""
    _, model, out = converted
    ids = torch.randint(0, 96, (NUM_IDS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        theirs = again.eval()(ids[None]).logits[0]
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=0)
    ours = reference_forward(load_model(out, ReferenceOps()), ids)
    torch.testing.assert_close(ours, expected, atol=LOGITS_ATOL, rtol=0)


def test_tokenizer_loads_in_transformers(converted):
    _, _, out = converted
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("ab<|im_end|> abc").input_ids
    assert ids == [12, 2, 13, 5]
    assert tokenizer.decode(ids) == "ab<|im_end|> abc"
