"""A token is in no output, log or error, whatever goes wrong."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from fastdecode_rdma import FastDecodeError, Generator, cli
from fastdecode_rdma.wire.token_file import TOKEN_FILE_VARIABLE

CLI = [sys.executable, "-m", "fastdecode_rdma.cli"]
RIGHT, WRONG = "0123456789abcdef" * 4, "fedcba9876543210" * 4


def assert_silent(text: str) -> None:
    """Neither token is in `text`, as hex or as bytes in any of the forms that Python prints."""
    for token in (RIGHT, WRONG):
        raw = bytes.fromhex(token)
        for form in (token, token.upper(), repr(raw)[2:-1], repr(list(raw)), raw.decode("latin-1")):
            assert form not in text


def options_of(command: str) -> dict[str, str]:
    """The options of a command and their help."""
    parser = argparse.ArgumentParser()
    import_module(f"fastdecode_rdma.{cli.COMMANDS[command][0]}").add_arguments(parser)
    return {name: str(act.help) for act in parser._actions for name in act.option_strings}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Path]:
    paths = {"right": tmp_path / "right", "wrong": tmp_path / "wrong", "open": tmp_path / "open"}
    for name, text in (("right", RIGHT), ("wrong", WRONG), ("open", RIGHT)):
        paths[name].write_text(text + "\n")
        paths[name].chmod(0o644 if name == "open" else 0o600)
    paths["twice"] = tmp_path / "twice"
    paths["twice"].write_text(f"{RIGHT}\n{WRONG}\n")
    paths["twice"].chmod(0o600)
    return paths


@pytest.fixture
def worker(tokens: dict[str, Path], tmp_path: Path):
    """A talkative worker with a token: its address, and what it said once it has ended."""
    command = [*CLI, "worker", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--verbose", "--token-file", str(tokens["right"])],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].startswith("ready "):  # what it has to say of the machine
        lines.append(process.stdout.readline())
    assert lines[-1], lines

    def finish() -> str:
        process.terminate()
        return "".join(lines) + process.communicate(timeout=10)[0]

    yield lines[-1].split()[1], finish
    process.kill()
    process.wait(10)


def test_commands_and_worker_are_silent_about_it(
    worker, tokens, tiny_models: Callable[..., Path], tmp_path, capfd, monkeypatch, caplog
):
    caplog.set_level(logging.DEBUG)
    address, finish = worker
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    model = str(tiny_models("llama"))
    status = ["status", "--workers", address]
    generate = ["generate", "--model", model, "--prompt", "x", "--workers", address]
    demo = ["demo", "--model", model, "--workers", address]
    own_worker = ["demo", "--model", model]  # one that the command itself starts
    serve = ["worker", "--listen", "127.0.0.1:0"]
    (tmp_path / "texts.jsonl").write_text('{"text": "x"}\n')
    files = ["-i", str(tmp_path / "texts.jsonl"), "-o", str(tmp_path / "scores.jsonl")]
    score = ["score", "--model", model, "--workers", address, *files]
    profile = ["profile", "--model", model, "--workers", address]
    profile += ["--output", str(tmp_path / "profile.json")]
    doctor = ["doctor", "--workers", address]
    commands = (status, generate, demo, own_worker, serve, score, profile, doctor)
    assert {command[0] for command in commands} == {
        name for name in cli.COMMANDS if "--token-file" in options_of(name)
    }
    failures = 0
    for command in commands:
        fine_without = command in (own_worker, serve)  # they need no token at all
        bad = [tokens["open"], tokens["twice"], RIGHT, f" {RIGHT.upper()}"]
        for given in [*bad, *([] if fine_without else [None, tokens["wrong"]])]:
            options = [] if given is None else ["--token-file", str(given)]
            assert cli.main([*command, *options]) in (1, 2), (command, given)
            failures += 1
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, RIGHT)
    for command in commands:
        assert cli.main(command) == 2, command
        failures += 1
    captured = capfd.readouterr()
    assert cli.main([*status, "--token-file", str(tokens["right"])]) == 0
    worker_said = finish()
    assert worker_said.count("refused") == 6  # it heard of the wrong ones and said so
    for text in (captured.out, captured.err, caplog.text, worker_said):
        assert_silent(text)
    told = captured.out.count("unreachable") + captured.out.count(f"to {address}")
    assert captured.err.count("fastdecode: error: ") + told == failures
    assert address in captured.err and "chmod 600" in captured.err


def test_errors_of_the_library_are_silent_about_it(
    worker, tokens, tiny_models: Callable[..., Path], monkeypatch
):
    address, finish = worker
    model = tiny_models("llama")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tokens["wrong"]))
    raw = bytes.fromhex(RIGHT)
    in_place = (RIGHT, RIGHT.encode(), raw, bytearray(raw), f"{RIGHT}\0")  # of the file
    for given in (None, tokens["wrong"], tokens["open"], tokens["twice"], *in_place):
        with pytest.raises(FastDecodeError) as caught:
            Generator.from_pretrained(model, workers=[address], token_file=given)
        report = "".join(traceback.format_exception(caught.value))
        chain: BaseException | None = caught.value
        while chain is not None:
            report += f"{chain!r} {vars(chain)}"
            chain = chain.__cause__ or chain.__context__
        assert_silent(report)
    with Generator.from_pretrained(  # what is said wins over the variable
        model, workers=[address], token_file=tokens["right"]
    ) as generator:
        assert_silent(f"{generator!r} {generator.stats()}")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tokens["right"]))
    Generator.from_pretrained(model, workers=[address]).close()
    assert_silent(finish())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_that_connects_takes_a_token_file(name):
    options = options_of(name)
    if options.keys() & {"--workers", "--listen"}:
        assert TOKEN_FILE_VARIABLE in options["--token-file"]


def test_a_made_token_is_not_shown(tmp_path, capfd):
    path = tmp_path / "token"
    assert cli.main(["token", "--output", str(path)]) == 0
    made = path.read_text().strip()
    assert cli.main(["token", "--output", str(path)]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "is there already" in captured.err
    assert made not in captured.err and path.read_text().strip() == made
