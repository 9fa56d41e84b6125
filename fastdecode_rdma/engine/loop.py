"""The engine thread: takes commands, steps while there is work, sleeps otherwise.

A thread of its own lets several iterators share the batch, uses the thread team from one caller,
and lets Ctrl-C interrupt a waiting caller without tearing a step apart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fastdecode_rdma.engine.core import Engine
from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import (
    FastDecodeError,
    GeneratorClosedError,
    QueueFullError,
    WorkerLostError,
)

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 10.0
"""close() waits this long for the step under way."""


class Listener(Protocol):
    """Who waits for a request."""

    def end(self, how: FastDecodeError | None) -> object:
        """Hears that nothing more will come."""


class SideTask(Protocol):
    """Work on the dense side that no step knows of: done in parts, between steps."""

    @property
    def holds_memory(self) -> bool: ...

    def advance(self, should_stop: Callable[[], bool]) -> bool:
        """Does a part of it; False when it is over. Never raises."""

    def stop(self, error: FastDecodeError) -> None:
        """Gives up, with an error for who waits."""


class EngineLoop:
    """Runs an Engine in a thread. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        reconnect: Callable[[], None],
        worker_wait_s: float,
        max_num_seqs: int,
        max_waiting: int,
    ) -> None:
        """`reconnect` takes in workers that have come back, without waiting; after worker_wait_s
        without any worker, requests fail with WorkerLostError. `max_waiting` sequences of
        requests that came one by one may wait for one of max_num_seqs seats."""
        self.engine = engine
        self._reconnect = reconnect
        self._worker_wait_s = worker_wait_s
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._num_submitted = self._num_added = 0  # sequences sent, and those the engine has
        self._num_submitted_single = self._num_added_single = 0  # of them, by submit and stream
        self._is_blocked = False  # the last step left some without a seat
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._commands: deque[Callable[[], None]] = deque()
        self._side_tasks: deque[SideTask] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: FastDecodeError | None = None
        self._no_worker_since: float | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fastdecode-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, listener: Listener | None = None) -> None:
        """Queues a request. One that comes alone has a listener, which hears of its end even if
        the engine dies; it is refused when the queue is full. A stream paces itself.

        Raises:
            QueueFullError: too many wait for a seat.
            FastDecodeError: the engine has been closed or has failed.
        """
        self.check_process()
        with self._wake:  # reentrant
            self.check()
            if listener is not None:
                self.check_room()
                self._listeners.add(listener)
                request.is_single = True
                self._num_submitted_single += request.params.n
            self._num_submitted += request.params.n
            self._commands.append(partial(self._add, request))
            self._wake.notify()

    def _add(self, request: Request) -> None:
        self._num_added += request.params.n
        self._num_added_single += request.params.n * request.is_single
        self.engine.add(request)

    @property
    def num_waiting(self) -> int:
        """Sequences without a seat."""
        return self.engine.num_waiting + self._num_submitted - self._num_added

    def check_room(self) -> None:
        """Raises what `submit` would with a listener, as far as it is known beforehand.

        Raises:
            QueueFullError: too many wait for a seat.
        """
        scheduler = self.engine.scheduler
        on_their_way = self._num_submitted_single - self._num_added_single
        single = scheduler.num_waiting_single + on_their_way
        seats = 0  # those that just came will take the free ones that lists leave them
        if not self._is_blocked:
            others = max(0, self.num_waiting - single)
            seats = max(0, self._max_num_seqs - scheduler.num_running - others)
        if single - seats >= self._max_waiting:
            raise QueueFullError(
                f"{self._max_waiting} sequences of single requests wait for a seat already, as "
                "many as max_waiting allows; try again later"
            )

    def cancel(self, request: Request) -> None:
        """Drops a request; does nothing if it is over or the engine is."""
        if not self.is_ours():
            return  # the request is the parent's; its lock may be held for ever here
        with self._wake:
            if self._failure is None and not self._closing:
                self._commands.append(lambda: self.engine.cancel(request))
                self._wake.notify()

    def run_beside(self, task: SideTask) -> None:
        """Queues a task that the engine's thread works on between steps, in turn with others.

        Raises:
            FastDecodeError: the engine has been closed or has failed.
        """
        self.check_process()
        with self._wake:  # reentrant
            self.check()
            self._commands.append(partial(self._side_tasks.append, task))
            self._wake.notify()

    def is_alive(self) -> bool:
        """Whether requests are still worked on. Once they are not, `check` says why."""
        return self._thread.is_alive() and self.is_ours()

    def check(self) -> None:
        """Raises what `submit` would.

        Raises:
            FastDecodeError: the engine has been closed or has failed.
        """
        self.check_process()
        with self._wake:
            if self._failure is not None:
                raise self._failure.with_traceback(None)  # it would grow with every call
            if self._closing:
                raise GeneratorClosedError("the generator is closed")
            if not self._thread.is_alive():
                raise FastDecodeError("the engine thread has gone; make a new generator")

    def is_ours(self) -> bool:
        """Whether this process made the engine, rather than a parent that forked."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Threads do not survive a fork, and locks may be held for ever by those that did not.

        Raises:
            FastDecodeError: this process has come by a fork since, or the caller is the engine's
                own thread: a logits processor that asks its generator would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise FastDecodeError("a logits processor must not call the generator that runs it")
        if not self.is_ours():
            raise FastDecodeError(
                "this generator was made before a fork, in another process; make one in each "
                "process (multiprocessing: start method 'spawn')"
            )

    def close(self) -> None:
        """Stops the thread after the step under way. Idempotent and bounded."""
        if not self.is_ours():
            return  # the thread is the parent's
        with self._wake:
            self._closing = True
            self.engine.stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_GRACE_S)

    def _run(self) -> None:
        error: FastDecodeError = GeneratorClosedError("the generator was closed")
        try:
            while self._take_commands():
                if self.engine.has_work():
                    self._step()
                if self._side_tasks:
                    self._advance_side_task()
            self.engine.fail_all(error)
        except BaseException as exc:  # whatever it was, every waiting caller must hear of it
            error = exc if isinstance(exc, FastDecodeError) else _wrap(exc)
            if error is not exc:
                logger.error("the engine failed", exc_info=exc)
            with self._wake:
                self._failure = error
            try:
                self._take_commands(block=False)
            finally:
                self.engine.fail_all(error)
        finally:
            for task in self._side_tasks:
                task.stop(error)
            for listener in list(self._listeners):
                listener.end(error)

    def _take_commands(self, *, block: bool = True) -> bool:
        """Runs queued commands; waits for one when there is no work. False when closing."""
        while True:
            with self._wake:
                while (
                    block
                    and not self._commands
                    and not self._closing
                    and not self.engine.has_work()
                    and not self._side_tasks
                ):
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing or not block or self.engine.has_work() or self._side_tasks:
                return not closing
            self._is_blocked = False

    def _advance_side_task(self) -> None:
        task = self._side_tasks[0]
        if not task.advance(lambda: self.engine.stopping):
            self._side_tasks.popleft()
        elif not task.holds_memory:
            self._side_tasks.rotate(-1)

    def _step(self) -> None:
        self._reconnect()
        if self.engine.placement.has_workers():
            self._no_worker_since = None
            self.engine.step()
            self._is_blocked = self.engine.num_waiting > 0
            return
        now = time.monotonic()
        if self._no_worker_since is None:
            self._no_worker_since = now
        if now - self._no_worker_since >= self._worker_wait_s:
            self.engine.fail_all(
                WorkerLostError(
                    "(all)", f"no attention worker came back within {self._worker_wait_s:g} s"
                )
            )
            self._no_worker_since = None  # later requests wait as long
            return
        time.sleep(min(0.02, self._worker_wait_s / 10))


def _wrap(exc: BaseException) -> FastDecodeError:
    error = FastDecodeError(f"the engine failed: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
