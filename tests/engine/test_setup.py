"""What from_pretrained builds: workers first, ends of sequence, memory, a tokenizer that fits."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams, TransportError
from fastdecode_rdma.engine.options import GeneratorOptions
from fastdecode_rdma.engine.setup import union_of_eos
from fastdecode_rdma.models import ModelConfig
from fastdecode_rdma.tokenizer import Tokenizer

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://no.such.host.invalid"])
def test_a_worker_that_is_not_there_is_named_before_weights_are_loaded(
    address: str, tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"rubbish")
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"^{address}.*cannot connect"):
        Generator.from_pretrained(tmp_path / "model", workers=[address], timeout_s=2.0)
    assert time.monotonic() - start < 10


def test_a_model_without_a_tokenizer_takes_ids(
    tmp_path: Path, tiny_models: Callable[..., Path]
) -> None:
    bare = shutil.copytree(tiny_models("llama"), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with Generator.from_pretrained(bare) as gen:
        assert gen.tokenizer is None
        (output,) = gen.complete([1, 2, 3], SamplingParams(max_tokens=3, logprobs=2))
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
        with pytest.raises(ConfigError, match="prompt 0: text needs a tokenizer"):
            gen.complete("text")
        with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
            gen.complete([1], SamplingParams(stop="x"))
    with Generator.from_pretrained(bare, tokenizer=tiny_models("llama")) as gen:
        assert gen.complete("text", GREEDY)[0].outputs[0].text


TEXT_CONFIG = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
"""A config.json whose decoder lies under text_config."""


def write_files(path: Path, files: dict[str, dict[str, object]]) -> None:
    """Writes JSON files, each over what is there; values of None take a key away."""
    for name, values in files.items():
        there = json.loads((path / name).read_text()) if (path / name).exists() else {}
        merged = {key: value for key, value in {**there, **values}.items() if value is not None}
        (path / name).write_text(json.dumps(merged))


@pytest.mark.parametrize(
    ("files", "argument", "expected"),
    [
        ({"config.json": {"eos_token_id": 5}}, None, {5}),
        ({"config.json": {"eos_token_id": [5, 6]}}, None, {5, 6}),
        ({"config.json": {**TEXT_CONFIG, "eos_token_id": 5}}, None, {5}),
        ({"config.json": {**TEXT_CONFIG, "nested": {"eos_token_id": 6}}}, None, {6}),
        (
            {"config.json": {**TEXT_CONFIG, "eos_token_id": [5], "nested": {"eos_token_id": [6]}}},
            None,
            {5, 6},
        ),
        ({"generation_config.json": {"eos_token_id": 7}}, None, {7}),
        ({"generation_config.json": {"eos_token_id": [7, 5000]}}, None, {7}),
        ({"generation_config.json": {"eos_token_id": [7, -1]}}, None, {7}),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, None, {257}),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, None, {257}),
        ({"special_tokens_map.json": {"eos_token": "<pad>"}}, None, {258}),
        ({"special_tokens_map.json": {"eos_token": {"content": "<pad>"}}}, None, {258}),
        ({}, 9, {9}),
        ({}, [9, 10], {9, 10}),
        (
            {
                "config.json": {"eos_token_id": 5},
                "generation_config.json": {"eos_token_id": [5, 7]},
                "tokenizer_config.json": {"eos_token": "</s>"},
            },
            8,
            {5, 7, 8, 257},
        ),
    ],
)
def test_ends_of_sequence_are_a_union_in_every_spelling(
    files: dict[str, dict[str, object]],
    argument: object,
    expected: set[int],
    tmp_path: Path,
    tiny_models: Callable[..., Path],
) -> None:
    nested = files.get("config.json", {}).get("architectures") is not None
    path = shutil.copytree(tiny_models("gemma3" if nested else "llama"), tmp_path / "model")
    (path / "generation_config.json").unlink(missing_ok=True)
    write_files(
        path, {"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": None}}
    )
    if nested:
        config = json.loads((path / "config.json").read_text())
        outer = dict(files["config.json"])
        config.update(outer.pop("nested", {}))
        (path / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    write_files(
        path,
        {name: values for name, values in files.items() if not (nested and name == "config.json")},
    )
    tokenizer = Tokenizer.from_directory(path)
    config = ModelConfig.from_hf(path)
    family_default = set() if config_names_eos(files) else set(config.eos_token_ids)
    options = GeneratorOptions(eos_token_id=argument)
    assert union_of_eos(config, options, tokenizer) == expected | family_default
    assert union_of_eos(config, options, None) <= expected | family_default


def config_names_eos(files: dict[str, dict[str, object]]) -> bool:
    """Whether config.json or generation_config.json says what ends a sequence; where neither does,
    the family's usual id holds, as in transformers."""
    return bool({"config.json", "generation_config.json"} & set(files))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [2, "3"], True, {"a": 1}, 2.5])
def test_an_end_of_sequence_that_is_none(
    name: str, value: object, tmp_path: Path, tiny_models: Callable[..., Path]
) -> None:
    path = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    write_files(path, {name: {"eos_token_id": value}})
    with pytest.raises(ConfigError, match=rf"{name}: eos_token_id must (be|hold) "):
        Generator.from_pretrained(path)


def test_each_end_of_sequence_ends_one(tmp_path: Path, tiny_models: Callable[..., Path]) -> None:
    path = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with Generator.from_pretrained(path) as gen:
        ids = gen.complete("a", params)[0].outputs[0].token_ids
    second = next(i for i in ids if i != ids[0])
    stops = SamplingParams(max_tokens=9, temperature=0.0)
    with Generator.from_pretrained(path, eos_token_id=[second]) as gen:
        output = gen.complete("a", stops)[0].outputs[0]
        assert output.token_ids == ids[: ids.index(second) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert gen.complete("a", params)[0].outputs[0].token_ids == ids
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 257, ids[0]]}))
    with Generator.from_pretrained(path) as gen:
        assert gen.complete("a", stops)[0].outputs[0].token_ids == ids[:1]
        # min_tokens masks them all: ids without a logit must not get in its way
        longer = SamplingParams(max_tokens=4, min_tokens=4, temperature=0.0)
        assert len(gen.complete("a", longer)[0].outputs[0].token_ids) == 4


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path: Path, tiny_models: Callable[..., Path]
) -> None:
    path = tiny_models("llama")
    other = tmp_path / "other"
    other.mkdir()
    backend = json.loads((path / "tokenizer.json").read_text())
    backend["model"]["vocab"]["<image>"] = 400
    backend["added_tokens"] += [{**backend["added_tokens"][0], "id": 400, "content": "<image>"}]
    (other / "tokenizer.json").write_text(json.dumps(backend))
    # an added token may lie beyond the embeddings (image placeholders do), if no prompt uses it
    with Generator.from_pretrained(path, tokenizer=other) as gen:
        image = gen.tokenizer.encode("<image>")
        assert image == [400]
        with pytest.raises(ConfigError, match="token id 400 at place 1 is outside the vocabulary"):
            gen.complete("a<image>")
        assert gen.complete("a", GREEDY)[0].finished
    backend["model"]["vocab"]["zzz"] = 301
    (other / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(ConfigError) as caught:
        Generator.from_pretrained(path, tokenizer=other)
    assert "the tokenizer has a token 301, the model only 300 embeddings" in str(caught.value)


def test_too_little_memory_lowers_max_model_len_or_says_what_to_do(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    (worker,) = start_workers(1, memory="16MiB")
    with Generator.from_pretrained(path, workers=[worker.address], kv_cache_dtype="fp32") as gen:
        bytes_per_token = 3 * 2 * 2 * 16 * 4
        assert 64 <= gen.max_model_len <= (16 << 20) // bytes_per_token
        assert list(gen.stats().notes) == [
            f"max_model_len lowered from {1 << 17} to {gen.max_model_len}: workers' memory"
        ]
        lowered = gen.max_model_len
        with pytest.raises(
            ConfigError, match=f"has {lowered} tokens and max_model_len is {lowered}"
        ):
            gen.generate([[1] * lowered])
    with pytest.raises(ConfigError, match=f"lower it to {lowered} or give a worker more --memory"):
        Generator.from_pretrained(
            path, workers=[worker.address], kv_cache_dtype="fp32", max_model_len=1 << 16
        )
