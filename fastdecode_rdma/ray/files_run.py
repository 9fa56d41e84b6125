"""`fastdecode generate --ray` and `score --ray`: the lines of a file through engines on a cluster,
written here. Ray Data reads the file, and keeps account of what is done in a checkpoint."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import FileHandler
from pathlib import Path
from typing import Any

import ray
from ray.data import Dataset

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.intake import FormatFor
from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.planning import LineRange, open_numbers, plan_ranges
from fastdecode_rdma.batch.progress import Counts, Progress, UnderWay
from fastdecode_rdma.batch.runner import WAIT_S
from fastdecode_rdma.errors import ConfigError, FastDecodeError, TransportError
from fastdecode_rdma.ray.engines import LineEngine, ScoreEngine
from fastdecode_rdma.ray.line_rows import (
    LineDatasource,
    Receiver,
    confirm,
    prepare_checkpoint,
)
from fastdecode_rdma.ray.processor import FastDecodeProcessorConfig
from fastdecode_rdma.tokenizer import Tokenizer

LINES_PER_RANGE = {LineEngine: 64, ScoreEngine: 256}
LOCAL_STORE_BYTES = 256 << 20
"""Object store of a Ray that is started here: records pass through it, no more."""

LOCAL_MORE_CPUS = 2
"""Beside those of engines and workers: for tasks that read and leave out what is done."""

CONNECT_TIMEOUT_S = 5.0
ENGINES_START_S = 600
"""Engines that have not started by then have no resources: a cluster may first have to grow, and
models take their time."""
END_S = 10.0
"""How long a job that is given up may take to end."""


@contextmanager
def connected(address: str | None, num_actors: int) -> Iterator[None]:
    """Connects to a cluster (`address`, else RAY_ADDRESS), or starts a Ray of this machine with
    room for so many actors; what this process is connected to already is used as it is."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address is not None or os.environ.get("RAY_ADDRESS"):
        _check_answers(address or os.environ["RAY_ADDRESS"])
        try:
            ray.init(address=address, **quiet)
        except Exception as error:  # Ray's are of many kinds
            raise ConfigError(f"cannot reach Ray at {address or 'RAY_ADDRESS'}: {error}") from error
    else:
        ray.init(
            address="local",  # or it would be the cluster that runs here, with other resources
            num_cpus=num_actors + LOCAL_MORE_CPUS,
            include_dashboard=False,
            object_store_memory=LOCAL_STORE_BYTES,
            **quiet,
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler ends with a status of its own
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes to reach what does not answer.

    Raises:
        ConfigError: nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", "local": Ray's to find
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot reach Ray at {address}: {error}; `ray status` there shows its address"
        ) from error


def processor_config(
    args: argparse.Namespace, model: str, options: dict[str, Any], *, scores: bool
) -> FastDecodeProcessorConfig:
    """Returns what the command's options ask for. Scoring needs no attention workers."""
    seats = args.max_num_seqs or 256
    engine = {
        name: value for name, value in options.items() if name not in ("workers", "token_file")
    }
    return FastDecodeProcessorConfig(
        model_source=model,
        engine_kwargs=engine,
        concurrency=args.ray_engines,
        num_workers=0 if scores else args.ray_workers,
        worker_memory=None if scores else args.ray_worker_memory,
        max_concurrent_batches=1 if scores else 2 + seats // LINES_PER_RANGE[LineEngine],
    )


@dataclass(frozen=True)
class LineWork:
    """What engines do with the lines of a file.

    path: of the file, the same on all nodes; first: its first line, None of an empty one. formats:
    of its lines, given a tokenizer. score_options: None for lines that are answered, arguments of a
    ScoreEngine for those that are scored.
    """

    path: str
    first: RawLine | None
    formats: Callable[[Tokenizer | None], FormatFor]
    score_options: Mapping[str, Any] | None = None

    @property
    def engine(self) -> type:
        return LineEngine if self.score_options is None else ScoreEngine


class RayRun:
    """One pass over a file's lines; `counts` may be read at any time.

    done: lines that are in the output already; checkpoint: the folder of Ray Data's account, None
    for an output that cannot be resumed.
    """

    def __init__(
        self,
        config: FastDecodeProcessorConfig,
        work: LineWork,
        done: DoneLines,
        output: Output,
        counts: Counts,
        progress: Progress,
        *,
        checkpoint: Path | None,
        limit: int | None,
        ordered: bool,
    ) -> None:
        self.counts = counts
        self._config = config
        self._work = work
        self._done = done
        self._taken = DoneLines()
        self._output = output
        self._progress = progress
        self._checkpoint = checkpoint
        self._limit = limit
        self._ordered = ordered
        self._numbers = open_numbers(work.path, done, limit)  # that the output has to hear of
        self._last_expected = 0

    def run(self) -> None:
        """Answers all lines.

        Raises:
            OSError: input or output broke. ConfigError: the cluster has no room.
            TransportError: the cluster, or an engine on it, failed.
        """
        ranges = [] if self._work.first is None else self._ranges()
        if ranges:
            with _ray_data_in_its_own_log():
                self._run(ranges)

    def _run(self, ranges: list[LineRange]) -> None:
        pool = self._config.start_workers()
        receiver = Receiver()
        job = _Job(
            lambda: self._dataset(ranges, pool).write_datasink(
                receiver.sink, ray_remote_args={"num_cpus": 0, "max_retries": 0}, concurrency=1
            )
        )
        try:
            job.start()
            while True:
                is_over = not job.is_alive()
                arrived = receiver.next(0.0 if is_over else WAIT_S)
                if arrived is not None:
                    rows, connection = arrived
                    with connection:  # who waits for a confirmation hears if there is none
                        for row in rows:
                            self._take(row)
                        confirm(connection)
                elif is_over:
                    break
                self._progress.show(UnderWay)
            job.check()
        finally:
            receiver.close()
            job.join(END_S)
            if pool is not None:
                pool.close()
            self._progress.end()

    def _dataset(self, ranges: list[LineRange], pool: Any) -> Dataset:
        work = self._work
        dataset = ray.data.read_datasource(
            LineDatasource(os.path.abspath(work.path), ranges), override_num_blocks=len(ranges)
        )
        context = dataset.context
        context.enable_progress_bars = False
        context.wait_for_min_actors_s = ENGINES_START_S
        context.execution_options.preserve_order = self._ordered
        context.checkpoint_config = None
        if self._checkpoint is not None:
            # It warns of sinks that would write twice what is brought twice; `_take` does not.
            warnings.filterwarnings("ignore", "Checkpointing with non-file datasink")
            context.checkpoint_config = prepare_checkpoint(self._checkpoint, self._done)
        return self._config.map_engines(
            dataset,
            work.engine,
            pool,
            batch_size=LINES_PER_RANGE[work.engine],
            formats=work.formats,
            first=work.first,
            **(work.score_options or {}),
        )

    def _ranges(self) -> list[LineRange]:
        seen = SeenIds()
        try:
            assert self._work.first is not None
            lines = self._work.formats(None)(self._work.first)  # ids depend on no tokenizer
            return [
                *plan_ranges(
                    self._work.path,
                    lines,
                    self._done,
                    seen,
                    num_lines=LINES_PER_RANGE[self._work.engine],
                    limit=self._limit,
                )
            ]
        finally:
            seen.close()

    def _take(self, row: dict[str, Any]) -> None:
        """Writes a record, unless it came before: a task that failed is run again."""
        if row["line"] in self._done or not self._taken.add(row["line"]):
            return
        while self._last_expected < row["line"]:
            self._last_expected = next(self._numbers)
            self._output.expect(self._last_expected)
        self._output.write(row["line"], row["record"])
        self.counts.requests += 1
        self.counts.failed += row["failed"]
        self.counts.tokens += row["tokens"]


@contextmanager
def _ray_data_in_its_own_log() -> Iterator[None]:
    """Ray Data tells of plans and, at length, of errors that are reported here in a line: on the
    terminal that would hide everything else. Its log file has it all."""
    logger = logging.getLogger("ray.data")
    shown = [
        (handler, handler.level)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, FileHandler)
    ]
    for handler, _ in shown:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in shown:
            handler.setLevel(level)


class _Job:
    """Ray Data at work, in a thread: it returns when all is written."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="fastdecode ray job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # told by check(), in the thread that waits
            self._error = error

    def check(self) -> None:
        """Tells how it failed, if it did."""
        error = self._error
        if error is None:
            return
        if not isinstance(error, ray.exceptions.RayError):
            raise error
        raise TransportError(f"an engine failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What an engine raised. Ray wraps it, several times at times, as an object or as the text of a
    traceback, and adds advice of its own."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = getattr(each, "cause", None) or each.__cause__
    for each in reversed(chain):
        if isinstance(each, FastDecodeError):
            return str(each)
    lines = [line.strip() for each in chain for line in str(each).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(f"{FastDecodeError.__module__}.")]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (ours or named or lines or [type(error).__name__])[-1].removeprefix(
        f"{FastDecodeError.__module__}."
    )
