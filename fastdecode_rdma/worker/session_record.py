"""One engine's session in a worker, and what the server needs of the rooms behind it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.transport.base import PlaneHost
from fastdecode_rdma.wire.messages import SlotPlan


class Session(Protocol):
    """What the server needs of worker.session.AttentionSession."""

    geometry: AttentionGeometry

    def stats(self) -> dict[str, Any]:
        """Figures; callable from any thread."""

    def close(self) -> None:
        """Frees all memory; idempotent."""


class Budget(Protocol):
    """What the server needs of worker.session.MemoryBudget."""

    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""

    def reserve(self, nbytes: int) -> None:
        """Takes bytes, or raises CacheFullError."""

    def release(self, nbytes: int) -> None:
        """Gives bytes back."""


class DataPlane(Protocol):
    """One data socket being served: transport.serve.DataPlane."""

    def run(self) -> None:
        """Serves frames until the socket ends; returns only when no kernel runs any more."""

    @property
    def num_messages(self) -> int:
        """Moves whenever a frame is begun or done with, so it is odd in the middle of one; callable
        from any thread."""

    def stats(self) -> dict[str, int]:
        """Counters, `frames_received` among them; callable from any thread."""


@dataclass(frozen=True)
class Machinery:
    """The rooms behind the server, so that tests can put fakes in their place."""

    open_session: Callable[[AttentionGeometry, Budget, int], Session]
    open_data_plane: Callable[..., DataPlane]
    """Called with descriptor, epoch, slots and session of a data socket and, where something else
    carries the frames, `plane`."""
    check_slots: Callable[[AttentionGeometry, SlotPlan], SlotPlan]
    """Returns the slots granted; raises ConfigError when the asked ones cannot work."""
    buffer_bytes: Callable[[AttentionGeometry, SlotPlan], int]
    """Returns the bytes of a data plane's row buffers."""
    open_hosts: Callable[[], list[PlaneHost]] = list
    """Returns the data planes that the worker offers besides TCP."""
    open_bench: Callable[[AttentionGeometry], Session] | None = None
    """Returns a benchmark's session; None: there are none."""


def shut(sock: socket.socket) -> None:
    """Ends a socket in both directions and wakes whoever waits on it; harmless a second time."""
    with contextlib.suppress(OSError):  # not connected any more, or closed by its own thread
        sock.shutdown(socket.SHUT_RDWR)


class SessionRecord:
    """One engine's session as the server sees it; safe to use from its several threads."""

    def __init__(
        self,
        key: bytes,
        slots: SlotPlan,
        session: Session,
        *,
        buffer_bytes: int,
        transport: str = "tcp",
    ) -> None:
        self.session_id = secrets.randbits(64)
        self.epoch = secrets.randbits(64)
        self.key = key
        self.slots = slots
        self.session = session
        self.buffer_bytes = buffer_bytes
        self.transport = transport
        self.control_socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._data_socket: socket.socket | None = None
        self._data_plane: DataPlane | None = None
        self._data_done = threading.Event()
        self._num_frames = 0
        self._closed = False

    def attach(self, data_socket: socket.socket) -> bool:
        """Takes the session's data socket; False when it has one already or is closing."""
        with self._lock:
            if self._closed or self._data_socket is not None:
                return False
            self._data_socket = data_socket
            return True

    def start(self, data_plane: DataPlane) -> None:
        """Names the data plane that is about to run on the attached socket."""
        self._data_plane = data_plane

    def detach(self) -> None:
        """Says that the data plane is done with the session, and ends the control connection."""
        self._num_frames = self.num_frames
        self._data_plane = None  # its buffers go with it
        self._data_done.set()
        if self.control_socket is not None:
            shut(self.control_socket)

    @property
    def progress(self) -> int:
        """Moves with every frame while the data plane runs; odd in the middle of one."""
        plane = self._data_plane
        return 0 if plane is None else plane.num_messages

    @property
    def num_frames(self) -> int:
        plane = self._data_plane
        return self._num_frames if plane is None else plane.stats()["frames_received"]

    @property
    def num_sequences(self) -> int:
        with self._lock:  # so that close() cannot free the session meanwhile
            return 0 if self._closed else self.session.stats()["sequences"]

    def close(self) -> None:
        """Ends the data plane, waits until it left the kernel, then frees the session's memory."""
        with self._lock:
            self._closed = True
            data_socket = self._data_socket
        if data_socket is not None:
            shut(data_socket)
            self._data_done.wait()
        self.session.close()
