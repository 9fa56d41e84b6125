"""Requests: vLLM's names and defaults, and every mistake an error that names the remedy."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams, TokenEvent


def test_defaults_are_vllms_except_max_tokens():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.min_p) == (1, 1.0, 1.0, 0.0)
    assert params.top_k == 0
    assert params.seed is None and params.logprobs is None and params.max_tokens is None
    assert params.stop == () and params.stop_token_ids == ()
    assert params.skip_special_tokens and not params.ignore_eos
    assert not params.is_greedy


def test_one_stop_string_or_several():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 5]).stop_token_ids == (3, 5)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_in_both_spellings(top_k):
    assert SamplingParams(top_k=top_k).top_k <= 0


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": 1.5},
        {"n": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 2.0},
        {"min_p": 1.5},
        {"seed": 1 << 64},
        {"seed": 1.0},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": -2},
        {"logprobs": True},
        {"stop": [""]},
        {"stop": [1]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["x"]},
        {"ignore_eos": 1},
    ],
    ids=repr,
)
def test_values_out_of_range_are_refused_by_name(bad):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert any(name in str(caught.value) for name in bad)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "'temperature'"),
        ("topk", "'top_k'"),
        ("stop_tokens", "stop"),
        ("max_new_tokens", "max_tokens"),
        ("num_beams", "beam search"),
        ("best_of", "n and choose"),
        ("frequency_penalty", "not supported"),
        ("xyzzy", "temperature"),
    ],
)
def test_unknown_keyword_names_the_nearest_one(name, hint):
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: 1})
    assert hint in str(caught.value)


def test_only_n_is_positional():
    assert SamplingParams(3).n == 3
    with pytest.raises(TypeError):
        SamplingParams(1, 0.5)


def test_params_are_frozen_and_survive_copies():
    params = SamplingParams(n=2, temperature=0.5, stop="x", seed=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=4).n == 4
    assert hash(params) == hash(copy.copy(params))


def test_failure_event():
    error = ConfigError("no")
    event = TokenEvent.failure(3, error)
    assert (event.request_index, event.finish_reason, event.error) == (3, "error", error)
    assert event.text == "" and event.token_id is None


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": 5},
        {"stop_token_ids": 5},
        {"stop_token_ids": "12"},
        {"temperature": np.array([1.0, 2.0])},
    ],
)
def test_values_of_the_wrong_shape_are_one_clear_line(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingParams(**bad)
