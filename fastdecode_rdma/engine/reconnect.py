"""Brings lost workers back: in threads, so that neither decoding nor cancelling waits."""

from __future__ import annotations

import logging
import threading
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
    Each address has a thread: one that does not answer does not delay another's return.
    """

    def __init__(self, connect: Callable[[str], WorkerLink]) -> None:
        self._connect = connect
        self._tried: set[str] = set()  # addresses that have a thread
        self._back: list[WorkerLink] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def lost(self, address: str) -> None:
        """Starts trying an address."""
        with self._lock:
            if self._closed.is_set() or address in self._tried:
                return
            self._tried.add(address)
        threading.Thread(
            target=self._run, args=(address,), name=f"fastdecode-reconnect {address}", daemon=True
        ).start()

    def take(self) -> list[WorkerLink]:
        """Returns the sessions opened since the last call."""
        if not self._back:
            return []
        with self._lock:
            back, self._back = self._back, []
        return back

    def close(self) -> None:
        """Ends every thread after its try, and the sessions that nobody took. Idempotent."""
        with self._lock:
            self._closed.set()
        for link in self.take():
            link.close()

    def _run(self, address: str) -> None:
        delay_s, link = FIRST_DELAY_S, None
        try:
            while link is None and not self._closed.wait(delay_s):
                link = self._try(address)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        finally:
            with self._lock:
                self._tried.discard(address)
                is_late = self._closed.is_set()
                if link is not None and not is_late:
                    self._back.append(link)
        if link is not None and is_late:
            link.close()

    def _try(self, address: str) -> WorkerLink | None:
        try:
            link = self._connect(address)
        except FastDecodeError as error:
            logger.info("worker %s is not back: %s", address, error)
            return None
        logger.warning("worker %s is back", address)
        return link
