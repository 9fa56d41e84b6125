"""One thread that beats to all remote workers and notices those that have fallen silent.

It never waits for the data plane, so an engine that computes for a minute is not taken for dead,
and a worker that dies is noticed while the engine waits for it: marking it lost wakes that wait.
"""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

TICK_S = 0.1


class Watched(ABC):
    """A control connection as the heartbeat thread sees it."""

    @abstractmethod
    def fileno(self) -> int:
        """The socket to wait for, -1 when it is closed."""

    @abstractmethod
    def beat(self, *, readable: bool) -> str | None:
        """Receives what there is, sends a heartbeat if one is due; why the worker is lost, or None."""


class Heartbeats(threading.Thread):
    """`on_lost(number, reason)` is called on this thread, at most once per worker."""

    def __init__(self, on_lost: Callable[[int, str], None]) -> None:
        super().__init__(name="fastdecode heartbeats", daemon=True)
        self._on_lost = on_lost
        self._watched: dict[int, Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def watch(self, number: int, control: Watched) -> None:
        """Takes over a control connection: from now on only this thread reads it."""
        with self._lock:
            self._watched[number] = control

    def stop(self) -> None:
        """Ends the thread and waits for it; from then on the connections are the caller's."""
        self._stop.set()
        if self is not threading.current_thread() and self.is_alive():
            self.join()

    def run(self) -> None:
        """Beats until stopped."""
        while not self._stop.is_set():
            with self._lock:
                watched = dict(self._watched)
            poller = select.poll()
            for control in watched.values():
                if control.fileno() >= 0:
                    poller.register(control.fileno(), select.POLLIN)
            # A short tick instead of a wake-up pipe: a stop or a new worker waits that long at most.
            ready = {fd for fd, _ in poller.poll(TICK_S * 1000)} if watched else set()
            if not watched:
                self._stop.wait(TICK_S)
            for number, control in watched.items():
                reason = control.beat(readable=control.fileno() in ready)
                if reason is not None:
                    with self._lock:
                        del self._watched[number]
                    self._on_lost(number, reason)
