"""Traces of an engine's steps in the Chrome trace format: `chrome://tracing` and Perfetto read it.

Tracks: the engine thread's phases, its dense layers, its exchange with workers, each mini-batch,
each worker's kernel. A worker says how long its kernel ran, not when: its span begins when the rows
had been sent and it was done with the ones before, at the latest so that it ends with the answer.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch import Tensor

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import DecoderModel

logger = logging.getLogger(__name__)

MAX_SPANS = 1_000_000
"""A file of some 100 MB, which viewers still open. Later spans are left out; the file says so."""
ENGINE, DENSE, TRANSPORT, MINI_BATCHES, WORKERS = 0, 1, 2, 10, 100
"""Tracks; mini-batch m has MINI_BATCHES + m, worker w has WORKERS + w."""

Span = tuple[int, str, float, float, int, int, int]
"""Track, name, start and end in seconds; step, layer and mini-batch, -1 where there is none."""


class Recorder:
    """Spans as they happen: one thread records, another may take them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_left_out = 0

    def add(
        self,
        track: int,
        name: str,
        start_s: float,
        end_s: float,
        *,
        step: int = -1,
        layer: int = -1,
        mini_batch: int = -1,
    ) -> None:
        """Takes down one span; times are time.perf_counter()'s."""
        if len(self.spans) >= MAX_SPANS:
            self.num_left_out += 1
            return
        self.spans.append((track, name, start_s, end_s, step, layer, mini_batch))

    def engine(self, name: str, start_s: float, end_s: float) -> None:
        """Takes down a phase of the engine thread."""
        self.add(ENGINE, name, start_s, end_s)

    def dense(self, name: str, start_s: float, end_s: float, *, step: int) -> None:
        """Takes down dense work of all mini-batches together."""
        self.add(DENSE, name, start_s, end_s, step=step)


class LayerRecorder:
    """What a step calls per layer, taken down: the same calls as the model's and the backend's."""

    def __init__(
        self, recorder: Recorder, model: DecoderModel, backend: AttentionBackend, step: int
    ) -> None:
        self.table = 0  # mini-batch whose turn it is: collect changes it
        self._recorder = recorder
        self._model = model
        self._backend = backend
        self._step = step
        self._submitted: dict[int, float] = {}
        self._idle_since = [0.0] * backend.num_workers

    def pre_attention(self, layer: int, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        """DecoderModel.pre_attention."""
        start = time.perf_counter()
        self._model.pre_attention(layer, x, positions, rows_out)
        self._dense("before attention", layer, start)

    def post_attention(self, layer: int, x: Tensor, attn_out: Tensor) -> Tensor:
        """DecoderModel.post_attention."""
        start = time.perf_counter()
        x = self._model.post_attention(layer, x, attn_out)
        self._dense("after attention", layer, start)
        return x

    def submit(self, table: int, layer: int) -> None:
        """AttentionBackend.submit."""
        start = time.perf_counter()
        self._backend.submit(table, layer)
        end = self._submitted[table] = time.perf_counter()
        self._add(TRANSPORT, "send", layer, start, end)

    def collect(self, table: int, layer: int) -> None:
        """AttentionBackend.collect."""
        start, self.table = time.perf_counter(), table
        self._backend.collect(table, layer)
        end = time.perf_counter()
        self._add(TRANSPORT, "wait", layer, start, end)
        self._add(MINI_BATCHES + table, "attention", layer, self._submitted[table], end)
        for worker in range(len(self._idle_since)):
            took = self._backend.kernel_s(worker, table)
            if not took:
                continue
            begun = end - took
            if not self._backend.is_embedded(worker):
                begun = min(begun, max(self._submitted[table], self._idle_since[worker]))
            self._idle_since[worker] = begun + took
            self._add(WORKERS + worker, "attention", layer, begun, begun + took)

    def _dense(self, name: str, layer: int, start: float) -> None:
        end = time.perf_counter()
        self._add(DENSE, name, layer, start, end)
        self._add(MINI_BATCHES + self.table, name, layer, start, end)

    def _add(self, track: int, name: str, layer: int, start: float, end: float) -> None:
        self._recorder.add(
            track, name, start, end, step=self._step, layer=layer, mini_batch=self.table
        )


class Trace:
    """Takes a trace between `start` and `stop`, or inside a `with` block, and writes it to a file.

    path: the file, JSON in the Chrome trace format, also for Perfetto. `attach(recorder)` is called
    with a recorder at the start and with None at the end; `worker_names()` at the end.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        attach: Callable[[Recorder | None], None],
        worker_names: Callable[[], list[str]],
    ) -> None:
        self._path = Path(path)
        self._attach = attach
        self._worker_names = worker_names
        self._recorder: Recorder | None = None
        self._file: TextIO | None = None

    def start(self) -> None:
        """Begins to record, with the next step.

        Raises:
            ConfigError: the file cannot be written, or a trace of the generator is taken already.
        """
        if self._recorder is not None:
            raise ConfigError("this trace has been started already")
        recorder = Recorder()
        self._attach(recorder)
        try:
            self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            self._attach(None)
            raise ConfigError(f"cannot write the trace {self._path}: {error.strerror}") from error
        self._recorder = recorder

    def stop(self) -> None:
        """Ends the recording and writes the file; of a step under way, what was recorded so far.
        Idempotent."""
        recorder, self._recorder = self._recorder, None
        file, self._file = self._file, None
        if recorder is None or file is None:
            return
        self._attach(None)
        with file:
            write_chrome_trace(file, recorder, self._worker_names())
        if recorder.num_left_out:
            logger.warning(
                "%s holds the first %d spans; %d later ones were left out",
                self._path,
                MAX_SPANS,
                recorder.num_left_out,
            )

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def write_chrome_trace(file: TextIO, recorder: Recorder, worker_names: list[str]) -> None:
    """Writes all spans, times in microseconds from the first one on."""
    spans = list(recorder.spans)  # the engine may still add to it
    origin = min((span[2] for span in spans), default=0.0)
    tracks = {ENGINE: "engine", DENSE: "dense", TRANSPORT: "transport"}
    for span in spans:
        if MINI_BATCHES <= span[0] < WORKERS:
            tracks[span[0]] = f"mini-batch {span[0] - MINI_BATCHES}"
        elif span[0] >= WORKERS:
            tracks[span[0]] = f"worker {worker_names[span[0] - WORKERS]}"
    pid = os.getpid()
    lines = [_metadata(pid, 0, "process_name", name="fastdecode")]
    for track, name in sorted(tracks.items()):
        lines.append(_metadata(pid, track, "thread_name", name=name))
        lines.append(_metadata(pid, track, "thread_sort_index", sort_index=track))
    file.write(f'{{"displayTimeUnit": "ms", "spansLeftOut": {recorder.num_left_out}, ')
    file.write('"traceEvents": [\n')
    file.write(",\n".join(lines))
    for track, name, start, end, step, layer, mini_batch in spans:
        known = {"step": step, "layer": layer, "mini_batch": mini_batch}
        event = {
            "ph": "X",
            "pid": pid,
            "tid": track,
            "name": name if layer < 0 else f"{name} {layer}",
            "ts": round((start - origin) * 1e6, 3),
            "dur": round((end - start) * 1e6, 3),
            "args": {key: value for key, value in known.items() if value >= 0},
        }
        file.write(",\n" + json.dumps(event))
    file.write("\n]}\n")


def _metadata(pid: int, track: int, what: str, **args: str | int) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": track, "name": what, "args": args})
