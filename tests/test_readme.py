"""README.md is true: its examples run as written, its first two commands are one line each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdecode_rdma import Generator
from fastdecode_rdma.cli import COMMANDS

README = Path(__file__).resolve().parents[1] / "README.md"
PLACEHOLDER = '"path/to/model"'


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_first_two_commands_are_one_line_each_and_use_the_tested_torch() -> None:
    main, tests = blocks("sh")[:2]
    for block in (main, tests):
        assert block.count("\n") == 1 and block.endswith("\n")
        assert "-c constraints.txt" in block and "venv" in block
    assert "fastdecode demo" in main
    assert "[test]" in tests and "pytest" in tests
    constraints = (README.parent / "constraints.txt").read_text()
    assert "torch==" in constraints


def test_the_ci_runs_the_readmes_test_command() -> None:
    script = (README.parent / ".ci" / "run").read_text()
    assert "README.md" in script and 'bash -c "$(readme_command 2)"' in script


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run_as_written(
    number: int, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = blocks("python")[number]
    assert PLACEHOLDER in source
    exec(compile(source.replace(PLACEHOLDER, repr(str(smollm2_dir))), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed or number > 0, printed


def test_there_is_an_example_and_it_is_public() -> None:
    (example, *_) = blocks("python")
    assert "from fastdecode_rdma import Generator, SamplingParams" in example
    assert example.count("with Generator.from_pretrained(") == 1


def test_commands_and_arguments_named_in_the_text_exist() -> None:
    text = README.read_text()
    named = set(re.findall(r"(?:^|`|/)fastdecode ([a-z]+)", text, re.MULTILINE))
    assert named and named <= set(COMMANDS), named - set(COMMANDS)
    arguments = set(
        re.findall(r"\b(\w+)=", " ".join(re.findall(r"from_pretrained\((.*?)\)", text, re.DOTALL)))
    )
    known = set(Generator.from_pretrained.__func__.__annotations__)
    assert arguments <= known, arguments - known
