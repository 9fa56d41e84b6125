"""Who may send what, when: the whole state machine of a connection, as data.

Two rules. Everything that decides whether a message is allowed lives here. And this file does not
know which role we play: both ends keep the same `State` and look up the sender.

The handshake is in lockstep, so both ends agree on the state. Once `READY` the two directions
overlap (a heartbeat may cross a request), so each row lists what may still be under way.
"""

from __future__ import annotations

import enum

from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.messages import Role


class State(enum.Enum):
    """Where a connection stands."""

    START = enum.auto()
    GREETED = enum.auto()  # the engine said hello
    CHALLENGED = enum.auto()  # the worker said hello
    PROVED = enum.auto()  # the engine proved that it has the token
    READY = enum.auto()  # so did the worker
    OPENING = enum.auto()  # a session was asked for
    OPEN = enum.auto()
    ENGINE_LEFT = enum.auto()  # said bye; messages of the other side may be under way
    WORKER_LEFT = enum.auto()
    DATA_ASKED = enum.auto()  # a data socket named its session
    DATA = enum.auto()  # frames from here on: no control message is allowed any more
    CLOSED = enum.auto()
    ERROR = enum.auto()  # a peer broke the protocol; only a last word may be sent


ENGINE, WORKER = Role.ENGINE, Role.WORKER
S = State

TRANSITIONS: dict[tuple[Role, State], dict[type, State]] = {
    (ENGINE, S.START): {m.Hello: S.GREETED, m.DataHello: S.DATA_ASKED},
    (WORKER, S.START): {m.Error: S.CLOSED},
    (ENGINE, S.GREETED): {m.Error: S.CLOSED},
    (WORKER, S.GREETED): {m.Hello: S.CHALLENGED, m.Error: S.CLOSED},
    (ENGINE, S.CHALLENGED): {m.Auth: S.PROVED, m.Error: S.CLOSED},
    (WORKER, S.CHALLENGED): {m.Error: S.CLOSED},
    (ENGINE, S.PROVED): {m.Error: S.CLOSED},
    (WORKER, S.PROVED): {m.Auth: S.READY, m.Error: S.CLOSED},
    (ENGINE, S.READY): {
        m.OpenSession: S.OPENING,
        m.OpenBench: S.OPENING,
        m.PlanesRequest: S.READY,
        m.StatusRequest: S.READY,
        m.Heartbeat: S.READY,
        m.Bye: S.ENGINE_LEFT,
        m.Error: S.CLOSED,
    },
    (WORKER, S.READY): {
        m.Planes: S.READY,
        m.Status: S.READY,
        m.Heartbeat: S.READY,
        m.Bye: S.WORKER_LEFT,
        m.Error: S.CLOSED,
    },
    (ENGINE, S.OPENING): {
        m.StatusRequest: S.OPENING,
        m.Heartbeat: S.OPENING,
        m.Bye: S.ENGINE_LEFT,
        m.Error: S.CLOSED,
    },
    (WORKER, S.OPENING): {
        m.SessionOpened: S.OPEN,
        m.Planes: S.OPENING,
        m.Status: S.OPENING,
        m.Heartbeat: S.OPENING,
        m.Bye: S.WORKER_LEFT,
        m.Error: S.CLOSED,
    },
    (ENGINE, S.OPEN): {
        m.StatusRequest: S.OPEN,
        m.Heartbeat: S.OPEN,
        m.Bye: S.ENGINE_LEFT,
        m.Error: S.CLOSED,
    },
    (WORKER, S.OPEN): {
        m.Status: S.OPEN,
        m.Heartbeat: S.OPEN,
        m.Bye: S.WORKER_LEFT,
        m.Error: S.CLOSED,
    },
    (ENGINE, S.ENGINE_LEFT): {},
    (WORKER, S.ENGINE_LEFT): {
        m.SessionOpened: S.ENGINE_LEFT,
        m.Planes: S.ENGINE_LEFT,
        m.Status: S.ENGINE_LEFT,
        m.Heartbeat: S.ENGINE_LEFT,
        m.Bye: S.CLOSED,
        m.Error: S.CLOSED,
    },
    (ENGINE, S.WORKER_LEFT): {
        m.OpenSession: S.WORKER_LEFT,
        m.OpenBench: S.WORKER_LEFT,
        m.PlanesRequest: S.WORKER_LEFT,
        m.StatusRequest: S.WORKER_LEFT,
        m.Heartbeat: S.WORKER_LEFT,
        m.Bye: S.CLOSED,
        m.Error: S.CLOSED,
    },
    (WORKER, S.WORKER_LEFT): {},
    (ENGINE, S.DATA_ASKED): {},
    (WORKER, S.DATA_ASKED): {m.DataAccepted: S.DATA, m.Error: S.CLOSED},
    (ENGINE, S.DATA): {},
    (WORKER, S.DATA): {},
    (ENGINE, S.CLOSED): {},
    (WORKER, S.CLOSED): {},
    (ENGINE, S.ERROR): {m.Error: S.CLOSED},
    (WORKER, S.ERROR): {m.Error: S.CLOSED},
}

ANONYMOUS = frozenset({S.START, S.GREETED, S.CHALLENGED, S.PROVED, S.DATA_ASKED})
"""States in which the ends do not know each other yet, and only short messages are read."""

LIVE = frozenset({S.READY, S.OPENING, S.OPEN})
"""States in which both sides send heartbeats."""

FINISHED = frozenset({S.DATA, S.CLOSED, S.ERROR})
"""States in which no further control message is read."""


def next_state(sender: Role, state: State, message: type) -> State | None:
    """Returns the state after `sender` sent a `message`, or None where that is not allowed."""
    return TRANSITIONS[sender, state].get(message)
