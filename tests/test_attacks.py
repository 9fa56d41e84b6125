"""Mistakes and mishaps that once hung, lost something, or ended in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, FastDecodeError, Generator, SamplingParams
from fastdecode_rdma.models import ModelConfig
from fastdecode_rdma.tokenizer import Tokenizer

CLI = [sys.executable, "-m", "fastdecode_rdma.cli"]


def run_cli(*args: str, cwd: Path, stdout: object = subprocess.PIPE) -> tuple[int, str]:
    done = subprocess.run(
        [*CLI, *args], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd=cwd
    )
    return done.returncode, done.stderr


def test_a_generator_says_so_in_a_forked_child(tiny_models: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=2)
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        expected = gen.complete("a", params)
        stream = gen.generate("a", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        child = os.fork()
        if child == 0:  # no pytest in here: it would report twice
            code = 0
            for call in (lambda: gen.complete("a", params), lambda: list(stream)):
                try:
                    call()
                    code = 1
                except FastDecodeError as error:
                    code |= 0 if "fork" in str(error) else 2
            gen.close()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        stream.close()
        assert len(gen.complete("a", params)) == len(expected)


def test_an_endless_source_of_bad_prompts_ends(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        with pytest.raises(ConfigError, match="prompt 0: NoneType is no prompt"):
            list(gen.generate(repeat(None), SamplingParams(max_tokens=2)))
        stream = gen.generate(repeat(None), SamplingParams(max_tokens=2), on_error="event")
        assert [next(stream).finish_reason for _ in range(1000)] == ["error"] * 1000
        stream.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
def test_a_ready_file_replaces_nothing_but_a_ready_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "precious"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        target = path if kind == "file" else tmp_path / "target"
        target.write_text("do not lose me\n")
        if kind == "link":
            path.symlink_to(target)
    code, stderr = run_cli(
        "worker", "--listen", "127.0.0.1:0", "--ready-file", str(path), cwd=tmp_path
    )
    assert code == 2 and stderr.count("\n") == 1 and "--ready-file" in stderr
    assert os.path.lexists(path)
    if kind in ("file", "link"):
        assert path.read_text() == "do not lose me\n"


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        code, stderr = run_cli("token", cwd=tmp_path, stdout=full)
    assert (code, stderr) == (2, "fastdecode: error: No space left on device\n")
    process = subprocess.Popen(
        [*CLI, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    code, stderr = run_cli("convert", str(gguf), str(tmp_path / "file" / "x"), cwd=tmp_path)
    assert code == 2 and stderr.count("\n") == 1 and stderr.startswith("fastdecode: error: ")


@pytest.mark.parametrize("number", [0, -1, 4097, 10**9])
def test_an_impossible_number_of_layers_is_refused_at_once(
    tiny_models: Callable[..., Path], tmp_path: Path, number: int
) -> None:
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    with pytest.raises(ConfigError, match="num_hidden_layers must be from 1 to 4096"):
        ModelConfig.from_hf(config | {"num_hidden_layers": number})


def test_a_config_that_is_no_file_or_nests_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no regular file"):
        ModelConfig.from_hf(tmp_path)
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot read"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("template", [3, [1], [{"name": "default"}], {"a": 1}])
def test_a_chat_template_that_is_no_text_is_a_config_error_or_none(
    tiny_models: Callable[..., Path], tmp_path: Path, template: object
) -> None:
    source = tiny_models("llama")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    try:
        tokenizer = Tokenizer.from_directory(tmp_path)
    except ConfigError as error:
        assert "chat_template must be text" in str(error)
    else:
        assert isinstance(template, list) and tokenizer.chat_template is None


def test_an_empty_chat_template_argument_is_no_path(tiny_models: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="chat_template is empty"):
        Generator.from_pretrained(tiny_models("llama"), chat_template="")
