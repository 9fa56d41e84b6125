"""What queue pairs driven from Python have in common, whichever binding they go through."""

from __future__ import annotations

import errno
import select
import socket
from abc import ABC, abstractmethod
from typing import Any

from fastdecode_rdma.transport._rdma import RECEIVED, SENT, explain_status

RECEIVE = (1 << 64) - 1
"""The number of a receive's work request; that of a write is its count."""

LIMITS = ("max_mr_size", "max_qp_wr", "max_cqe", "max_mr", "max_qp")


class PythonQueue(ABC):
    """A queue pair on one port of a device, over memory that it registers and the caller keeps: the
    calls of `_verbs.VerbsQueue`. Every message takes the interpreter's lock and makes Python
    objects, which costs some tens of microseconds."""

    fd = -1
    max_inline = 0
    _cq: Any
    _qp: Any
    _mr: Any
    _route = ""

    def __init__(self) -> None:
        self._closing: list[Any] = []  # in the order of making

    def _own(self, thing: Any) -> Any:
        self._closing.append(thing)
        return thing

    def _check_open(self) -> None:
        if not self._closing:
            raise OSError(errno.ENOTCONN, "the queue pair is closed")

    @property
    def qp_num(self) -> int:
        return self._qp.qp_num

    @property
    def rkey(self) -> int:
        return self._mr.rkey

    @abstractmethod
    def _completions(self, limit: int) -> list[Any]:
        """Takes completions."""

    def _immediate(self, wc: Any) -> int:
        """The immediate value of a completion."""
        return socket.ntohl(wc.imm_data)

    @abstractmethod
    def _take_event(self) -> None:
        """Takes one event of the completion queue, which is there."""

    def poll(self, limit: int) -> list[tuple[int, int, int, int, int]]:
        """Takes completions: (kind, status, imm, nbytes, count)."""
        self._check_open()
        events = []
        for wc in self._completions(limit):
            if wc.status:
                events.append((SENT, int(wc.status), 0, 0, 0))
            elif wc.wr_id == RECEIVE:
                events.append((RECEIVED, 0, self._immediate(wc), wc.byte_len, 0))
            else:
                events.append((SENT, 0, 0, 0, wc.wr_id))
        return events

    def disarm(self) -> None:
        """Takes what made the descriptor readable."""
        if not self._closing:
            return
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while poller.poll(0):
            self._take_event()

    def explain(self, status: int) -> str:
        """Returns what the status of a failed completion means."""
        return explain_status(status, self._route)

    def close(self) -> None:
        """Ends the queue pair, then the registration. Idempotent.

        Raises:
            OSError: the device refused; all else is closed.
        """
        if self.fd >= 0:
            self.disarm()  # a queue with events that nobody took cannot be destroyed
        owned, self._closing = self._closing[::-1], []
        refused = None
        # memory and queues hang on each other in this order: pair, completions, channel, memory
        for thing in owned:
            try:
                thing.close()
            except Exception as error:
                refused = refused or error
        if refused is not None:
            raise OSError(None, f"closing a queue pair: {refused}") from refused
