"""The engine thread: takes commands, steps while there is work, sleeps otherwise.

A thread of its own lets several iterators share the batch, uses the thread team from one caller,
and lets Ctrl-C interrupt a waiting caller without tearing a step apart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from fastdecode_rdma.engine.core import Engine
from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import FastDecodeError, WorkerLostError

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 10.0
"""close() waits this long for the step under way."""


class EngineLoop:
    """Runs an Engine in a thread. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self, engine: Engine, *, reconnect: Callable[[], None], worker_wait_s: float
    ) -> None:
        """`reconnect` takes in workers that have come back, without waiting; after worker_wait_s
        without any worker, requests fail with WorkerLostError."""
        self.engine = engine
        self._reconnect = reconnect
        self._worker_wait_s = worker_wait_s
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: FastDecodeError | None = None
        self._no_worker_since: float | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fastdecode-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            FastDecodeError: the engine has been closed or has failed.
        """
        self._send(lambda: self.engine.add(request))

    def cancel(self, request: Request) -> None:
        """Drops a request; does nothing if it is over or the engine is."""
        with self._wake:
            if self._failure is None and not self._closing:
                self._commands.append(lambda: self.engine.cancel(request))
                self._wake.notify()

    def is_alive(self) -> bool:
        """Whether requests are still worked on. Once they are not, `check` says why."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def check(self) -> None:
        """Raises what `submit` would.

        Raises:
            FastDecodeError: the engine has been closed or has failed.
        """
        self._check_process()
        with self._wake:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise FastDecodeError("the generator is closed")
            if not self._thread.is_alive():
                raise FastDecodeError("the engine thread has gone; make a new generator")

    def _check_process(self) -> None:
        """Threads do not survive a fork, and locks may be held for ever by those that did not."""
        if os.getpid() != self._pid:
            raise FastDecodeError(
                "this generator was made before a fork, in another process; make one in each "
                "process (multiprocessing: start method 'spawn')"
            )

    def _send(self, command: Callable[[], None]) -> None:
        self._check_process()
        with self._wake:  # reentrant
            self.check()
            self._commands.append(command)
            self._wake.notify()

    def close(self) -> None:
        """Stops the thread after the step under way. Idempotent and bounded."""
        if os.getpid() != self._pid:
            return  # the thread is the parent's
        with self._wake:
            self._closing = True
            self.engine.stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_GRACE_S)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
            self.engine.fail_all(FastDecodeError("the generator was closed"))
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

    def _take_commands(self, *, block: bool = True) -> bool:
        """Runs queued commands; waits for one when there is no work. False when closing."""
        while True:
            with self._wake:
                while (
                    block
                    and not self._commands
                    and not self._closing
                    and not self.engine.has_work()
                ):
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing or not block or self.engine.has_work():
                return not closing

    def _step(self) -> None:
        self._reconnect()
        if self.engine.placement.has_workers():
            self._no_worker_since = None
            self.engine.step()
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
