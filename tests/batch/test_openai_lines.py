"""OpenAI's batch files: what is understood, what is refused by name, and the shape of answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma import Generator, SamplingParams
from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.openai_lines import OpenAILines, is_openai
from fastdecode_rdma.batch.records import seeded
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import SamplingError

DEFAULTS = SamplingParams(temperature=0.5)
FORMAT = OpenAILines(DEFAULTS, 7, "job", 123, "my-model", None)
USER = {"role": "user", "content": "hi"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def line_of(url: str, body: Any, **changes: Any) -> RawLine:
    values = {"custom_id": "a", "method": "POST", "url": f"/v1/{url}", "body": body, **changes}
    return RawLine(3, json.dumps({k: v for k, v in values.items() if v is not None}).encode())


def parse(url: str, body: Any, **changes: Any):
    return FORMAT.parse(line_of(url, body, **changes))


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        ("completions", {"prompt": "x"}, {"max_tokens": 16}),
        (
            "completions",
            {"prompt": "x", "max_tokens": 5, "top_k": 3},
            {"max_tokens": 5, "top_k": 3},
        ),
        ("completions", {"prompt": "x", "max_tokens": 0, "n": 3}, {"max_tokens": 1}),
        (
            "completions",
            {"prompt": "x", "echo": True, "logprobs": 2, "stop": "q"},
            {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 2, "stop": ("q",)},
        ),
        (
            "completions",
            {"prompt": "x", "echo": True, "logprobs": 0, "max_tokens": 0},
            {"max_tokens": 1, "prompt_logprobs": 0},
        ),
        ("completions", {"prompt": "x", "stream": False, "user": "u"}, {"max_tokens": 16}),
        ("chat/completions", {"messages": [USER]}, {}),
        ("chat/completions", {"messages": [USER], "max_tokens": 4}, {"max_tokens": 4}),
        ("chat/completions", {"messages": [USER], "max_completion_tokens": 4}, {"max_tokens": 4}),
        (
            "chat/completions",
            {"messages": [USER], "max_completion_tokens": 4, "max_tokens": 4, "seed": 5},
            {"max_tokens": 4, "seed": 5},
        ),
        ("chat/completions", {"messages": [USER], "logprobs": True}, {"logprobs": 0}),
        (
            "chat/completions",
            {"messages": [USER], "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 1}},
            {"logprobs": 3, "logit_bias": {5: 1.0}},
        ),
        (
            "chat/completions",
            {"messages": [USER], "tools": [], "response_format": {"type": "text"}, "n": 2},
            {"n": 2},
        ),
    ],
)
def test_parameters_mean_what_they_mean_there(url, body, expected):
    record = parse(url, body)
    assert record.error is None
    wanted = SamplingParams(**{"temperature": 0.5, **expected})
    assert record.params == seeded(wanted, 7, record)
    is_chat = url.startswith("chat")
    assert record.prompts == [Chat([USER]) if is_chat else "x"] and record.id == "a"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ["x"]),
        ([1, 2], [[1, 2]]),
        (["x", "y"], ["x", "y"]),
        ([[1, 2], "x"], [[1, 2], "x"]),
    ],
)
def test_prompts_come_alone_and_together(prompt, expected):
    assert parse("completions", {"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (line_of("completions", {"prompt": "x", "stream": True}), "stream", "not supported"),
        (
            line_of("chat/completions", {"messages": [USER], "tools": [{}]}),
            "tools",
            "not supported",
        ),
        (
            line_of("chat/completions", {"messages": [USER], "response_format": {"type": "json"}}),
            "response_format",
            "not supported",
        ),
        (line_of("embeddings", {"input": "x"}), "url", "/v1/chat/completions"),
        (line_of("completions", {"prompt": "x"}, method="GET"), "method", "must be POST"),
        (line_of("completions", {"prompt": "x"}, custom_id=""), "custom_id", "must be text"),
        (line_of("completions", {"prompt": "x"}, custom_id=None), "custom_id", "must be text"),
        (line_of("completions", {"prompt": "x"}, bdy={}), "bdy", "did you mean 'body'"),
        (line_of("completions", None), "body", "must be an object"),
        (line_of("completions", {}), "prompt", "prompt must be text"),
        (line_of("completions", {"prompt": []}), "prompt", "prompt must be text"),
        (line_of("completions", {"prompt": [1, "x"]}), "prompt", "prompt must be text"),
        (line_of("completions", {"prompt": "x", "max_tokns": 3}), "max_tokns", "'max_tokens'"),
        (line_of("completions", {"prompt": "x", "max_tokens": -1}), "max_tokens", "at least 1"),
        (line_of("completions", {"prompt": "x", "logprobs": True}), "logprobs", "integer from 0"),
        (line_of("completions", {"prompt": "x", "logprobs": 21}), "logprobs", "from 0 to 20"),
        (line_of("completions", {"prompt": "x", "echo": 1}), "echo", "true or false"),
        (line_of("completions", {"prompt": "x", "best_of": 3}), "best_of", "not supported"),
        (line_of("completions", {"prompt": "x", "top_p": 7}), "top_p", "top_p must be"),
        (line_of("completions", {"prompt": "x", "messages": [USER]}), "messages", "unknown field"),
        (line_of("chat/completions", {"prompt": "x"}), "prompt", "unknown field"),
        (line_of("chat/completions", {"model": "m"}), "messages", "missing"),
        (
            line_of("chat/completions", {"messages": [USER], "max_completion_tokens": 0}),
            "max_completion_tokens",
            "at least 1",
        ),
        (
            line_of(
                "chat/completions",
                {"messages": [USER], "max_completion_tokens": 1, "max_tokens": 2},
            ),
            "max_tokens",
            "differ",
        ),
        (
            line_of("chat/completions", {"messages": [USER], "top_logprobs": 2}),
            "top_logprobs",
            "needs logprobs",
        ),
        (line_of("chat/completions", {"messages": [USER], "logprobs": 2}), "logprobs", "true or"),
        (line_of("chat/completions", {"messages": [USER], "echo": True}), "echo", "unknown field"),
        (line_of("completions", {"prompt": "x", "model": 3}), "model", "model must be text"),
        (RawLine(3, b'{"custom_id": "a", '), None, "no JSON"),
    ],
)
def test_a_wrong_request_names_its_field(line, field, words):
    record = FORMAT.parse(line)
    assert record.error is not None and words in str(record.error)
    values = json.loads(FORMAT.failure(record, record.error))
    assert values.keys() == {"id", "custom_id", "response", "error"}
    assert values["custom_id"] == record.id
    assert values["response"]["status_code"] == 400
    said = values["response"]["body"]["error"]
    assert (said["param"], said["type"]) == (field, "invalid_request_error")
    assert values["error"]["message"] == said["message"] and words in said["message"]


def test_a_failure_of_ours_is_500_and_ids_are_the_jobs_and_the_lines():
    record = parse("completions", {"prompt": "x"})
    values = json.loads(FORMAT.failure(record, SamplingError("request 7: boom")))
    assert values["response"]["status_code"] == 500
    assert values["error"]["code"] == "SamplingError" and values["error"]["message"] == "boom"
    assert values == json.loads(FORMAT.failure(record, SamplingError("boom")))
    other = OpenAILines(DEFAULTS, 7, "another job", 123, "my-model", None)
    assert json.loads(other.failure(record, SamplingError("boom")))["id"] != values["id"]
    ids = {values["id"], values["response"]["request_id"].replace("req_", "batch_req_")}
    assert len(ids) == 2 and values["id"].endswith("000000000003")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"custom_id": "a"}', True),
        (b'{"url": "/v1/completions", "body": {}}', True),
        (b'{"id": "a", "prompt": "x", "url": "y"}', False),
        (b"{", False),
        (b'{"custom_id": "a", "body": {', True),
    ],
)
def test_the_first_line_tells_the_kind(line, expected):
    assert is_openai(RawLine(1, line)) is expected


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a chat template."""
    path = tmp_path_factory.mktemp("chatty") / "tiny"
    shutil.copytree(tiny_models("llama"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> Iterator[Callable[..., Any]]:
    """What the library itself answers, greedily."""
    with Generator.from_pretrained(model) as generator:
        yield lambda prompt, **params: generator.complete(
            prompt, SamplingParams(temperature=0.0, **params)
        )[0]


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a batch file; returns the output's lines by custom_id."""

    def run_lines(*lines: RawLine) -> dict[str, Any]:
        (tmp_path / "in").write_bytes(b"\n".join(line.data for line in lines))
        options = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--temperature", "0"]
        assert main(["generate", "--model", str(model), *options]) in (0, 3)
        values = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        return {each["custom_id"]: each for each in values}

    return run_lines


def test_a_bad_first_line_spoils_no_other(run, model, tmp_path, capsys):
    good = line_of("completions", {"prompt": "hello", "max_tokens": 2}, custom_id="c")
    found = run(RawLine(1, b"{"), good)
    assert found["c"]["response"]["status_code"] == 200 and found[None]["error"] is not None
    assert main(["generate", "--model", str(model), "-i", str(tmp_path / "in"), "--dry-run"]) == 3
    assert "2 lines, 1 of them wrong" in capsys.readouterr().out


def test_answers_have_openais_shape(run, answers, tmp_path):
    found = run(
        line_of("completions", {"prompt": "hello", "max_tokens": 4, "model": "gpt"}, custom_id="c"),
        line_of("chat/completions", {"messages": [USER], "max_tokens": 4}, custom_id="d"),
        line_of("completions", {"prompt": "x", "max_completion_tokens": 4}, custom_id="e"),
        line_of("completions", {"prompt": "x"}, custom_id="c"),
    )
    state = json.loads((tmp_path / "out.job").read_text())
    text = answers("hello", max_tokens=4).outputs[0]
    said = found["d"]["response"]["body"]
    told = answers([USER], max_tokens=4)
    assert found["d"]["error"] is None and found["d"]["response"]["status_code"] == 200
    assert said == {
        "id": said["id"],
        "object": "chat.completion",
        "created": state["created"],
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant", "content": told.outputs[0].text, "refusal": None
                },
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(told.prompt_token_ids),
            "completion_tokens": 4,
            "total_tokens": len(told.prompt_token_ids) + 4,
        },
    }  # fmt: skip
    assert said["id"].startswith("chatcmpl-")
    assert found["e"]["error"]["param"] == "max_completion_tokens"
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    first, second = sorted((x for x in lines if x["custom_id"] == "c"), key=lambda x: x["id"][-4:])
    body = first["response"]["body"]
    assert body["choices"][0]["text"] == text.text and body["object"] == "text_completion"
    assert body["model"] == "gpt" and body["id"].startswith("cmpl-")
    assert second["error"]["message"] == "id 'c' was on line 1 already"
    assert len({line["id"] for line in lines}) == 4


def test_several_prompts_and_samples_are_choices_of_one_answer(run, answers):
    body = {"prompt": ["hello", [104, 105]], "n": 2, "max_tokens": 3}
    found = run(line_of("completions", body))["a"]["response"]["body"]
    texts = [answers(prompt, max_tokens=3).outputs[0].text for prompt in body["prompt"]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in found["choices"]] == [t for t in texts for _ in range(2)]
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_and_log_probabilities_of_a_completion(run, answers, max_tokens):
    body = {"prompt": "hello", "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    found = run(line_of("completions", body))["a"]["response"]["body"]
    expected = answers("hello", max_tokens=max(1, max_tokens), logprobs=2, prompt_logprobs=2)
    output = expected.outputs[0]
    (choice,) = found["choices"]
    assert choice["text"] == "hello" + (output.text if max_tokens else "")
    assert choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == max_tokens
    shown = choice["logprobs"]
    entries = [*expected.prompt_logprobs[1:], *output.logprobs[:max_tokens]]
    ids = [*expected.prompt_token_ids[1:], *output.token_ids[:max_tokens]]
    own = [entry[token_id] for entry, token_id in zip(entries, ids, strict=True)]
    assert shown["tokens"] == ["h", *(each.decoded_token for each in own)]
    assert shown["token_logprobs"] == [None, *(each.logprob for each in own)]
    assert shown["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert shown["top_logprobs"][0] is None
    for top, entry in zip(shown["top_logprobs"][1:], entries, strict=True):
        assert len(entry) - 1 <= len(top) <= 3
        assert all(each.logprob in top.values() for each in entry.values() if each.rank == 1)


def test_log_probabilities_of_a_chat(run, answers):
    body = {"messages": [USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    found = run(line_of("chat/completions", body))["a"]["response"]["body"]
    output = answers([USER], max_tokens=3, logprobs=2).outputs[0]
    shown = found["choices"][0]["logprobs"]["content"]
    assert len(shown) == 3
    for place, entry in enumerate(output.logprobs):
        own = entry[output.token_ids[place]]
        assert shown[place]["token"] == own.decoded_token
        assert shown[place]["logprob"] == own.logprob
        assert shown[place]["bytes"] == list(own.decoded_token.encode())
        tops = [each["logprob"] for each in shown[place]["top_logprobs"]]
        assert tops == sorted(tops, reverse=True) and len(tops) == 2 and tops[0] == own.logprob
