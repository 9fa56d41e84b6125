"""Prompts and parameters as users write them: what is accepted, one clear line per mistake."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma.chat import Chat
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
        (Chat(CHAT), True), ([Chat(CHAT)], False), ({"prompt": "a"}, True),
        ({"prompt_token_ids": [1]}, True), ({"messages": CHAT}, True), ({"input_ids": [1]}, False),
        ([{"prompt": "a"}, {"messages": CHAT}], False), ([{"prompt": "a"}, "b"], False),
        ([{"role": "user"}, {"prompt": "a"}], True), (torch.tensor([1, 2]), True),
        (torch.tensor([[1, 2]]), False), (np.array(["a", "b"]), False), (np.int64(1), False),
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
    for same in (torch.tensor(text_ids), torch.tensor(text_ids, dtype=torch.int32)):
        assert encoder.encode(same).tolist() == text_ids
    for same in (
        {"prompt": "hi"},
        {"prompt_token_ids": text_ids},
        {"prompt": text_ids},
        {"prompt_token_ids": np.array(text_ids), "prompt": "given"},
        np.str_("hi"),
    ):
        assert encoder.encode(same).tolist() == text_ids  # fmt: skip
    chat_ids = encoder.encode("user:hi;").tolist()
    for same in (CHAT, tuple(CHAT), Chat(CHAT), {"messages": CHAT}):
        assert encoder.encode(same).tolist() == chat_ids
    assert encoder.encode({"messages": CHAT, "chat_template": "{{ 'x' }}"}).tolist() == (
        encoder.encode("x").tolist()
    )
    assert encoder.encode([0, 299]).tolist() == [0, 299]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "prompt is empty and the tokenizer adds no BOS token"),
        ([], "prompt is empty; at least one token is needed"),
        (torch.tensor([], dtype=torch.int64), "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        (Chat(CHAT, chat_template="{# #}"), "the chat template made an empty prompt"),
        (Chat(CHAT, chat_template="{% for"), "not valid Jinja"),
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
        (b"ab", "bytes is no prompt; expected text, token ids, chat messages; decode bytes to"),
        ({"role": "user"}, "one message is no prompt; a chat is a list of messages"),
        ({"input_ids": [1]}, "give prompt['input_ids'] itself"),
        ({"text": "a"}, "'prompt_token_ids' or 'prompt' or 'messages'; got 'text'"),
        ({}, "got none"),
        ({"prompt": "a", "multi_modal_data": {}}, "cannot have 'multi_modal_data', only prompt,"),
        ({"messages": CHAT, "tool": []}, "cannot have 'tool', only add_generation_prompt,"),
        ({"prompt": 5}, "'prompt' must be text or token ids, got 5"),
        ({"prompt": CHAT}, "'prompt' must be text or token ids"),
        ({"prompt_token_ids": "ab"}, "'prompt_token_ids' must be a list of token ids, got 'ab'"),
        ({"messages": "hi"}, "messages must be a list of dicts, got 'hi'"),
        ([{"content": "hi"}], "message 0 needs a 'role'"),
        (torch.tensor([1.0]), "dtype float32"),
        (torch.tensor([1], dtype=torch.bfloat16), "Tensor cannot be read as token ids"),
        (torch.tensor([1], device="meta"), "Tensor cannot be read as token ids"),
        (torch.tensor([[1]]), "2 dimensions"),
        (torch.tensor([True]), "dtype bool"),
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
        np.int64(5),
        torch.tensor(5),
    ],
)
def test_what_holds_no_prompts_in_order_is_refused(prompts: object) -> None:
    with pytest.raises(ConfigError, match=r"is no prompt; expected text, .* chat|a dict is"):
        as_iterable(prompts)


def test_odd_texts(encoder: PromptEncoder, texts: list[str]) -> None:
    roomy = PromptEncoder(encoder.tokenizer, vocab_size=300, max_model_len=2_000_000)
    for text in filter(None, texts):
        assert encoder.tokenizer.decode(roomy.encode(text).tolist()) == text
    assert len(roomy.encode("a\0b")) == 3
    assert len(roomy.encode("word " * 200_000)) == 1_000_000
    with pytest.raises(ConfigError, match="has 1000000 tokens and max_model_len is 16"):
        encoder.encode("x" * 1_000_000)
    for bad in ("\ud83d", "a\udc00b", {"prompt": "\ud800"}):
        with pytest.raises(ConfigError, match="no valid text"):
            encoder.encode(bad)


def test_an_empty_text_is_the_bos_token_where_there_is_one(text_backend) -> None:
    tokenizer = Tokenizer(text_backend("byte_level"), special_tokens={"bos_token": "<s>"})
    encoder = PromptEncoder(tokenizer, vocab_size=500, max_model_len=16)
    assert encoder.encode("").tolist() == [tokenizer.bos_token_id]
    with pytest.raises(ConfigError, match="prompt is empty; at least"):
        encoder.encode([])


def test_the_text_of_a_prompt_is_kept(encoder: PromptEncoder) -> None:
    prompts = ["a", {"prompt": "b"}, {"prompt_token_ids": [1], "prompt": "c"}, [1], CHAT]
    checked = check_all(prompts, SamplingParams(), encoder.encode, any_params)
    assert [prompt.text for prompt in checked] == ["a", "b", "c", None, None]


def test_lists_of_dicts_are_several_prompts(encoder: PromptEncoder) -> None:
    prompts = as_iterable([{"prompt": "ab"}, {"prompt_token_ids": [5]}, {"messages": CHAT}])
    checked = check_all(prompts, SamplingParams(), encoder.encode, any_params)
    assert [len(prompt.ids) for prompt in checked] == [2, 1, 8]


def test_rows_of_a_tensor_are_prompts(encoder: PromptEncoder) -> None:
    rows = as_iterable(torch.tensor([[1, 2], [3, 4]]))
    assert isinstance(rows, list)
    checked = check_all(rows, SamplingParams(), encoder.encode, any_params)
    assert [prompt.ids.tolist() for prompt in checked] == [[1, 2], [3, 4]]


def test_lazily_nothing_is_read_ahead(encoder: PromptEncoder) -> None:
    read: list[int] = []

    def source() -> Iterator[str]:
        for number in itertools.count():
            read.append(number)
            yield "ab"

    pulled = check_lazily(source(), SamplingParams(), encoder.encode, any_params)
    assert [next(pulled).index for _ in range(3)] == [0, 1, 2]
    assert read == [0, 1, 2]


def test_lazily_only_the_prompt_that_is_too_long_fails(encoder: PromptEncoder) -> None:
    texts = ["x" * length for length in (14, 15, 16, 17, 1)]
    got = list(check_lazily(iter(texts), SamplingParams(), encoder.encode, any_params))
    assert [len(item.ids) for item in got if not isinstance(item, tuple)] == [14, 15, 1]
    errors = [str(item[1]) for item in got if isinstance(item, tuple)]
    assert "has 16 tokens and max_model_len is 16" in errors[0]
    assert "has 17 tokens and max_model_len is 16" in errors[1]


def test_rows_of_an_array_are_checked_at_once(encoder: PromptEncoder) -> None:
    rows = as_iterable(np.array([[1, 2], [3, 400]]))
    with pytest.raises(ConfigError, match=r"^prompt 1: token id 400"):
        check_all(rows, SamplingParams(), encoder.encode, any_params)
