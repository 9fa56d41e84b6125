"""The messages of the control connection: plain slotted dataclasses, no bytes and no I/O.

An engine and a worker speak them over one TCP connection (`Role`), and a second one, the data
socket, opens with `DataHello` and `DataAccepted` before frames flow, over it or over what the two
have agreed on in `details`. `codec.py` gives them
bytes, `state.py` says who may send what when.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fastdecode_rdma.config import AttentionGeometry

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
MAC_BYTES = 32


class Role(enum.IntEnum):
    """Which end of a connection: the engine connects, the worker listens."""

    ENGINE = 1
    WORKER = 2

    @property
    def peer(self) -> Role:
        return Role.WORKER if self is Role.ENGINE else Role.ENGINE


class ErrorCode(enum.IntEnum):
    """Why a peer ends the connection. Codes keep their meaning in every protocol version."""

    PROTOCOL = 1  # bytes or a message that the state does not allow
    VERSION = 2
    AUTH = 3
    BUSY = 4
    GEOMETRY = 5  # the worker cannot serve this model
    MEMORY = 6
    SESSION = 7  # no such session, or its data socket is there already
    LOST = 8  # no sign of life for too long
    SHUTDOWN = 9
    INTERNAL = 10
    PLANE = 11  # the data plane cannot be set up; another one may


@dataclass(slots=True)
class Hello:
    """First message of either side. The layout never changes, so that any two versions can refuse
    each other by name. `auth_required` is the worker's: it was started with a token."""

    role: Role
    nonce: bytes  # NONCE_BYTES random bytes
    software: str  # "0.1.0"
    auth_required: bool = False
    version: int = PROTOCOL_VERSION


@dataclass(slots=True)
class Auth:
    """Proof of the shared token over both hellos; without a token the key is empty."""

    mac: bytes


@dataclass(slots=True)
class SlotPlan:
    """Slots per direction of the data socket: how many frames may be under way, how long."""

    num_latency: int
    num_bulk: int
    latency_nbytes: int
    bulk_nbytes: int


@dataclass(slots=True)
class PlanesRequest:
    """The engine asks which data planes the worker offers."""


@dataclass(slots=True)
class Planes:
    """What the worker offers besides TCP: by name, what an engine must know to use each. The planes
    themselves define that; to this room it is bytes."""

    offers: tuple[tuple[str, bytes], ...] = ()


@dataclass(slots=True)
class OpenSession:
    """The engine asks for a session: what the worker must know of the model, slots wished, and the
    data plane that it will come with."""

    geometry: AttentionGeometry
    slots: SlotPlan
    transport: str = "tcp"


@dataclass(slots=True)
class OpenBench:
    """The engine asks for a benchmark's session instead: frames of a model without its kernel and
    K/V, and messages of up to a slot's length. `force`: also beside sequences of others."""

    geometry: AttentionGeometry
    slots: SlotPlan
    transport: str = "tcp"
    force: bool = False


@dataclass(slots=True)
class SessionOpened:
    """The worker granted a session. `slots` is what it grants, never more than was asked for."""

    session_id: int
    epoch: int  # random, 64 bits; every frame of the data socket carries it
    capacity_bytes: int  # the worker's limit: K/V and row buffers of all its sessions
    num_threads: int
    isa: str
    block_tokens: int
    seg_tokens: int
    slots: SlotPlan
    transport: str = "tcp"


@dataclass(slots=True)
class DataHello:
    """First message on the data socket: whose it is, proved with the session key, and the engine's
    end of the data plane, which the proof covers."""

    session_id: int
    nonce: bytes
    mac: bytes
    details: bytes = b""


@dataclass(slots=True)
class DataAccepted:
    """The worker took the data socket: its own proof, and its end of the data plane. Only frames
    follow, in both directions."""

    mac: bytes
    details: bytes = b""


@dataclass(slots=True)
class Heartbeat:
    """Sign of life. `progress` counts units of work finished; `pending` says that some is waiting,
    so a peer whose progress stands still while pending is stuck, not idle."""

    progress: int
    pending: int = 0


@dataclass(slots=True)
class StatusRequest:
    """The engine (or `fastdecode status`) asks for the worker's figures; needs no session."""


@dataclass(slots=True)
class Status:
    """A worker's figures."""

    name: str  # host name and process id
    software: str
    uptime_s: float
    memory_limit_bytes: int
    memory_used_bytes: int
    num_sessions: int
    num_threads: int
    isa: str
    num_sequences: int
    num_messages: int  # data-plane frames since the start


@dataclass(slots=True)
class Error:
    """Ends the connection, with a reason for people. Never contains secrets."""

    code: ErrorCode
    text: str


@dataclass(slots=True)
class Bye:
    """Ends the connection on purpose."""


@dataclass(slots=True)
class ConnectionClosed:
    """Event only, never sent: the peer closed the stream between two messages."""


Message = (
    Hello
    | Auth
    | PlanesRequest
    | Planes
    | OpenSession
    | OpenBench
    | SessionOpened
    | DataHello
    | DataAccepted
    | Heartbeat
    | StatusRequest
    | Status
    | Error
    | Bye
)
Event = Message | ConnectionClosed
