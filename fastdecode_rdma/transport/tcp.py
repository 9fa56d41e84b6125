"""TCP: works everywhere. The pump sends straight out of the row buffers and receives into them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from fastdecode_rdma.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
)
from fastdecode_rdma.transport._pump import Pump
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import Transport
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.connection import (
    NEED_DATA,
    Connection,
    check_data_accepted,
    data_hello,
)

USER_TIMEOUT_MS = 10_000
"""How long sent bytes may stay unacknowledged before the kernel gives the connection up. The
heartbeat is faster; this is for sockets that nobody is waiting for."""

BUFFER_BYTES = 4 << 20

Received = TypeVar("Received")


def dial(address: Address, timeout_s: float) -> socket.socket:
    """Returns a connected socket whose calls take at most `timeout_s`.

    Raises:
        TransportTimeout, TransportError: they name the address and the reason.
    """
    try:
        sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except TimeoutError as error:
        raise TransportTimeout(f"{address}: no connection within {timeout_s:g} s") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TransportError(f"{address}: cannot connect: {reason}", error.errno) from error
    prepare_socket(sock)
    return sock


def prepare_socket(sock: socket.socket) -> None:
    """Sets what both ends of a connection need, in place: small frames leave at once, and bytes
    that nobody acknowledges end it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def widen_buffers(sock: socket.socket, nbytes: int) -> None:
    """Asks for socket buffers of `nbytes`, in place.

    Only where the system grants that much: a smaller answer would also switch off the kernel's own
    tuning, which goes up to several megabytes by itself.
    """
    for option, limit in (
        (socket.SO_SNDBUF, "/proc/sys/net/core/wmem_max"),
        (socket.SO_RCVBUF, "/proc/sys/net/core/rmem_max"),
    ):
        try:
            granted = int(Path(limit).read_text())
        except (OSError, ValueError):
            continue  # no such file in this sandbox: leave the kernel's tuning alone
        if granted >= nbytes:
            sock.setsockopt(socket.SOL_SOCKET, option, nbytes)


@contextlib.contextmanager
def naming(peer: str) -> Iterator[None]:
    """Puts the peer's name before what it is blamed for."""
    try:
        yield
    except HandshakeError as error:
        raise HandshakeError(f"{peer}: {error}", error.code) from error
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{peer}: {error}") from error


class BlockingConnection:
    """A wire connection over a socket, one message at a time; all is over by the deadline."""

    def __init__(
        self, sock: socket.socket, conn: Connection, *, peer: str, timeout_s: float
    ) -> None:
        self.sock = sock
        self.conn = conn
        self.peer = peer
        self.timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def send(self, message: m.Message) -> None:
        """Sends one message.

        Raises:
            TransportTimeout, TransportError: it did not leave.
        """
        data = b"".join(self.conn.send(message))
        try:
            self.sock.settimeout(self._left_s())
            self.sock.sendall(data)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, kind: type[Received]) -> Received:
        """Returns the next message, which must be of a kind; heartbeats before it are skipped.

        Raises:
            RemoteProtocolError: the peer refused us, or sent something else. HandshakeError: we
                refuse it. Both name the peer.
            TransportTimeout, TransportError: nothing came, or the peer left.
        """
        while True:
            with naming(self.peer):
                event = self.conn.next_event()
            if isinstance(event, kind):
                return event
            if event is NEED_DATA:
                self._feed()
            elif isinstance(event, m.Error):
                raise RemoteProtocolError(f"{self.peer}: refused: {event.text}")
            elif isinstance(event, m.ConnectionClosed | m.Bye):
                raise TransportError(f"{self.peer}: it closed the connection")
            elif not isinstance(event, m.Heartbeat):
                raise RemoteProtocolError(
                    f"{self.peer}: sent {type(event).__name__} where {kind.__name__} was due"
                )

    def _feed(self) -> None:
        try:
            self.sock.settimeout(self._left_s())
            # no byte beyond the message: on a data socket the rest belongs to the pump
            data = self.sock.recv(self.conn.bytes_needed())
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._broken(error) from error
        self.conn.receive_data(data, now_s=time.monotonic())

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._late()
        return left_s

    def _late(self) -> TransportTimeout:
        return TransportTimeout(f"{self.peer}: no answer within {self.timeout_s:g} s")

    def _broken(self, error: OSError) -> TransportError:
        reason = error.strerror or str(error)
        return TransportError(f"{self.peer}: the connection broke: {reason}", error.errno)


class TcpTransport(Transport):
    """The data socket of a session that a worker has opened."""

    scheme = "tcp"

    def __init__(self, address: Address, sock: socket.socket, opened: m.SessionOpened) -> None:
        self.address = address
        self._sock = sock
        self._opened = opened
        self._pump: Pump | None = None
        self._port = -1

    @classmethod
    def open(
        cls, address: Address, opened: m.SessionOpened, session_key: bytes, *, timeout_s: float
    ) -> TcpTransport:
        """Connects the data socket and proves, both ways, that it belongs to the session.

        Raises:
            TransportError, TransportTimeout, RemoteProtocolError: they name the address.
        """
        sock = dial(address, timeout_s)
        try:
            widen_buffers(sock, int(address.options.get("buffer_bytes", BUFFER_BYTES)))
            conn = Connection(m.Role.ENGINE, now_s=time.monotonic())
            link = BlockingConnection(sock, conn, peer=str(address), timeout_s=timeout_s)
            hello = data_hello(session_key, opened, nonce=os.urandom(m.NONCE_BYTES))
            link.send(hello)
            accepted = link.receive(m.DataAccepted)
            with naming(str(address)):
                check_data_accepted(accepted, session_key, opened, nonce=hello.nonce)
        except BaseException:
            sock.close()
            raise
        return cls(address, sock, opened)

    def attach(self, pump: Pump) -> int:
        """Gives the pump the socket, which is the pump's from then on."""
        slots = self._opened.slots
        self._port = pump.add_stream(
            str(self.address),
            self._sock.fileno(),
            epoch=self._opened.epoch,
            latency_slots=slots.num_latency,
            bulk_slots=slots.num_bulk,
        )
        self._sock.detach()
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
        with contextlib.suppress(OSError):  # detached or closed already
            self._sock.close()
