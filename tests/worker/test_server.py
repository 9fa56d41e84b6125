"""The server with fakes behind it; tests/worker/test_command.py runs whole worker processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time

import pytest

from fastdecode_rdma.attention.status_command import read_status
from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.errors import CacheFullError, ConfigError, WorkerError
from fastdecode_rdma.wire import codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import (
    NEED_DATA,
    Connection,
    check_data_accepted,
    data_hello,
)
from fastdecode_rdma.wire.messages import ErrorCode, Role
from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer
from fastdecode_rdma.worker.session_record import Machinery

GEOMETRY = AttentionGeometry(
    (KVGroup((0, 1), 4, 2, 16),), scale=0.25, kv_dtype="fp32", max_rows=8, max_model_len=128
)
SLOTS = m.SlotPlan(4, 2, 4096, 8192)
BUFFER_BYTES = 1000
SESSION_BYTES = 5000
LIMIT_BYTES = 100_000
TOKEN = b"t" * 32


class FakeBudget:
    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes):
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                raise CacheFullError(f"{nbytes} bytes do not fit")
            self.used_bytes += nbytes

    def release(self, nbytes):
        with self._lock:
            self.used_bytes -= nbytes


class FakeSession:
    def __init__(self, budget):
        budget.reserve(SESSION_BYTES)
        self._budget = budget
        self.closed = threading.Event()

    def stats(self):
        assert not self.closed.is_set(), "asked after its memory was freed"
        return {"sequences": 3}

    def close(self):
        if not self.closed.is_set():
            self.closed.set()
            self._budget.release(SESSION_BYTES)


class FakePlane:
    """Counts bytes until the socket ends; then stays in its kernel until `kernel` is set."""

    def __init__(self, fd, session, kernel):
        self._sock = socket.socket(fileno=os.dup(fd))
        self._session = session
        self._kernel = kernel
        self.num_messages = 0

    def stats(self):
        return {"frames_received": self.num_messages}

    def run(self):
        with self._sock:
            while data := self._sock.recv(1 << 16):
                self.num_messages += len(data)
        assert self._kernel.wait(10)
        assert not self._session.closed.is_set(), "closed under the kernel"


class Bench:
    """A running server and what was made for its engines."""

    def __init__(self, **config):
        self.budget = FakeBudget(LIMIT_BYTES)
        self.kernel = threading.Event()
        self.kernel.set()
        self.sessions = []
        self.failure = None
        self.server = WorkerServer(
            WorkerConfig(
                host="127.0.0.1", port=0, memory_bytes=LIMIT_BYTES, num_threads=2, isa="avx2",
                block_tokens=64, seg_tokens=1024, **config,
            ),
            self.budget,
            Machinery(
                open_session=self._open_session,
                open_data_plane=lambda fd, epoch, slots, session: FakePlane(
                    fd, session, self.kernel
                ),
                check_slots=self._check_slots,
                buffer_bytes=lambda geometry, slots: BUFFER_BYTES,
            ),
        )  # fmt: skip
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.address = "tcp://{}:{}".format(*self.server.address)

    def _open_session(self, geometry, budget, num_threads):
        if self.failure is not None:
            raise self.failure
        assert (geometry, budget, num_threads) == (GEOMETRY, self.budget, 2)
        self.sessions.append(FakeSession(budget))
        return self.sessions[-1]

    def _check_slots(self, geometry, slots):
        if slots.num_latency > 8:
            raise ConfigError("at most 8 slots")
        return m.SlotPlan(min(slots.num_latency, 4), slots.num_bulk, 4096, 8192)

    def engine(self, token=None):
        return Engine(self.server.address, token)

    def status(self, token=None):
        return read_status(self.address, token)


class Engine:
    """A blocking client of the control protocol."""

    def __init__(self, address, token=None):
        self.address = address
        self.sock = socket.create_connection(address, timeout=10)
        self.conn = Connection(Role.ENGINE, now_s=0.0, token=token)

    def send(self, message):
        for data in self.conn.send(message):
            self.sock.sendall(data)

    def receive(self, *kinds):
        """Returns the next message of these kinds; heartbeats are left out unless asked for."""
        while True:
            event = self.conn.next_event()
            if event is NEED_DATA:
                self.conn.receive_data(self.sock.recv(self.conn.bytes_needed()), now_s=0.0)
            elif isinstance(event, kinds) or not isinstance(event, m.Heartbeat):
                assert isinstance(event, kinds), event
                return event

    def greet(self):
        self.send(self.conn.hello(os.urandom(32)))
        self.receive(m.Hello)
        self.send(self.conn.proof())
        self.receive(m.Auth)
        return self

    def open(self):
        self.greet()
        self.send(m.OpenSession(GEOMETRY, SLOTS))
        self.opened = self.receive(m.SessionOpened)
        return self

    def attach(self, **changes):
        """Returns a second connection after its data hello was answered, and the answer."""
        data = Engine(self.address)
        hello = data_hello(self.conn.session_key, self.opened, nonce=b"n" * 32)
        for name, value in changes.items():
            setattr(hello, name, value)
        data.send(hello)
        return data, data.receive(m.DataAccepted, m.Error)

    def is_ended(self):
        """Waits for the end of the connection."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(4096):
                pass
        return True


@pytest.fixture
def start():
    benches = []

    def make(**config):
        benches.append(Bench(**config))
        return benches[-1]

    yield make
    for bench in benches:
        bench.kernel.set()
        assert bench.server.close(5.0)
        bench.thread.join(5.0)
        assert not bench.thread.is_alive()
        assert bench.budget.used_bytes == 0


def wait_until(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def test_a_session_and_its_data_socket(start):
    bench = start()
    engine = bench.engine().open()
    opened = engine.opened
    assert opened.slots == m.SlotPlan(4, 2, 4096, 8192)
    assert opened.capacity_bytes == LIMIT_BYTES
    assert (opened.num_threads, opened.isa, opened.block_tokens, opened.seg_tokens) == (
        2, "avx2", 64, 1024,
    )  # fmt: skip
    data, accepted = engine.attach()
    check_data_accepted(accepted, engine.conn.session_key, opened, nonce=b"n" * 32)
    data.sock.sendall(b"frames")
    wait_until(lambda: bench.status().num_messages == 6)
    status = bench.status()
    assert (status.num_sessions, status.num_sequences) == (1, 3)
    assert status.memory_used_bytes == SESSION_BYTES + BUFFER_BYTES
    assert status.memory_limit_bytes == LIMIT_BYTES
    assert f":{os.getpid()}" in status.name

    engine.send(m.Bye())
    engine.receive(m.Bye)
    assert engine.is_ended() and data.is_ended()
    wait_until(lambda: bench.status().num_sessions == 0)
    assert bench.status().num_messages == 6  # those of ended sessions still count
    assert bench.sessions[0].closed.is_set()


def test_accepted_sockets_send_at_once_and_end_with_a_dead_network(start):
    bench = start()
    engine = Engine(bench.server.address).open()
    data, _ = engine.attach()
    sockets = [thread.sock for thread in bench.server._threads]
    assert len(sockets) == 2
    for sock in sockets:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    data.sock.close()


def test_it_beats_and_reports_progress(start):
    bench = start()
    engine = bench.engine().open()
    data, _ = engine.attach()
    data.sock.sendall(b"12345")
    started_s = time.monotonic()
    beats = []
    while time.monotonic() < started_s + 1.1:
        beats.append(engine.receive(m.Heartbeat))
        engine.send(m.Heartbeat(0))
    assert 3 <= len(beats) <= 6  # one each 250 ms
    assert beats[-1].progress == 5


def test_a_silent_engine_is_given_up(start):
    bench = start()
    engine = bench.engine().open()
    started_s = time.monotonic()
    error = engine.receive(m.Error)
    assert error.code is ErrorCode.LOST
    assert 1.9 <= time.monotonic() - started_s <= 3.5
    wait_until(lambda: bench.budget.used_bytes == 0)


@pytest.mark.parametrize("which", ["control", "data"])
def test_the_end_of_either_socket_ends_the_session_at_once(start, which):
    bench = start()
    engine = bench.engine().open()
    data, _ = engine.attach()
    first, second = (engine, data) if which == "control" else (data, engine)
    started_s = time.monotonic()
    first.sock.close()
    assert second.is_ended()
    wait_until(lambda: bench.budget.used_bytes == 0)
    assert time.monotonic() - started_s < 1.0


def test_a_session_is_not_freed_under_a_running_kernel(start):
    bench = start()
    bench.kernel.clear()
    engine = bench.engine().open()
    engine.attach()
    engine.sock.close()
    time.sleep(0.3)
    assert not bench.sessions[0].closed.is_set()
    assert bench.status().num_sessions == 1  # and the worker answers meanwhile
    bench.kernel.set()  # FakePlane.run asserts that the session is still open
    assert bench.sessions[0].closed.wait(2)


def test_a_kernel_that_does_not_end_does_not_hold_up_the_stop_for_ever(start):
    bench = start()
    bench.kernel.clear()
    engine = bench.engine().open()
    engine.attach()
    started_s = time.monotonic()
    assert not bench.server.close(0.3)
    assert time.monotonic() - started_s < 1.0


def test_engines_are_told_when_the_worker_stops(start):
    bench = start()
    engine, greeted = bench.engine().open(), bench.engine().greet()
    bench.server.stop()
    for each in (engine, greeted):
        assert each.receive(m.Error).code is ErrorCode.SHUTDOWN
    bench.thread.join(1.0)
    assert not bench.thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"session_id": 1}, ErrorCode.SESSION),
        ({"mac": bytes(32)}, ErrorCode.AUTH),
        ({"nonce": b"m" * 32}, ErrorCode.AUTH),
    ],
)
def test_a_stranger_gets_no_data_socket_and_does_no_harm(start, changes, code):
    bench = start()
    engine = bench.engine().open()
    stranger, answer = engine.attach(**changes)
    assert answer.code is code
    assert stranger.is_ended()
    assert isinstance(engine.attach()[1], m.DataAccepted)


def test_a_session_has_one_data_socket(start):
    bench = start()
    engine = bench.engine().open()
    data, _ = engine.attach()
    second, answer = engine.attach()
    assert answer.code is ErrorCode.SESSION
    assert second.is_ended()
    data.sock.sendall(b"still served")
    wait_until(lambda: bench.status().num_messages == len(b"still served"))


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (ConfigError("no such head_dim"), ErrorCode.GEOMETRY, "no such head_dim"),
        (CacheFullError("needs 9 bytes of 3"), ErrorCode.MEMORY, "9 bytes of 3"),
        (MemoryError(), ErrorCode.MEMORY, "no memory left"),
        (ZeroDivisionError("inner detail"), ErrorCode.INTERNAL, "its log says more"),
    ],
)
def test_sessions_that_cannot_be_opened(start, failure, code, words):
    bench = start()
    bench.failure = failure
    engine = bench.engine().greet()
    engine.send(m.OpenSession(GEOMETRY, SLOTS))
    error = engine.receive(m.Error)
    assert error.code is code and words in error.text
    assert "inner detail" not in error.text
    wait_until(lambda: bench.budget.used_bytes == 0)
    bench.failure = None
    bench.engine().open()


def test_slots_transports_and_memory_are_checked_before_a_session_is_made(start):
    bench = start()
    bench.failure = AssertionError("must not be called")
    for request, code in (
        (m.OpenSession(GEOMETRY, m.SlotPlan(9, 1, 1, 1)), ErrorCode.GEOMETRY),
        (m.OpenSession(GEOMETRY, SLOTS, transport="pigeon"), ErrorCode.GEOMETRY),
    ):
        engine = bench.engine().greet()
        engine.send(request)
        assert engine.receive(m.Error).code is code
    bench.budget.reserve(LIMIT_BYTES)
    engine = bench.engine().greet()
    engine.send(m.OpenSession(GEOMETRY, SLOTS))
    assert engine.receive(m.Error).code is ErrorCode.MEMORY
    bench.budget.release(LIMIT_BYTES)


def test_tokens(start):
    bench = start(token=TOKEN)
    bench.engine(TOKEN).open()
    for token, words in ((None, "demands a token"), (b"x" * 32, "tokens of engine and worker")):
        with pytest.raises(WorkerError, match=words) as caught:
            bench.status(token)
        assert bench.address in str(caught.value)
    with pytest.raises(WorkerError, match="cannot prove itself"):
        start().status(TOKEN)


def test_an_engine_of_another_version_learns_both(start):
    engine = start().engine()
    engine.send(m.Hello(Role.ENGINE, bytes(32), "9.9.9", version=77))
    error = engine.receive(m.Error)
    assert error.code is ErrorCode.VERSION
    assert "9.9.9" in error.text and "protocol 77" in error.text and "protocol 2" in error.text


def test_a_slow_loris_is_dropped_by_the_deadline(start):
    bench = start(handshake_timeout_s=0.4)
    engine = bench.engine()
    (hello,) = engine.conn.send(engine.conn.hello(bytes(32)))
    started_s = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in hello:  # each byte alone comes in good time
            engine.sock.sendall(bytes([byte]))
            time.sleep(0.05)
    assert engine.is_ended()
    assert 0.3 <= time.monotonic() - started_s <= 4.0
    # the deadline is that of the whole greeting
    engine = bench.engine()
    engine.send(engine.conn.hello(bytes(32)))
    engine.receive(m.Hello)
    error = engine.receive(m.Error)
    assert error.code is ErrorCode.LOST and "no handshake in time" in error.text
    assert engine.is_ended()


def test_idle_connections_do_not_lock_engines_out(start):
    bench = start(max_handshakes=4)
    threads_before = threading.active_count()
    idle = [bench.engine() for _ in range(40)]
    engine = bench.engine().open()
    for each in idle[:30]:
        assert each.is_ended()
    wait_until(lambda: threading.active_count() - threads_before <= 6)
    engine.send(m.StatusRequest())
    assert engine.receive(m.Status).num_sessions == 1


def test_random_bytes_do_no_harm(start):
    bench = start()
    engine = bench.engine().open()
    dice = random.Random(7)
    hello = framing.frame(*codec.encode(m.Hello(Role.ENGINE, bytes(32), "0.1.0")))
    opening = framing.frame(*codec.encode(m.OpenSession(GEOMETRY, SLOTS)))
    for round_number in range(120):
        stranger = Engine(bench.server.address)
        data = bytearray(dice.choice((dice.randbytes(200), hello, hello + opening)))
        if round_number % 2:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        with contextlib.suppress(OSError):  # it may have been dropped already
            stranger.sock.sendall(data)
            stranger.sock.shutdown(socket.SHUT_WR)
            assert stranger.is_ended()
        stranger.sock.close()
        if round_number % 20 == 0:
            engine.send(m.Heartbeat(0))
    engine.send(m.StatusRequest())
    assert engine.receive(m.Status).num_sessions == 1


def test_a_greeted_engine_that_breaks_the_protocol_ends_alone(start):
    bench = start()
    good, bad = bench.engine().open(), bench.engine().open()
    bad.sock.sendall(framing.frame(*codec.encode(m.Auth(bytes(32)))))
    error = bad.receive(m.Error)
    assert error.code is ErrorCode.PROTOCOL and "Auth" in error.text
    wait_until(lambda: bench.budget.used_bytes == SESSION_BYTES + BUFFER_BYTES)
    good.send(m.StatusRequest())
    good.receive(m.Status)


def test_an_http_client_is_answered_in_no_time(start):
    bench = start()
    with socket.create_connection(bench.server.address, timeout=5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        started_s = time.monotonic()
        answer = sock.recv(4096)
        assert time.monotonic() - started_s < 1.0
    assert b"does not speak the fastdecode control protocol" in answer


def test_addresses_that_cannot_be_listened_on_are_one_clear_line(start, monkeypatch):
    bench = start()
    host, port = bench.server.address
    config = bench.server.config
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}: Address already"):
        WorkerServer(
            WorkerConfig(host, port, 1, 1, config.isa, 64, 1024), bench.budget,
            bench.server.machinery,
        )  # fmt: skip

    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"cannot listen on nobody:1: Name or service"):
        WorkerServer(
            WorkerConfig("nobody", 1, 1, 1, config.isa, 64, 1024), bench.budget,
            bench.server.machinery,
        )  # fmt: skip


def test_status_of_something_else(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(WorkerError, match=r"no answer within 0\.3 s"):
            read_status(f"127.0.0.1:{port}", None, timeout_s=0.3)

        def answer():
            listener.accept()[0].close()  # of the attempt before
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"SSH-2.0-other\r\n")
                sock.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerError, match="does not speak"):
            read_status(f"127.0.0.1:{port}", None)
        thread.join()
    with pytest.raises(WorkerError, match="cannot connect: Connection refused"):
        read_status(f"127.0.0.1:{port}", None)
