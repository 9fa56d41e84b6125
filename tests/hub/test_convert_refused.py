"""What cannot be converted: said by name in one line, exit code 2, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.gguf_models import ARCHITECTURES

WIDTHS = tuple(
    f"llama.{key}"
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
)
EXPERTS = {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}
REFUSED: list[tuple[dict, str]] = [
    ({"drop": ("blk.1.attn_v.weight",)}, "layers.1.self_attn.v_proj.weight"),
    ({"drop": ("output_norm.weight",)}, "model.norm.weight"),
    ({"drop": ("token_embd.weight",)}, "'token_embd.weight' is missing"),
    ({"tensors": EXPERTS}, "ffn_gate_exps"),
    ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
    ({"metadata": {"llama.rope.scaling.type": "cubic"}}, "'cubic' is not supported"),
    ({"metadata": {"llama.rope.dimension_count": 16}}, "16 of 32 elements"),
    ({"metadata": {"llama.attention.head_count": 5}}, "5 heads over 2"),
    ({"metadata": {"llama.attention.head_count": 0}}, "head_count must be a positive"),
    ({"metadata": {"llama.attention.head_count": [4, 2]}}, "differs by layer"),
    ({"metadata": {"llama.attention.head_count": "x" * 999}}, "head_count must be a positive"),
    ({"metadata": {"llama.attention.head_count": 1 << 40}}, "head_count must be a positive"),
    ({"metadata": {"llama.attention.value_length": 16}}, "different width"),
    ({"metadata": dict.fromkeys(WIDTHS, 1 << 30)}, "attn_q.weight is .*the metadata says"),
    ({"metadata": {"llama.embedding_length": None}}, "lacks 'llama.embedding_length'"),
    ({"metadata": {"llama.embedding_length": (1 << 31) - 1}}, "the metadata says"),
    ({"metadata": {"llama.feed_forward_length": True}}, "must be a positive integer, got True"),
    ({"metadata": {"llama.block_count": (1 << 31) - 1}}, "tensors of 2 layers"),
    ({"metadata": {"llama.context_length": 1 << 62}}, "context_length must be a positive"),
    ({"metadata": {"llama.context_length": -1}}, "context_length must be a positive"),
    ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "got nan"),
    ({"metadata": {"llama.attention.layer_norm_rms_epsilon": [1e-5]}}, "a positive number"),
    ({"metadata": {"llama.rope.freq_base": float("inf")}}, "freq_base must be a positive number"),
    ({"metadata": {"llama.rope.freq_base": 0.0}}, "freq_base must be a positive number"),
    ({"metadata": {"llama.attention.clamp_kqv": 8.0}}, "attention.clamp_kqv 8.0"),
    ({"metadata": {"llama.attention.causal": False}}, "attention.causal False"),
    ({"metadata": {"llama.attention.scale": 0.5}}, "attention.scale 0.5"),
    ({"metadata": {"llama.residual_scale": 0.5}}, "residual_scale 0.5"),
    ({"metadata": {"llama.attn_logit_softcapping": 30.0}}, "attn_logit_softcapping 30.0"),
    ({"metadata": {"llama.pooling_type": 1}}, "pooling_type 1"),
    ({"tensors": {"blk.1.ffn_up.weight": np.ones((9, 64), np.float32)}}, "ffn_up.weight is"),
    ({"tensors": {"blk.1.ffn_up.weight": np.ones((2, 3, 4), np.float32)}}, "ffn_up.weight is"),
    ({"tensors": {"blk.1.attn_norm.bias": np.ones(64, np.float32)}}, "attn_norm.bias is not"),
    ({"tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "not finite"),
    ({"tensors": {"blk.2.ffn_norm.weight": np.ones(64, np.float32)}}, "tensors of 3 layers"),
    ({"tensors": {"blk.00.ffn_norm.weight": np.ones(64, np.float32)}}, "tensors of 3 layers"),
    ({"tensors": {"blk.٣.ffn_norm.weight": np.ones(64, np.float32)}}, "not known"),
    ({"tensors": {"../../evil.weight": np.ones(64, np.float32)}}, "'../../evil.weight' is not"),
    ({"tensors": {"blk.0.x/../../y.weight": np.ones(64, np.float32)}}, "is not known"),
    ({"metadata": {"split.count": 3}}, "one of 3 parts"),
    ({"metadata": {"split.count": 1 << 60}}, "split.count must be a positive integer"),
    ({"metadata": {"split.tensors.count": 7}}, "the parts hold 20 tensors, 7 are expected"),
    ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, "tokenizer 'rwkv' is not supported"),
    ({"metadata": {"tokenizer.ggml.pre": "nosuch"}}, "'nosuch' is not supported.*smollm"),
    ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 14}}, "vocabulary is inconsistent"),
    ({"metadata": {"tokenizer.ggml.tokens": [1, 2]}}, "must be a list of texts"),
    ({"metadata": {"tokenizer.ggml.token_type": [1]}}, "vocabulary is inconsistent"),
    ({"metadata": {"tokenizer.ggml.merges": ["a b", "ab"]}}, "merges holds 'ab'"),
    ({"metadata": {"tokenizer.ggml.merges": ["a zz"]}}, "merges holds 'a zz'"),
    ({"metadata": {"tokenizer.ggml.merges": None}}, "lacks 'tokenizer.ggml.merges'"),
    ({"metadata": {"tokenizer.ggml.eos_token_id": 14}}, "eos_token_id 14 is not in the vocab"),
    ({"metadata": {"tokenizer.ggml.bos_token_id": "1"}}, "bos_token_id must be an integer of"),
    ({"metadata": {"tokenizer.chat_template": 7}}, "chat_template must be a text, got 7"),
    ({"metadata": {"tokenizer.ggml.add_bos_token": "yes"}}, "must be true or false, got 'yes'"),
    ({"metadata": {"general.sampling.temp": "hot"}}, "temp must be a positive number"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_converted_is_named(make_gguf, tmp_path, capsys, options, message):
    path, _ = make_gguf("llama", **options)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "new" / "out")
    assert main(["convert", str(path), str(tmp_path / "new" / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fastdecode: error: ") and err.count("\n") == 1
    assert len(err.replace(str(tmp_path), "")) < 500
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_without_an_end_is_named(make_gguf, tmp_path):
    tokens = ["<|a|>", "<|b|>", "<|c|>", *"abcdefgh", "Ġ", "ab", "Ġab"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": None}
    path, _ = make_gguf("llama", metadata=metadata)
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        convert_gguf(path, tmp_path / "out")


def test_unknown_architecture_is_named(make_gguf, tmp_path):
    path, _ = make_gguf("mamba")
    supported = ", ".join(sorted(ARCHITECTURES))
    with pytest.raises(ConfigError, match=f"'mamba' is not supported; supported are {supported}"):
        convert_gguf(path, tmp_path / "out")


def test_a_window_is_refused_where_the_architecture_has_none(make_gguf, tmp_path):
    path, _ = make_gguf("qwen3", metadata={"qwen3.attention.sliding_window": 8})
    with pytest.raises(ConfigError, match=r"sliding_window 8 is not supported for .* 'qwen3'"):
        convert_gguf(path, tmp_path / "out")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(ConfigError, match="is no regular file"):
        convert_gguf(tmp_path, tmp_path / "out")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ConfigError, match="is not a whole GGUF file: it is empty"):
        convert_gguf(tmp_path / "empty.gguf", tmp_path / "out")


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
    for place in rng.integers(0, 2500, 160).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        broken.write_bytes(changed)
        target = tmp_path / f"out{place}"
        try:  # noqa: SIM105 - a changed name or number may well be valid
            convert_gguf(broken, target)
        except ConfigError:
            pass
        assert not list(tmp_path.glob(".out*"))
