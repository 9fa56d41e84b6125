"""`fastdecode generate --ray`: the lines of a file through engines on a cluster, written here."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.data import DataContext

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.intake import FormatFor
from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.planning import plan_ranges
from fastdecode_rdma.batch.progress import Counts, Progress, UnderWay
from fastdecode_rdma.errors import ConfigError, TransportError
from fastdecode_rdma.ray.engines import LineEngine
from fastdecode_rdma.ray.processor import FastDecodeProcessorConfig
from fastdecode_rdma.tokenizer import Tokenizer

LINES_PER_RANGE = 64
LOCAL_STORE_BYTES = 256 << 20
"""Object store of a Ray that is started here: records pass through it, no more."""


@contextmanager
def connected(address: str | None, num_actors: int) -> Iterator[None]:
    """Connects to a cluster (`address`, else RAY_ADDRESS), or starts a Ray of this machine with
    room for so many actors; one that runs already is used as it is."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None or os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ConfigError(f"cannot reach Ray at {address or 'RAY_ADDRESS'}: {error}") from error
    else:
        ray.init(
            num_cpus=num_actors + 1,
            include_dashboard=False,
            object_store_memory=LOCAL_STORE_BYTES,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def processor_config(
    args: argparse.Namespace, model: str, options: dict[str, Any]
) -> FastDecodeProcessorConfig:
    """Returns what the command's options ask for."""
    seats = args.max_num_seqs or 256
    engine = {
        name: value for name, value in options.items() if name not in ("workers", "token_file")
    }
    return FastDecodeProcessorConfig(
        model_source=model,
        engine_kwargs=engine,
        concurrency=args.ray_engines,
        num_workers=args.ray_workers,
        worker_memory=args.ray_worker_memory,
        max_concurrent_batches=2 + seats // LINES_PER_RANGE,
    )


class RayRun:
    """One pass over a file's lines; `counts` may be read at any time.

    path: of the input, the same on all nodes. formats: of its lines, given a tokenizer; first: its
    first line. done: lines that are in the output already.
    """

    def __init__(
        self,
        config: FastDecodeProcessorConfig,
        path: str,
        formats: Callable[[Tokenizer | None], FormatFor],
        first: RawLine | None,
        done: DoneLines,
        output: Output,
        counts: Counts,
        progress: Progress,
        *,
        limit: int | None,
        ordered: bool,
    ) -> None:
        self.counts = counts
        self._config = config
        self._path = path
        self._formats = formats
        self._first = first
        self._done = done
        self._output = output
        self._progress = progress
        self._limit = limit
        self._ordered = ordered

    def run(self) -> None:
        """Answers all lines.

        Raises:
            OSError: input or output broke. ConfigError: the cluster has no room.
            TransportError: the cluster, or an engine on it, failed.
        """
        if self._first is None:
            return
        ranges = self._ranges()
        if not ranges:
            return
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = self._ordered
        pool = self._config.start_workers()
        try:
            dataset = ray.data.from_items(ranges, override_num_blocks=len(ranges))
            results = self._config.map_engines(
                dataset, LineEngine, pool, batch_size=1, formats=self._formats, first=self._first
            )
            for row in results.iter_rows():
                self._take(row)
                self._progress.show(UnderWay)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            last = str(cause).strip().splitlines() or [type(cause).__name__]
            raise TransportError(f"an engine failed: {last[-1]}") from error
        finally:
            if pool is not None:
                pool.close()
            self._progress.end()

    def _ranges(self) -> list[dict[str, str]]:
        seen = SeenIds()
        try:
            # ids do not depend on the tokenizer
            lines = self._formats(None)(self._first)
            planned = plan_ranges(
                os.path.abspath(self._path),
                lines,
                self._done,
                seen,
                num_lines=LINES_PER_RANGE,
                limit=self._limit,
            )
            return [{"range": json.dumps(each)} for each in planned]
        finally:
            seen.close()

    def _take(self, row: dict[str, Any]) -> None:
        self._output.write(row["line"], row["record"])
        self.counts.requests += 1
        self.counts.failed += row["failed"]
        self.counts.tokens += row["tokens"]
