"""GGUF conversion: files, parts, the command, and what must be refused."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub import convert_command
from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.gguf_models import rotary_row_order


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


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


def test_files(make_gguf, tmp_path):
    path, stored = make_gguf("llama")
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
    # Silence would mean the readers' defaults: token 1, for Llama.
    assert config["pad_token_id"] is None
    assert read_json(out / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer_config = read_json(out / "tokenizer_config.json")
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}"
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    embeddings = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embeddings, torch.from_numpy(stored["token_embd.weight"]).bfloat16())
    assert not list(tmp_path.glob(".out*"))


def test_recommended_sampling(make_gguf, tmp_path):
    sampling = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "penalty_repeat": 1.25, "xtc_threshold": 9}
    path, _ = make_gguf(
        "llama", metadata={f"general.sampling.{key}": value for key, value in sampling.items()}
    )
    convert_gguf(path, tmp_path / "out")
    assert read_json(tmp_path / "out" / "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.75,
        "repetition_penalty": 1.25,
    }


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({"temp": 0.0, "top_k": 5}, {"do_sample": False}), ({"top_k": 0, "min_p": 0.0}, {})],
)
def test_recommended_sampling_that_is_off(make_gguf, tmp_path, sampling, expected):
    path, _ = make_gguf(
        "llama", metadata={f"general.sampling.{key}": value for key, value in sampling.items()}
    )
    convert_gguf(path, tmp_path / "out")
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    assert read_json(tmp_path / "out" / "generation_config.json") == ids | expected


def test_untied_head_and_some_biases(make_gguf, tmp_path):
    """Where the class has a bias that the file lacks, it is zero."""
    more = {"output.weight": np.ones((14, 64), np.float32)}
    for name, rows in (("q", 128), ("k", 64), ("v", 64)):
        more[f"blk.1.attn_{name}.bias"] = np.arange(rows, dtype=np.float32)
    path, _ = make_gguf("llama", tensors=more)
    convert_gguf(path, tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True and config["mlp_bias"] is False
    assert torch.equal(tensors["lm_head.weight"], torch.ones(14, 64))
    prefix = "model.layers.1.self_attn"
    order = [float(i) for i in rotary_row_order(64, 2)]
    assert tensors[f"{prefix}.k_proj.bias"].tolist() == order
    assert tensors[f"{prefix}.v_proj.bias"].tolist() == list(range(64))
    assert tensors[f"{prefix}.o_proj.bias"].tolist() == [0.0] * 64
    assert tensors["model.layers.0.self_attn.q_proj.bias"].tolist() == [0.0] * 128


@pytest.mark.parametrize(
    ("pattern", "local"),
    [(2, [True, False]), ([True, True], [True, True]), (1, [False, False]), (0, [True, True])],
)
def test_windows_by_layer(make_gguf, tmp_path, pattern, local):
    path, _ = make_gguf("gemma3", metadata={"gemma3.attention.sliding_window_pattern": pattern})
    convert_gguf(path, tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    names = {True: "sliding_attention", False: "full_attention"}
    assert config["layer_types"] == [names[flag] for flag in local]
    assert config["sliding_window"] == 16 and config["query_pre_attn_scalar"] == 32


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


# -- a model in parts


def test_parts_are_the_whole(make_gguf, tmp_path):
    whole, _ = make_gguf("llama")
    first, _ = make_gguf("llama", max_tensors=6)
    parts = sorted(tmp_path.glob("llama-*.gguf"))
    assert len(parts) > 2 and first == parts[0]
    convert_gguf(whole, tmp_path / "whole")
    for number, part in enumerate((first, parts[-1])):
        convert_gguf(part, tmp_path / f"out{number}")
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            expected = (tmp_path / "whole" / name).read_bytes()
            actual = (tmp_path / f"out{number}" / name).read_bytes()
            if name == "model.safetensors":
                assert len(actual) == len(expected)
            else:
                assert actual == expected
        ours, theirs = (
            load_file(tmp_path / out / "model.safetensors") for out in ("whole", f"out{number}")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_parts_that_do_not_fit_are_named(make_gguf, tmp_path):
    first, _ = make_gguf("llama", max_tensors=6)
    parts = sorted(tmp_path.glob("llama-*.gguf"))
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"must end in -00001-of-0000\d.gguf"):
        convert_gguf(renamed, tmp_path / "out")
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ConfigError, match=r"part 2 of .* but it says split\.no 2"):
        convert_gguf(first, tmp_path / "out")
    parts[1].write_bytes(second[: len(second) // 2])
    with pytest.raises(ConfigError, match=f"{parts[1].name} is not a whole GGUF file"):
        convert_gguf(first, tmp_path / "out")
    parts[1].unlink()
    with pytest.raises(ConfigError, match=f"missing beside it: {parts[1].name}"):
        convert_gguf(first, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the target, the command


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
    assert capsys.readouterr().err == ""  # no terminal, no progress
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_progress_on_a_terminal(make_gguf, tmp_path, capsys, monkeypatch):
    path, _ = make_gguf("llama")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("\r1/20 tensors\r2/20 tensors") and shown.endswith("\r20/20 tensors\n")


def test_an_error_after_progress_has_its_own_line(make_gguf, tmp_path, capsys, monkeypatch):
    damaged = {"blk.1.ffn_down.weight": np.full((64, 96), np.inf, np.float32)}
    path, _ = make_gguf("llama", tensors=damaged)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "tensors\nfastdecode: error: tensor 'blk.1.ffn_down" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_signal_leaves_nothing(make_gguf, tmp_path, monkeypatch, number, code):
    path, _ = make_gguf("llama")
    before = sorted(tmp_path.rglob("*"))
    handler = signal.getsignal(signal.SIGTERM)
    calls = []

    def kill(done: int, total: int) -> None:
        calls.append(list(tmp_path.rglob("*.safetensors")))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(convert_command, "_show", kill)
    try:
        result = main(["convert", str(path), str(tmp_path / "new" / "out")])
    except SystemExit as exc:
        result = exc.code
    assert result == code
    assert calls and calls[0]  # it was being written
    assert sorted(tmp_path.rglob("*")) == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_memory_is_that_of_a_piece(make_gguf, tmp_path):
    """25 million weights, of which a few pieces of 2 million in fp32 are in memory at a time."""
    rows, peak_bytes = 400_000, 48 << 20
    path, _ = make_gguf("llama", drop=("token_embd.weight",))
    small = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    for key, value in small.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = value.types[0]
            sub = value.types[1] if len(value.types) > 1 else None
            writer.add_key_value(key, value.contents(), kind, sub)
    for tensor in small.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor_info("token_embd.weight", (rows, 64), np.dtype(np.float16), rows * 64 * 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in small.tensors:
        writer.write_tensor_data(np.asarray(tensor.data))
    writer.close()
    with (tmp_path / "large.gguf").open("r+b") as file:  # a hole: zeros that take no room
        file.truncate(file.seek(0, os.SEEK_END) + rows * 64 * 2 + 64)
    tracemalloc.start()
    try:
        convert_gguf(tmp_path / "large.gguf", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < peak_bytes
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > rows * 64 * 2
