"""One end of a control connection or of a data socket's first exchange; no socket, clock or random.

Any I/O can drive it: bytes to send come out of `send`, received bytes go into `receive_data`, and
`next_event` returns a message, `NEED_DATA`, or `ConnectionClosed`. An engine, on blocking sockets:

    conn = Connection(Role.ENGINE, token=token, now_s=time.monotonic())   # token: bytes | None

    def send(message):
        for data in conn.send(message):
            control.sendall(data)

    def receive():                       # one message; reads no byte beyond it
        while True:
            event = conn.next_event()    # RemoteProtocolError says why the peer is refused
            if event is not NEED_DATA:
                return event             # Error(code, text) and ConnectionClosed() are events too
            conn.receive_data(control.recv(conn.bytes_needed()), now_s=time.monotonic())

    send(conn.hello(os.urandom(NONCE_BYTES)))
    receive()                            # Hello: versions and need of a token are checked by now
    send(conn.proof())
    receive()                            # Auth: the worker has the token as well; state READY
    slots = SlotPlan(num_latency=2, num_bulk=4, latency_nbytes=…, bulk_nbytes=…)
    send(OpenSession(geometry, slots))
    opened = receive()                   # SessionOpened(session_id, epoch, …, slots granted)

    data_conn = Connection(Role.ENGINE, now_s=time.monotonic())           # on a second socket
    hello = data_hello(conn.session_key, opened, nonce=os.urandom(NONCE_BYTES))
    ... send hello over the data socket with data_conn.send, receive DataAccepted with its own
        receive() ...
    check_data_accepted(accepted, conn.session_key, opened, nonce=hello.nonce)
    # from here on the data socket carries frames only, and no byte of them was read

    # a thread of its own, every conn.heartbeat_interval_s or sooner:
    for data in conn.heartbeat(now_s, progress=frames_done): control.sendall(data)
    if conn.is_lost(now_s): ...          # 2 s without a byte
    send(StatusRequest()); ... Status ...; send(Bye())

An instance is not thread-safe: where one thread beats and another asks, both hold one lock around
`send`/`heartbeat` and the `sendall` of what it returned.
"""

from __future__ import annotations

import enum

from fastdecode_rdma import __version__
from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire import auth, codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.auth import HandshakeError
from fastdecode_rdma.wire.messages import ErrorCode, Role
from fastdecode_rdma.wire.state import ANONYMOUS, FINISHED, LIVE, State, next_state

HEARTBEAT_INTERVAL_S = 0.25
LOST_AFTER_S = 2.0


class NeedData(enum.Enum):
    """The type of NEED_DATA."""

    NEED_DATA = enum.auto()


NEED_DATA = NeedData.NEED_DATA


class Connection:
    """One end. `token` is the shared secret, None where there is none; `now_s` any steady clock."""

    def __init__(
        self,
        our_role: Role,
        *,
        now_s: float,
        token: bytes | None = None,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.our_role = our_role
        self.state = State.START
        self.peer: m.Hello | None = None
        self.peer_heartbeat = m.Heartbeat(0)
        self.heartbeat_interval_s = heartbeat_interval_s
        self.lost_after_s = lost_after_s
        self._token = token
        self._reader = framing.FrameReader()
        self._saw_eof = False
        self._hello_bytes: dict[Role, bytes] = {}
        self._last_heard_s = now_s
        self._last_beat_s = now_s
        self._last_progress_s = now_s

    def send(self, message: m.Message) -> list[bytes]:
        """Returns the bytes that carry `message`, to be written in order.

        Raises:
            LocalProtocolError: the state does not allow it, or a field is out of range. Nothing but
                an Error may be sent then.
        """
        after = next_state(self.our_role, self.state, type(message))
        try:
            if after is None:
                raise LocalProtocolError(
                    f"{self.our_role.name.lower()} may not send {type(message).__name__} in state "
                    f"{self.state.name}"
                )
            type_code, body = codec.encode(message)
            data = framing.frame(type_code, body)
        except LocalProtocolError:
            self._fail()
            raise
        if isinstance(message, m.Hello):
            self._hello_bytes[self.our_role] = body
        self.state = after
        return [data]

    def receive_data(self, data: bytes | bytearray | memoryview, *, now_s: float) -> None:
        """Takes received bytes; empty ones mean that the peer closed its side."""
        if not len(data):
            self._saw_eof = True
            return
        self._last_heard_s = now_s
        self._reader.feed(data)

    def bytes_needed(self) -> int:
        """Returns how many bytes to receive at most before the next `next_event`; 0 when done."""
        return 0 if self.state in FINISHED else self._reader.bytes_needed()

    @property
    def trailing_data(self) -> int:
        """Bytes received behind the last message: 0 when at most `bytes_needed` were received."""
        return self._reader.num_buffered

    def next_event(self) -> m.Event | NeedData:
        """Returns the next message of the peer, NEED_DATA, or ConnectionClosed.

        Raises:
            RemoteProtocolError: the peer broke the protocol or was refused (HandshakeError with the
                code to send); the only thing to send then is an Error. Nothing else is ever raised.
        """
        if self.state is State.ERROR:
            raise RemoteProtocolError("the connection was given up after an earlier error")
        if self.state is State.CLOSED:
            return m.ConnectionClosed()
        if self.state is State.DATA:
            return NEED_DATA
        try:
            return self._next_event()
        except RemoteProtocolError:
            self._fail()
            raise

    def _next_event(self) -> m.Event | NeedData:
        anonymous = self.state in ANONYMOUS
        limit = framing.MAX_GREETING_BYTES if anonymous else framing.MAX_BODY_BYTES
        found = self._reader.next_frame(limit)
        if found is None:
            return self._at_eof() if self._saw_eof else NEED_DATA
        type_code, body = found
        message = codec.decode(type_code, body)
        after = next_state(self.our_role.peer, self.state, type(message))
        if after is None:
            raise RemoteProtocolError(
                f"the {self.our_role.peer.name.lower()} may not send {type(message).__name__} in "
                f"state {self.state.name}"
            )
        if isinstance(message, m.Hello):
            self._take_hello(message, body)
        elif isinstance(message, m.Auth):
            self._check_proof(message)
        elif isinstance(message, m.Heartbeat):
            self._take_heartbeat(message)
        self.state = after
        return message

    def _at_eof(self) -> m.ConnectionClosed:
        if self._reader.num_buffered:
            raise RemoteProtocolError("the peer closed the connection in the middle of a message")
        self.state = State.CLOSED
        return m.ConnectionClosed()

    def _fail(self) -> None:
        if self.state is not State.CLOSED:
            self.state = State.ERROR

    # The handshake

    def hello(self, nonce: bytes) -> m.Hello:
        """Returns our hello. `nonce`: NONCE_BYTES fresh random bytes."""
        return m.Hello(self.our_role, nonce, __version__, auth_required=self._token is not None)

    def proof(self) -> m.Auth:
        """Returns the proof that we hold the token; both hellos must have passed."""
        return m.Auth(auth.handshake_mac(self._token or b"", self.our_role, *self._hellos()))

    @property
    def session_key(self) -> bytes:
        """The key of this handshake, for the data socket; both hellos must have passed."""
        return auth.session_key(self._token or b"", *self._hellos())

    def _hellos(self) -> tuple[bytes, bytes]:
        if len(self._hello_bytes) < 2:
            raise LocalProtocolError("the hellos have not been exchanged yet")
        return self._hello_bytes[Role.ENGINE], self._hello_bytes[Role.WORKER]

    def _take_hello(self, hello: m.Hello, body: bytes) -> None:
        if hello.version != m.PROTOCOL_VERSION:
            raise HandshakeError(
                f"the {self.our_role.peer.name.lower()} runs fastdecode_rdma {hello.software} "
                f"(protocol {hello.version}), the {self.our_role.name.lower()} {__version__} "
                f"(protocol {m.PROTOCOL_VERSION}): install the same version on both",
                ErrorCode.VERSION,
            )
        if hello.role is not self.our_role.peer:
            raise RemoteProtocolError(f"expected a {self.our_role.peer.name.lower()} at that end")
        self.peer = hello
        self._hello_bytes[self.our_role.peer] = body
        if self.our_role is Role.ENGINE and hello.auth_required and self._token is None:
            raise HandshakeError(
                "the worker demands a token and none was given: pass its token file "
                "(--token-file, token_file= or FASTDECODE_TOKEN_FILE)",
                ErrorCode.AUTH,
            )
        # Going on without proof would let anybody at that address pose as the worker.
        if self.our_role is Role.ENGINE and not hello.auth_required and self._token is not None:
            raise HandshakeError(
                "a token was given but the worker runs without one and cannot prove itself: start "
                "the worker with --token-file, or drop the token here",
                ErrorCode.AUTH,
            )

    def _check_proof(self, proof: m.Auth) -> None:
        expected = auth.handshake_mac(self._token or b"", self.our_role.peer, *self._hellos())
        if auth.check_mac(proof.mac, expected):
            return
        had_token = self.peer is not None and self.peer.auth_required
        if self.our_role is Role.WORKER and self._token is not None and not had_token:
            raise HandshakeError("the worker demands a token and none was given", ErrorCode.AUTH)
        raise HandshakeError(
            "the tokens of engine and worker differ: give both the same token file", ErrorCode.AUTH
        )

    # Signs of life

    def _take_heartbeat(self, beat: m.Heartbeat) -> None:
        if beat.progress != self.peer_heartbeat.progress or not self.peer_heartbeat.pending:
            self._last_progress_s = self._last_heard_s
        self.peer_heartbeat = beat

    def heartbeat(self, now_s: float, *, progress: int, pending: int = 0) -> list[bytes]:
        """Returns the bytes of a heartbeat when one is due, else none."""
        if self.state not in LIVE or now_s - self._last_beat_s < self.heartbeat_interval_s:
            return []
        self._last_beat_s = now_s
        return self.send(m.Heartbeat(progress, pending))

    def beat_due_in_s(self, now_s: float) -> float:
        """Returns the time until the next heartbeat is due, 0 when it is."""
        return max(0.0, self._last_beat_s + self.heartbeat_interval_s - now_s)

    def silence_s(self, now_s: float) -> float:
        """Returns for how long nothing came from the peer."""
        return now_s - self._last_heard_s

    def is_lost(self, now_s: float) -> bool:
        """Says whether the peer has been silent for so long that it must be given up."""
        return self.silence_s(now_s) > self.lost_after_s

    def stalled_s(self, now_s: float) -> float:
        """Returns for how long the peer has reported waiting work without progress; 0 when idle."""
        return now_s - self._last_progress_s if self.peer_heartbeat.pending else 0.0


def data_hello(
    session_key: bytes, opened: m.SessionOpened, *, nonce: bytes, details: bytes = b""
) -> m.DataHello:
    """Returns the engine's first message on the data socket of the session `opened`; `details` is
    its end of the data plane."""
    mac = auth.data_mac(
        session_key,
        Role.ENGINE,
        session_id=opened.session_id,
        epoch=opened.epoch,
        nonce=nonce,
        plane=opened.transport,
        details=details,
    )
    return m.DataHello(opened.session_id, nonce, mac, details)


def check_data_hello(
    hello: m.DataHello, session_key: bytes, epoch: int, *, plane: str = "tcp"
) -> None:
    """Checks the proof in a data socket's hello.

    Raises:
        HandshakeError: it is not that of the engine which opened the session.
    """
    expected = auth.data_mac(
        session_key,
        Role.ENGINE,
        session_id=hello.session_id,
        epoch=epoch,
        nonce=hello.nonce,
        plane=plane,
        details=hello.details,
    )
    if not auth.check_mac(hello.mac, expected):
        raise HandshakeError(
            "the data socket does not belong to the engine that opened the session", ErrorCode.AUTH
        )


def accept_data_hello(
    hello: m.DataHello, session_key: bytes, epoch: int, *, plane: str = "tcp", details: bytes = b""
) -> m.DataAccepted:
    """Returns the worker's answer to a data socket's hello, after checking its proof; `details` is
    the worker's end of the data plane.

    Raises: as check_data_hello.
    """
    check_data_hello(hello, session_key, epoch, plane=plane)
    mac = auth.data_mac(
        session_key,
        Role.WORKER,
        session_id=hello.session_id,
        epoch=epoch,
        nonce=hello.nonce,
        plane=plane,
        details=details,
    )
    return m.DataAccepted(mac, details)


def check_data_accepted(
    accepted: m.DataAccepted, session_key: bytes, opened: m.SessionOpened, *, nonce: bytes
) -> None:
    """Checks the worker's answer on the data socket; `nonce` is the DataHello's.

    Raises:
        HandshakeError: the other end of the data socket is not the worker of the handshake.
    """
    expected = auth.data_mac(
        session_key,
        Role.WORKER,
        session_id=opened.session_id,
        epoch=opened.epoch,
        nonce=nonce,
        plane=opened.transport,
        details=accepted.details,
    )
    if not auth.check_mac(accepted.mac, expected):
        raise HandshakeError(
            "the data socket ended at another worker than the handshake", ErrorCode.AUTH
        )
