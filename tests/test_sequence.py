"""Requests: vLLM's names and defaults, and every mistake an error that names the remedy."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
import transformers

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import HINTS
from fastdecode_rdma.sequence import SamplingParams, TokenEvent


def max_out(output_ids, logits):
    return logits


def test_defaults_are_vllms_except_max_tokens():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.min_p) == (1, 1.0, 1.0, 0.0)
    assert params.top_k == 0
    assert params.seed is None and params.logprobs is None and params.max_tokens is None
    assert params.stop == () and params.stop_token_ids == () and params.bad_words == ()
    assert params.skip_special_tokens and not params.ignore_eos
    assert params.detokenize and params.spaces_between_special_tokens
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0 and params.prompt_logprobs is None
    assert params.logit_bias is None and params.allowed_token_ids is None
    assert params.logits_processors == ()
    assert not params.is_greedy


def test_lists_become_tuples_without_repetition():
    params = SamplingParams(
        stop_token_ids=np.array([3, 5, 3]),
        bad_words=["a", [1, np.int64(2)], "a", (1, 2)],
        allowed_token_ids=range(3),
        logits_processors=[max_out],
        logit_bias={"7": 1, np.int64(8): np.float32(-0.5)},
    )
    assert params.stop_token_ids == (3, 5)
    assert params.bad_words == ("a", (1, 2))
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.logits_processors == (max_out,)
    assert params.logit_bias == {7: 1.0, 8: -0.5}
    empty = SamplingParams(
        bad_words=None, logit_bias=None, allowed_token_ids=None, logits_processors=None
    )
    assert empty == SamplingParams()


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
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": None},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 10**400},
        {"prompt_logprobs": -2},
        {"prompt_logprobs": 1.0},
        {"detokenize": None},
        {"detokenize": False, "stop": "x"},
        {"spaces_between_special_tokens": 0},
        {"include_stop_str_in_output": "yes"},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [" "]},
        {"bad_words": [[]]},
        {"bad_words": [5, 6]},
        {"bad_words": [[5, "x"]]},
        {"bad_words": [[-1]]},
        {"bad_words": [b"word"]},
        {"bad_words": 5},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: -101}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: "x"}},
        {"logit_bias": {1: 1.0, "1": 2.0}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-3]},
        {"allowed_token_ids": 3},
        {"allowed_token_ids": {3: 1}},
        {"logits_processors": max_out},
        {"logits_processors": [5]},
        {"logits_processors": 5},
        {"logits_processors": [lambda: None]},
        {"logits_processors": [lambda a, b, c, d: None]},
        {"logits_processors": [lambda a, b, *, c: None]},
    ],
    ids=lambda bad: re.sub(r" at 0x\w+", "", repr(bad)),
)
def test_values_out_of_range_are_refused_by_name(bad):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert any(name in str(caught.value) for name in bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "'temperature'"),
        ("topk", "'top_k'"),
        ("stop_tokens", "stop"),
        ("max_new_tokens", "max_tokens"),
        ("num_beams", "beam search"),
        ("best_of", "n and choose"),
        ("frequency_penality", "'frequency_penalty'"),
        ("structured_outputs", "README"),
        ("guided_decoding", "logits_processors"),
        ("truncate_prompt_tokens", "cut the prompt"),
        ("typical_p", "logits_processors"),
        ("no_repeat_ngram_size", "logits_processors"),
        ("do_sample", "temperature=0.0"),
        ("use_beam_search", "beam search is not supported"),
        ("bad_words_ids", "bad_words"),
        ("repeat_penalty", "repetition_penalty"),
        ("min_new_tokens", "min_tokens"),
        ("extra_args", "README"),
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


def test_params_with_everything_survive_copies_too():
    params = SamplingParams(
        bad_words=["a", [1, 2]],
        logit_bias={3: 4.0},
        allowed_token_ids=[1],
        logits_processors=[max_out],
    )
    for other in (
        pickle.loads(pickle.dumps(params)),
        copy.deepcopy(params),
        dataclasses.replace(params),
        SamplingParams.from_dict(dataclasses.asdict(params)),
    ):
        assert other == params and hash(other) == hash(params)
    assert dataclasses.replace(params, logit_bias={3: 5.0}) != params
    bias = {3: 4.0}
    mine = SamplingParams(logit_bias=bias)
    bias[3] = 99.0
    assert mine.logit_bias == {3: 4.0}


def test_from_dict_reads_json():
    text = (
        '{"n": 2, "temperature": null, "stop": null, "max_tokens": 5, "logit_bias": {"7": -1.5},'
        ' "bad_words": ["x", [1, 2]], "stop_token_ids": [4], "seed": null}'
    )
    assert SamplingParams.from_dict(json.loads(text)) == SamplingParams(
        2, max_tokens=5, logit_bias={7: -1.5}, bad_words=["x", (1, 2)], stop_token_ids=[4]
    )
    assert SamplingParams.from_dict({}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_new_tokens": 3}, "SamplingParams has no 'max_new_tokens': use max_tokens"),
        ({"temprature": None}, "did you mean 'temperature'"),
        ({"temprature": 1, "n_beams": 2}, "'temprature'.*; SamplingParams has no 'n_beams'"),
        ({1: 2}, "SamplingParams has no 1"),
        ({"temperature": -1}, "temperature must be at least 0.0"),
        ([1], r"must be an object of names and values, got \[1\]"),
        (None, "must be an object of names and values"),
        ("n=1", "must be an object of names and values"),
    ],
)
def test_from_dict_names_mistakes_as_the_constructor_does(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        SamplingParams.from_dict(values)


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


VLLM_NAMES = (
    "structured_outputs", "guided_decoding", "extra_args", "flat_logprobs", "stream_interval",
    "skip_clone", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
    "trace_decode_token_ids", "routed_experts_prompt_start", "prompt_logprob_start",
    "prompt_logprob_token_ids", "logprob_token_ids", "output_kind", "output_text_buffer_length",
    "truncate_prompt_tokens", "best_of", "use_beam_search", "beam_width", "length_penalty",
    "early_stopping",
)  # fmt: skip
"""Of SamplingParams and BeamSearchParams, now or in earlier versions; what we lack."""


@pytest.mark.parametrize("source", ["transformers", "vllm"])
def test_what_others_have_is_ours_or_explained_in_its_own_words(source: str) -> None:
    """A nearest spelling would send users astray: max_time is not max_tokens."""
    ours = {f.name for f in dataclasses.fields(SamplingParams)}
    config = transformers.GenerationConfig()
    theirs = {
        name for name in dir(config)
        if not name.startswith("_") and not callable(getattr(config, name))
    } if source == "transformers" else set(VLLM_NAMES)  # fmt: skip
    assert len(theirs) > 20
    assert sorted(theirs - ours - set(HINTS)) == []
    assert not ours & set(HINTS)
    with pytest.raises(ConfigError, match="no 'max_time': call cancel"):
        SamplingParams(max_time=3.0)
