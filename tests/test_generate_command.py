"""`fastdecode generate` as a user runs it: files, pipes, interrupts, full disks, real models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma import Generator, SamplingParams
from fastdecode_rdma.batch.files import LineWriter
from fastdecode_rdma.cli import main
from fastdecode_rdma.tokenizer import Tokenizer

CLI = [sys.executable, "-m", "fastdecode_rdma.cli", "generate"]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a chat template."""
    path = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(tiny_models("llama"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[..., list[Any]]:
    """What the library itself answers, greedily."""
    with Generator.from_pretrained(model) as generator:

        def complete(*prompts: Any, **params: Any) -> list[Any]:
            values = {"temperature": 0.0, "max_tokens": 6, **params}
            return [generator.complete(prompt, SamplingParams(**values))[0] for prompt in prompts]

        yield complete


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read_lines(path: Path) -> dict[Any, dict[str, Any]]:
    """Output lines by id; all of them are whole."""
    text = path.read_text()
    assert not text or text.endswith("\n")
    values = [json.loads(line) for line in text.splitlines()]
    return {each["id"]: each for each in values}


# -- files


def test_every_line_is_answered_or_says_why_not(model, answers, tmp_path, capfd):
    source = tmp_path / "in.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    source.write_bytes(
        b'\xef\xbb\xbf{"id": "a", "prompt": "hello", "label": [1, {"x": null}]}\r\n'
        b"\r\n"
        b'{"prompt": [104, 105]}\n'
        b'{"id": "c", "messages": [{"role": "user", "content": "hi"}]}\n'
        b'{"id": "d", "prompt": "hello", "sampling_params": {"max_tokens": 2}}\n'
        b'{"id": "e", "prompt": "hello", "sampling_params": {"max_tokns": 2}}\n'
        b'{"id": "f", "prompt": "unfinished\n'
        b'{"id": "a", "prompt": "again", "label": 2}\n'
        b'{"id": "h", "prompt": "' + b"x" * 600 + b'"}\n'
        b'{"id": "i", "prompt": [1, 2, 99999]}\n'
        b'{"id": "j", "messages": [{"content": "no role"}]}\n'
        b'{"id": "k", "prompt": "hello", "weight": NaN}\n'
        b'{"id": "l", "prompt": "hello", "sampling_params": {"n": 2, "logprobs": 1}}'
    )
    out = tmp_path / "out.jsonl"
    options = ["--input", str(source), "--output", str(out), *GREEDY, "--token-ids"]
    assert main(["generate", "--model", str(model), *options]) == 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "12 requests (7 failed), " in captured.err and "tokens/s" in captured.err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 12
    good = {line["id"]: line for line in lines if "error" not in line}
    hello, ids, chatted = answers("hello", [104, 105], chat)
    assert good["a"] == {
        "id": "a",
        "line": 1,
        "text": hello.outputs[0].text,
        "finish_reason": hello.outputs[0].finish_reason,
        "stop_reason": None,
        "token_ids": hello.outputs[0].token_ids,
        "usage": {"prompt_tokens": 5, "completion_tokens": len(hello.outputs[0].token_ids)},
        "label": [1, {"x": None}],
    }
    assert good[3]["token_ids"] == ids.outputs[0].token_ids
    assert good["c"]["token_ids"] == chatted.outputs[0].token_ids
    assert good["c"]["usage"]["prompt_tokens"] == len(chatted.prompt_token_ids)
    assert good["d"]["token_ids"] == hello.outputs[0].token_ids[:2]
    for index, sample in enumerate(good["l"]["outputs"]):
        assert sample["index"] == index and sample["token_ids"] == hello.outputs[0].token_ids
        assert [x["token_id"] for x in sample["logprobs"]] == sample["token_ids"]
    bad = [line for line in lines if "error" in line]
    assert {(line["line"], line["id"]) for line in bad} == {
        (6, "e"), (7, 7), (8, "a"), (9, "h"), (10, "i"), (11, "j"), (12, 12),
    }  # fmt: skip
    said = {line["line"]: line["error"]["message"] for line in bad}
    for number, words in (
        (6, "did you mean 'max_tokens'"),
        (7, "no JSON"),
        (8, "id 'a' was on line 1 already"),
        (9, "the prompt has 600 tokens"),
        (10, "token id 99999 at place 2"),
        (11, "role"),
        (12, "NaN"),
    ):
        assert words in said[number], said[number]
    assert next(line for line in bad if line["line"] == 8)["label"] == 2


def test_all_good_is_0_and_results_are_not_overwritten(model, tmp_path, capfd):
    source = write_lines(tmp_path / "in", *({"prompt": f"p{i}"} for i in range(5)))
    lines = source.read_text()
    out = tmp_path / "out"
    options = ["generate", "--model", str(model), *GREEDY, "--input", str(source)]
    assert main([*options, "--output", str(out)]) == 0
    first = out.read_bytes()
    assert sorted(read_lines(out)) == [1, 2, 3, 4, 5]
    capfd.readouterr()
    assert main([*options, "--output", str(out)]) == 2
    assert "already and not empty" in capfd.readouterr().err and out.read_bytes() == first
    assert main([*options, "--output", str(out), "--overwrite"]) == 0
    assert out.read_bytes().count(b"\n") == 5
    assert main([*options, "--output", str(source), "--overwrite"]) == 2
    assert "same file" in capfd.readouterr().err and source.read_text() == lines


def test_the_models_own_defaults_hold_until_something_else_is_said(model, tmp_path, capfd):
    own = tmp_path / "model"
    shutil.copytree(model, own)
    (own / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 3}')
    source = write_lines(
        tmp_path / "in", {"prompt": "p"}, {"prompt": "p", "sampling_params": {"max_tokens": 2}}
    )
    options = ["generate", "--model", str(own), "--input", str(source), "--token-ids"]
    assert main([*options, "--output", str(tmp_path / "a")]) == 0
    assert "generation_config.json: temperature=0.0, max_tokens=3\n" in capfd.readouterr().err
    three, two = (read_lines(tmp_path / "a")[i]["token_ids"] for i in (1, 2))
    assert len(three) == 3 and two == three[:2]
    assert main([*options, "--output", str(tmp_path / "b"), "--max-tokens", "4"]) == 0
    assert "generation_config.json: temperature=0.0\n" in capfd.readouterr().err
    four, two = (read_lines(tmp_path / "b")[i]["token_ids"] for i in (1, 2))
    assert len(four) == 4 and four[:3] == three and two == three[:2]


def test_lines_are_read_as_the_batch_has_room(model, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in", *({"prompt": f"p{i}"} for i in range(60)))
    submitted: list[Any] = []
    written: list[int] = []
    submit, write = Generator.submit, LineWriter.write

    def counting(generator: Generator, *args: Any) -> Any:
        submitted.append(args)
        return submit(generator, *args)

    def noting(*args: Any) -> None:
        written.append(len(submitted))
        write(*args)

    monkeypatch.setattr(Generator, "submit", counting)
    monkeypatch.setattr(LineWriter, "write", noting)
    options = ["--input", str(source), "--output", str(tmp_path / "out"), "--max-num-seqs", "4"]
    assert main(["generate", "--model", str(model), *GREEDY, *options]) == 0
    assert written[0] <= 8 and len(written) == 60 and len(submitted) == 60


def test_more_lines_than_may_wait(model, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in", *({"prompt": f"p{i}"} for i in range(40)))
    made = Generator.from_pretrained
    monkeypatch.setattr(Generator, "from_pretrained", partial(made, max_waiting=1))
    monkeypatch.setattr(Generator, "lookahead", 40)
    options = ["--input", str(source), "--output", str(tmp_path / "out"), "--max-num-seqs", "2"]
    assert main(["generate", "--model", str(model), *GREEDY, *options]) == 0
    assert sorted(read_lines(tmp_path / "out")) == list(range(1, 41))


def test_only_ids_that_are_given_must_differ(model, tmp_path):
    lines = [{"id": 2, "prompt": "a"}, {"prompt": "b"}, {"id": "2", "prompt": "c"}, {"prompt": "d"}]
    source = write_lines(tmp_path / "in", *lines, {"id": 4, "prompt": "e"}, {"id": 4, "prompt": ""})
    out = tmp_path / "out"
    options = ["--input", str(source), "--output", str(out), *GREEDY]
    assert main(["generate", "--model", str(model), *options]) == 3
    values = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(each["line"], each["id"], "error" in each) for each in values} == {
        (1, 2, False), (2, 2, False), (3, "2", False), (4, 4, False), (5, 4, False), (6, 4, True),
    }  # fmt: skip
    (said,) = (each["error"]["message"] for each in values if "error" in each)
    assert said == "id 4 was on line 5 already"


def test_a_chats_tools_reach_the_template(model, answers, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    template = "{{ tools[0].name }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"
    more = {"tools": [{"name": "f"}], "chat_template_kwargs": {"style": "!"}}
    source = write_lines(tmp_path / "in", {**chat, **more, "chat_template": template})
    options = ["--input", str(source), "--output", str(tmp_path / "out"), *GREEDY, "--token-ids"]
    assert main(["generate", "--model", str(model), *options]) == 0
    (expected,) = answers("f!hi")
    assert read_lines(tmp_path / "out")[1]["token_ids"] == expected.outputs[0].token_ids


def test_a_failure_while_it_runs_has_the_lines_number_alone(model, tmp_path):
    params = {"allowed_token_ids": [5], "bad_words": [[5, 5]], "ignore_eos": True}
    lines = [{"prompt": "x"}, {"id": "none", "prompt": "x", "sampling_params": params}]
    source = write_lines(tmp_path / "in", *lines)
    options = ["--input", str(source), "--output", str(tmp_path / "out"), *GREEDY]
    assert main(["generate", "--model", str(model), *options]) == 3
    error = read_lines(tmp_path / "out")["none"]["error"]
    assert error["type"] == "SamplingError"
    assert error["message"].startswith("output token 1: ")


def test_warnings_are_heard_on_stderr(tiny_models, start_workers, capfd):
    (worker,) = start_workers(1, memory="32MiB")
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    options = ["--model", str(path), *GREEDY, "--prompt", "hello", "--workers", worker.address]
    assert main(["generate", *options]) == 0
    captured = capfd.readouterr()
    first, last = captured.err.splitlines()
    assert first.startswith("max_model_len lowered from 131072 to ") and "6 tokens in" in last
    assert captured.out.count("\n") >= 1 and "lowered" not in captured.out


# -- prompts


def test_prompts_stream_to_the_terminal(model, answers, capfd):
    (hello,) = answers("hello")
    assert main(["generate", "--model", str(model), *GREEDY, "--prompt", "hello"]) == 0
    captured = capfd.readouterr()
    assert captured.out == hello.outputs[0].text + "\n"
    assert "6 tokens in " in captured.err
    chat, other = answers(
        [{"role": "user", "content": "hello"}], [{"role": "user", "content": "p2"}]
    )
    options = ["--prompt", "hello", "p2", "--chat"]
    assert main(["generate", "--model", str(model), *GREEDY, *options]) == 0
    assert capfd.readouterr().out == (
        f"[1/2] hello\n{chat.outputs[0].text}\n\n[2/2] p2\n{other.outputs[0].text}\n\n"
    )


def test_prompts_as_lines(model, answers, capfd):
    hello, chat = answers("hello", [{"role": "user", "content": "hello"}])
    options = ["generate", "--model", str(model), *GREEDY, "--prompt", "hello", "--output", "-"]
    assert main(options) == 0
    assert json.loads(capfd.readouterr().out)["text"] == hello.outputs[0].text
    assert main([*options, "--chat", "--logprobs", "0"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert values["text"] == chat.outputs[0].text
    assert len(values["logprobs"]) == values["usage"]["completion_tokens"]
    assert main([*options, "--stop", hello.outputs[0].text[1]]) == 0
    assert json.loads(capfd.readouterr().out)["stop_reason"] == hello.outputs[0].text[1]


# -- wrong usage


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of the arguments --prompt --input/-i is required"),
        (["--prompt", "x", "--input", "y"], "not allowed with"),
        (["--input", "/nowhere/in"], "cannot read /nowhere/in: No such file"),
        (["--input", "/"], "it is a directory"),
        (["--input", "/dev/null", "--output", "/nowhere/out"], "there is no folder /nowhere"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--prompt", "x", "--token-file", "t"], "--token-file is for --workers"),
        (["--prompt", "x", "--workers", " ,"], "--workers names no worker"),
        (["--prompt", "x", "--workers", "h", "--token-file", ""], "token"),
        (["--prompt", "x", "--workers", "h", "--token-file", "/nowhere"], "cannot read token"),
        (["--prompt", "x", "--token-ids"], "need --output"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "x", "--max-model-len", "1"], "max_model_len must be"),
        (["--prompt", "x", "--max-tokns", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_one_line_and_2(model, options, words, capfd, monkeypatch):
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE", raising=False)
    assert main(["generate", "--model", str(model), *options]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and words in captured.err
    assert captured.err.startswith("fastdecode: error: ") and captured.err.count("\n") == 1


def test_a_model_that_is_not_there_leaves_no_output_behind(tmp_path, capfd):
    source = write_lines(tmp_path / "in", {"prompt": "x"})
    options = ["--input", str(source), "--output", str(tmp_path / "out")]
    assert main(["generate", "--model", str(tmp_path / "none"), *options]) == 2
    assert "no model at" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["generate", "--model", str(tmp_path / "empty"), *options]) == 2
    assert not (tmp_path / "out").exists()


# -- processes


@pytest.fixture
def spawn(model: Path, tmp_path: Path):
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, code: str = "", **streams: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, "generate"] if code else CLI
        started.append(
            subprocess.Popen(
                [*command, "--model", str(model), *options],
                cwd=tmp_path,
                text=True,
                **{"stderr": subprocess.PIPE, **streams},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


NO_RDMA = """
import sys
class NoRdma:
    def find_spec(self, name, path=None, target=None):
        if "verbs" in name or "rdma_cm" in name.lower():
            print("asked for", name)
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, NoRdma())
from fastdecode_rdma.cli import main
from fastdecode_rdma.tokenizer import Tokenizer
sys.exit(main(sys.argv[1:]))
"""


def test_answers_come_while_the_pipe_is_open_and_tcp_needs_nothing_of_rdma(
    spawn, answers, start_workers
):
    (worker,) = start_workers(1)
    process = spawn(
        "--input", "-", *GREEDY, "--workers", worker.address, code=NO_RDMA,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    for prompt in ("hello", "p2"):  # each question waits for the answer before
        process.stdin.write(json.dumps({"id": prompt, "prompt": prompt}) + "\n")
        process.stdin.flush()
        line = json.loads(process.stdout.readline())
        (expected,) = answers(prompt)
        assert (line["id"], line["text"]) == (prompt, expected.outputs[0].text)
    process.stdout.close()  # a reader that leaves ends it quietly
    process.stdin.write('{"prompt": "nobody reads this"}\n')
    process.stdin.flush()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""


def test_a_long_request_holds_up_no_short_ones(spawn, tiny_models):
    minutes = {"temperature": 0, "max_tokens": 100_000, "ignore_eos": True}
    process = spawn(
        "--model", str(tiny_models("llama-long", max_position_embeddings=1 << 17)),
        "--input", "-", *GREEDY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    lines = [{"id": "long", "prompt": "x", "sampling_params": minutes}, {"id": 0, "prompt": "a"}]
    process.stdin.write("".join(json.dumps(line) + "\n" for line in lines))
    for number in range(4):
        process.stdin.flush()
        line = json.loads(process.stdout.readline())
        assert line["id"] == number and line["usage"]["completion_tokens"] == 6
        time.sleep(0.1)  # nothing comes for a while
        process.stdin.write(json.dumps({"id": number + 1, "prompt": "b"}) + "\n")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert output == "" and errors.startswith("interrupted: 4 requests, 24 tokens in ")
    assert errors.count("\n") == 1


def test_an_interrupt_loses_no_finished_line(spawn, tmp_path):
    source = write_lines(
        tmp_path / "in",
        *(
            {"id": i, "prompt": "x", "sampling_params": {"max_tokens": 1 if i < 3 else 400}}
            for i in range(200)
        ),
    )
    out = tmp_path / "out"
    process = spawn(
        "--input", str(source), "--output", str(out), "--max-num-seqs", "8"
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    done = read_lines(out)
    assert {0, 1, 2} <= set(done) and len(done) < 200
    assert f"interrupted: {len(done)} requests, " in errors and "Traceback" not in errors


def test_a_full_disk_is_one_clear_line(model, tmp_path, capfd):
    source = write_lines(tmp_path / "in", *({"prompt": f"p{i}"} for i in range(3)))
    options = ["--input", str(source), "--output", "/dev/full", *GREEDY]
    assert main(["generate", "--model", str(model), *options]) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == "fastdecode: error: No space left on device"
    assert second.startswith("stopped: 0 requests, ")


def test_workers_and_their_token(model, answers, start_workers, tmp_path, capfd, monkeypatch):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for path, text in ((right, "5a" * 32), (wrong, "a5" * 32)):
        path.write_text(text)
        path.chmod(0o600)
    monkeypatch.setenv("FASTDECODE_TOKEN_FILE", str(right))
    addresses = [worker.address for worker in start_workers(2)]
    (hello,) = answers("hello")
    options = ["generate", "--model", str(model), *GREEDY, "--prompt", "hello"]
    options += ["--workers", ",".join(addresses)]
    assert main(options) == 0  # by the variable
    assert capfd.readouterr().out == hello.outputs[0].text + "\n"
    monkeypatch.setenv("FASTDECODE_TOKEN_FILE", str(wrong))
    assert main([*options, "--token-file", str(right)]) == 0  # what is said wins
    assert capfd.readouterr().out == hello.outputs[0].text + "\n"
    right.chmod(0o640)
    for more, words in (
        ([], "give both the same token file"),
        (["--token-file", str(right)], f"chmod 600 {right}"),
    ):
        assert main([*options, *more]) == 2
        error = capfd.readouterr().err
        assert words in error and error.count("\n") == 1
        assert "5a5a" not in error and "a5a5" not in error
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE")
    assert main(options) == 2
    error = capfd.readouterr().err
    assert addresses[0] in error and "demands a token and none was given" in error


def test_a_real_model_chats_from_a_file(smollm2_dir, tmp_path, capfd):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    source = write_lines(
        tmp_path / "in",
        {"id": "chat", "messages": chat},
        {"id": "text", "prompt": "The capital of France is"},
    )
    options = ["--input", str(source), "--output", str(tmp_path / "out")]
    options += ["--temperature", "0", "--max-tokens", "16"]
    assert main(["generate", "--model", str(smollm2_dir), *options]) == 0
    lines = read_lines(tmp_path / "out")
    assert "Paris" in lines["chat"]["text"] and "Paris" in lines["text"]["text"]
    assert "<|im_" not in lines["chat"]["text"]
    expected = Tokenizer.from_directory(smollm2_dir).encode_chat(chat)
    assert lines["chat"]["usage"]["prompt_tokens"] == len(expected)


def test_the_help_describes_the_formats(capfd):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    text = capfd.readouterr().out
    for words in ('"messages"', '"sampling_params"', '"usage"', "in the order in which requests",
                  "exit status: 0", "--overwrite", "--resume", "--token-file"):  # fmt: skip
        assert words in text
    assert os.linesep + os.linesep in text
