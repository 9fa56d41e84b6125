"""The iterator of `Generator.generate`: pulls prompts, waits for events, cancels when left."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from fastdecode_rdma.engine.loop import EngineLoop
from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import FastDecodeError, WorkerLostError
from fastdecode_rdma.sequence import TokenEvent

WAIT_S = 1.0
"""How long one wait lasts before the engine's health is looked at again."""

Deliver = Callable[[list[TokenEvent]], None]
Fail = Callable[[int, FastDecodeError], None]
MakeRequest = Callable[[Deliver, Fail], Request]
"""Builds a request that delivers to the two callables given."""

Submission = MakeRequest | tuple[int, FastDecodeError]
"""A prompt ready to run, or the index of a bad one and what is wrong with it."""


@dataclass(slots=True)
class _Progress:
    """What is still to come of one request, and its text so far."""

    request: Request
    unfinished: int
    texts: list[str] = field(default_factory=list)


class EventStream(Iterator[TokenEvent]):
    """Iterates over the events of some requests, in the order in which they happen.

    Prompts are pulled and submitted by the thread that iterates, `lookahead` ahead of what the
    engine has finished, so an endless source is fine. `close()`, leaving a `with` block and losing
    the last reference cancel what is left and free its memory. A loop that is left early does so
    only if nothing else refers to the stream: `for event in gen.generate(...)`.
    """

    def __init__(
        self,
        loop: EngineLoop,
        source: Iterator[Submission],
        *,
        lookahead: int,
        raise_errors: bool,
    ) -> None:
        self._loop = loop
        self._source: Iterator[Submission] | None = source
        self._lookahead = lookahead
        self._raise_errors = raise_errors
        self._arrived: queue.SimpleQueue[list[TokenEvent] | tuple[int, FastDecodeError]] = (
            queue.SimpleQueue()
        )
        self._ready: deque[TokenEvent] = deque()
        self._open: dict[int, _Progress] = {}
        self._bad_in_a_row = 0
        self._error: FastDecodeError | None = None
        self._closed = False
        arrived = self._arrived
        # No method of the stream: requests that refer to it would keep an abandoned one alive.
        self._report: Fail = lambda index, error: arrived.put((index, error))
        self._top_up()

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> TokenEvent:
        """The next event.

        Raises:
            FastDecodeError: with on_error="raise", the first error, once all others are done.
        """
        try:
            while not self._ready:
                if self._closed:
                    raise StopIteration
                self._top_up()
                if self._ready:
                    break
                if not self._open:
                    raise StopIteration if self._error is None else self._error
                self._wait()
            return self._ready.popleft()
        except BaseException:  # the end, a failure, Ctrl-C, whatever the source of prompts raised
            self.close()
            raise

    def close(self) -> None:
        """Cancels what is not finished. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._source = None
        for progress in self._open.values():
            self._loop.cancel(progress.request)
        self._open.clear()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _top_up(self) -> None:
        """Submits prompts until `lookahead` sequences are under way or the source is dry."""
        while self._source is not None and self._num_open() + len(self._ready) < self._lookahead:
            submission = next(self._source, None)
            if submission is None:
                self._source = None
                return
            if isinstance(submission, tuple):
                self._record_failure(*submission, texts=[])
                self._bad_in_a_row += 1
                if self._raise_errors and self._bad_in_a_row > self._lookahead:
                    self._source = None  # nothing but bad prompts: stop, and raise the error
                continue
            self._bad_in_a_row = 0
            request = submission(self._arrived.put, self._report)
            count = request.params.n
            self._open[request.index] = _Progress(request, count, [""] * count)
            self._loop.submit(request)

    def _num_open(self) -> int:
        return sum(progress.unfinished for progress in self._open.values())

    def _wait(self) -> None:
        """Takes one batch of events or one failure off the queue."""
        try:
            item = self._arrived.get(timeout=WAIT_S)
        except queue.Empty:
            if not self._loop.is_alive() and self._arrived.empty():
                self._loop.check()  # nothing more will come
            return
        if isinstance(item, tuple):
            self._take_failure(*item)
            return
        for event in item:
            progress = self._open.get(event.request_index)
            if progress is None:
                continue
            progress.texts[event.sample_index] += event.text
            if event.finish_reason is not None:
                progress.unfinished -= 1
                if not progress.unfinished:
                    del self._open[event.request_index]
            self._ready.append(event)

    def _take_failure(self, index: int, error: FastDecodeError) -> None:
        progress = self._open.pop(index, None)
        if progress is not None:
            self._record_failure(index, error, texts=progress.texts)

    def _record_failure(self, index: int, error: FastDecodeError, *, texts: list[str]) -> None:
        """An event, or the error to raise at the end: the first, with all lost requests' texts."""
        if not self._raise_errors:
            self._ready.append(TokenEvent.failure(index, error))
            return
        if self._error is None:
            lost = isinstance(error, WorkerLostError)
            self._error = WorkerLostError(error.worker, error.remote_message) if lost else error
        if isinstance(self._error, WorkerLostError):
            self._error.texts[index] = texts
