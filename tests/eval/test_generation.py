"""generation_kwargs of tasks -> SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest

from fastdecode_rdma import ConfigError, SamplingParams
from fastdecode_rdma.eval.generation import read_generation


@pytest.mark.parametrize(
    ("given", "params", "until"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 256}, ()),
        ({"until": "x", "max_gen_toks": 5}, {"temperature": 0.0, "max_tokens": 5}, ("x",)),
        ({"until": ["a", "", "b"]}, {"temperature": 0.0, "max_tokens": 256}, ("a", "b")),
        ({"stop": ["a"], "max_tokens": 9}, {"temperature": 0.0, "max_tokens": 9}, ("a",)),
        ({"max_new_tokens": "7"}, {"temperature": 0.0, "max_tokens": 7}, ()),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0, "max_tokens": 256}, ()),
        ({"temperature": 0.7}, {"temperature": 0.7, "max_tokens": 256}, ()),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 3},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 3, "max_tokens": 256},
            (),
        ),
        ({"do_sample": True}, {"max_tokens": 256}, ()),
        (
            {"repetition_penalty": 1.2, "min_new_tokens": 3, "num_beams": 1, "use_cache": True},
            {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 3, "max_tokens": 256},
            (),
        ),
    ],
)
def test_what_tasks_write(given: dict[str, Any], params: dict[str, Any], until: tuple[str]) -> None:
    before = dict(given)
    read = read_generation(given, default_max_gen_toks=256)
    assert read.params == SamplingParams(**params)
    assert read.until == until and read.max_gen_toks == params["max_tokens"]
    assert given == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_pp": 0.9}, "generation_kwargs has 'top_pp': did you mean 'top_p'"),
        ({"num_beams": 4}, "'num_beams': there is no beam search"),
        ({"max_length": 100}, "'max_length': it counts the prompt, too; give max_gen_toks"),
        ({"logprobs": 1}, "generation_kwargs has 'logprobs'"),
        ({"until": 5}, "until must be text or a list of texts"),
        ({"max_gen_toks": 0}, "max_gen_toks must be at least 1"),
        ({"max_gen_toks": "many"}, "generation_kwargs: invalid literal"),
        ({"temperature": 1.0, "top_p": 7}, "top_p"),
        ("greedy", "generation_kwargs must be a dict, got str"),
    ],
)
def test_what_they_must_not_write(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_generation(given, default_max_gen_toks=256)
