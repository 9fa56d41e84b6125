"""A control connection, or a data socket's first exchange, over a socket that blocks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

from fastdecode_rdma.errors import RemoteProtocolError, TransportError, TransportTimeout
from fastdecode_rdma.transport.base import PlaneUnavailable
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.connection import NEED_DATA, Connection

Received = TypeVar("Received")


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

    def send(self, message: m.Message, *, fds: tuple[int, ...] = ()) -> None:
        """Sends one message; `fds` are descriptors that go along, on a Unix socket.

        Raises:
            TransportTimeout, TransportError: it did not leave.
        """
        data = b"".join(self.conn.send(message))
        try:
            self.sock.settimeout(self._left_s())
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
            if sent < len(data):  # a peer that has answered and left is still to be heard
                self.sock.sendall(data[sent:])
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, kind: type[Received]) -> Received:
        """Returns the next message, which must be of a kind; heartbeats before it are skipped.

        Raises:
            PlaneUnavailable: the peer cannot set this data plane up.
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
                if event.code is m.ErrorCode.PLANE:
                    raise PlaneUnavailable(f"{self.peer}: {event.text}")
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
