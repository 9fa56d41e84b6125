"""Shared memory: engine and worker on one machine, of one user, touch the same pages.

The engine makes the segment and sends it over the worker's Unix socket together with its proof that
it opened the session; the layout follows from what the handshake agreed on. See cython/plane_shm.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from fastdecode_rdma.errors import RemoteProtocolError
from fastdecode_rdma.transport._pump import ShmPlane, shm_segment_bytes
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import Attempt, FrameSizes, PlaneUnavailable
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.connected import ConnectedTransport, data_link, prove_data_socket
from fastdecode_rdma.transport.same_host import boot_id, cpu_mask, peer_of
from fastdecode_rdma.wire import messages as m

BOOT_ID_BYTES = 36
HELLO = struct.Struct("<q")  # nanoseconds to spin, -1: as the cores say; the engine's cores follow
ACCEPTED = struct.Struct("<Q")  # nanoseconds to spin, both sides
MAX_SPIN_NS = 1_000_000_000

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL, since Linux 6.3: nothing in it can ever be run


def make_segment(nbytes: int) -> int:
    """Returns a new memory segment whose length nobody can change any more.

    Raises:
        OSError: the system does not grant it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("fastdecode", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("fastdecode", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class ShmTransport(ConnectedTransport):
    """Frames through shared pages; the Unix socket wakes sleepers and ends with the peer."""

    scheme = "shm"

    @classmethod
    def why_not(cls, address: Address, offer: bytes | None) -> str:
        """Returns why the worker cannot be reached by shared memory, nothing if it may be."""
        if offer is None:
            return "the worker does not offer it"
        ours = boot_id()
        if len(ours) != BOOT_ID_BYTES or offer[:BOOT_ID_BYTES] != ours:
            return "the worker is on another machine"
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
    ) -> ShmTransport:
        """Makes the segment and gives it to the worker of the session.

        Raises:
            PlaneUnavailable: the two cannot share memory; says why.
            TransportError, TransportTimeout, RemoteProtocolError: they name the address.
        """
        sock = _connect(address, offer[BOOT_ID_BYTES:], timeout_s)
        with data_link(sock, address, timeout_s) as link:
            plane = _share(link, address, opened, session_key, sizes)
        return cls(address, sock, opened, plane)


def _share(
    link: BlockingConnection,
    address: Address,
    opened: m.SessionOpened,
    session_key: bytes,
    sizes: FrameSizes,
) -> ShmPlane:
    try:
        segment = make_segment(shm_segment_bytes(opened.slots, sizes))
    except OSError as error:
        raise PlaneUnavailable(f"{address}: no shared memory: {error.strerror}") from error
    try:
        plane = ShmPlane(segment, opened.slots, sizes, is_engine=True)
        spin_us = address.options.get("spin_us")
        wish_ns = -1 if spin_us is None else int(float(spin_us) * 1000)
        details = HELLO.pack(wish_ns) + cpu_mask()
        answer = prove_data_socket(link, opened, session_key, details=details, fds=(segment,))
    finally:
        os.close(segment)
    if len(answer) != ACCEPTED.size or ACCEPTED.unpack(answer)[0] > MAX_SPIN_NS:
        raise RemoteProtocolError(f"{address}: a malformed answer about shared memory")
    (plane.spin_ns,) = ACCEPTED.unpack(answer)
    return plane


def _connect(address: Address, name: bytes, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(b"\0" + name)
        _, uid = peer_of(sock)
    except OSError as error:
        sock.close()
        reason = "another network namespace" if error.errno == errno.ECONNREFUSED else ""
        text = f"its Unix socket cannot be reached: {error.strerror or error}"
        raise PlaneUnavailable(f"{address}: {text}{reason and f' ({reason}?)'}") from error
    if uid != os.geteuid():
        sock.close()
        raise PlaneUnavailable(
            f"{address}: the worker runs as user {uid}, this engine as {os.geteuid()}: they share "
            "memory only as the same user"
        )
    return sock
