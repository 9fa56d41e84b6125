"""What the commands over files share: a job from its start, or where it was left, to its end, and
what is said about it."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastdecode_rdma.batch.arguments import engine_options, model_options
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
from fastdecode_rdma.batch.line_pass import LinePass, Source
from fastdecode_rdma.batch.output import Output, done_lines
from fastdecode_rdma.batch.progress import Counts, Progress
from fastdecode_rdma.batch.records import PromptLines
from fastdecode_rdma.batch.table_output import check_tables, write_table
from fastdecode_rdma.batch.tables import TableSource, is_table
from fastdecode_rdma.errors import ConfigError, FastDecodeError

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.tokenizer import Tokenizer

EXIT_STOPPED = 1
EXIT_FAILED_LINES = 3


TABLE_LINES = ".jsonl"
"""What is added to the name of a table for the lines that it is made of."""


class Run(Protocol):
    """One pass over the lines."""

    counts: Counts

    def run(self) -> None:
        """Works on all lines."""


MakeRun = Callable[[LinePass], Run]


@dataclass(frozen=True)
class Work:
    """What a command does with the lines of a file.

    facts: parameters that make the job what it is; seed: of lines that give none. load: loads the
    model. formats: how the lines of a job are read and written. make_run: works on them here.
    score_options: None for lines that are answered; of those that are scored, what the engines of
    a cluster are told.
    """

    command: str
    directory: Path
    facts: Mapping[str, Any]
    seed: int | None
    load: Callable[[], Generator]
    formats: Callable[[Job, Tokenizer | None], FormatFor]
    make_run: MakeRun
    score_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Files:
    """The input and the output of a job: checked, not yet touched.

    output: where lines go. table: what is made of them at the end, if anything is. state: where the
    job's state is, None where it cannot be resumed. seen: what a pass over the input showed, None
    for pipes.
    """

    source: Source
    output: str
    table: str | None
    state: Path | None
    seen: InputFacts | None


@dataclass
class _Begun:
    """A job that is new or goes on. writer: None if the output is to be opened when all else is
    there, so that a model that does not load leaves nothing behind."""

    job: Job
    writer: LineWriter | None = None
    done: DoneLines = field(default_factory=DoneLines)


def run_file(args: argparse.Namespace, source: Source, work: Work) -> int:
    """Works on the lines of a file; returns the exit code.

    Raises:
        ConfigError: the files or the job cannot be used as asked.
    """
    if args.dry_run:
        from fastdecode_rdma.batch.dry_run import dry_run

        return dry_run(args, source, work.directory, work.formats)
    files = _check_files(args, source)
    with ExitStack() as stack:
        begun = _begin(args, work, files)
        if begun.writer is not None:
            stack.callback(begun.writer.close)
        if files.seen is not None and begun.done.count and begun.done.count == files.seen.num_lines:
            say(f"all {begun.done.count} lines are in {files.output} already")
            _make_table(files)
            return EXIT_FAILED_LINES if begun.done.failed else 0
        is_ray = getattr(args, "ray", False)
        if is_ray:
            if files.output == STANDARD:
                begun.writer = LineWriter(files.output, overwrite=False)
                stack.callback(begun.writer.close)
            stack.enter_context(_output_on_stderr())
        generator = stack.enter_context(_ray(args) if is_ray else work.load())
        if begun.writer is None:
            begun.writer = LineWriter(files.output, overwrite=args.overwrite)
            stack.callback(begun.writer.close)
            if files.table is not None:  # the one before is none of this job's lines
                Path(files.table).unlink(missing_ok=True)
            begun.job.save()
        if is_ray:
            run = _ray_run(args, work, files, begun)
        else:
            intake = Intake(
                source,
                work.formats(begun.job, generator.tokenizer),
                begun.done,
                limit=args.limit,
                first=None if files.seen is None else files.seen.first,
            )
            stack.callback(intake.close)
            counts, progress = _counting(args, files, begun)
            output = Output(begun.writer, ordered=args.ordered)
            run = work.make_run(LinePass(generator, source, intake, output, counts, progress))
        again = None if files.state is None else _resume_command(args)
        return _watch(run, files, begun.writer, again)


def _make_table(files: _Files) -> None:
    """Makes the table, if one was asked for. Its lines stay: a job that goes on adds to them."""
    if files.table is None:
        return
    count = write_table(files.output, files.table)
    lines = f", made of {files.output}"
    if files.state is None:  # nothing can go on from them
        os.unlink(files.output)
        lines = ""
    say(f"{files.table} has {count} rows{lines}")


def _check_files(args: argparse.Namespace, source: Source) -> _Files:
    output = args.output or STANDARD
    table = None
    file_source = None if isinstance(source, PromptLines) else source
    if is_table(output):
        check_tables()
        check_output(output, file_source, overwrite=args.overwrite, resume=args.resume)
        table, output = output, output + TABLE_LINES
        if args.resume and _holds_something(table) and not _holds_something(output):
            raise ConfigError(
                f"cannot resume {table}: {output}, the lines that it was made of, is not there; "
                "--overwrite starts anew"
            )
    check_output(output, file_source, overwrite=args.overwrite, resume=args.resume)
    state = state_path(output) if _is_resumable(file_source, output) else None
    if args.resume and state is None:
        raise ConfigError("--resume needs files for --input and --output, no pipes")
    seen = None
    if file_source is not None and file_source.path is not None:
        seen = scan_input(file_source.lines())
    return _Files(source, output, table, state, seen)


def _begin(args: argparse.Namespace, work: Work, files: _Files) -> _Begun:
    """Starts a job, or takes up the one that began the output."""
    facts = _facts(args, work, None if files.state is None else files.seen)
    if files.state is None or not args.resume or not _holds_something(files.output):
        return _Begun(start_job(facts, work.seed, files.state))
    job = load_job(facts, work.seed, files.state, files.output)
    assert files.seen is not None
    writer = LineWriter(files.output, overwrite=False, resume=True)
    try:
        return _Begun(job, writer, done_lines(writer, files.seen.last_number))
    except BaseException:
        writer.close()
        raise


def _counting(args: argparse.Namespace, files: _Files, begun: _Begun) -> tuple[Counts, Progress]:
    assert begun.writer is not None
    total = None if files.seen is None else min(files.seen.num_lines, args.limit or sys.maxsize)
    counts = Counts(resumed=begun.done.count, resumed_failed=begun.done.failed, total=total)
    return counts, Progress(counts, output_is_terminal=begun.writer.is_terminal)


@contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Ray prints what its processes say; records alone belong on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _ray(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Connects to the cluster."""
    try:
        from fastdecode_rdma.ray.files_run import connected
    except ImportError as error:
        raise ConfigError(
            f"--ray needs Ray Data ({error}); install it with `pip install fastdecode_rdma[ray]`"
        ) from error
    return connected(args.ray_address, args.ray_engines + args.ray_workers)


def _ray_run(args: argparse.Namespace, work: Work, files: _Files, begun: _Begun) -> Run:
    from fastdecode_rdma.ray.files_run import LineWork, RayRun, processor_config

    assert begun.writer is not None and files.seen is not None
    counts, progress = _counting(args, files, begun)
    model = str(work.directory.resolve())
    return RayRun(
        processor_config(args, model, engine_options(args), scores=work.score_options is not None),
        LineWork(
            args.input, files.seen.first, partial(work.formats, begun.job), work.score_options
        ),
        begun.done,
        Output(begun.writer, ordered=args.ordered),
        counts,
        progress,
        checkpoint=None if files.state is None else Path(f"{files.output}.checkpoint"),
        limit=args.limit,
        ordered=args.ordered,
    )


def _watch(run: Run, files: _Files, writer: LineWriter, again: str | None) -> int:
    """Runs to the end, or says how far it came and how to go on."""

    def end(how: str) -> None:
        say(f"{how}: {run.counts.summary()}; all are in {writer.name}")
        if again is not None:
            say(f"continue with: {again}")

    try:
        run.run()
        _make_table(files)
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


def _is_resumable(source: LineSource | TableSource | None, output: str) -> bool:
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
        **model_options(args),
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
