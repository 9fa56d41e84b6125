"""Brings lost workers back: a thread of its own, so that neither decoding nor cancelling waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from fastdecode_rdma.attention.backend import WorkerLink
from fastdecode_rdma.errors import FastDecodeError

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
"""A restarted worker is back within a second; one that is gone costs a try now and then."""


class Reconnector:
    """Tries the addresses of lost workers with growing delays; the engine takes what has come back.

    `connect` opens a session on an address, within a bounded time, or raises a FastDecodeError.
    """

    def __init__(self, connect: Callable[[str], WorkerLink]) -> None:
        self._connect = connect
        self._due: dict[str, tuple[float, float]] = {}  # address -> (when, delay after that)
        self._back: list[WorkerLink] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def lost(self, address: str) -> None:
        """Starts trying an address."""
        with self._changed:
            if self._closed:
                return
            self._due[address] = (time.monotonic() + FIRST_DELAY_S, 2 * FIRST_DELAY_S)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fastdecode-reconnect", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def take(self) -> list[WorkerLink]:
        """Returns the sessions opened since the last call."""
        if not self._back:
            return []
        with self._changed:
            back, self._back = self._back, []
        return back

    def close(self) -> None:
        """Ends the thread after its try, and the sessions that nobody took. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
        for link in self.take():
            link.close()

    def _next_due(self) -> str | None:
        """Waits for an address whose time has come; None when there is nothing more to try."""
        with self._changed:
            while self._due and not self._closed:
                address = min(self._due, key=lambda each: self._due[each][0])
                wait_s = self._due[address][0] - time.monotonic()
                if wait_s <= 0:
                    return address
                self._changed.wait(wait_s)
            self._thread = None
            return None

    def _run(self) -> None:
        while (address := self._next_due()) is not None:
            link = self._try(address)
            with self._changed:
                if link is not None and not self._closed:
                    self._due.pop(address, None)
                    self._back.append(link)
                    continue
                _, delay_s = self._due.get(address, (0.0, LONGEST_DELAY_S))
                if not self._closed:
                    later = min(2 * delay_s, LONGEST_DELAY_S)
                    self._due[address] = (time.monotonic() + delay_s, later)
            if link is not None:
                link.close()

    def _try(self, address: str) -> WorkerLink | None:
        try:
            link = self._connect(address)
        except FastDecodeError as error:
            logger.info("worker %s is not back: %s", address, error)
            return None
        logger.warning("worker %s is back", address)
        return link
