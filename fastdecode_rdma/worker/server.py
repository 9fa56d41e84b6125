"""The worker's listening side: accepts sockets, keeps the sessions of any number of engines, stops.

Threads: the caller's accepts; one per control connection (control.py) beats and answers and never
waits for a kernel; one per data socket runs the data plane. Whoever connects and does not finish
the handshake in time is dropped, and of those still in it the oldest goes first when there are too
many, so a flood can delay a newcomer by milliseconds but not lock it out.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from fastdecode_rdma import __version__
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport.base import PlaneHost
from fastdecode_rdma.transport.tcp import prepare_socket
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.worker.control import SocketThread
from fastdecode_rdma.worker.session_record import Budget, Machinery, Session, SessionRecord, shut

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker serves. `token` None means that nobody has to prove anything."""

    host: str
    port: int
    memory_bytes: int
    num_threads: int
    isa: str
    block_tokens: int
    seg_tokens: int
    token: bytes | None = field(default=None, repr=False)
    handshake_timeout_s: float = 5.0
    max_handshakes: int = 64
    max_engines: int = 256  # two sockets each: within the usual limit of 1024 open files


class WorkerServer:
    """A listening worker. `serve_forever` runs on the caller's thread, `stop` may come from any."""

    def __init__(self, config: WorkerConfig, budget: Budget, machinery: Machinery) -> None:
        self.config = config
        self.budget = budget
        self.machinery = machinery
        self._listener = _listen(config.host, config.port)
        self.hosts = {host.name: host for host in machinery.open_hosts()}
        self._stop_read, self._stop_write = os.pipe()
        self._stopping = False
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._records: dict[int, SessionRecord] = {}
        self._threads: set[SocketThread] = set()
        self._handshakes: dict[SocketThread, None] = {}  # ordered: the oldest first
        self._engines: set[SocketThread] = set()  # control connections past the handshake
        self._ended_frames = 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def stop_fd(self) -> int:
        """Becomes readable when the server stops; threads poll it next to their socket."""
        return self._stop_read

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Asks serve_forever to return; callable from a signal handler and more than once."""
        if not self._stopping:
            self._stopping = True
            os.write(self._stop_write, b"x")

    def serve_forever(self) -> None:
        """Accepts engines until `stop`."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop_read, select.POLLIN)
        hosts = [host for host in self.hosts.values() if host.listener is not None]
        for host in hosts:
            poller.register(host.listener, select.POLLIN)
        while not self._stopping:
            ready = [fd for fd, _ in poller.poll()]
            if self._listener.fileno() in ready:
                self._accept(self._listener, None)
            for host in hosts:
                if host.listener.fileno() in ready:
                    self._accept(host.listener, host)

    def _accept(self, listener: socket.socket, host: PlaneHost | None) -> None:
        try:
            sock, peer = listener.accept()
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                logger.warning("cannot accept a connection: %s", exc.strerror)
                self._drop_oldest_handshake()
                time.sleep(0.05)  # else the listener stays readable and this loop spins
            return  # otherwise the peer left between poll and accept
        if host is None:
            prepare_socket(sock)
            name: str | None = f"{peer[0]}:{peer[1]}"
        else:
            name = host.admit(sock)
        if name is None:
            sock.close()
            return
        thread = SocketThread(self, sock, name, host)
        with self._lock:
            too_many = len(self._handshakes) >= self.config.max_handshakes
            self._threads.add(thread)
            self._handshakes[thread] = None
        if too_many:
            self._drop_oldest_handshake()
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads allowed: this engine is refused, others go on
            logger.warning("cannot serve %s: %s", thread.peer, exc)
            self.forget(thread)
            sock.close()

    def _drop_oldest_handshake(self) -> None:
        with self._lock:
            oldest = next(iter(self._handshakes), None)
        if oldest is not None:
            self.handshake_done(oldest)
            shut(oldest.sock)

    def handshake_done(self, thread: SocketThread) -> None:
        """Takes a connection out of the bounded set of those that have not proved themselves."""
        with self._lock:
            self._handshakes.pop(thread, None)

    def admit(self, thread: SocketThread) -> None:
        """Takes in a control connection that has proved itself.

        Raises:
            HandshakeError: there are as many as the worker can serve.
        """
        with self._lock:
            self._handshakes.pop(thread, None)
            if len(self._engines) >= self.config.max_engines:
                raise HandshakeError(
                    f"the worker serves {self.config.max_engines} engines already, its limit: end "
                    "some, or start another worker",
                    m.ErrorCode.BUSY,
                )
            self._engines.add(thread)

    def forget(self, thread: SocketThread) -> None:
        """Drops a connection that has ended."""
        with self._lock:
            self._handshakes.pop(thread, None)
            self._engines.discard(thread)
            self._threads.discard(thread)

    def _open(self, request: m.OpenSession | m.OpenBench) -> Session:
        if isinstance(request, m.OpenSession):
            return self.machinery.open_session(
                request.geometry, self.budget, self.config.num_threads
            )
        if self.machinery.open_bench is None:
            raise ConfigError("this worker serves no benchmarks")
        return self.machinery.open_bench(request.geometry)

    def _check_idle(self) -> None:
        """Makes sure that a benchmark disturbs nobody.

        Raises:
            HandshakeError: engines have sequences here.
        """
        status = self.status()
        if status.num_sequences:
            raise HandshakeError(
                f"the worker holds {status.num_sequences} sequences of engines, which a benchmark "
                "would slow down: run it later, or pass --force",
                m.ErrorCode.BUSY,
            )

    def open_session(self, request: m.OpenSession | m.OpenBench, key: bytes) -> SessionRecord:
        """Returns a new session.

        Raises:
            ConfigError: its slots or its model cannot be served.
            CacheFullError: there is no room for it.
            HandshakeError: a benchmark would disturb engines.
        """
        if isinstance(request, m.OpenBench) and not request.force:
            self._check_idle()
        if request.transport not in ("tcp", *self.hosts):
            served = ", ".join(("tcp", *self.hosts))
            raise ConfigError(f"this worker serves {served}, not {request.transport!r}")
        slots = self.machinery.check_slots(request.geometry, request.slots)
        nbytes = self.machinery.buffer_bytes(request.geometry, slots)
        self.budget.reserve(nbytes)
        try:
            session = self._open(request)
        except BaseException:
            self.budget.release(nbytes)
            raise
        record = SessionRecord(
            key, slots, session, buffer_bytes=nbytes, transport=request.transport
        )
        with self._lock:
            self._records[record.session_id] = record
        return record

    def find_session(self, session_id: int) -> SessionRecord | None:
        """Returns the open session of that number."""
        with self._lock:
            return self._records.get(session_id)

    def close_session(self, record: SessionRecord) -> None:
        """Frees a session; returns when its memory is free."""
        record.close()
        self.budget.release(record.buffer_bytes)
        with self._lock:
            del self._records[record.session_id]
            self._ended_frames += record.num_frames

    def status(self) -> m.Status:
        """Returns the figures that `fastdecode status` shows."""
        with self._lock:
            records = list(self._records.values())
            ended_frames = self._ended_frames
        return m.Status(
            name=f"{socket.gethostname()[:40]}:{os.getpid()}",
            software=__version__,
            uptime_s=time.monotonic() - self._started_s,
            memory_limit_bytes=self.config.memory_bytes,
            memory_used_bytes=self.budget.used_bytes,
            num_sessions=len(records),
            num_threads=self.config.num_threads,
            isa=self.config.isa,
            num_sequences=sum(record.num_sequences for record in records),
            num_messages=ended_frames + sum(record.num_frames for record in records),
        )

    def close(self, timeout_s: float) -> bool:
        """Ends every connection; False when some thread was still in a kernel after `timeout_s`."""
        self.stop()
        self._listener.close()
        for host in self.hosts.values():
            host.close()
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        os.close(self._stop_read)
        os.close(self._stop_write)
        return True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener
