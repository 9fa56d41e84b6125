"""Prompts and parameters as users write them: what is accepted, one clear line per mistake."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.prompts import (
    MAX_NAMED,
    PromptEncoder,
    as_iterable,
    check_all,
    check_lazily,
    is_single_prompt,
)
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def encoder(tiny_models: Callable[..., Path]) -> PromptEncoder:
    tokenizer = Tokenizer.from_directory(tiny_models("llama"), chat_template=TEMPLATE)
    return PromptEncoder(tokenizer, vocab_size=300, max_model_len=16)


def any_params(params: SamplingParams, ids: np.ndarray) -> None:
    """Nothing is wrong with any parameters."""


@pytest.mark.parametrize(
    ("prompts", "is_single"),
    [
        ("text", True), ([1, 2], True), ((1, 2), True), (np.array([1, 2]), True), (CHAT, True),
        ([np.int64(1), 2], True), (["text"], False), ([[1, 2]], False), ([CHAT], False),
        ([], False), (np.array([[1, 2]]), False), (np.array([1.0]), False), ([1, True], False),
        ([1, 2.0], False), (["a", [1]], False), (iter("ab"), False), ({"role": "user"}, False),
    ],
)  # fmt: skip
def test_one_prompt_is_told_from_several(prompts: object, is_single: bool) -> None:
    assert is_single_prompt(prompts) is is_single


def test_all_shapes_of_a_prompt_give_ids(encoder: PromptEncoder) -> None:
    text_ids = encoder.encode("hi").tolist()
    assert len(text_ids) == 2
    for same in (text_ids, tuple(text_ids), np.array(text_ids), np.array(text_ids, np.uint8)):
        assert encoder.encode(same).tolist() == text_ids
        assert encoder.encode(same).dtype == np.int64
    assert encoder.encode(CHAT).tolist() == encoder.encode("user:hi;").tolist()
    assert encoder.encode([0, 299]).tolist() == [0, 299]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        (np.array([]), "prompt is empty"),
        ([300], "token id 300 at place 0 is outside the vocabulary of 300"),
        ([1, -1], "token id -1 at place 1 is outside"),
        ([2**70], f"token id {2**70} at place 0 is outside"),
        ([-(2**70)], "is outside the vocabulary"),
        (np.array([2**63 + 1], np.uint64), f"token id {2**63 + 1} at place 0"),
        ([1] * 16, "has 16 tokens and max_model_len is 16: at most 15"),
        ([1] * 17, "has 17 tokens and max_model_len is 16"),
        ("x" * 100_000, "has 100000 tokens"),
        ("\ud800", "no valid text"),
        (True, "bool is no prompt"),
        (None, "NoneType is no prompt"),
        (5, "int is no prompt"),
        (1.5, "float is no prompt"),
        (b"ab", "bytes is no prompt"),
        ({"role": "user"}, "a chat is a list of messages"),
        ({1, 2}, "set is no prompt"),
        ([True], "token ids must be integers, got bool at place 0"),
        ([1, 2.0], "token ids must be integers, got float at place 1"),
        ([[1]], "got list at place 0"),
        (["a", 1], "got str at place 0"),
        ([CHAT[0], 5], "all of them dicts"),
        (np.array(5), "0 dimensions"),
        (np.array([1.0]), "dtype float64"),
        (np.array([[1]]), "2 dimensions"),
        (np.array(["a"], dtype=object), "dtype object"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_one_clear_line(
    encoder: PromptEncoder, prompt: object, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        encoder.encode(prompt)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lengths_at_the_border(encoder: PromptEncoder) -> None:
    for length in (1, 14, 15):
        assert len(encoder.encode([7] * length)) == length
    for length in (16, 17):
        with pytest.raises(ConfigError, match=f"has {length} tokens"):
            encoder.encode([7] * length)


def test_without_a_tokenizer_ids_work_and_text_says_why_not() -> None:
    encoder = PromptEncoder(None, vocab_size=300, max_model_len=16)
    assert encoder.encode([1, 2]).tolist() == [1, 2]
    for prompt in ("text", CHAT):
        with pytest.raises(ConfigError, match="needs a tokenizer, and this model has none"):
            encoder.encode(prompt)


def test_every_bad_prompt_is_named_by_its_index(encoder: PromptEncoder) -> None:
    prompts = ["ok", "", [1, 300], "ok", None]
    with pytest.raises(ConfigError) as caught:
        check_all(prompts, SamplingParams(), encoder.encode, any_params)
    named = [part.split(":")[0] for part in str(caught.value).split("; prompt ")]
    assert named == ["prompt 1", "2", "4"]


def test_of_many_bad_prompts_the_rest_is_counted(encoder: PromptEncoder) -> None:
    with pytest.raises(ConfigError, match=r"prompt 9: .*; and 15 more$") as caught:
        check_all([""] * 25, SamplingParams(), encoder.encode, any_params)
    assert str(caught.value).count("prompt is empty") == MAX_NAMED == 10


@pytest.mark.parametrize(
    ("each", "complaint"),
    [
        ([], "got 2 prompts and only 0 sampling params"),
        ([SamplingParams()], "got 2 prompts and only 1 sampling params"),
        ([SamplingParams()] * 3, "got 2 prompts and more sampling params"),
        (itertools.repeat(SamplingParams()), "got 2 prompts and more sampling params"),
        ([None, SamplingParams()], "prompt 0: expected SamplingParams for each prompt, got None"),
        ([SamplingParams(), {}], "prompt 1: expected SamplingParams for each prompt, got dict"),
    ],
)  # fmt: skip
def test_parameters_must_match_the_prompts(
    encoder: PromptEncoder, each: object, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_all(["a", "b"], each, encoder.encode, any_params)


def test_a_check_of_parameters_is_told_the_prompt(encoder: PromptEncoder) -> None:
    def refuse_long(params: SamplingParams, ids: np.ndarray) -> None:
        if len(ids) * params.n > 4:
            raise ConfigError("too much")

    with pytest.raises(ConfigError, match=r"^prompt 1: too much$"):
        check_all(["ab", "abcdef"], SamplingParams(n=2), encoder.encode, refuse_long)


def test_lazily_a_bad_prompt_fails_alone(encoder: PromptEncoder) -> None:
    each = iter([SamplingParams(max_tokens=n) for n in (1, 2, 3)])
    got = list(check_lazily(iter(["a", "", "b", "c"]), each, encoder.encode, any_params))
    assert [item.index for item in (got[0], got[2])] == [0, 2]
    assert [item.params.max_tokens for item in (got[0], got[2])] == [1, 3]
    assert got[1][0] == 1 and "prompt 1: the prompt is empty" in str(got[1][1])
    assert got[3][0] == 3 and "fewer sampling params than prompts" in str(got[3][1])


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"a",
        bytearray(b"a"),
        memoryview(b"a"),
        {"a": 1},
        {"a"},
        frozenset("a"),
        np.array(5),
    ],
)
def test_what_holds_no_prompts_in_order_is_refused(prompts: object) -> None:
    with pytest.raises(ConfigError, match="is no prompt; expected text, token ids, chat messages"):
        as_iterable(prompts)


def test_rows_of_an_array_are_checked_at_once(encoder: PromptEncoder) -> None:
    rows = as_iterable(np.array([[1, 2], [3, 400]]))
    with pytest.raises(ConfigError, match=r"^prompt 1: token id 400"):
        check_all(rows, SamplingParams(), encoder.encode, any_params)
