"""The engine's end of a control connection after the handshake."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from fastdecode_rdma.attention.heartbeat import Watched
from fastdecode_rdma.errors import FastDecodeError, RemoteProtocolError
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import NEED_DATA, Connection


class ControlLink(Watched):
    """Beats, listens, and says once why the worker is lost. Never blocks; any thread may call."""

    def __init__(self, sock: socket.socket, conn: Connection) -> None:
        self._sock = sock
        self._conn = conn
        self._unsent = b""
        self._lost: str | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        sock.setblocking(False)

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """`tell(reason)` is called once, on any thread, when the worker is lost; now if it is."""
        with self._lock:
            self._on_lost = tell
            reason = self._lost
        if reason is not None:
            tell(reason)

    def fileno(self) -> int:
        """The socket to wait for, -1 when it is closed."""
        return self._sock.fileno()

    def beat(self, *, readable: bool) -> bool:
        """Receives, beats; False when closed or lost."""
        with self._lock:
            if self._sock.fileno() < 0 or self._lost is not None:
                return False
            reason = self._lost = self._work(readable)
            tell = self._on_lost
        if reason is not None and tell is not None:
            tell(reason)
        return reason is None

    def delay_reason(self, waited_s: float) -> str:
        """Says what the worker's heartbeats tell of an answer that did not come in `waited_s`, and
        what helps: it never got the work, is busy with it, or is stuck."""
        news_s = 2 * self._conn.heartbeat_interval_s
        if waited_s < 2 * news_s:
            return ""  # the last heartbeat may be from before the wait
        with self._lock:
            pending = self._conn.peer_heartbeat.pending
            stalled_s = self._conn.stalled_s(time.monotonic())
        if not pending:
            return "it reports no work: did the request get through the network?"
        if stalled_s < waited_s - news_s:
            return "it is busy and gets on: allow it a longer timeout_s"
        return f"it is stuck: no progress for {stalled_s:.1f} s with work begun; restart it"

    def _work(self, readable: bool) -> str | None:
        try:
            reason = self._receive() if readable else None
            now_s = time.monotonic()
            self._unsent += b"".join(self._conn.heartbeat(now_s, progress=0))
            self._flush()
        except (OSError, FastDecodeError) as error:
            return f"its control connection broke: {error}"
        if reason is None and self._conn.is_lost(now_s):
            return f"no sign of life for {self._conn.silence_s(now_s):.1f} s"
        return reason

    def _receive(self) -> str | None:
        while True:
            try:
                data = self._sock.recv(max(1, self._conn.bytes_needed()))
            except BlockingIOError:
                return None
            self._conn.receive_data(data, now_s=time.monotonic())
            event = self._conn.next_event()
            if isinstance(event, m.Error):
                return event.text
            if isinstance(event, m.ConnectionClosed | m.Bye):
                return "it closed the connection"
            if event is not NEED_DATA and not isinstance(event, m.Heartbeat):
                raise RemoteProtocolError(f"unexpected {type(event).__name__}")

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return  # the peer does not read: its own silence will tell
            self._unsent = self._unsent[sent:]

    def close(self) -> None:
        """Says goodbye if that takes no waiting, and closes. Idempotent, never raises."""
        with self._lock:
            if self._sock.fileno() < 0:
                return
            with contextlib.suppress(OSError, FastDecodeError):  # dead, or in no mood for goodbyes
                self._unsent += b"".join(self._conn.send(m.Bye()))
                self._flush()
                self._receive()  # a socket closed with unread bytes resets, and the Bye is lost
            self._sock.close()
