from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastdecode_rdma import __version__
from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire import codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.connection import (
    NEED_DATA,
    Connection,
    accept_data_hello,
    check_data_accepted,
    data_hello,
)
from fastdecode_rdma.wire.messages import ErrorCode, Role
from fastdecode_rdma.wire.state import FINISHED, LIVE, State, next_state

TOKEN, OTHER_TOKEN = b"t" * 32, b"o" * 32


def wire_bytes(message):
    return framing.frame(*codec.encode(message))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_whole_conversation(make_pair, geometry, slots, token):
    pair = make_pair(token)
    opened = pair.open()
    assert pair.engine.state is pair.worker.state is State.OPEN
    assert pair.engine.session_key == pair.worker.session_key
    status = m.Status("h:1", "0.1.0", 1.0, 2, 1, 1, 4, "avx2", 3, 9)
    assert pair.pass_(Role.ENGINE, m.StatusRequest()) == m.StatusRequest()
    assert pair.pass_(Role.WORKER, status) == status
    assert opened.slots == slots
    pair.pass_(Role.ENGINE, m.Bye())
    pair.pass_(Role.WORKER, m.Heartbeat(1))  # was under way
    pair.pass_(Role.WORKER, m.Bye())
    assert pair.engine.state is pair.worker.state is State.CLOSED
    assert pair.engine.next_event() == m.ConnectionClosed()


def test_the_greeting_byte_by_byte(make_pair):
    pair = make_pair(TOKEN)
    for sender, message in (
        (Role.ENGINE, pair.engine.hello(b"e" * 32)),
        (Role.WORKER, pair.worker.hello(b"w" * 32)),
    ):
        (data,) = pair.ends[sender].send(message)
        receiver = pair.ends[sender.peer]
        for i in range(len(data)):
            assert receiver.next_event() is NEED_DATA
            assert 1 <= receiver.bytes_needed() <= len(data) - i
            receiver.receive_data(data[i : i + 1], now_s=0.0)
        assert receiver.next_event() == message


def test_two_versions_refuse_each_other_by_name(make_pair):
    for sender in Role:
        pair = make_pair()
        if sender is Role.WORKER:
            pair.pass_(Role.ENGINE, pair.engine.hello(b"e" * 32))
        later = dataclasses.replace(pair.ends[sender].hello(b"x" * 32), version=9, software="7.3.1")
        receiver = pair.ends[sender.peer]
        # what a later version appends to its hello must not hide the message
        code, body = codec.encode(later)
        receiver.receive_data(framing.frame(code, body + b"more fields"), now_s=0.0)
        with pytest.raises(HandshakeError) as caught:
            receiver.next_event()
        assert caught.value.code is ErrorCode.VERSION
        for part in ("7.3.1", "protocol 9", __version__, "protocol 2", "install the same version"):
            assert part in str(caught.value)
        # and the refused side gets to know it
        (data,) = receiver.send(m.Error(caught.value.code, str(caught.value)))
        pair.ends[sender].send(m.Hello(sender, b"x" * 32, "7.3.1"))
        pair.ends[sender].receive_data(data, now_s=0.0)
        assert pair.ends[sender].next_event().code is ErrorCode.VERSION


@pytest.mark.parametrize(
    ("engine_token", "worker_token", "said_by", "words"),
    [
        (None, TOKEN, Role.ENGINE, "demands a token and none was given"),
        (TOKEN, None, Role.ENGINE, "cannot prove itself"),
        (OTHER_TOKEN, TOKEN, Role.WORKER, "tokens of engine and worker differ"),
    ],
)
def test_tokens_that_do_not_fit(make_pair, engine_token, worker_token, said_by, words):
    pair = make_pair(engine_token, worker_token)
    with pytest.raises(HandshakeError, match=words) as caught:
        pair.greet()
    assert caught.value.code is ErrorCode.AUTH
    assert pair.ends[said_by].state is State.ERROR
    for token in (TOKEN, OTHER_TOKEN):
        assert token.hex() not in str(caught.value) and repr(token) not in str(caught.value)


def test_an_engine_that_skips_the_refusal_gets_no_further(make_pair):
    pair = make_pair(None, TOKEN)
    pair.pass_(Role.ENGINE, pair.engine.hello(b"e" * 32))
    pair.worker.send(pair.worker.hello(b"w" * 32))
    pair.worker.receive_data(wire_bytes(m.Auth(bytes(32))), now_s=0.0)
    with pytest.raises(HandshakeError, match="demands a token and none was given"):
        pair.worker.next_event()


def test_a_worker_without_the_token_cannot_pose_as_one(make_pair):
    pair = make_pair(TOKEN, OTHER_TOKEN)
    pair.pass_(Role.ENGINE, pair.engine.hello(b"e" * 32))
    pair.pass_(Role.WORKER, pair.worker.hello(b"w" * 32))
    proof = pair.engine.proof()
    pair.engine.send(proof)
    for forged in (pair.worker.proof(), proof):  # its own, and the engine's sent back
        pair.engine.state = State.PROVED
        pair.engine.receive_data(wire_bytes(forged), now_s=0.0)
        with pytest.raises(HandshakeError):
            pair.engine.next_event()


def test_proofs_of_another_handshake_do_not_fit(make_pair):
    first, second = make_pair(TOKEN), make_pair(TOKEN)
    first.greet()
    second.pass_(Role.ENGINE, second.engine.hello(b"E" * 32))
    second.pass_(Role.WORKER, second.worker.hello(b"w" * 32))
    second.engine.send(first.engine.proof())
    second.worker.receive_data(wire_bytes(first.engine.proof()), now_s=0.0)
    with pytest.raises(HandshakeError, match="differ"):
        second.worker.next_event()


def test_the_data_socket_is_bound_to_its_handshake(make_pair):
    pair = make_pair(TOKEN)
    opened = pair.open()
    data_pair = make_pair()
    hello = data_hello(pair.engine.session_key, opened, nonce=b"n" * 32)
    assert data_pair.pass_(Role.ENGINE, hello) == hello
    accepted = accept_data_hello(hello, pair.worker.session_key, opened.epoch)
    (data,) = data_pair.worker.send(accepted)
    data_pair.engine.receive_data(data + b"frames", now_s=0.0)
    assert data_pair.engine.next_event() == accepted
    check_data_accepted(accepted, pair.engine.session_key, opened, nonce=b"n" * 32)
    assert data_pair.engine.state is data_pair.worker.state is State.DATA
    assert data_pair.engine.bytes_needed() == 0
    assert data_pair.engine.trailing_data == len(b"frames")
    assert data_pair.engine.next_event() is NEED_DATA

    stranger = make_pair(OTHER_TOKEN)
    stranger.greet()
    with pytest.raises(HandshakeError, match="does not belong"):
        accept_data_hello(hello, stranger.worker.session_key, opened.epoch)
    with pytest.raises(HandshakeError, match="does not belong"):
        accept_data_hello(hello, pair.worker.session_key, opened.epoch + 1)
    with pytest.raises(HandshakeError, match="another worker"):
        check_data_accepted(accepted, stranger.engine.session_key, opened, nonce=b"n" * 32)


def test_proofs_need_both_hellos(make_pair):
    for call in (Connection.proof, lambda conn: conn.session_key):
        with pytest.raises(LocalProtocolError, match="hellos"):
            call(make_pair().engine)


def test_before_the_greeting_only_short_messages_are_read(make_pair):
    pair = make_pair()
    header = framing.HEADER.pack(framing.MAGIC, 3, framing.MAX_GREETING_BYTES + 1)
    pair.worker.receive_data(header, now_s=0.0)
    with pytest.raises(RemoteProtocolError, match="1025 bytes; at most 1024"):
        pair.worker.next_event()
    pair = make_pair()
    pair.greet()
    pair.worker.receive_data(header, now_s=0.0)
    assert pair.worker.next_event() is NEED_DATA


def test_the_end_of_the_stream(make_pair):
    pair = make_pair()
    pair.worker.receive_data(b"", now_s=0.0)
    assert pair.worker.next_event() == m.ConnectionClosed()
    assert pair.worker.state is State.CLOSED
    pair = make_pair()
    pair.worker.receive_data(b"FD\x01", now_s=0.0)
    pair.worker.receive_data(b"", now_s=0.0)
    with pytest.raises(RemoteProtocolError, match="in the middle"):
        pair.worker.next_event()


def test_messages_before_the_end_are_still_delivered(make_pair):
    pair = make_pair()
    pair.greet()
    (data,) = pair.engine.send(m.Heartbeat(4))
    pair.worker.receive_data(data, now_s=0.0)
    pair.worker.receive_data(b"", now_s=0.0)
    assert pair.worker.next_event() == m.Heartbeat(4)
    assert pair.worker.next_event() == m.ConnectionClosed()


def test_heartbeats_are_due_by_the_clock_that_is_passed_in(make_pair):
    pair = make_pair()
    assert pair.engine.heartbeat(10.0, progress=0) == []  # nobody is greeted yet
    pair.greet()
    assert pair.engine.heartbeat(0.2, progress=0) == []
    assert pair.engine.beat_due_in_s(0.2) == pytest.approx(0.05)
    (data,) = pair.engine.heartbeat(0.25, progress=3)
    assert pair.engine.heartbeat(0.26, progress=3) == []
    pair.worker.receive_data(data, now_s=0.3)
    assert pair.worker.next_event() == m.Heartbeat(3)
    assert pair.worker.silence_s(2.2) == pytest.approx(1.9)
    assert not pair.worker.is_lost(2.2)
    assert pair.worker.is_lost(2.31)


def test_busy_is_told_from_stuck_and_from_idle(make_pair):
    pair = make_pair()
    pair.greet()
    for now_s, progress, pending, stalled_s in (
        (1.0, 5, 1, 0.0),
        (2.0, 6, 1, 0.0),  # busy: it moves
        (3.0, 6, 1, 1.0),  # stuck for a second
        (4.0, 6, 1, 2.0),
        (5.0, 7, 1, 0.0),
        (6.0, 7, 0, 0.0),  # idle
        (9.0, 7, 1, 0.0),  # new work has just come
    ):
        (data,) = pair.worker.send(m.Heartbeat(progress, pending))
        pair.engine.receive_data(data, now_s=now_s)
        pair.engine.next_event()
        assert pair.engine.stalled_s(now_s) == pytest.approx(stalled_s), now_s


@given(st.lists(st.binary(max_size=64), max_size=8), st.sampled_from(list(Role)))
def test_random_bytes_raise_remote_protocol_errors_only(chunks, role):
    for prefix in (b"", b"FD", b"FD\x01\x00\x2b\x00\x00\x00", b"FD\x05\x00\x48\x00\x00\x00"):
        conn = Connection(role, now_s=0.0)
        with contextlib.suppress(RemoteProtocolError):
            for chunk in (prefix, *chunks):
                conn.receive_data(chunk, now_s=0.0)
                while conn.next_event() not in (NEED_DATA, m.ConnectionClosed()):
                    pass


class BackToBack(RuleBasedStateMachine):
    """Two ends that send anything they may, over two byte streams delivered in any pieces."""

    @initialize(token=st.sampled_from([None, TOKEN]))
    def start(self, token):
        self.now_s = 0.0
        self.ends = {role: Connection(role, now_s=0.0, token=token) for role in Role}
        self.streams = {role: bytearray() for role in Role}  # bytes sent by role, not delivered
        self.sent = {role: [] for role in Role}
        self.got = {role: [] for role in Role}

    def make(self, role, kind):
        conn = self.ends[role]
        if kind is m.Hello:
            return conn.hello(bytes([role]) * 32)
        if kind is m.Auth:
            return conn.proof()
        return next(example for example in EXAMPLES if type(example) is kind)

    @rule(role=st.sampled_from(list(Role)), data=st.data())
    def send(self, role, data):
        conn = self.ends[role]
        allowed = [
            kind for kind in m.Message.__args__ if next_state(role, conn.state, kind) is not None
        ]
        if allowed:
            kind = data.draw(st.sampled_from(sorted(allowed, key=lambda kind: kind.__name__)))
            message = self.make(role, kind)
            for part in conn.send(message):
                self.streams[role] += part
            self.sent[role].append(message)

    @rule(role=st.sampled_from(list(Role)), data=st.data())
    def send_what_is_not_allowed(self, role, data):
        # on a copy of the state: the attempt itself ends a connection
        probe = Connection(role, now_s=0.0)
        probe.state = self.ends[role].state
        kind = data.draw(st.sampled_from(m.Message.__args__))
        if next_state(role, probe.state, kind) is None:
            message = next(example for example in EXAMPLES if type(example) is kind)
            with pytest.raises(LocalProtocolError):
                probe.send(message)

    @rule(role=st.sampled_from(list(Role)), length=st.integers(1, 300))
    def deliver(self, role, length):
        piece = bytes(self.streams[role][:length])
        del self.streams[role][:length]
        if piece:
            self.ends[role.peer].receive_data(piece, now_s=self.now_s)
        self.read(role.peer)

    def read(self, role):
        conn = self.ends[role]
        while conn.state not in FINISHED:
            event = conn.next_event()  # whatever a correct peer sends is accepted
            if event is NEED_DATA:
                break
            self.got[role].append(event)

    @rule(seconds=st.floats(0.0, 1.0), role=st.sampled_from(list(Role)))
    def beat(self, seconds, role):
        self.now_s += seconds
        conn = self.ends[role]
        due = conn.state in LIVE and conn.beat_due_in_s(self.now_s) == 0.0
        parts = conn.heartbeat(self.now_s, progress=1)
        assert bool(parts) == due
        for part in parts:
            self.streams[role] += part
            self.sent[role].append(m.Heartbeat(1))

    @precondition(lambda self: hasattr(self, "ends"))
    @invariant()
    def what_arrives_is_a_prefix_of_what_was_sent(self):
        for role in Role:
            got = self.got[role.peer]
            assert got == self.sent[role][: len(got)]
            assert self.ends[role].state is not State.ERROR

    def teardown(self):
        for role in Role:
            self.deliver(role, 1 << 20)
        for role in Role:
            if self.ends[role.peer].state not in FINISHED:
                assert self.got[role.peer] == self.sent[role]


EXAMPLES: tuple = ()
TestBackToBack = BackToBack.TestCase
TestBackToBack.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture(autouse=True)
def _examples(examples):
    global EXAMPLES
    EXAMPLES = examples


def test_the_room_does_no_io():
    # socket, ssl, select, time and threads belong to those who drive it
    code = (
        "import sys; import fastdecode_rdma.config; before = set(sys.modules)\n"
        "import fastdecode_rdma.wire.connection\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "fastdecode_rdma.wire.connection" in loaded
    assert not loaded & {"socket", "ssl", "select", "selectors", "threading", "asyncio", "secrets"}
