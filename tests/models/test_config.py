"""What config.json keys become, in every spelling, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import transformers as hf

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.families import FAMILIES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 7,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(base: dict, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**base, **changes})


def test_llama_defaults():
    config = read(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "bf16")
    assert (config.norm_eps, config.max_model_len) == (1e-6, 2048)
    assert config.scale == 16**-0.5
    assert not (config.tie_word_embeddings or config.qkv_bias or config.mlp_bias)
    assert config.windows == (None, None)
    assert config.ropes[0].theta == 10000.0
    assert config.qkv_width == 12 * 16


CLASSES = {
    "LlamaForCausalLM": hf.LlamaConfig,
    "MistralForCausalLM": hf.MistralConfig,
    "MinistralForCausalLM": hf.MinistralConfig,
    "Qwen2ForCausalLM": hf.Qwen2Config,
    "Qwen3ForCausalLM": hf.Qwen3Config,
    "GemmaForCausalLM": hf.GemmaConfig,
    "Gemma2ForCausalLM": hf.Gemma2Config,
    "Gemma3ForCausalLM": hf.Gemma3TextConfig,
    "Phi3ForCausalLM": hf.Phi3Config,
    "SmolLM3ForCausalLM": hf.SmolLM3Config,
    "GraniteForCausalLM": hf.GraniteConfig,
    "Olmo2ForCausalLM": hf.Olmo2Config,
    "Olmo3ForCausalLM": hf.Olmo3Config,
    "Exaone4ForCausalLM": hf.Exaone4Config,
    "SeedOssForCausalLM": hf.SeedOssConfig,
    "CwmForCausalLM": hf.CwmConfig,
    "OPTForCausalLM": hf.OPTConfig,
}


def test_every_row_is_compared_here():
    wrapped = {"Gemma3ForConditionalGeneration"}  # its text_config is that of Gemma3ForCausalLM
    assert CLASSES.keys() | wrapped == FAMILIES.keys()


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("num_layers", [None, 9])
def test_defaults_are_those_of_transformers(architecture, num_layers):
    """A config.json that holds next to nothing means what transformers makes of it."""
    hf_class, family = CLASSES[architecture], FAMILIES[architecture]
    raw = {"architectures": [architecture], "model_type": family.model_type}
    raw |= {LLAMA["model_type"]: LLAMA, OPT["model_type"]: OPT}.get(family.model_type, {})
    if num_layers is not None:
        raw["num_hidden_layers"] = num_layers
    ours = ModelConfig.from_hf(raw)
    full = ModelConfig.from_hf(hf_class(**raw).to_dict())
    for field in ("dtype", "embed_dim"):
        object.__setattr__(full, field, getattr(ours, field))  # spelled out there, no arithmetic
    assert ours == full


def test_null_means_none_where_that_is_not_the_default():
    """Mistral 0.2 and later say "sliding_window": null; absent, it would be 4096."""
    mistral = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
    assert read(mistral).windows == (4096, 4096)
    assert read(mistral, sliding_window=None).windows == (None, None)
    gemma2 = {"architectures": ["Gemma2ForCausalLM"]}
    assert (read(gemma2).attn_softcap, read(gemma2).final_softcap) == (50.0, 30.0)
    config = read(gemma2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attn_softcap, config.final_softcap) == (None, None)


def test_a_window_that_no_sequence_outgrows_is_none():
    """Phi-3.5 states a window of 262144 tokens and 131072 positions."""
    phi3 = {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 1}
    assert read(phi3, sliding_window=4095).windows == (4095,)
    assert read(phi3, sliding_window=4096).windows == (None,)


def test_head_dim_need_not_be_hidden_over_heads():
    config = read(LLAMA, head_dim=32, num_key_value_heads=2)
    assert config.head_dim == 32 and config.ropes[0].rot_dim == 32
    assert config.kv_groups[0].row_width == 8 * 32


def test_gemma3_layers_follow_the_pattern():
    config = read(GEMMA, sliding_window=512)
    assert config.windows == (512,) * 5 + (None,) + (512,)
    assert [rope.theta for rope in config.ropes] == [1e4] * 5 + [1e6] + [1e4]
    assert config.tie_word_embeddings and config.embed_scale == 8.0
    local, full = config.kv_groups
    assert local.layers == (0, 1, 2, 3, 4, 6) and full.layers == (5,)


def test_gemma3_rope_scaling_is_for_global_layers_only():
    config = read(GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    kinds = [rope.kind for rope in config.ropes]
    assert kinds == ["default"] * 5 + ["linear"] + ["default"]
    assert config.max_model_len == 131072  # Gemma states the stretched length


@pytest.mark.parametrize("where", ["top", "text_config", "top_wins", "default"])
def test_tie_flag_may_sit_under_text_config(where):
    text = {key: value for key, value in GEMMA.items() if key != "architectures"}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    if where in ("top", "top_wins"):
        raw["tie_word_embeddings"] = False
    if where in ("text_config", "top_wins"):
        text["tie_word_embeddings"] = where == "top_wins"
    assert ModelConfig.from_hf(raw).tie_word_embeddings == (where == "default")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_spellings(key):
    rope = {"rope_type": "linear", "factor": 2.0}
    if key == "rope_scaling":
        config = read(LLAMA, rope_scaling=rope, rope_theta=5000.0)
    else:
        config = read(LLAMA, rope_parameters={**rope, "rope_theta": 5000.0})
    assert config.ropes[0].theta == 5000.0 and config.ropes[0].param("factor") == 2.0
    assert config.max_model_len == 4096  # Llama states the length before stretching


def test_llama3_original_length_beside_the_rope_parameters_wins():
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    key = "original_max_position_embeddings"
    assert read(LLAMA, rope_scaling=rope).ropes[0].param(key) == 4096
    assert read(LLAMA, rope_scaling=rope, **{key: 1024}).ropes[0].param(key) == 1024
    assert read(LLAMA, rope_scaling=rope).max_model_len == 2048


def test_partial_rotary():
    assert read(LLAMA, partial_rotary_factor=0.5).ropes[0].rot_dim == 8


def test_a_layer_type_without_rope():
    rope = {"full_attention": None, "sliding_attention": {"rope_type": "default"}}
    config = read(GEMMA, rope_parameters=rope)
    assert config.ropes[5] is None and config.ropes[4] is not None


def test_eos_is_the_union_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 7, 9)
    assert ModelConfig.from_hf(tmp_path / "config.json").eos_token_ids == (2, 7, 9)


def test_without_a_word_on_eos_the_familys_holds_but_null_is_none():
    silent = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert ModelConfig.from_hf(silent).eos_token_ids == (2,)
    assert ModelConfig.from_hf(silent | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float16", "torch.float16"])
def test_dtype_spellings(key, name):
    assert read({**LLAMA, "torch_dtype": None}, **{key: name}).dtype == "fp16"


def test_model_type_stands_in_for_architectures():
    assert read(LLAMA, architectures=None).module == "decoder"
    assert read(OPT, architectures=[]).module == "opt"


GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16}
ARITHMETIC = {
    "attention_multiplier": ([], GRANITE, "scale", lambda value: value),
    "attn_logit_softcapping": ([0], GEMMA2, "attn_softcap", lambda value: value),
    "clip_qkv": ([], None, None, None),
    "embedding_multiplier": ([1], GRANITE, "embed_scale", lambda value: value),
    "final_logit_softcapping": ([0], GEMMA2, "final_softcap", lambda value: value),
    "layer_rope_theta": ([], None, None, None),
    "logits_scaling": ([1], GRANITE, "logits_scale", lambda value: 1 / value),
    "query_pre_attn_scalar": ([], GEMMA2, "scale", lambda value: value**-0.5),
    "residual_multiplier": ([1], GRANITE, "residual_scale", lambda value: value),
    "rope_interleaved": ([False], None, None, None),
    "use_bidirectional_attention": ([False], None, None, None),
}
"""Keys that change the arithmetic: values that do not; a family with the key; field and meaning."""


@pytest.mark.parametrize("value", [0, 1, None, 2, False, True])
@pytest.mark.parametrize("key", ARITHMETIC)
@pytest.mark.parametrize("base", [LLAMA, OPT], ids=["llama", "opt"])
def test_a_family_without_a_key_takes_only_what_changes_nothing(base, key, value):
    neutral = [None, *ARITHMETIC[key][0]]
    if any(value is one for one in neutral):
        assert read(base, **{key: value}) == read(base)
    else:
        with pytest.raises(ConfigError, match=f"^{key} {value} is not supported with model_type"):
            read(base, **{key: value})


@pytest.mark.parametrize("key", [key for key, row in ARITHMETIC.items() if row[1] is not None])
def test_a_family_with_the_key_means_each_value(key):
    _, base, field, meaning = ARITHMETIC[key]
    for value in (1, 2):
        assert getattr(read(base, **{key: value}), field) == meaning(value)
    null = getattr(read(base, **{key: None}), field)
    assert null == (None if field.endswith("softcap") else getattr(read(base), field))
    with pytest.raises(ConfigError, match=f"^{key} must be positive, got 0"):
        read(base, **{key: 0})
    with pytest.raises(ConfigError, match=f"^{key} must be a number, got True"):
        read(base, **{key: True})


REFUSED = {
    "architecture": (LLAMA, {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not"),
    "architecture_nested": (LLAMA, {"architectures": [["Llama"]]}, "'Llama'.* is not supported"),
    "model_type": (LLAMA, {"architectures": None, "model_type": "mamba"}, "'mamba' is not"),
    "quantized": (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not"),
    "activation": (LLAMA, {"hidden_act": "relu6"}, "hidden_act 'relu6'"),
    "opt_activation": (OPT, {"activation_function": "silu"}, "activation_function 'silu'"),
    "rope_kind": (
        LLAMA,
        {"rope_scaling": {"rope_type": "mrope", "mrope_section": [16, 24, 24]}},
        "rope type 'mrope' is not supported",
    ),
    "rope_unknown_key": (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "attention_factor": 1.2}},
        r"\['attention_factor'\]",
    ),
    "rope_lacks_factor": (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope_flat_gemma": (GEMMA, {"rope_parameters": {"rope_type": "default"}}, "per layer type"),
    "rope_lacks_layer_type": (
        GEMMA,
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "no entry for sliding_attention",
    ),
    "interleaved": (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
    "bidirectional": (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "layer_types": (GEMMA, {"layer_types": ["linear_attention"] * 7}, "linear_attention"),
    "layer_types_count": (GEMMA, {"layer_types": ["full_attention"]}, "1 entries for 7 layers"),
    "softcap": (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not"),
    "multiplier": (LLAMA, {"residual_multiplier": 0.22}, "residual_multiplier 0.22 is not .*llama"),
    "nope": (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "clip_qkv": (LLAMA, {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    "heads": (LLAMA, {"num_attention_heads": 5}, "64 does not divide over 5 heads"),
    "kv_heads": (LLAMA, {"num_key_value_heads": 3}, "4 query heads do not divide over 3"),
    "odd_head_dim": (LLAMA, {"head_dim": 12}, "multiple of 8"),
    "missing": (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    "text": (LLAMA, {"vocab_size": "100"}, "vocab_size must be an integer"),
    "flag": (LLAMA, {"attention_bias": "yes"}, "attention_bias must be true or false"),
    "eps": (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps must be positive"),
    "dtype": (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "eos": (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
}


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_is_refused_by_name(base, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(base, **changes)
    assert "\n" not in str(caught.value)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "head_dim": 12}))
    with pytest.raises(ConfigError, match=r"config\.json: head_dim must"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5),
        ("vocab_size", 10**30),
        ("hidden_size", 10**30),
        ("head_dim", 10**400),
        ("rope_theta", 10**400),
        ("rms_norm_eps", 10**400),
        ("max_position_embeddings", 10**400),
    ],
)
def test_absurd_values_are_one_line_that_names_the_key(key, value):
    with pytest.raises(ConfigError, match=f"^{key} must be") as caught:
        read(LLAMA, **{key: value})
    assert len(str(caught.value)) < 200
