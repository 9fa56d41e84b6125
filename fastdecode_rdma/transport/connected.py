"""What the transports that go through a connection of the pump have in common."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from fastdecode_rdma.errors import LocalProtocolError
from fastdecode_rdma.transport._pump import Plane, Pump
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import Transport
from fastdecode_rdma.transport.blocking import BlockingConnection, naming
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection, check_data_accepted, data_hello


class ConnectedTransport(Transport):
    """The data socket of a session that a worker has opened, proved by both ends; `plane` carries
    the frames, None: the socket does. `detail` says over what, in one line, where there is more to
    say than the plane's name."""

    detail = ""

    @classmethod
    def prepare(cls) -> None:
        """Does what takes its time and needs no worker yet."""

    @classmethod
    def is_expected(cls, offer: bytes | None) -> bool:
        """Whether going without this plane is news."""
        return False

    def __init__(
        self,
        address: Address,
        sock: socket.socket,
        opened: m.SessionOpened,
        plane: Plane | None = None,
    ) -> None:
        self.address = address
        self._sock = sock
        self._opened = opened
        self._plane = plane
        self._pump: Pump | None = None
        self._port = -1

    def attach(self, pump: Pump) -> int:
        """Gives the pump the socket and the plane, which are the pump's from then on."""
        slots = self._opened.slots
        self._port = pump.add_stream(
            str(self.address),
            self._sock.fileno(),
            epoch=self._opened.epoch,
            latency_slots=slots.num_latency,
            bulk_slots=slots.num_bulk,
            bulk_bytes=slots.bulk_nbytes,
            plane=self._plane,
        )
        self._sock.detach()
        self._plane = None
        self._pump = pump
        return self._port

    def post(self, kind: int, payload: bytes) -> None:
        """Sends one cold frame; see Transport.post."""
        self._attached().post(self._port, kind, payload=payload)

    def request(self, kind: int, payload: bytes) -> bytes:
        """Sends one cold frame and returns its reply; see Transport.request."""
        return self._attached().request(self._port, kind, payload=payload)

    def _attached(self) -> Pump:
        if self._pump is None:
            raise LocalProtocolError("this transport was not attached to a pump")
        return self._pump

    def close(self) -> None:
        """Ends the connection; idempotent."""
        if self._pump is not None:
            self._pump.mark_lost(self._port, "the engine closed the connection")
        self._plane = None
        with contextlib.suppress(OSError):  # detached or closed already
            self._sock.close()


@contextlib.contextmanager
def data_link(
    sock: socket.socket, address: Address, timeout_s: float
) -> Iterator[BlockingConnection]:
    """The engine's side of the messages that set a fresh data socket up, which is closed if that
    fails."""
    try:
        conn = Connection(m.Role.ENGINE, now_s=time.monotonic())
        yield BlockingConnection(sock, conn, peer=str(address), timeout_s=timeout_s)
    except BaseException:
        sock.close()
        raise


def prove_data_socket(
    link: BlockingConnection,
    opened: m.SessionOpened,
    session_key: bytes,
    *,
    details: bytes = b"",
    fds: tuple[int, ...] = (),
) -> bytes:
    """Proves, both ways, that a fresh data socket belongs to the session, and exchanges the ends of
    the data plane: `details` is ours, `fds` go along where the socket can; returns the worker's.

    Raises:
        PlaneUnavailable: the worker cannot set the plane up.
        TransportError, TransportTimeout, RemoteProtocolError: they name the peer.
    """
    nonce = os.urandom(m.NONCE_BYTES)
    hello = data_hello(session_key, opened, nonce=nonce, details=details)
    link.send(hello, fds=fds)
    accepted = link.receive(m.DataAccepted)
    with naming(link.peer):
        check_data_accepted(accepted, session_key, opened, nonce=hello.nonce)
    return accepted.details
