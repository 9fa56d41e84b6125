"""GGUF conversion: weights, configuration and files, and what must be refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.gguf_models import rotary_row_order

Q = gguf.GGMLQuantizationType
LLAMA_NAMES = {
    "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_every_quantisation_is_dequantised(make_gguf, tmp_path, kind):
    path, stored = make_gguf("llama", quantization=kind)
    convert_gguf(path, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 2 + 2 * 9
    for ours, theirs in LLAMA_NAMES.items():
        assert tensors[ours].dtype is torch.bfloat16
        assert torch.equal(tensors[ours], torch.from_numpy(stored[theirs]).bfloat16()), ours


@pytest.mark.parametrize(("projection", "heads"), [("q", 4), ("k", 2)])
def test_interleaved_rotary_becomes_half_split(make_gguf, tmp_path, projection, heads):
    """The same rotation, applied as each convention has it, gives the same numbers per head."""
    path, stored = make_gguf("llama")
    convert_gguf(path, tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    converted = tensors[f"model.layers.0.self_attn.{projection}_proj.weight"].double().numpy()
    dim = 32
    angle = 0.7 * np.exp(-np.arange(dim // 2))
    turn = np.cos(angle) + 1j * np.sin(angle)
    x = np.random.default_rng(1).standard_normal(converted.shape[1])
    interleaved = (stored[f"blk.0.attn_{projection}.weight"].astype(np.float64) @ x).reshape(
        heads, dim // 2, 2
    )
    halves = (converted @ x).reshape(heads, 2, dim // 2)
    expected = (interleaved[..., 0] + 1j * interleaved[..., 1]) * turn
    actual = (halves[:, 0] + 1j * halves[:, 1]) * turn
    np.testing.assert_array_equal(actual, expected)


def test_row_order_is_a_permutation_within_heads():
    order = rotary_row_order(64, 2)
    assert sorted(order[:32]) == list(range(32)) and sorted(order[32:]) == list(range(32, 64))
    assert order[:3].tolist() == [0, 2, 4] and order[16] == 1


def test_llama_files(make_gguf, tmp_path):
    path, _ = make_gguf("llama")
    out = tmp_path / "out"
    convert_gguf(path, out)
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_json(out / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 500000.0
    assert config["head_dim"] == 32 and config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"] is True and config["vocab_size"] == 14
    assert config["torch_dtype"] == "bfloat16" and config["rope_scaling"] is None
    assert read_json(out / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer_config = read_json(out / "tokenizer_config.json")
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}"
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert not list(tmp_path.glob(".out*"))


def test_gemma3_norms_and_layer_types(make_gguf, tmp_path):
    path, stored = make_gguf("gemma3", metadata={"gemma3.attention.sliding_window_pattern": 2})
    convert_gguf(path, tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 16 and config["query_pre_attn_scalar"] == 32
    assert config["rope_local_base_freq"] == 10000.0
    for ours, theirs in {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
        "model.layers.1.pre_feedforward_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.post_feedforward_layernorm.weight": "blk.1.post_ffw_norm.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.post_attention_norm.weight",
    }.items():
        assert torch.equal(tensors[ours], torch.from_numpy(stored[theirs]) - 1), ours
    # Gemma's q and k are stored as Hugging Face has them.
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(q, torch.from_numpy(stored["blk.0.attn_q.weight"]))


def test_untied_head_and_biases(make_gguf, tmp_path):
    more = {"output.weight": np.ones((14, 64), np.float32)}
    for layer in range(2):
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            more[f"blk.{layer}.attn_{name}.bias"] = np.arange(rows, dtype=np.float32)
    path, _ = make_gguf("llama", tensors=more)
    convert_gguf(path, tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["tie_word_embeddings"] is False and config["attention_bias"] is True
    assert torch.equal(tensors["lm_head.weight"], torch.ones(14, 64))
    bias = tensors["model.layers.1.self_attn.k_proj.bias"]
    assert bias.tolist() == [float(i) for i in rotary_row_order(64, 2)]
    assert tensors["model.layers.1.self_attn.v_proj.bias"].tolist() == list(range(64))


def test_llama3_rope_factors_are_recovered(make_gguf, tmp_path):
    inverse = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    wavelength = 2 * math.pi / inverse
    smooth = (8192 / wavelength - 1) / 3
    factors = np.where(
        wavelength < 8192 / 4,
        1.0,
        np.where(wavelength > 8192, 32.0, 1 / ((1 - smooth) / 32.0 + smooth)),
    ).astype(np.float32)
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": factors})
    convert_gguf(path, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ConfigError, match="rope_freqs"):
        convert_gguf(path, tmp_path / "out2")


def test_shards_with_an_index(make_gguf, tmp_path):
    path, stored = make_gguf("llama")
    out = tmp_path / "out"
    convert_gguf(path, out, max_shard_bytes=40_000)
    index = read_json(out / "model.safetensors.index.json")
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    total = 0
    for name in files:
        for tensor_name, tensor in load_file(out / name).items():
            assert index["weight_map"][tensor_name] == name
            total += tensor.numel() * 2
    assert index["metadata"]["total_size"] == total
    assert total == 2 * sum(value.size for value in stored.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ("blk.1.attn_v.weight",)}, "layers.1.self_attn.v_proj.weight"),
        ({"drop": ("output_norm.weight",)}, "model.norm.weight"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}}, "ffn_gate_exps"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"llama.attention.head_count": 5}}, "blk.0.attn_q.weight is"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count must be a positive"),
        ({"tensors": {"blk.1.ffn_up.weight": np.ones((9, 64), np.float32)}}, "ffn_up.weight is"),
        ({"tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "not finite"),
        (
            {"tensors": {"blk.2.ffn_norm.weight": np.ones(64, np.float32)}},
            "tensors of 3 layers",
        ),
    ],
)
def test_what_is_missing_or_unsupported_is_named(make_gguf, tmp_path, options, message):
    path, _ = make_gguf("llama", **options)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_unknown_architecture_is_named(make_gguf, tmp_path):
    path, _ = make_gguf("mamba")
    with pytest.raises(ConfigError, match="'mamba' is not supported; supported are gemma3, llama"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of damaged weights
def test_broken_files_are_typed_errors(make_gguf, tmp_path):
    """Cut anywhere in the header, or with any of its bytes changed: never anything but ours."""
    path, _ = make_gguf("llama")
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    rng = np.random.default_rng(3)
    cuts = [0, 3, 4, 8, 23, *rng.integers(24, len(whole) - 1, 30).tolist()]
    for cut in cuts:
        broken.write_bytes(whole[:cut])
        with pytest.raises(ConfigError):
            convert_gguf(broken, tmp_path / "out")
    for place in rng.integers(0, 2500, 300).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        broken.write_bytes(changed)
        target = tmp_path / f"out{place}"
        try:  # noqa: SIM105 - a changed name or number may well be valid
            convert_gguf(broken, target)
        except ConfigError:
            pass
    with pytest.raises(ConfigError, match="no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")


def test_existing_target_is_left_alone(make_gguf, tmp_path):
    path, _ = make_gguf("llama")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="exists"):
        convert_gguf(path, out)
    assert [p.name for p in out.iterdir()] == ["mine"]
    empty = tmp_path / "empty"
    empty.mkdir()
    convert_gguf(path, empty)
    assert (empty / "config.json").is_file()


def test_command(make_gguf, tmp_path, capsys):
    path, _ = make_gguf("gemma3")
    assert main(["convert", str(path), str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype is (
        torch.float16
    )
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_transformers_loads_the_directory(make_gguf, tmp_path, kind):
    """Strictly: no weight missing, none left over, and the text goes through its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, _ = make_gguf(kind)
    convert_gguf(path, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("ab cab", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "ab cab"
