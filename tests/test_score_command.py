"""`fastdecode score` as a user runs it."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma import Generator
from fastdecode_rdma.batch import score_runner
from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.score_lines import ScoreLines
from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError, WorkerLostError
from fastdecode_rdma.scoring import Loglikelihood

GOOD: list[dict[str, Any]] = [
    {"id": "a", "context": "hello", "continuation": " world", "label": 1},
    {"context": "hello ", "continuation": "there"},
    {"id": "empty", "context": "", "continuation": "x"},
    {"id": "ids", "context": [104, 105], "continuation": [106]},
    {"id": "text", "text": "a whole text"},
    {"id": "long", "text": "y" * 700},
]


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    """A tiny model."""
    return tiny_models("llama")


@pytest.fixture(scope="module")
def scored(model: Path) -> Iterator[dict[Any, Loglikelihood]]:
    """What the library says of the good lines, by id or number."""
    with Generator.from_pretrained(model, deterministic=True) as generator:
        found: dict[Any, Loglikelihood] = {}
        for number, line in enumerate(GOOD, 1):
            if "text" in line:
                (one,) = generator.loglikelihood_rolling([line["text"]])
            else:
                (one,) = generator.loglikelihood([(line["context"], line["continuation"])])
            found[line.get("id", number)] = one
        yield found


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(model: Path, *options: Any) -> int:
    return main(["score", "--model", str(model), "--deterministic", *map(str, options)])


@pytest.mark.parametrize("together", [512, 2])
def test_scores_are_the_librarys(model, scored, tmp_path, monkeypatch, together):
    monkeypatch.setattr(score_runner, "MAX_LINES", together)
    source, out = write_lines(tmp_path / "in", [*GOOD, "{"]), tmp_path / "out"
    assert score(model, "-i", source, "-o", out, "--token-logprobs") == 3
    lines = {line["id"]: line for line in read_lines(out)}
    assert len(lines) == 7 and "no JSON" in lines[7]["error"]["message"]
    for number, (name, expected) in enumerate(scored.items(), 1):
        carried = {"label": 1} if name == "a" else {}
        cut = {"num_truncated": expected.num_truncated} if expected.num_truncated else {}
        assert lines[name] == {
            "id": name,
            "line": number,
            "logprob": expected.logprob,
            "num_tokens": len(expected.token_ids),
            "is_greedy": expected.is_greedy,
            "token_logprobs": expected.token_logprobs,
            **cut,
            **carried,
        }
    assert lines["long"]["num_tokens"] == 700


def test_a_job_goes_on_where_it_was_lost(model, scored, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(score_runner, "MAX_LINES", 2)
    source, out = write_lines(tmp_path / "in", GOOD), tmp_path / "out"
    real, calls = Generator.loglikelihood, []

    def failing(generator: Generator, pairs: list[Any], **options: Any) -> list[Loglikelihood]:
        calls.append(len(pairs))
        if len(calls) == 2:
            lost = WorkerLostError("w", "gone")
            return [Loglikelihood(math.nan, error=lost) for _ in pairs]
        return real(generator, pairs, **options)

    monkeypatch.setattr(Generator, "loglikelihood", failing)
    assert score(model, "-i", source, "-o", out, "--ordered") == 1
    assert "continue with: fastdecode score --model" in capfd.readouterr().err
    assert [line["id"] for line in read_lines(out)] == ["a", 2]
    out.write_bytes(out.read_bytes()[:-5])  # the last line is torn
    assert score(model, "-i", source, "-o", out, "--ordered", "--resume") == 0
    assert [line["id"] for line in read_lines(out)] == [*scored]
    assert [line["logprob"] for line in read_lines(out)] == [s.logprob for s in scored.values()]
    assert score(model, "-i", source, "-o", out, "--ordered", "--resume", "--token-logprobs") == 2
    assert "token_logprobs is true and was false" in capfd.readouterr().err


def test_a_pair_that_fails_is_an_error_record(model, tmp_path):
    lines = [{"context": "a", "continuation": ""}, {"context": [1], "continuation": [999]}]
    source, out = write_lines(tmp_path / "in", [*lines, GOOD[0]]), tmp_path / "out"
    assert score(model, "-i", source, "-o", out) == 3
    errors = {line["line"]: line.get("error") for line in read_lines(out)}
    assert errors[3] is None and "999" in errors[2]["message"]


def test_pipes_are_answered_while_they_are_open(model, scored, tmp_path):
    source, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(source)

    def feed() -> None:
        with source.open("w") as pipe:
            for number in range(2):
                pipe.write(json.dumps(GOOD[number]) + "\n")
                pipe.flush()
                while not out.exists() or out.read_bytes().count(b"\n") <= number:
                    pass

    thread = threading.Thread(target=feed)
    thread.start()
    assert score(model, "-i", source, "-o", out) == 0
    thread.join(10)
    assert [line["logprob"] for line in read_lines(out)] == [
        scored["a"].logprob, scored[2].logprob,
    ]  # fmt: skip


def test_a_dry_run_measures_context_and_continuation(model, tmp_path, capfd):
    source = write_lines(tmp_path / "in", [*GOOD[:2], {"context": [1], "continuation": "x"}])
    assert score(model, "-i", source, "--dry-run") == 3
    out = capfd.readouterr().out
    assert "line 3: context and continuation must both be text or both token ids" in out
    assert "22 tokens in prompts; the longest has 11, on line 1" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "'context' and 'continuation' are needed, or 'text' alone; given: none"),
        ({"context": "x"}, "given: 'context'"),
        ({"continuation": "x"}, "given: 'continuation'"),
        ({"context": "x", "continuation": "y", "text": "z"}, "'text' alone"),
        ({"prompt": "x"}, "'prompt' is for `fastdecode generate`"),
        ({"messages": []}, "'messages' is for `fastdecode generate`"),
        ({"text": "x", "sampling_params": {"max_tokens": 1}}, "change no score"),
        ({"text": 3}, "text must be text or token ids, got 3"),
        ({"text": [1, "x"]}, "text must be text or token ids"),
        ({"text": "x", "logprob": 1}, "'logprob' is a key of the output"),
        ({"text": "x", "id": 1.5}, "id must be text or an integer"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(line, words):
    lines = ScoreLines()
    record = lines.parse(RawLine(3, json.dumps({**line, "label": 7}).encode()))
    assert isinstance(record.error, ConfigError) and words in str(record.error)
    values = json.loads(lines.failure(record, record.error))
    assert values["line"] == 3 and values["label"] == 7


def test_nothing_that_json_has_not_is_written():
    lines = ScoreLines(with_token_logprobs=True)
    record = lines.parse(RawLine(1, b'{"text": "x"}'))
    long = json.loads(lines.result(record, Loglikelihood(-2e4, [-2.0] * 10_000, [1] * 10_000)))
    assert long["logprob"] == -2e4  # the sum of a long text
    values = json.loads(lines.result(record, Loglikelihood(-math.inf, [-1.0, -math.inf], [1, 2])))
    assert values["logprob"] == -9999.0 and values["token_logprobs"] == [-1.0, -9999.0]
