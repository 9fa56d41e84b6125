"""Attacks on handshake and data socket, over real sockets: each fails, says why, harms nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.attention.status_command import read_status
from fastdecode_rdma.errors import FastDecodeError, RemoteProtocolError, WorkerError
from fastdecode_rdma.transport.base import plan_slots
from fastdecode_rdma.wire import codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.connection import NEED_DATA, Connection, data_hello
from fastdecode_rdma.wire.messages import ErrorCode, Role

TOKEN, OTHER = b"t" * 32, b"o" * 32


def wire_bytes(message: m.Message) -> bytes:
    return framing.frame(*codec.encode(message))


class Peer:
    """A connection driven by hand: it may send what it likes."""

    def __init__(self, sock: socket.socket, role: Role, token: bytes | None = None) -> None:
        self.sock = sock
        self.conn = Connection(role, now_s=0.0, token=token)
        self.reader = framing.FrameReader()

    def send(self, message: m.Message) -> None:
        """Sends by the rules."""
        self.sock.sendall(b"".join(self.conn.send(message)))

    def receive(self) -> m.Event:
        """Receives by the rules."""
        while (event := self.conn.next_event()) is NEED_DATA:
            self.conn.receive_data(self.sock.recv(self.conn.bytes_needed()), now_s=0.0)
        return event

    def greet(self) -> Peer:
        self.send(self.conn.hello(os.urandom(32)))
        self.receive()
        self.send(self.conn.proof())
        assert isinstance(self.receive(), m.Auth)
        return self

    def any_message(self) -> m.Message | None:
        """The next message whatever the rules; None at the end of the connection."""
        while (found := self.reader.next_frame(framing.MAX_BODY_BYTES)) is None:
            try:
                data = self.sock.recv(4096)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.reader.feed(data)
        return codec.decode(*found)


def place_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.fixture
def dial() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def connect(url: str, token: bytes | None = None) -> Peer:
        sock = socket.create_connection(place_of(url), timeout=10)
        peers.append(Peer(sock, Role.ENGINE, token))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.sock.close()


@pytest.fixture
def pose() -> Iterator[Callable[..., str]]:
    """Runs a false worker: `play(peer)` is called for each connection; returns its address."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(play: Callable[[Peer], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        play(Peer(sock, Role.WORKER))

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


class Middle:
    """A man in the middle: passes everything on, keeps what engines sent, changes messages."""

    def __init__(self, url: str, change: Callable[[m.Message], m.Message] | None) -> None:
        self.target = place_of(url)
        self.change = change
        self.sent: list[bytearray] = []  # by connection, in the order they were made
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self.listener.accept()
                worker = socket.create_connection(self.target)
                self.sockets += [engine, worker]
                self.sent.append(bytearray())
                for pair in ((engine, worker, self.sent[-1]), (worker, engine, bytearray())):
                    threading.Thread(target=self._relay, args=pair, daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        reader = framing.FrameReader()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                if self.change is None:
                    target.sendall(data)
                    continue
                reader.feed(data)
                while (found := reader.next_frame(framing.MAX_BODY_BYTES)) is not None:
                    target.sendall(wire_bytes(self.change(codec.decode(*found))))
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listener.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def stand_between() -> Iterator[Callable[..., Middle]]:
    made: list[Middle] = []

    def make(url: str, change: Callable[[m.Message], m.Message] | None = None) -> Middle:
        made.append(Middle(url, change))
        return made[-1]

    yield make
    for middle in made:
        middle.close()


# -- who is there


def test_nonces_are_fresh_and_the_systems(serve, stand_between, new_geometry, monkeypatch):
    drawn: list[bytes] = []
    seen: list[bytes] = []
    real = os.urandom

    def urandom(count: int) -> bytes:
        drawn.append(real(count))
        return drawn[-1]

    def listen(message: m.Message) -> m.Message:
        if isinstance(message, m.Hello | m.DataHello):
            seen.append(message.nonce)
        return message

    monkeypatch.setattr(os, "urandom", urandom)
    middle = stand_between(serve(token=TOKEN).url, listen)
    for _ in range(3):
        for worker in open_sessions([middle.url], new_geometry(), token=TOKEN):
            worker.close()
    assert len(set(seen)) == len(seen) == 9  # of engine, worker and data socket, each time
    assert set(seen) <= set(drawn)


def test_a_worker_that_echoes_the_challenge_is_refused(pose, new_geometry):
    def echo(peer: Peer) -> None:
        while data := peer.sock.recv(4096):
            peer.sock.sendall(data)

    url = pose(echo)
    with pytest.raises(RemoteProtocolError, match="expected a worker at that end") as caught:
        open_sessions([url], new_geometry(), token=TOKEN)
    assert str(caught.value).startswith(f"{url}: ")


def test_a_worker_that_reflects_nonce_and_proof_is_refused(pose, new_geometry):
    def reflect(peer: Peer) -> None:
        hello = peer.any_message()
        peer.sock.sendall(
            wire_bytes(m.Hello(Role.WORKER, hello.nonce, hello.software, auth_required=True))
        )
        peer.sock.sendall(wire_bytes(peer.any_message()))
        peer.any_message()

    url = pose(reflect)
    with pytest.raises(HandshakeError, match="tokens of engine and worker differ") as caught:
        open_sessions([url], new_geometry(), token=TOKEN)
    assert caught.value.code is ErrorCode.AUTH and str(caught.value).startswith(f"{url}: ")


def test_a_worker_gives_no_proof_before_it_has_one(serve, dial):
    # else a stranger could have it prove what he then passes on as his own
    peer = dial(serve(token=TOKEN).url)
    peer.send(peer.conn.hello(os.urandom(32)))
    assert isinstance(peer.any_message(), m.Hello)
    peer.sock.sendall(wire_bytes(m.Auth(bytes(32))))
    error = peer.any_message()
    assert isinstance(error, m.Error) and error.code is ErrorCode.AUTH
    assert peer.any_message() is None


def test_an_engines_recorded_handshake_is_worth_nothing(serve, stand_between, dial, new_geometry):
    served = serve(token=TOKEN)
    middle = stand_between(served.url)
    (worker,) = open_sessions([middle.url], new_geometry(), token=TOKEN)
    control, data = (bytes(kept) for kept in middle.sent[:2])
    for recorded in (data, control + data):  # while the session lives: its data socket is there
        peer = dial(served.url)
        peer.sock.sendall(recorded)
        answers = [peer.any_message(), peer.any_message()]
        errors = [each for each in answers if isinstance(each, m.Error)]
        assert [each.code for each in errors] == [
            ErrorCode.SESSION if recorded is data else ErrorCode.AUTH
        ]
    assert served.server.status().num_sessions == 1
    worker.close()
    wait_until(lambda: served.server.status().num_sessions == 0)
    peer = dial(served.url)
    peer.sock.sendall(data)  # afterwards: nobody knows that session
    error = peer.any_message()
    assert isinstance(error, m.Error) and error.code is ErrorCode.SESSION


def test_a_man_in_the_middle_cannot_swap_sessions(serve, stand_between, connect, new_geometry):
    served = serve(token=TOKEN)
    victim = connect([served.url], token=TOKEN)
    victim.run([(0, [1])], 0)
    (theirs,) = served.server._records.values()

    def swap(message: m.Message) -> m.Message:
        if isinstance(message, m.SessionOpened):
            return dataclasses.replace(message, session_id=theirs.session_id, epoch=theirs.epoch)
        return message

    middle = stand_between(served.url, swap)
    with pytest.raises(RemoteProtocolError, match="does not belong to the engine") as caught:
        open_sessions([middle.url], new_geometry(), token=TOKEN)
    assert str(caught.value).startswith(f"{middle.url}: ")
    victim.run([(0, [1])], 1)
    wait_until(lambda: served.server.status().num_sessions == 1)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (m.Hello, {"nonce": b"x" * 32}, "tokens of engine and worker differ"),
        (m.Hello, {"software": "6.6.6"}, "tokens of engine and worker differ"),
        (m.Auth, {"mac": bytes(32)}, "tokens of engine and worker differ"),
        (m.SessionOpened, {"epoch": 1}, "does not belong to the engine"),
        (m.DataHello, {"nonce": b"x" * 32}, "does not belong to the engine"),
        (m.DataAccepted, {"mac": bytes(32)}, "ended at another worker"),
    ],
)
def test_what_a_man_in_the_middle_changes_is_noticed(
    serve, stand_between, new_geometry, kind, changes, words
):
    served = serve(token=TOKEN)

    def change(message: m.Message) -> m.Message:
        return dataclasses.replace(message, **changes) if isinstance(message, kind) else message

    middle = stand_between(served.url, change)
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        open_sessions([middle.url], new_geometry(), token=TOKEN)
    assert str(caught.value).startswith(f"{middle.url}: ")
    wait_until(lambda: served.server.status().num_sessions == 0)


# -- downgrades


@pytest.mark.parametrize(
    ("engine_token", "worker_token", "remedy"),
    [
        (TOKEN, None, "start the worker with --token-file, or drop the token here"),
        (None, TOKEN, r"pass its token file \(--token-file, token_file= or FASTDECODE_TOKEN_FILE"),
        (OTHER, TOKEN, "give both the same token file"),
    ],
)
def test_sides_that_do_not_agree_name_host_and_remedy(
    serve, new_geometry, engine_token, worker_token, remedy
):
    served = serve(token=worker_token)
    with pytest.raises(RemoteProtocolError, match=remedy) as caught:
        open_sessions([served.url], new_geometry(), token=engine_token)
    assert str(caught.value).startswith(f"{served.url}: ")
    with pytest.raises(WorkerError, match=remedy) as caught:
        read_status(served.url, engine_token)
    assert served.url in str(caught.value)
    for error in (str(caught.value), repr(caught.value.__cause__)):
        for token in (TOKEN, OTHER):
            assert token.hex() not in error and token.decode() not in error
    assert served.server.status().num_sessions == 0


def test_a_middle_that_takes_the_demand_away_gains_nothing(serve, stand_between, new_geometry):
    served = serve(token=TOKEN)

    def drop_demand(message: m.Message) -> m.Message:
        if isinstance(message, m.Hello):
            return dataclasses.replace(message, auth_required=False)
        return message

    middle = stand_between(served.url, drop_demand)
    with pytest.raises(HandshakeError, match="cannot prove itself"):
        open_sessions([middle.url], new_geometry(), token=TOKEN)
    # an engine without a token goes on, and is refused by the worker all the same
    with pytest.raises(RemoteProtocolError, match="demands a token and none was given"):
        open_sessions([middle.url], new_geometry())
    assert served.server.status().num_sessions == 0


# -- data sockets


@pytest.mark.parametrize("which", ["none", "stale", "other session's", "other token's"])
def test_a_data_socket_needs_the_key_of_its_own_handshake(serve, dial, new_geometry, which):
    served = serve(token=TOKEN)
    geometry = new_geometry()
    engines = []
    for _ in range(2):
        engines.append(dial(served.url, TOKEN).greet())
        engines[-1].send(m.OpenSession(geometry, plan_slots(geometry)))
        engines[-1].opened = engines[-1].receive()
    mine, other = engines
    key = {
        "none": b"",
        "stale": dial(served.url, TOKEN).greet().conn.session_key,
        "other session's": other.conn.session_key,
        "other token's": b"x" * 32,
    }[which]
    stranger = dial(served.url)
    stranger.send(data_hello(key, mine.opened, nonce=os.urandom(32)))
    error = stranger.receive()
    assert isinstance(error, m.Error) and error.code is ErrorCode.AUTH
    assert stranger.any_message() is None
    for engine in engines:  # nobody's place was taken
        data = dial(served.url)
        data.send(data_hello(engine.conn.session_key, engine.opened, nonce=os.urandom(32)))
        assert isinstance(data.receive(), m.DataAccepted)
        again = dial(served.url)
        again.send(data_hello(engine.conn.session_key, engine.opened, nonce=os.urandom(32)))
        refused = again.receive()
        assert isinstance(refused, m.Error) and refused.code is ErrorCode.SESSION
    assert served.server.status().num_sessions == 2


# -- before anybody is known


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_half_open_connections_hold_up_nobody(serve, new_geometry):
    served = serve(token=TOKEN, max_handshakes=8)
    stop = threading.Event()
    hello = wire_bytes(m.Hello(Role.ENGINE, bytes(32), "0.1.0"))

    def flood() -> None:
        """Opens connections without end: silent ones, half a hello, a whole one and no proof."""
        held: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(place_of(served.url), timeout=1))
                held[-1].sendall((b"", hello[:20], hello)[len(held) % 3])
            if len(held) > 40:
                held.pop(0).close()
            time.sleep(0.01)
        for sock in held:
            sock.close()

    before = threading.active_count()
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.3)
        for _ in range(5):
            started = time.monotonic()
            (worker,) = open_sessions([served.url], new_geometry(), token=TOKEN)
            assert time.monotonic() - started < 2.0
            worker.close()
        assert threading.active_count() - before < 8 + 8  # those just dropped may still be ending
    finally:
        stop.set()
        thread.join(5)


def test_strangers_cost_no_memory_whatever_length_they_announce(serve, dial):
    served = serve(token=TOKEN)
    tracemalloc.start()
    try:
        for nbytes in (framing.MAX_GREETING_BYTES + 1, 1 << 20, (1 << 32) - 1):
            peer = dial(served.url)
            started = time.monotonic()
            peer.sock.sendall(framing.HEADER.pack(framing.MAGIC, 1, nbytes))
            error = peer.any_message()
            assert isinstance(error, m.Error) and "at most 1024 are allowed" in error.text
            assert time.monotonic() - started < 1.0
            with contextlib.suppress(OSError):  # nobody reads any more
                for _ in range(64):
                    peer.sock.sendall(bytes(1 << 16))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- afterwards


def test_engines_beyond_the_limit_are_told_and_get_in_when_one_leaves(serve, new_geometry):
    served = serve(max_engines=2)
    workers = [open_sessions([served.url], new_geometry())[0] for _ in range(2)]
    with pytest.raises(RemoteProtocolError, match="serves 2 engines already") as caught:
        open_sessions([served.url], new_geometry())
    assert str(caught.value).startswith(f"{served.url}: ")
    workers.pop().close()

    def gets_in() -> bool:
        with contextlib.suppress(FastDecodeError):
            workers.extend(open_sessions([served.url], new_geometry()))
        return len(workers) == 2

    wait_until(gets_in)
    for worker in workers:
        worker.close()


def test_a_configs_text_does_not_hold_the_token(serve):
    config = serve(token=TOKEN).server.config
    assert TOKEN.decode() not in repr(config) and TOKEN.hex() not in repr(config)
