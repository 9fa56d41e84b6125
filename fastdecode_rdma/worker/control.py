"""One accepted socket of a worker: the handshake, then either an engine's control connection or the
data socket of a session.

The control side beats every 250 ms and gives up an engine after 2 s of silence. It never waits for
a kernel: the data plane runs on the data socket's own thread, and this thread waits for that one
only when the session has ended.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from fastdecode_rdma.errors import (
    CacheFullError,
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
)
from fastdecode_rdma.transport.base import FrameSizes, PlaneHost
from fastdecode_rdma.transport.shm_host import FdInbox
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.connection import (
    LOST_AFTER_S,
    NEED_DATA,
    Connection,
    accept_data_hello,
    check_data_hello,
)
from fastdecode_rdma.wire.messages import ErrorCode, Role

if TYPE_CHECKING:
    from fastdecode_rdma.transport._pump import Plane
    from fastdecode_rdma.worker.server import WorkerServer
    from fastdecode_rdma.worker.session_record import SessionRecord

logger = logging.getLogger(__name__)


class _Stopping(Exception):
    """The server stops: the engine is told so and the connection ends."""


class SocketThread(threading.Thread):
    """Serves one accepted socket until it ends. `peer` is its address, for the log. `host`: the
    data plane whose listener it came from, None for the worker's TCP port."""

    def __init__(
        self, server: WorkerServer, sock: socket.socket, peer: str, host: PlaneHost | None = None
    ) -> None:
        super().__init__(name=f"engine {peer}", daemon=True)
        self.sock = sock
        self.peer = peer
        self._server = server
        self._host = host
        self._inbox = None if host is None else FdInbox()
        self._record: SessionRecord | None = None
        self._conn = Connection(Role.WORKER, now_s=time.monotonic(), token=server.config.token)

    def run(self) -> None:
        """Serves the socket; whatever it brings, only this connection ends."""
        # A peer that does not read must not hold this thread for ever.
        self.sock.settimeout(LOST_AFTER_S)
        try:
            self._serve()
        except _Stopping:
            self._last_word(ErrorCode.SHUTDOWN, "the worker is shutting down")
        except HandshakeError as exc:
            logger.info("refused %s: %s", self.peer, exc)
            self._last_word(exc.code, str(exc))
        except RemoteProtocolError as exc:
            logger.info("dropped %s: %s", self.peer, exc)
            self._last_word(ErrorCode.PROTOCOL, str(exc))
        except TransportTimeout as exc:
            logger.info("lost %s: %s", self.peer, exc)
            self._last_word(ErrorCode.LOST, str(exc))
        except (TransportError, OSError) as exc:
            logger.info("lost %s: %s", self.peer, exc)
        except Exception:
            logger.exception("a fault of this worker while it served %s", self.peer)
            self._last_word(ErrorCode.INTERNAL, "a fault of the worker; its log says more")
        finally:
            self._end()

    def _end(self) -> None:
        try:
            if self._record is not None:
                self._server.close_session(self._record)
                logger.info("session of %s closed", self.peer)
        finally:
            if self._inbox is not None:
                self._inbox.close()
            self.sock.close()
            self._server.forget(self)

    def _serve(self) -> None:
        deadline_s = time.monotonic() + self._server.config.handshake_timeout_s
        first = self._receive(deadline_s)
        if isinstance(first, m.DataHello):
            self._serve_data(first)
        elif self._host is not None:
            raise HandshakeError("this socket takes data planes only", ErrorCode.PROTOCOL)
        elif isinstance(first, m.Hello):
            self._send(self._conn.hello(os.urandom(m.NONCE_BYTES)))
            if isinstance(self._receive(deadline_s), m.Auth):
                self._send(self._conn.proof())
                self._server.admit(self)
                self._serve_control()

    # Input and output

    def _send(self, message: m.Message) -> None:
        for data in self._conn.send(message):
            self.sock.sendall(data)

    def _last_word(self, code: ErrorCode, text: str) -> None:
        try:
            self._send(m.Error(code, text))
        except (
            LocalProtocolError,
            OSError,
        ) as exc:  # it has left, or the state allows no more words
            logger.debug("%s does not get to know why: %s", self.peer, exc)

    def _wait(self, timeout_s: float) -> bool:
        """Waits for bytes; False after `timeout_s`.

        Raises:
            _Stopping: the server stops.
        """
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self._server.stop_fd, select.POLLIN)
        ready = poller.poll(max(0.0, timeout_s) * 1000)
        if self._server.stopping:
            raise _Stopping
        return bool(ready)

    def _feed(self) -> None:
        # No byte beyond the next message: on a data socket the rest belongs to the data plane.
        needed = self._conn.bytes_needed()
        if self._inbox is None:
            data = self.sock.recv(needed)
        else:
            data = self._inbox.receive(self.sock, needed)
        self._conn.receive_data(data, now_s=time.monotonic())

    def _receive(self, deadline_s: float) -> m.Event:
        while True:
            event = self._conn.next_event()
            if event is not NEED_DATA:
                return event
            if not self._wait(deadline_s - time.monotonic()):
                raise TransportTimeout("no handshake in time")
            self._feed()

    # The two kinds of socket

    def _serve_data(self, hello: m.DataHello) -> None:
        record = self._server.find_session(hello.session_id)
        if record is None:
            raise HandshakeError("there is no such session", ErrorCode.SESSION)
        check_data_hello(hello, record.key, record.epoch, plane=record.transport)
        options, details = self._accept_plane(record, hello)
        accepted = accept_data_hello(
            hello, record.key, record.epoch, plane=record.transport, details=details
        )
        if not record.attach(self.sock):
            raise HandshakeError("the session has its data socket already", ErrorCode.SESSION)
        try:
            self._server.handshake_done(self)
            self._send(accepted)
            plane = self._server.machinery.open_data_plane(
                self.sock.fileno(), record.epoch, record.slots, record.session, **options
            )
            record.start(plane)
            self.sock.setblocking(True)  # the data plane waits in the kernel, without a poll
            plane.run()
        finally:
            record.detach()

    def _accept_plane(
        self, record: SessionRecord, hello: m.DataHello
    ) -> tuple[dict[str, Plane], bytes]:
        """Returns what carries the frames of a session, nothing for TCP, and our end of it."""
        host = self._server.hosts.get(record.transport)
        if self._host is not (None if host is None or host.listener is None else host):
            raise HandshakeError(
                f"the session is for {record.transport}: its data socket came the wrong way",
                ErrorCode.SESSION,
            )
        if host is None:
            return {}, b""
        fd = None if self._inbox is None else self._inbox.fd
        sizes = FrameSizes.of(record.session.geometry, bulk_bytes=record.slots.bulk_nbytes)
        try:
            plane, details = host.accept(hello.details, fd, record.slots, sizes)
        except TransportError as exc:
            raise HandshakeError(str(exc), ErrorCode.PLANE) from exc
        finally:
            if self._inbox is not None:
                self._inbox.close()
        return {"plane": plane}, details

    def _serve_control(self) -> None:
        while True:
            event = self._conn.next_event()
            if event is NEED_DATA:
                self._idle()
            elif isinstance(event, m.StatusRequest):
                self._send(self._server.status())
            elif isinstance(event, m.PlanesRequest):
                hosts = self._server.hosts.values()
                self._send(m.Planes(tuple((host.name, host.offer()) for host in hosts)))
            elif isinstance(event, m.OpenSession | m.OpenBench):
                self._open_session(event)
            elif isinstance(event, m.Bye):
                self._send(m.Bye())
                return
            elif isinstance(event, m.Error):
                logger.info("%s gave up: %s", self.peer, event.text)
                return
            elif isinstance(event, m.ConnectionClosed):
                return

    def _idle(self) -> None:
        if self._wait(self._conn.beat_due_in_s(time.monotonic())):
            self._feed()
        now_s = time.monotonic()
        progress = 0 if self._record is None else self._record.progress
        pending = progress % 2  # odd in the middle of a frame
        for data in self._conn.heartbeat(now_s, progress=progress, pending=pending):
            self.sock.sendall(data)
        if self._conn.is_lost(now_s):
            raise TransportTimeout(
                f"no sign of life from the engine for {self._conn.silence_s(now_s):.1f} s"
            )

    def _open_session(self, request: m.OpenSession | m.OpenBench) -> None:
        try:
            record = self._server.open_session(request, self._conn.session_key)
        except ConfigError as exc:
            raise HandshakeError(str(exc), ErrorCode.GEOMETRY) from exc
        except (CacheFullError, MemoryError) as exc:
            text = str(exc) or "the worker has no memory left"
            raise HandshakeError(text, ErrorCode.MEMORY) from exc
        self._record = record
        record.control_socket = self.sock
        config = self._server.config
        logger.info("session of %s opened", self.peer)
        self._send(
            m.SessionOpened(
                session_id=record.session_id,
                epoch=record.epoch,
                capacity_bytes=config.memory_bytes,
                num_threads=config.num_threads,
                isa=config.isa,
                block_tokens=config.block_tokens,
                seg_tokens=config.seg_tokens,
                slots=record.slots,
                transport=record.transport,
            )
        )
