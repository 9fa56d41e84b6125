"""A worker in this process: the pump calls its kernel directly, cold frames are plain calls."""

from __future__ import annotations

from fastdecode_rdma.errors import FastDecodeError, StepError
from fastdecode_rdma.transport._pump import Pump
from fastdecode_rdma.transport.base import Session, Transport, step_code
from fastdecode_rdma.transport.serve import serve_cold


class LoopbackTransport(Transport):
    """Carries the same frames as a connection, without one. The session stays the caller's."""

    scheme = "loopback"

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.session = session
        self._port = -1

    def attach(self, pump: Pump) -> int:
        """Gives the pump the session's entry points."""
        entry = self.session.native()
        self._port = pump.add_local(
            self.name,
            attend=entry.attend_addr,
            store=entry.store_addr,
            ctx=entry.ctx_addr,
            begin=self.session.begin_step,
            owner=(self.session, entry),
        )
        return self._port

    def post(self, kind: int, payload: bytes) -> None:
        """Serves the frame at once.

        Raises:
            StepError: the session refused it.
        """
        self.request(kind, payload)

    def request(self, kind: int, payload: bytes) -> bytes:
        """Serves the frame and returns its reply.

        Raises:
            StepError: the session refused it.
        """
        try:
            return serve_cold(self.session, kind, payload)
        except FastDecodeError as error:
            raise StepError(self.name, self._port, step_code(error), str(error)) from error

    def close(self) -> None:
        """Nothing to end: the session is the caller's."""
