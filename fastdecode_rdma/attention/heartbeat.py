"""One thread that beats to all remote workers and notices those that have fallen silent.

It never waits for the data plane, so an engine that computes for a minute is not taken for dead,
and a worker that dies is noticed while the engine waits for it: marking it lost wakes that wait.
"""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod

TICK_S = 0.1


class Watched(ABC):
    """A control connection as the heartbeat thread sees it. Both methods are callable from any
    thread, never block and never raise."""

    @abstractmethod
    def fileno(self) -> int:
        """The socket to wait for, -1 when it is closed."""

    @abstractmethod
    def beat(self, *, readable: bool) -> bool:
        """Receives what there is and sends a heartbeat if one is due; False when there is no more
        to be done: it was closed, or is lost and has told so."""


class Heartbeats:
    """The thread runs as long as there is somebody to watch."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, control: Watched) -> None:
        """Beats for a connection until it is closed or lost."""
        with self._lock:
            self._watched.add(control)
            if self._thread is None:
                name = "fastdecode heartbeats"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                if not watched:
                    self._thread = None
                    return
            poller = select.poll()
            for control in watched:
                if (fd := control.fileno()) >= 0:
                    poller.register(fd, select.POLLIN)
            # A short tick instead of a wake-up pipe: what changes is seen that much later at most.
            ready = {fd for fd, _ in poller.poll(TICK_S * 1000)}
            ended = {c for c in watched if not c.beat(readable=c.fileno() in ready)}
            with self._lock:
                self._watched -= ended
