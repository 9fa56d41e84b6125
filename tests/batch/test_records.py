"""What a line may hold, and what is written for it."""

from __future__ import annotations

import json
import math

import pytest

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.records import (
    CHAT_KEYS,
    OwnLines,
    failure_line,
    override,
    result_line,
    seeded,
)
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import CacheFullError, ConfigError, SamplingError
from fastdecode_rdma.sequence import CompletionOutput, Logprob, SamplingParams

USER = {"role": "user", "content": "x"}
DEFAULTS = SamplingParams(temperature=0.5, max_tokens=7)


def record_of(text: str | bytes | dict, number: int = 3):
    if isinstance(text, dict):
        text = json.dumps(text)
    data = text.encode() if isinstance(text, str) else text
    return OwnLines(DEFAULTS, seed=7).parse(RawLine(number, data))


def test_a_full_line():
    record = record_of(
        {
            "id": "a-1",
            "prompt": "Hallo, Wörld",
            "sampling_params": {"max_tokens": 2, "stop": ["x", "y"], "seed": None},
            "label": {"deep": [1, 2.5, None]},
            "": True,
        }
    )
    assert record.error is None
    assert (record.id, record.number, record.prompts) == ("a-1", 3, ["Hallo, Wörld"])
    expected = SamplingParams(temperature=0.5, max_tokens=2, stop=["x", "y"])
    assert record.params == seeded(expected, 7, record)
    assert record.carried == {"label": {"deep": [1, 2.5, None]}, "": True}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": [1, 2]}, 3),
        ({"prompt": "x", "id": None}, 3),
        ({"prompt": "x", "id": 0}, 0),
        ({"prompt": "x", "id": ""}, ""),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": None, "id": "é"}, "é"),
        ({"prompt": "x", "sampling_params": None}, 3),
    ],
)
def test_absent_and_null_are_the_same(values, expected):
    record = record_of(values)
    assert record.error is None and record.id == expected
    assert record.params == seeded(DEFAULTS, 7, record)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON: Expecting property name"),
        ('{"prompt": "x"', "no JSON: Expecting ',' delimiter at column 15"),
        ("{'prompt': 'x'}", "no JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("7", "must hold a JSON object"),
        ('{"prompt": "x"} {"prompt": "y"}', "no JSON: Extra data at column 17"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 13"),
        ("{}".encode("utf-16"), "not UTF-8"),
        ('{"prompt": "x", "a": NaN}', "NaN is no number"),
        ('{"prompt": "x", "a": -Infinity}', "-Infinity is no number"),
        ('{"prompt": "x", "a": 1e999}', "too large: 1e999"),
        ('{"prompt": "x", "a": ' + "9" * 5000 + "}", "digits"),
        ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' twice"),
        ('{"prompt": "x", "a": {"b": 1, "b": 2}}', "the key 'b' twice"),
        ('{"prompt": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "too deep"),
        ('{"prompt": "x", "a": ' + "[" * 300 + "]" * 300 + "}", "nests deeper than 200"),
        ("{}", "one of 'prompt' and 'messages' is needed; neither"),
        ({"text": "x"}, "'text' is for `fastdecode score`"),
        ({"context": "x", "continuation": "y"}, "'context' is for `fastdecode score`"),
        ({"prompt": "x", "text": "y"}, "'text' is a key of the output; rename"),
        ({"input": "x"}, "did you mean 'prompt' by 'input'"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "both are given"),
        ({"prompt": 3}, "prompt must be text or token ids, got 3"),
        ({"prompt": {"role": "user"}}, "prompt must be text or token ids"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "give them as 'messages'"),
        ({"messages": []}, "needs at least one message"),
        ({"messages": "x"}, "messages must be a list of dicts"),
        ({"messages": [{"content": "x"}]}, "message 0 needs a 'role'"),
        ({"messages": [USER], "tools": {"name": "f"}}, "tools must be a list of dicts"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict"),
        ({"messages": [USER], "continue_final_message": "no"}, "must be True or False, got 'no'"),
        ({"prompt": "x", "tools": []}, "'tools' goes with 'messages'"),
        ({"prompt": "x", "max_tokens": 3}, "'max_tokens' is a sampling parameter; put it into"),
        ({"messages": [USER], "logprobs": 0}, "'logprobs' is a sampling parameter; put it into"),
        ({"prompt": "x", "max_new_tokens": 3}, "in 'sampling_params', use max_tokens"),
        ({"prompt": "x", "id": 1.5}, "id must be text or an integer, got 1.5"),
        ({"prompt": "x", "id": True}, "id must be text or an integer"),
        ({"prompt": "x", "id": ["a"]}, "id must be text or an integer"),
        ({"prompt": "x", "error": 1}, "'error' is a key of the output"),
        ({"prompt": "x", "sampling_params": [1]}, "sampling_params must be an object"),
        ({"prompt": "x", "sampling_params": {"max_token": 3}}, "did you mean 'max_tokens'"),
        ({"prompt": "x", "sampling_params": {"max_new_tokens": 3}}, "max_tokens"),
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"prompt": "x", "sampling_params": {"temperature": "hot"}}, "temperature must be"),
        ({"prompt": "x", "sampling_params": {"self": 1}}, "no 'self'"),
        ({"prompt": "x", "sampling_params": {"cls": 1}}, "no 'cls'"),
        ({"prompt": "x", "sampling_params": {"logits_processors": ["f"]}}, "logits_processors"),
        ({"prompt": "x", "sampling_params": {"min_tokens": 8}}, "exceeds max_tokens"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(line, words):
    record = record_of(line)
    assert isinstance(record.error, ConfigError)
    assert words in str(record.error) and "\n" not in str(record.error)
    assert len(str(record.error)) < 1000
    shown = json.loads(failure_line(record, record.error))
    assert shown["line"] == 3 and shown["error"]["type"] == "ConfigError"


def test_a_line_that_is_too_long():
    record = OwnLines(DEFAULTS, seed=7).parse(RawLine(5, None))
    assert "longer than 32 MiB" in str(record.error) and record.id == 5


def test_what_is_known_of_a_wrong_line_is_carried():
    record = record_of({"id": "a", "label": 7, "text": "old"})
    values = json.loads(failure_line(record, record.error))
    message = str(record.error)
    assert values == {
        "id": "a",
        "line": 3,
        "error": {"type": "ConfigError", "message": message},
        "label": 7,
    }


def test_a_chat_is_all_that_the_library_knows_of_one():
    more = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template": "default",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert more.keys() == set(CHAT_KEYS)
    record = record_of({"messages": [USER], "label": 1, **more})
    assert record.error is None
    assert record.prompts == [Chat([USER], **more)] and record.carried == {"label": 1}
    record = record_of({"messages": [USER], **dict.fromkeys(more), "max_tokens": None})
    assert record.error is None
    assert record.prompts == [Chat([USER])] and record.carried == {}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SamplingError("request 7: non-finite logits"), "non-finite logits"),
        (SamplingError("request 7, output token 3: boom"), "output token 3: boom"),
        (CacheFullError("request 12: no worker had room"), "no worker had room"),
        (ConfigError("prompt 3: the prompt is empty"), "the prompt is empty"),
        (ConfigError("pair 0: the continuation is empty"), "the continuation is empty"),
        (ConfigError("text 5: no"), "no"),
        (ConfigError("the prompt 3: is"), "the prompt 3: is"),
    ],
)
def test_an_error_names_no_number_but_the_lines(error, message):
    values = json.loads(failure_line(record_of({"id": "a", "prompt": "x"}), error))
    assert values["line"] == 3
    assert values["error"] == {"type": type(error).__name__, "message": message}


def test_a_lines_seed_is_made_of_the_jobs_and_its_id():
    def seed_of(values: dict, *, number: int = 3, job: int = 7) -> int | None:
        line = RawLine(number, json.dumps({"prompt": "x", **values}).encode())
        return OwnLines(DEFAULTS, seed=job).parse(line).params.seed

    by_id = seed_of({"id": "a"})
    assert by_id == seed_of({"id": "a"}, number=9)  # wherever the line is
    others = [seed_of({"id": "b"}), seed_of({"id": "a"}, job=8), seed_of({}), seed_of({"id": 3})]
    others += [seed_of({"id": "3"}), seed_of({}, number=4)]
    assert len({by_id, *others}) == 7
    assert seed_of({"sampling_params": {"seed": 5}}) == 5


def test_override():
    assert override(DEFAULTS, None) is DEFAULTS
    changed = override(DEFAULTS, {"max_tokens": 9, "temperature": None, "stop": "x"})
    assert (changed.max_tokens, changed.temperature, changed.stop) == (9, 0.5, ("x",))


def test_one_sample_is_flat_and_several_are_a_list():
    record = record_of({"id": "é", "prompt": "x", "label": "\u2028"})
    one = CompletionOutput(0, "a", [5, 6], finish_reason="stop", stop_reason="!")
    two = CompletionOutput(1, "b", [7], finish_reason="length")
    line = result_line(record, [one], num_prompt_tokens=4)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and "é".encode() in line
    assert json.loads(line) == {
        "id": "é",
        "line": 3,
        "text": "a",
        "finish_reason": "stop",
        "stop_reason": "!",
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
        "label": "\u2028",
    }
    line = result_line(record, [one, two], num_prompt_tokens=4, with_token_ids=True)
    assert json.loads(line)["outputs"] == [
        {"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": "!", "token_ids": [5, 6]},
        {"index": 1, "text": "b", "finish_reason": "length", "stop_reason": None, "token_ids": [7]},
    ]
    assert json.loads(line)["usage"] == {"prompt_tokens": 4, "completion_tokens": 3}


def test_log_probabilities():
    record = record_of({"prompt": "x"})
    entry = {6: Logprob(-math.inf, 3, "c"), 5: Logprob(-0.5, 1, "b")}
    output = CompletionOutput(
        0, "c", [6, 5], logprobs=[entry, {5: Logprob(-0.25, 1, "b")}], finish_reason="length"
    )
    line = result_line(
        record, [output], num_prompt_tokens=1, prompt_logprobs=[None, {9: Logprob(-2.0, 4, "i")}]
    )
    values = json.loads(line)
    low = {"token_id": 6, "token": "c", "logprob": -9999.0, "rank": 3}
    assert values["logprobs"] == [
        {**low, "top_logprobs": [low, {"token_id": 5, "token": "b", "logprob": -0.5, "rank": 1}]},
        {"token_id": 5, "token": "b", "logprob": -0.25, "rank": 1},
    ]
    assert values["prompt_logprobs"] == [
        None,
        {"token_id": 9, "token": "i", "logprob": -2.0, "rank": 4},
    ]


def test_lone_surrogates_come_back_as_they_went_in():
    record = record_of('{"prompt": "x", "label": "\\ud800"}')
    line = failure_line(record, ConfigError("ü \udc00"))
    assert json.loads(line)["label"] == "\ud800"
