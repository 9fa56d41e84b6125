"""A library speaks through its logger, and only when the application lets it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fastdecode_rdma"
COMMANDS = {"cli", "command_line", "doctor", "terminal", "batch", "bench"}
"""Rooms of the command line, besides modules `*command`: their business is to print."""
QUIETENED = {"ray/files_run.py": "'ray.data'"}
"""Modules of the command line that keep another library's logger off the terminal for a while."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_printed_and_no_logger_but_ours_is_used(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    is_command = room in COMMANDS or path.stem.endswith("command")
    for name, call in calls(path):
        if not is_command:
            assert name not in ("print", "sys.stdout.write", "sys.stderr.write"), name
        if name == "logging.getLogger":
            (argument,) = map(ast.unparse, call.args)
            theirs = QUIETENED.get(str(path.relative_to(PACKAGE)))
            assert argument in ("__name__", "'fastdecode_rdma'", theirs), argument
        elif name.startswith("logging.") and not name.startswith("logging.getLogger("):
            assert name in ("logging.NullHandler", "logging.StreamHandler", "logging.Formatter")
            assert is_command or name == "logging.NullHandler", name
        assert name not in ("warnings.warn", "traceback.print_exc"), name


def test_an_application_decides_what_is_heard() -> None:
    code = (
        "import logging, fastdecode_rdma\n"
        "log = logging.getLogger('fastdecode_rdma.engine.loop')\n"
        "log.error('unheard')\n"
        "assert log.propagate and logging.getLogger('fastdecode_rdma').level == logging.NOTSET\n"
        "logging.basicConfig()\n"
        "log.warning('heard')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.stderr == "WARNING:fastdecode_rdma.engine.loop:heard\n"
