"""Requests submitted one by one: a handle for threads, a stream for asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType

from fastdecode_rdma.engine.loop import EngineLoop
from fastdecode_rdma.errors import FastDecodeError, RequestCancelledError, WorkerLostError
from fastdecode_rdma.inbox import Courier, Inbox
from fastdecode_rdma.results import ResultCollector
from fastdecode_rdma.sequence import RequestOutput, TokenEvent
from fastdecode_rdma.stream import WAIT_S, MakeRequest


class _Submitted:
    """A request under way and its inbox. It ends with its last reference."""

    def __init__(
        self,
        loop: EngineLoop,
        make_request: MakeRequest,
        events: list[TokenEvent] | deque[TokenEvent],
    ) -> None:
        self._inbox = Inbox(events)
        self._loop = loop
        request = make_request(self._inbox.put, self._inbox.fail)
        self._inbox.unfinished = request.params.n
        self._inbox.abandon = partial(loop.cancel, request)
        try:
            loop.submit(request, listener=self._inbox)
        except FastDecodeError:
            self._inbox.abandon = None
            self._inbox.ends.append(None)  # nothing is under way
            raise

    def cancel(self) -> bool:
        """Ends the request and frees its memory. Returns False if it was over already."""
        if self._inbox.ends:
            return False
        return self._inbox.end(RequestCancelledError("the request was cancelled"))

    def done(self) -> bool:
        """Whether the request is over: finished, failed or cancelled."""
        return bool(self._inbox.ends)

    def cancelled(self) -> bool:
        """Whether it was cancelled before it was over."""
        return self.done() and isinstance(self._inbox.ends[0], RequestCancelledError)

    def _error(self) -> FastDecodeError | None:
        """How the request failed, if it did, without the traceback of an earlier raise."""
        error = self._inbox.ends[0]
        if isinstance(error, WorkerLostError):  # all requests share it; the texts are this one's
            error = WorkerLostError(error.worker, error.remote_message)
        return None if error is None else error.with_traceback(None)

    def __del__(self) -> None:
        if hasattr(self, "_inbox"):
            self.cancel()


class RequestHandle(_Submitted):
    """A request under way, as `Generator.submit` returns it. Any thread may use it.

    Iterating gives the events, from the first on, in each `for` loop anew; `result` waits for the
    end. A handle that is not read costs nobody anything but the memory of its events. Dropping the
    last reference cancels the request, as nobody can hear of it any more; so does leaving a `with`
    block. Leaving a `for` loop or a Ctrl-C while waiting does not: the handle can be asked again.
    """

    def __init__(self, loop: EngineLoop, make_request: MakeRequest) -> None:
        """Submits; use `Generator.submit`."""
        self._results = ResultCollector(1, use_tqdm=False)
        self._results_lock = threading.Lock()
        self._output: RequestOutput | None = None
        (watched,) = self._results.watch(iter([make_request]))
        assert not isinstance(watched, tuple)
        super().__init__(loop, watched, [])

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yields the events as they happen; ends early, without an error, when cancelled.

        Raises:
            FastDecodeError: what ended the request, after the events that came before it.
        """
        inbox, seen = self._inbox, 0
        while True:
            is_over = self.done()  # before the events: those that came before the end are there
            while seen < len(inbox.events):
                if self.cancelled():
                    return
                seen += 1
                yield inbox.events[seen - 1]
            if is_over:
                break
            self._wait(lambda seen=seen: inbox.has_news(seen), None, for_end=False)
        error = None if self.cancelled() else self._failure()
        if error is not None:
            raise error

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all samples."""
        return len(self._inbox.events)

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Has `call()` called once when the request is over, or now if it is already. The engine's
        thread does it: it must neither wait nor raise, and what it refers to stays alive. Wake
        another thread (`queue.SimpleQueue().put`), which asks for the `result`.
        """
        self._inbox.leave_end_bell(call)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end and returns the result; again and again if asked.

        timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: it is not over yet; it goes on.
            RequestCancelledError: it was cancelled.
            FastDecodeError: what ended the request. A WorkerLostError carries its texts so far.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._wait(self.done, deadline, for_end=True):
            raise TimeoutError(
                f"the request was not over within {timeout:g} s; it goes on: ask again, or cancel()"
            )
        error = self._failure()
        if error is not None:
            raise error
        return self._collected()

    def _failure(self) -> FastDecodeError | None:
        error = self._error()
        if isinstance(error, WorkerLostError):
            error.texts[0] = [sample.text for sample in self._collected().outputs]
        return error

    def _collected(self) -> RequestOutput:
        with self._results_lock:
            if self._output is None:
                for event in self._inbox.events:
                    self._results.add(event)
                (self._output,) = self._results.results()
            return self._output

    def _wait(self, is_there: Callable[[], bool], deadline: float | None, *, for_end: bool) -> bool:
        """Waits until something is there; False at the deadline. Ctrl-C ends the wait."""
        if is_there():
            return True
        self._loop.check_process()
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        ring = partial(bell.put, None)
        try:
            while True:
                self._inbox.leave_bell(ring, for_end=for_end)
                if is_there():
                    return True
                left = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
                if left <= 0:
                    return False
                # not for ever: an interrupt that is no signal to this thread is seen between waits
                with suppress(queue.Empty):
                    bell.get(timeout=left)
                self._inbox.take_bell(ring)
        finally:
            self._inbox.take_bell(ring)

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncEventStream(_Submitted, AsyncIterator[TokenEvent]):
    """The events of one request for `async for`, as `Generator.stream` returns it.

    Cancelling the task while it waits for an event, `cancel`, `aclose`, leaving an `async with`
    block and losing the last reference cancel the request and free its memory. Leaving an
    `async for` by `break` or an error does so only because nobody refers to the stream any more:
    while a variable does (or a traceback that is kept), the request runs on. So give it no name
    (`async for event in gen.stream(...)`), or use `async with gen.stream(...) as events`.

    It may be made in any thread and is read by one task at a time, on any event loop; when that
    loop is closed, the request ends.
    """

    def __init__(self, loop: EngineLoop, make_request: MakeRequest) -> None:
        """Submits; use `Generator.stream`."""
        self._is_awaited = False
        super().__init__(loop, make_request, deque())

    def __aiter__(self) -> AsyncEventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event.

        Raises:
            FastDecodeError: what ended the request, after the events that came before it.
        """
        if self._is_awaited:
            raise RuntimeError("another task is waiting for this stream; one at a time")
        self._is_awaited = True
        inbox = self._inbox
        try:
            while True:
                is_over = self.done()
                if is_over and self.cancelled():
                    raise StopAsyncIteration
                if inbox.events:
                    return inbox.events.popleft()
                if is_over:
                    raise self._error() or StopAsyncIteration
                await self._wait()
        except BaseException:  # the end, a failure, the task was cancelled
            self.cancel()
            raise
        finally:
            self._is_awaited = False

    async def _wait(self) -> None:
        self._loop.check_process()
        event_loop = asyncio.get_running_loop()
        courier = self._inbox.courier
        if courier is None or not courier.serves(event_loop):
            courier = self._inbox.courier = Courier.of(event_loop)
        future = event_loop.create_future()
        ring = partial(courier.wake, future)
        self._inbox.leave_bell(ring)
        try:
            if not self._inbox.has_news(0):
                await future
        finally:
            self._inbox.take_bell(ring)

    async def aclose(self) -> None:
        """Cancels the request if it is not over. Idempotent."""
        self.cancel()

    async def __aenter__(self) -> AsyncEventStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
