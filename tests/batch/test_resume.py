"""Jobs that end at any moment and are resumed: every line once, as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma.batch import output as output_module
from fastdecode_rdma.cli import main

FORKING = """
import os, resource, signal, sys
import torch
import fastdecode_rdma.batch.command, fastdecode_rdma.batch.runner, fastdecode_rdma.generator
from fastdecode_rdma.batch import openai_lines
from fastdecode_rdma.cli import main
for line in sys.stdin:
    max_bytes, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if max_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_bytes), int(max_bytes)))
        torch.set_num_threads(1)
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Imports once and forks before any thread is started: a start takes no seconds."""

SAMPLED = ["--max-tokens", "3", "--temperature", "0.8", "--seed", "11", "--deterministic"]
THREE = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]


class Runs:
    """Runs of the command, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )

    def start(self, arguments: Sequence[str], *, max_bytes: int | None = None) -> int:
        """Starts a run; returns its process id."""
        self._process.stdin.write("\t".join([str(max_bytes or ""), *arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """Returns the exit code, -N for a signal."""
        return int(self._process.stdout.readline())

    def run(self, arguments: Sequence[str], **options: Any) -> int:
        """Starts a run and waits for its end."""
        self.start(arguments, **options)
        return self.wait()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Forks runs of the command."""
    started = Runs(tmp_path_factory.mktemp("runs"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    """A tiny model."""
    return tiny_models("llama")


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def own_lines(count: int) -> list[Any]:
    """Lines of all kinds: with ids and without, samples, errors, ids that come twice."""
    lines: list[Any] = []
    for number in range(count):
        line: dict[str, Any] = {"prompt": f"p{number % 97}", "label": number}
        if number % 3:
            line["id"] = f"id-{number - 20 if number % 40 == 25 else number}"
        if number % 11 == 0:
            line["sampling_params"] = {"max_tokens": 1 + number % 13, "n": 1 + number % 2}
        lines.append("{" if number % 50 == 7 else line)
    return lines


def openai_lines(count: int) -> list[Any]:
    """The same in OpenAI's manner."""
    lines: list[Any] = []
    for number in range(count):
        body = {"model": "m", "prompt": f"p{number % 97}", "max_tokens": number % 5, "logprobs": 1}
        line = {"custom_id": f"c{number - 1 if number % 20 == 7 else number}", "method": "POST"}
        line |= {"url": "/v1/embeddings" if number % 30 == 9 else "/v1/completions", "body": body}
        lines.append('{"custom_id": 3}' if number % 50 == 8 else line)
    return lines


def sorted_lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return sorted(data.splitlines())


def kill_when(path: Path, nbytes: int, process: int) -> None:
    """kill -9 once the output has so many bytes."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < nbytes:
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.0005)
    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("is_openai", "num_lines", "num_kills"),
    [(False, 2000, 10), (True, 300, 2)],
    ids=["own", "openai-ordered"],
)
def test_kill_9_at_random_moments_changes_nothing(
    runs, model, tmp_path, is_openai, num_lines, num_kills
):
    lines = openai_lines(num_lines) if is_openai else own_lines(num_lines)
    more = ["--ordered"] if is_openai else []
    source = write_lines(tmp_path / "in", lines)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    options = ["generate", "--model", str(model), "-i", str(source), *SAMPLED, *more]
    assert runs.run([*options, "-o", str(whole)]) == 3
    assert whole.read_bytes().count(b"\n") == len(lines)
    nbytes = whole.stat().st_size
    if is_openai:  # answers hold the moment at which the job was begun first: the same job, then
        Path(f"{torn}.job").write_text(Path(f"{whole}.job").read_text())
        torn.write_bytes(whole.read_bytes()[:100])  # no whole line yet
    moments = random.Random(len(lines))
    # not near the end: ordered lines come in bursts, and the last one may end the job first
    for moment in sorted(moments.uniform(0.02, 0.8) for _ in range(num_kills)):
        process = runs.start([*options, "-o", str(torn), "--resume"])
        kill_when(torn, int(moment * nbytes), process)
        assert runs.wait() == -signal.SIGKILL
        assert torn.stat().st_size < nbytes
    assert runs.run([*options, "-o", str(torn), "--resume"]) == 3
    assert sorted_lines(torn) == sorted_lines(whole)
    assert not is_openai or torn.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_says_how_to_go_on(runs, model, tmp_path, sign, code):
    lines = [{"prompt": f"p{i}", "sampling_params": {"max_tokens": 60}} for i in range(120)]
    source, out = write_lines(tmp_path / "in 1", lines), tmp_path / "out"
    options = ["generate", "--model", str(model), "-i", str(source), "-o", str(out), *SAMPLED]
    process = runs.start([*options, "--max-num-seqs", "8", "--overwrite"])
    deadline = time.monotonic() + 60
    while not out.exists() or not out.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process, sign)
    assert runs.wait() == code
    done = out.read_bytes().count(b"\n")
    assert 0 < done < 120
    said = runs.errors.read_text().splitlines()[-2:]
    counted = int(said[0].removeprefix("interrupted: ").partition(" requests, ")[0])
    assert counted in (done, done - 1)  # the signal may come between a record and its count
    again = f"continue with: fastdecode {' '.join(options)} --max-num-seqs 8 --resume"
    assert said[1] == again.replace(str(source), f"'{source}'")
    assert runs.run([*options, "--resume"]) == 0
    assert sorted(json.loads(line)["line"] for line in sorted_lines(out)) == [*range(1, 121)]
    assert "of an earlier run" in runs.errors.read_text().splitlines()[-1]


def test_a_full_disk_stops_a_job_that_then_goes_on(runs, model, tmp_path):
    source = write_lines(tmp_path / "in", [{"prompt": f"p{i}"} for i in range(60)])
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ["generate", "--model", str(model), "-i", str(source), *SAMPLED]
    assert runs.run([*options, "-o", str(whole)]) == 0
    assert runs.run([*options, "-o", str(out)], max_bytes=3000) == 1
    assert out.read_bytes().endswith(b"\n") and 0 < out.stat().st_size <= 3000
    said = runs.errors.read_text().splitlines()[-3:]
    assert said[0] == "fastdecode: error: File too large"
    assert said[1].startswith("stopped: ") and said[2].startswith("continue with: fastdecode")
    assert runs.run([*options, "-o", str(out), "--resume"]) == 0
    assert sorted_lines(out) == sorted_lines(whole)


def generate(model: Path, *options: Any) -> int:
    return main(["generate", "--model", str(model), *map(str, options)])


def test_a_job_that_is_complete_is_left_alone(model, tmp_path, capfd):
    source, out = write_lines(tmp_path / "in", [*THREE, "{"]), tmp_path / "out"
    options = ["-i", source, "-o", out, "--max-tokens", 2, "--resume"]
    assert generate(model, *options) == 3  # nothing to resume: it starts
    before = out.read_bytes()
    capfd.readouterr()
    assert generate(model, *options) == 3
    assert capfd.readouterr().err == f"all 4 lines are in {out} already\n"
    assert out.read_bytes() == before


def test_another_job_is_refused_and_named(model, tiny_models, tmp_path, capfd):
    source, out = write_lines(tmp_path / "in", THREE), tmp_path / "out"
    options = ["-i", source, "-o", out, "--max-tokens", 2, "--seed", 3]
    assert generate(model, *options) == 0
    first = out.read_bytes()
    capfd.readouterr()
    other = tiny_models("llama-other", num_hidden_layers=2)
    for changed, words in (
        ([*options, "--top-p", "0.5"], "top_p is 0.5 and was null"),
        ([*options, "--max-tokens", 3], "max_tokens is 3 and was 2"),
        ([*options, "--seed", 4], "seed is 4 and was 3"),
        ([*options, "--ordered"], "ordered is true and was false"),
        ([*options, "--model", other], "model is "),
    ):
        assert generate(model, *changed, "--resume") == 2
        error = capfd.readouterr().err
        assert words in error and "another job began it" in error and error.count("\n") == 1
    source.write_text(source.read_text().replace('"c"', '"d"'))
    assert generate(model, *options, "--resume") == 2
    assert "input is " in capfd.readouterr().err
    assert out.read_bytes() == first
    assert generate(model, *options, "--overwrite") == 0
    assert generate(model, *options, "--resume") == 0  # the new job's


def test_what_cannot_be_resumed_says_why(model, tmp_path, capfd):
    source, out = write_lines(tmp_path / "in", THREE), tmp_path / "out"
    out.write_text('{"line": 1}\n')
    assert generate(model, "-i", source, "-o", out, "--resume") == 2
    assert f"{out}.job is not there" in capfd.readouterr().err
    assert generate(model, "-i", source, "--resume") == 2
    assert "needs files" in capfd.readouterr().err
    assert generate(model, "-i", "-", "-o", tmp_path / "new", "--resume") == 2
    assert "needs files" in capfd.readouterr().err
    assert generate(model, "-i", source, "-o", out, "--resume", "--overwrite") == 2
    assert "not allowed with" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (b'{"line": 2}\n', "second record of line 2"),
        (b'{"line": 4}\n', "is no record"),
        (b'{"line": true}\n', "is no record"),
        (b'{"id": "batch_req_zz"}\n', "is no record"),
        (b"notes of a user\n", "line 4 of .* is no JSON"),
        (b'{"line": NaN}\n', "NaN"),
    ],
)
def test_an_output_that_holds_something_else_is_not_touched(model, tmp_path, capfd, extra, words):
    source, out = write_lines(tmp_path / "in", THREE), tmp_path / "out"
    assert generate(model, "-i", source, "-o", out, "--max-tokens", 2) == 0
    out.write_bytes(out.read_bytes() + extra)
    before = out.read_bytes()
    assert generate(model, "-i", source, "-o", out, "--max-tokens", 2, "--resume") == 2
    assert re.search(words, capfd.readouterr().err)
    assert out.read_bytes() == before


def test_two_runs_do_not_write_into_one_file(model, tmp_path, capfd):
    source, out = write_lines(tmp_path / "in", THREE), tmp_path / "out"
    options = ["-i", source, "-o", out, "--max-tokens", 2]
    assert generate(model, *options) == 0
    holder = output_module.LineWriter(str(out), overwrite=False, resume=True)
    for more in ("--resume", "--overwrite"):
        assert generate(model, *options, more) == 2
        assert "another process is writing" in capfd.readouterr().err
    assert out.read_bytes().count(b"\n") == 3
    holder.close()
    assert generate(model, *options, "--resume") == 0


def test_a_larger_limit_goes_on(model, tmp_path):
    source, out = write_lines(tmp_path / "in", THREE), tmp_path / "out"
    options = ["-i", source, "-o", out, "--max-tokens", 2]
    assert generate(model, *options, "--limit", 1) == 0
    assert [json.loads(line)["line"] for line in sorted_lines(out)] == [1]
    assert generate(model, *options, "--resume", "--limit", 2) == 0
    assert generate(model, *options, "--resume") == 0
    assert sorted(json.loads(line)["line"] for line in sorted_lines(out)) == [1, 2, 3]
