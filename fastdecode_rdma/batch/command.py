"""What the commands over files share: arguments, a job from its start (or where it was left) to its
end, and what is said about it."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastdecode_rdma.batch.files import STANDARD, LineSource, LineWriter, check_output
from fastdecode_rdma.batch.intake import FormatFor, Intake
from fastdecode_rdma.batch.job import (
    DoneLines,
    InputFacts,
    Job,
    load_job,
    model_digest,
    scan_input,
    start_job,
    state_path,
)
from fastdecode_rdma.batch.output import Output, done_lines
from fastdecode_rdma.batch.progress import Counts, Progress
from fastdecode_rdma.command_line import split_workers
from fastdecode_rdma.errors import ConfigError, FastDecodeError

if TYPE_CHECKING:
    from fastdecode_rdma.batch.records import PromptLines
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.tokenizer import Tokenizer

EXIT_STOPPED = 1
EXIT_FAILED_LINES = 3


class Run(Protocol):
    """One pass over the lines."""

    counts: Counts

    def run(self) -> None:
        """Works on all lines."""


MakeRun = Callable[["Generator", "LineSource | PromptLines", Intake, Output, Counts, Progress], Run]


@dataclass(frozen=True)
class Work:
    """What a command does with the lines of a file.

    facts: parameters that make the job what it is; seed: of lines that give none. load: loads the
    model. formats: how the lines of a job are read and written. make_run: works on them.
    """

    command: str
    directory: Path
    facts: Mapping[str, Any]
    seed: int | None
    load: Callable[[], Generator]
    formats: Callable[[Job, Tokenizer | None], FormatFor]
    make_run: MakeRun


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what concerns the files of a job, except --input."""
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="where results go (default: -, standard output)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--overwrite", action="store_true", help="replace an output file that holds something"
    )
    begin.add_argument(
        "--resume",
        action="store_true",
        help="go on with the job that began the output file; start it if there is none",
    )
    parser.add_argument(
        "--ordered", action="store_true", help="write results in the order of the input"
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="only the first N lines of the input"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all lines, name the longest prompt and those that cannot fit; run nothing",
    )


def _positive(text: str) -> int:
    value = int(text) if text.strip().isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return value


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what concerns the model and its workers."""
    parser.add_argument(
        "--workers",
        metavar="A,B",
        help="attention workers, HOST[:PORT], comma-separated (default: one in this process)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of one sequence")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences run at once")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="auto, fp32, fp16, bf16, …")
    parser.add_argument(
        "--quantization", metavar="NAME", help="int8: weights rounded as they are loaded"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in any batch, on any workers"
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `Generator.from_pretrained`.

    Raises:
        ConfigError: they make no sense together.
    """
    workers = None
    if args.workers is not None:
        workers = split_workers(args.workers)
    elif args.token_file is not None:
        raise ConfigError("--token-file is for --workers")
    named = {**_model_options(args), "max_num_seqs": args.max_num_seqs}
    return {
        "workers": workers,
        "token_file": args.token_file,
        "deterministic": args.deterministic,
        **{name: value for name, value in named.items() if value is not None},
    }


def _model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options that change what comes out, unlike workers and the size of the batch."""
    return {
        "max_model_len": args.max_model_len,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
    }


def run_file(args: argparse.Namespace, source: LineSource | PromptLines, work: Work) -> int:
    """Works on the lines of a file; returns the exit code.

    Raises:
        ConfigError: the files or the job cannot be used as asked.
    """
    output = args.output or STANDARD
    if args.dry_run:
        from fastdecode_rdma.batch.dry_run import dry_run

        return dry_run(args, source, work.directory, work.formats)
    file_source = source if isinstance(source, LineSource) else None
    check_output(output, file_source, overwrite=args.overwrite, resume=args.resume)
    path = state_path(output) if _is_resumable(file_source, output) else None
    if args.resume and path is None:
        raise ConfigError("--resume needs files for --input and --output, no pipes")
    seen = None
    if file_source is not None and file_source.path is not None:
        seen = scan_input(file_source.path)
    facts = _facts(args, work, seen if path is not None else None)
    counts = Counts(total=None if seen is None else min(seen.num_lines, args.limit or sys.maxsize))
    with ExitStack() as stack:
        writer, done = None, DoneLines()
        if path is not None and args.resume and _holds_something(output):
            job = load_job(facts, work.seed, path, output)
            assert seen is not None
            writer = LineWriter(output, overwrite=False, resume=True)
            stack.callback(writer.close)
            done = done_lines(writer, seen.last_number)
            counts.resumed, counts.resumed_failed = done.count, done.failed
            if done.count == seen.num_lines:
                say(f"all {done.count} lines are in {output} already")
                return EXIT_FAILED_LINES if done.failed else 0
        else:
            job = start_job(facts, work.seed, path)
        generator = stack.enter_context(work.load())
        if writer is None:
            writer = LineWriter(output, overwrite=args.overwrite)
            stack.callback(writer.close)
            job.save()
        intake = Intake(source, work.formats(job, generator.tokenizer), done, limit=args.limit)
        stack.callback(intake.close)
        counts.restart()
        run = work.make_run(
            generator,
            source,
            intake,
            Output(writer, ordered=args.ordered),
            counts,
            Progress(counts, output_is_terminal=writer.is_terminal),
        )
        return _watch(run, writer, _resume_command(args) if path is not None else None)


def _watch(run: Run, writer: LineWriter, again: str | None) -> int:
    """Runs to the end, or says how far it came and how to go on."""

    def end(how: str) -> None:
        say(f"{how}: {run.counts.summary()}; all are in {writer.name}")
        if again is not None:
            say(f"continue with: {again}")

    try:
        run.run()
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, SystemExit):  # the latter by a signal
        end("interrupted")
        raise
    except (OSError, FastDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"fastdecode: error: {reason}", file=sys.stderr)
        end("stopped")
        return EXIT_STOPPED
    say(run.counts.summary())
    return EXIT_FAILED_LINES if run.counts.any_failed else 0


def _is_resumable(source: LineSource | None, output: str) -> bool:
    if source is None or source.path is None or output == STANDARD:
        return False
    try:
        return stat.S_ISREG(os.stat(output).st_mode)
    except FileNotFoundError:
        return True


def _holds_something(output: str) -> bool:
    return os.path.exists(output) and os.stat(output).st_size > 0


def _facts(args: argparse.Namespace, work: Work, seen: InputFacts | None) -> dict[str, Any]:
    """What must be the same for a job to go on. A job that cannot needs but a name."""
    facts: dict[str, Any] = {
        "command": work.command,
        **_model_options(args),
        "deterministic": args.deterministic,
        "ordered": args.ordered,
        **work.facts,
    }
    if seen is not None:
        facts |= {"input": seen.digest, "model": model_digest(work.directory)}
    return facts


def _resume_command(args: argparse.Namespace) -> str:
    words = [word for word in args.command_line if word not in ("--overwrite", "--resume")]
    return shlex.join([*words, "--resume"])


def say(line: str) -> None:
    """Prints a line for people."""
    print(line, file=sys.stderr, flush=True)
