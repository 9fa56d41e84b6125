"""Runs the requests of a file through a generator, as many together as it has room for.

Lines are read as the batch has room, so a file of any length starts at once and needs little
memory. Results are written as they finish, each with its id and line. A pipe is served like a
file: whatever is under way, a line that comes is taken up at once if there is room.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fastdecode_rdma.batch.line_pass import LinePass
from fastdecode_rdma.batch.progress import UnderWay
from fastdecode_rdma.batch.records import Record
from fastdecode_rdma.errors import (
    ConfigError,
    FastDecodeError,
    GeneratorClosedError,
    ProtocolError,
    QueueFullError,
    TransportError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from fastdecode_rdma.handles import RequestHandle

WAIT_S = 0.5
RETRY_S = 0.02
"""Between attempts while the generator's queue is full, which nobody tells the end of."""

STOPPING = (GeneratorClosedError, ProtocolError, TransportError, WorkerLostError)
"""No fault of the line that meets it: the job stops, and can be resumed."""


@dataclass(slots=True)
class _Open:
    """A record under way: one handle for each of its prompts."""

    record: Record
    handles: list[RequestHandle] = field(default_factory=list)
    unfinished: int = 0


class BatchRun:
    """Answers the lines; `counts` may be read at any time."""

    def __init__(self, lines: LinePass) -> None:
        self.counts = lines.counts
        self._lines = lines
        self._generator = lines.generator
        self._intake = lines.intake
        self._output = lines.output
        self._open: dict[int, _Open] = {}  # by the line's number
        self._num_open = 0  # their sequences
        self._held: _Open | None = None  # read, and not all submitted: the queue was full
        # Numbers of lines one of whose requests is over; None: a pipe has something.
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Answers all lines.

        Raises:
            OSError: input or output broke. FastDecodeError: the generator is no longer usable.
        """
        self._lines.source.on_news = partial(self._news.put, None)
        try:
            while not self._intake.ended or self._held is not None or self._open:
                # One line, then a look at what has finished: neither waits for the other.
                self._hear(0.0 if self._take_line() else self._patience_s)
                self._lines.progress.show(self._under_way)
        finally:
            for each in (*self._open.values(), *filter(None, [self._held])):
                for handle in each.handles:
                    handle.cancel()
            self._lines.progress.end()

    @property
    def _patience_s(self) -> float:
        return RETRY_S if self._held is not None else WAIT_S

    def _under_way(self) -> UnderWay:
        stats = self._generator.stats()
        tokens = sum(h.num_tokens for each in self._open.values() for h in each.handles)
        return UnderWay(tokens, stats.num_requests_running, stats.num_requests_waiting)

    def _take_line(self) -> bool:
        """Takes up the next line; False if there is none, or no room for it, just now."""
        if self._held is None:
            if self._num_open >= self._generator.lookahead or self._output.is_full:
                return False
            record = self._intake.next_record()
            if record is None:
                return False
            self._output.expect(record.number)
            self._held = _Open(record)
            self._num_open += record.num_sequences
        each = self._held
        error = each.record.error
        if error is None:
            try:
                self._submit(each)
            except QueueFullError:
                return False
            except ConfigError as exc:
                error = exc
        self._held = None
        if error is None:
            self._open[each.record.number] = each
            for handle in each.handles:
                handle.add_done_callback(partial(self._news.put, each.record.number))
            return True
        for handle in each.handles:
            handle.cancel()
        self._num_open -= each.record.num_sequences
        self._lines.fail(each.record, error)
        return True

    def _submit(self, each: _Open) -> None:
        record = each.record
        assert record.params is not None
        for prompt in record.prompts[len(each.handles) :]:
            each.handles.append(self._generator.submit(prompt, record.params))
            each.unfinished += 1

    def _hear(self, timeout_s: float) -> None:
        """Writes the answers that are there; if there is no news at all, waits for some."""
        with suppress(queue.Empty):
            while True:
                number = self._news.get(timeout=timeout_s)
                if number is not None:
                    self._open[number].unfinished -= 1
                    if not self._open[number].unfinished:
                        self._finish(self._open.pop(number))
                timeout_s = 0.0

    def _finish(self, each: _Open) -> None:
        record = each.record
        self._num_open -= record.num_sequences
        try:
            results = [handle.result() for handle in each.handles]
            line = self._intake.format.result(record, results)
        except STOPPING:
            raise
        except FastDecodeError as error:
            self._lines.fail(record, error)
            return
        self._lines.finish(record, line, sum(handle.num_tokens for handle in each.handles))
