"""The `fastdecode` command: finds the subcommand and imports only what that one needs."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from fastdecode_rdma import __version__
from fastdecode_rdma.errors import ConfigError, FastDecodeError

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate_command", "answer prompts, or a file of requests, one a line"),
    "score": ("score_command", "log-probabilities of continuations and texts, one a line"),
    "worker": ("worker.command", "serve attention and hold the KV-cache for engines"),
    "status": ("attention.status_command", "show the figures of running workers"),
    "models": ("models.models_command", "list the model architectures that load"),
    "doctor": ("doctor", "show what this machine has and what will be used"),
    "token": ("worker.token_command", "make a shared token for workers and engines"),
    "demo": ("hub.demo_command", "fetch a small model and decode with a worker on this machine"),
    "convert": ("hub.convert_command", "turn a GGUF file into a Hugging Face directory"),
    "plan": ("perfmodel.plan_command", "predict what hardware does with a model"),
    "simulate": ("perfmodel.simulate_command", "run a trace on predicted hardware"),
    "profile": ("perfmodel.profile_command", "measure what plan and simulate predict from"),
    "lm-eval": ("eval.command", "run the lm-evaluation-harness with --model fastdecode"),
    "bench": ("bench.command", "measure the attention kernel beside what the machine can do"),
}
"""Command -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def usage() -> str:
    """Returns the help of the command itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fastdecode [--version] COMMAND [options]",
            "",
            "Decode large language models with the KV-cache in attention workers.",
            "",
            *lines,
            "",
            "`fastdecode COMMAND --help` shows the options of one.",
        ]
    )


class _Parser(argparse.ArgumentParser):
    """Reports bad arguments as every other bad input: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"


def _fail(message: str) -> int:
    print(f"fastdecode: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE


def _hold_standard_streams() -> None:
    """Puts the null device in the place of closed standard streams (`>&-`): the next file that is
    opened would take their number and be written to."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _drop_stdout() -> None:
    """What is still buffered cannot be written: the interpreter's flush at exit must not try."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for bad input, 130 when interrupted."""
    _hold_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    name = arguments[0]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"fastdecode {__version__}")
        return 0
    if name not in COMMANDS:
        return _fail(_unknown(name))
    module_name, text = COMMANDS[name]
    try:
        module = import_module(f"fastdecode_rdma.{module_name}")
        parser = _Parser(prog=f"fastdecode {name}", description=text)
        module.add_arguments(parser)
        args = parser.parse_args(arguments[1:])
        args.command_line = ["fastdecode", *arguments]
        code = module.run(args)
        sys.stdout.flush()
        return code
    except FastDecodeError as exc:
        return _fail(str(exc))
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as exc:  # a full disk, a folder that may not be written
        if exc.filename is None:
            _drop_stdout()
        where = f": {exc.filename}" if exc.filename is not None else ""
        return _fail(f"{exc.strerror or exc}{where}")
    except ImportError as exc:
        if (exc.name or "").startswith("fastdecode_rdma"):
            raise  # a fault of ours
        return _fail(f"{exc}; `fastdecode doctor` shows what is missing")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
