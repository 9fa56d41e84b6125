"""generation_config.json: the sampling values that apply when no parameters are given."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.engine.sampling_defaults import SamplingDefaults


def defaults_of(tmp_path: Path, values: object) -> SamplingDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return SamplingDefaults(tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingParams()),
        ({"eos_token_id": 2, "max_length": 20, "num_beams": 4}, SamplingParams()),
        ({"temperature": None, "top_p": None}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            SamplingParams(temperature=0.6, top_p=0.9),
        ),
        (
            {"temperature": 1, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            SamplingParams(temperature=1, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"max_new_tokens": 32}, SamplingParams(max_tokens=32)),
        ({"do_sample": False}, SamplingParams(temperature=0.0)),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.2},
            SamplingParams(temperature=0.0, repetition_penalty=1.2),
        ),
    ],
)
def test_what_the_file_says(tmp_path: Path, values: object, expected: SamplingParams) -> None:
    assert defaults_of(tmp_path, values).params() == expected


def test_no_file_is_no_recommendation(tmp_path: Path) -> None:
    assert SamplingDefaults(tmp_path).params() == SamplingParams()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -1}, "temperature=-1: temperature must be at least 0"),
        ({"temperature": "hot"}, "temperature='hot': temperature must be a number"),
        ({"top_p": 0}, "top_p=0: top_p must be above 0"),
        ({"top_k": 1.5}, "top_k=1.5: top_k must be an integer"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: repetition_penalty must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: max_tokens must be at least 1"),
        ({"do_sample": "no"}, "do_sample must be true or false, got 'no'"),
    ],
)
def test_a_wrong_value_names_file_and_key_once_it_matters(
    tmp_path: Path, values: object, complaint: str
) -> None:
    defaults = defaults_of(tmp_path, values)
    for use in (defaults.params, defaults.apply):
        with pytest.raises(ConfigError) as caught:
            use()
        message = str(caught.value)
        assert f"generation_config.json: {complaint}" in message
        assert message.endswith("correct the file, or pass SamplingParams")
        assert "\n" not in message


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        SamplingDefaults(tmp_path)


def test_they_apply_without_parameters_only_and_are_logged_once(
    tmp_path: Path, tiny_models: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "max_new_tokens": 6, "top_k": 7})
    )
    caplog.set_level(logging.INFO, logger="fastdecode_rdma")
    with Generator.from_pretrained(path) as gen:
        chosen = gen.get_default_sampling_params()
        assert chosen == SamplingParams(temperature=0.0, max_tokens=6, top_k=7)
        assert gen.complete("a", SamplingParams(max_tokens=9, ignore_eos=True))[0].finished
        assert "generation_config" not in caplog.text
        outputs = [
            gen.complete(["a"])[0],
            gen.complete(iter(["a"]))[0],
            gen.complete("a", chosen)[0],
        ]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert len(outputs[0].outputs[0].token_ids) == 6
        given = gen.complete("a", SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0))
        assert len(given[0].outputs[0].token_ids) == 9
    lines = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    assert len(lines) == 1
    assert "temperature=0.0" in lines[0] and "max_tokens=6" in lines[0] and str(path) in lines[0]


def test_a_wrong_value_does_not_keep_a_model_from_use(
    tmp_path: Path, tiny_models: Callable[..., Path]
) -> None:
    path = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (path / "generation_config.json").write_text('{"top_p": 7}')
    with Generator.from_pretrained(path) as gen:
        with pytest.raises(ConfigError, match="top_p=7: top_p must be"):
            gen.generate("a")
        with pytest.raises(ConfigError, match="top_p=7"):
            gen.get_default_sampling_params()
        assert gen.complete("a", SamplingParams(max_tokens=2))[0].finished
