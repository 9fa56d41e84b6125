"""The architectures. One is a row of FAMILIES: its file, its reader, and its keys' defaults.

Defaults are those of transformers: what a config.json means that leaves the key out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastdecode_rdma.models.hf_config import Family, read_opt, read_rope_decoder
from fastdecode_rdma.models.hf_layers import TypedLayers, nope_layers, one_window, upper_layers

_BASE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLAMA = _BASE | {"attention_bias": False, "mlp_bias": False}
_MISTRAL = _BASE | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _BASE | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}
_GEMMA = _BASE | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_PHI3 = _BASE | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
}
_SMOLLM3 = _LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "use_sliding_window": False,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}
_GRANITE = _LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_OLMO2 = _BASE | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "eos_token_id": 50279,
}
_OLMO3 = _OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096}
_EXAONE4 = _BASE | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
_SEED_OSS = _LLAMA | {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
_CWM = _BASE | {
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 8192,
    "eos_token_id": [128001, 128008, 128009],
}
_OPT = {
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def _decoder(model_type: str, models: str, defaults: Mapping[str, Any], **own: Any) -> Family:
    """A row whose layers decoder.py builds."""
    return Family("decoder", model_type, models, read_rope_decoder, defaults, **own)


_NO_BIAS = {"qkv_bias": False, "o_bias": False}
_GEMMA_NORMS = {"norm_order": "around", "unit_offset": True, "scale_embeddings": True}
_GEMMA3_ROW = _decoder(
    "gemma3_text",
    "Gemma 3 270M, 1B; text of 4B to 27B",
    _GEMMA3,
    layers=TypedLayers(period=6, full_at=5, period_key="sliding_window_pattern"),
    activation_key="hidden_activation",
    qk_norm="head",
    stretch_max_len=False,
    local_theta="rope_local_base_freq",
    **_GEMMA_NORMS,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _decoder(
        "llama", "Llama 1 to 3.3, SmolLM 1 and 2, Yi, DeepSeek LLM", _LLAMA, mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": _decoder(
        "mistral", "Mistral 7B, NeMo, Small; Codestral", _MISTRAL, layers=one_window, **_NO_BIAS
    ),
    "MinistralForCausalLM": _decoder(
        "ministral",
        "Ministral 8B",
        _MISTRAL,
        layers=TypedLayers(period=1, full_at=-1),
        **_NO_BIAS,
    ),
    "Qwen2ForCausalLM": _decoder(
        "qwen2", "Qwen 1.5, 2, 2.5", _QWEN2, layers=upper_layers, qkv_bias=True, o_bias=False
    ),
    "Qwen3ForCausalLM": _decoder(
        "qwen3", "Qwen 3 (dense)", _QWEN3, layers=upper_layers, qk_norm="head"
    ),
    "GemmaForCausalLM": _decoder(
        "gemma",
        "Gemma 1",
        _GEMMA,
        # Its first files say "gelu" and mean the tanh form.
        activations={"gelu": "gelu_tanh"},
        unit_offset=True,
        scale_embeddings=True,
    ),
    "Gemma2ForCausalLM": _decoder(
        "gemma2",
        "Gemma 2",
        _GEMMA2,
        layers=TypedLayers(period=2, full_at=1),
        activation_key="hidden_activation",
        **_GEMMA_NORMS,
    ),
    "Gemma3ForCausalLM": _GEMMA3_ROW,
    # The text half of the multi-modal model; both layouts that transformers has saved.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3_ROW,
        model_type="gemma3",
        renames=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        ignored=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
    "Phi3ForCausalLM": _decoder(
        "phi3",
        "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini",
        _PHI3,
        layers=one_window,
        fused=True,
        # Its first files call longrope by other names.
        rope_aliases={"yarn": "longrope"},
        **_NO_BIAS,
    ),
    "SmolLM3ForCausalLM": _decoder(
        "smollm3", "SmolLM 3", _SMOLLM3, layers=nope_layers, mlp_bias="mlp_bias"
    ),
    "GraniteForCausalLM": _decoder("granite", "Granite 3 (dense)", _GRANITE, mlp_bias="mlp_bias"),
    "Olmo2ForCausalLM": _decoder("olmo2", "OLMo 2", _OLMO2, norm_order="after", qk_norm="row"),
    "Olmo3ForCausalLM": _decoder(
        "olmo3",
        "OLMo 3",
        _OLMO3,
        layers=TypedLayers(period=4, full_at=3),
        norm_order="after",
        qk_norm="row",
        local_theta="rope_theta",
    ),
    "Exaone4ForCausalLM": _decoder(
        "exaone4",
        "EXAONE 4",
        _EXAONE4,
        layers=TypedLayers(
            period=4, full_at=3, period_key="sliding_window_pattern", nope_when_full=True
        ),
        norm_order="after",
        qk_norm="head",
        **_NO_BIAS,
    ),
    "SeedOssForCausalLM": _decoder(
        "seed_oss", "Seed-OSS", _SEED_OSS, o_bias="attention_out_bias", mlp_bias="mlp_bias"
    ),
    "CwmForCausalLM": _decoder(
        "cwm", "CWM", _CWM, layers=TypedLayers(period=4, full_at=0), **_NO_BIAS
    ),
    "OPTForCausalLM": Family(
        module="opt",
        model_type="opt",
        models="OPT",
        read=read_opt,
        defaults=_OPT,
        activation_key="activation_function",
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        renames=(("decoder.", "model.decoder."),),
    ),
}
"""Supported architectures by the name that config.json gives them."""
