"""The worker's side of shared memory: a Unix socket for engines of the same user."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport._pump import Plane, ShmPlane
from fastdecode_rdma.transport.base import FrameSizes, PlaneHost
from fastdecode_rdma.transport.same_host import boot_id, cpu_mask, peer_of, spin_ns
from fastdecode_rdma.transport.shm import ACCEPTED, HELLO, MAX_SPIN_NS
from fastdecode_rdma.wire.messages import SlotPlan

_FD = struct.Struct("@i")
_MAX_FDS = 4  # the kernel closes what does not fit

logger = logging.getLogger(__name__)


class ShmHost(PlaneHost):
    """Listens on an abstract Unix socket whose name engines get over their control connection.

    Raises:
        OSError: there are no Unix sockets here.
    """

    name = "shm"

    def __init__(self) -> None:
        self._address = f"fastdecode/{os.geteuid()}/{secrets.token_hex(16)}".encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(b"\0" + self._address)
            self.listener.listen(128)
            self.listener.setblocking(False)
        except BaseException:
            self.listener.close()
            raise

    def offer(self) -> bytes:
        """Returns which machine this is, and the socket's name."""
        return boot_id() + self._address

    def admit(self, sock: socket.socket) -> str | None:
        """Names the process at the other end; None if it is another user's."""
        pid, uid = peer_of(sock)
        if uid != os.geteuid():
            logger.info("refused process %d of user %d: shared memory is for one user", pid, uid)
            return None
        return f"process {pid}"

    def accept(
        self, details: bytes, fd: int | None, slots: SlotPlan, sizes: FrameSizes
    ) -> tuple[Plane, bytes]:
        """Maps the segment that the engine sent, after checking that it cannot shrink under us.

        Raises:
            TransportError: it is not what was agreed on.
        """
        if fd is None or len(details) < HELLO.size:
            raise TransportError("shared memory: the engine sent no segment")
        (wish_ns,) = HELLO.unpack_from(details)
        budget_ns = wish_ns if wish_ns >= 0 else spin_ns(cpu_mask(), details[HELLO.size :])
        budget_ns = min(budget_ns, MAX_SPIN_NS)
        plane = ShmPlane(fd, slots, sizes, is_engine=False, spin_ns=budget_ns)
        return plane, ACCEPTED.pack(budget_ns)

    def close(self) -> None:
        """Takes no more engines."""
        if self.listener is not None:
            self.listener.close()


class FdInbox:
    """Receives bytes from a Unix socket and keeps the first descriptor that comes along."""

    def __init__(self) -> None:
        self.fd: int | None = None

    def receive(self, sock: socket.socket, nbytes: int) -> bytes:
        """Returns up to `nbytes`, as `recv` does. Descriptors that nobody asked for are closed."""
        # not socket.recv_fds, which leaves the flag out: a child of ours would inherit them
        room = socket.CMSG_SPACE(_MAX_FDS * _FD.size)
        data, ancillary, _, _ = sock.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep_first([fd for (fd,) in _FD.iter_unpack(raw[: len(raw) // 4 * 4])])
        return data

    def _keep_first(self, fds: list[int]) -> None:
        for fd in fds:
            if self.fd is None:
                self.fd = fd
            else:
                os.close(fd)

    def close(self) -> None:
        """Closes the descriptor; idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
