"""TCP: works everywhere. The pump sends straight out of the row buffers and receives into them."""

from __future__ import annotations

import socket
from pathlib import Path

from fastdecode_rdma.errors import TransportError, TransportTimeout
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import Attempt, FrameSizes
from fastdecode_rdma.transport.connected import ConnectedTransport, data_link, prove_data_socket
from fastdecode_rdma.wire import messages as m

USER_TIMEOUT_MS = 10_000
"""How long sent bytes may stay unacknowledged before the kernel gives the connection up. The
heartbeat is faster; this is for sockets that nobody is waiting for."""

BUFFER_BYTES = 4 << 20


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


class TcpTransport(ConnectedTransport):
    """Frames over the data socket itself."""

    scheme = "tcp"

    @classmethod
    def why_not(cls, address: Address, offer: bytes | None) -> str:
        """TCP is always there."""
        return ""

    @classmethod
    def open(
        cls,
        address: Address,
        opened: m.SessionOpened,
        session_key: bytes,
        *,
        sizes: FrameSizes,
        offer: bytes,
        timeout_s: float,
        attempt: Attempt,
    ) -> TcpTransport:
        """Connects the data socket and proves, both ways, that it belongs to the session.

        Raises:
            TransportError, TransportTimeout, RemoteProtocolError: they name the address.
        """
        sock = dial(address, timeout_s)
        with data_link(sock, address, timeout_s) as link:
            widen_buffers(sock, int(address.options.get("buffer_bytes", BUFFER_BYTES)))
            prove_data_socket(link, opened, session_key)
        return cls(address, sock, opened)
