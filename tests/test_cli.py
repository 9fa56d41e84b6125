from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import types
from importlib import import_module

import pytest

from fastdecode_rdma import __version__, cli
from fastdecode_rdma.errors import ConfigError


@pytest.fixture
def command(monkeypatch):
    """Installs a command `probe` whose run is the given function."""

    def install(run):
        module = types.ModuleType("fastdecode_rdma.probe_command")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "only a test"))

    return install


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module_and_help(name, capsys):
    module = import_module(f"fastdecode_rdma.{cli.COMMANDS[name][0]}")
    assert callable(module.add_arguments) and callable(module.run)
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"fastdecode {name}" in capsys.readouterr().out


def test_a_command_is_run_with_its_options(command):
    command(lambda args: args.number)
    assert cli.main(["probe", "--number", "7"]) == 7


def test_bad_input_is_one_line_and_code_2(command, capsys):
    def refuse(args):
        raise ConfigError("number must be even")

    command(refuse)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "fastdecode: error: number must be even\n"
    assert cli.main(["probe", "--number", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastdecode: error: ") and "'x'" in error and error.count("\n") == 1


def test_a_missing_dependency_is_one_line_and_a_missing_module_of_ours_a_fault(command, capsys):
    command(lambda args: import_module("no_such_dependency"))
    assert cli.main(["probe"]) == 2
    assert "No module named 'no_such_dependency'" in capsys.readouterr().err
    command(lambda args: import_module("fastdecode_rdma.no_such_module"))
    with pytest.raises(ImportError):
        cli.main(["probe"])


def test_faults_keep_their_traceback(command):
    command(lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_interrupt_is_code_130(command):
    def interrupt(args):
        raise KeyboardInterrupt

    command(interrupt)
    assert cli.main(["probe"]) == 130


@pytest.mark.parametrize(
    ("name", "words"),
    [("wroker", "did you mean 'worker'?"), ("docter", "'doctor'"), ("xyz", "there are generate, ")],
)
def test_an_unknown_command_names_the_nearest(name, words, capsys):
    assert cli.main([name]) == 2
    error = capsys.readouterr().err
    assert repr(name) in error and words in error


def test_usage_and_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastdecode {__version__}\n"
    assert cli.main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(name in help_text and text in help_text for name, (_, text) in cli.COMMANDS.items())
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == help_text


def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path):
    code = (
        "import sys; from fastdecode_rdma.cli import main; main(['--version'])\n"
        "print(*{'torch', 'numpy', 'socket', 'fastdecode_rdma.worker'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fastdecode {__version__}\n\n"


def test_a_token_redirected_to_a_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "token"
    with path.open("w") as file:
        os.fchmod(file.fileno(), 0o644)
        subprocess.run(
            [sys.executable, "-m", "fastdecode_rdma.cli", "token"],
            cwd=tmp_path, stdout=file, check=True,
        )  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    from fastdecode_rdma.wire.token_file import read_token

    assert len(read_token(path)) == 32


def test_a_token_to_a_pipe(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fastdecode_rdma.cli", "token"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)


def test_closed_standard_streams_are_as_good_as_the_null_device(tmp_path: os.PathLike[str]) -> None:
    """The next file opened would take their number and be written to."""
    started = {}
    for closed in (">&-", "<&-", "2>&-", ">&- 2>&- <&-"):
        # `models` opens hundreds of files, all of which the kernel numbers by the same rule
        command = "token" if closed in ("<&-", "2>&-") else "models"
        code = f"exec {sys.executable} -m fastdecode_rdma.cli {command} {closed}"
        started[closed] = subprocess.Popen(
            ["sh", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path,
        )  # fmt: skip
    for closed, process in started.items():
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, (closed, errors)
        assert "Traceback" not in errors
