"""The demo as a user runs it: a real model, a real worker process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import WorkerError
from fastdecode_rdma.hub import demo_command

COMMAND = [sys.executable, "-m", "fastdecode_rdma.cli", "demo"]


def address_in(text: str) -> tuple[str, int]:
    found = re.search(r"tcp://(127\.0\.0\.1):(\d+)", text)
    assert found, text
    return found[1], int(found[2])


def is_listening(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_demo_decodes_and_says_where_the_time_went(
    smollm2_dir: Path, capfd: pytest.CaptureFixture[str]
):
    arguments = ["--model", str(smollm2_dir), "--max-tokens", "6"]
    prompts = ["--prompt", "What is the capital of France?", "--prompt", "Say yes."]
    assert main(["demo", *arguments, *prompts]) == 0, capfd.readouterr().err
    output = capfd.readouterr().out
    first, second = output.index("[1/2] What is"), output.index("[2/2] Say yes.")
    assert first < output.index("The capital of France is Paris") < second
    summary = output.strip().splitlines()[-1]
    assert re.fullmatch(
        r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s; "
        r"time: dense \d+%, attention \d+%, transport \d+%, Python \d+%",
        summary,
    )
    assert not is_listening(address_in(output))


def test_interrupted_demo_ends_its_worker(smollm2_dir, tmp_path):
    output = tmp_path / "output"
    arguments = ["--model", str(smollm2_dir), "--max-tokens", "2000", "--prompt", "Count up."]
    with output.open("wb") as file:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=file, stderr=file, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while "[1/1]" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        address = address_in(output.read_text())
        assert is_listening(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert not is_listening(address)
    assert "Traceback" not in output.read_text()


def test_a_worker_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'no memory here' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(demo_command.sys, "executable", str(script))
    with (
        pytest.raises(WorkerError, match="code 3: no memory here"),
        demo_command.local_worker(),
    ):
        raise AssertionError("it did start")


def test_bad_arguments_are_one_line(capsys, tmp_path):
    assert main(["demo", "--model", "nonesuch"]) == 2
    error = capsys.readouterr().err
    assert "nonesuch" in error and "smollm2" in error and error.count("\n") == 1
    assert main(["demo", "--model", str(tmp_path), "--from-file", "x.whl"]) == 2
    assert main(["demo", "--max-tokens", "0"]) == 2
    assert "max_tokens" in capsys.readouterr().err
    for given in ("", " , "):
        assert main(["demo", "--workers", given]) == 2
        assert "--workers names no worker" in capsys.readouterr().err


def test_the_token_file_is_the_callers_wherever_the_worker_runs(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("5a" * 32)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    for given in ("token", None):
        monkeypatch.setenv("FASTDECODE_TOKEN_FILE", "/nowhere" if given else "token")
        with demo_command.local_worker(given) as address:
            assert main(["status", "--workers", address, "--token-file", "token"]) == 0


def test_terms_come_first(monkeypatch, capsys, tmp_path):
    def stop_here(*args: object, **kwargs: object) -> Path:
        assert "Gemma Terms of Use" in capsys.readouterr().out
        raise WorkerError("here", "stop")

    monkeypatch.setattr(demo_command, "demo_model_dir", stop_here)
    assert main(["demo", "--model", "gemma3-270m"]) == 2
    assert "stop" in capsys.readouterr().err
