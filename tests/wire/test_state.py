from __future__ import annotations

from collections import deque

import pytest

from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire import codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection
from fastdecode_rdma.wire.messages import Role
from fastdecode_rdma.wire.state import FINISHED, LIVE, TRANSITIONS, State, next_state

MESSAGES = m.Message.__args__
LEGAL = [
    (sender, state, message, after)
    for (sender, state), row in TRANSITIONS.items()
    for message, after in row.items()
]
ILLEGAL = [
    (sender, state, message)
    for (sender, state), row in TRANSITIONS.items()
    for message in MESSAGES
    if message not in row
]


@pytest.fixture
def example_of(examples):
    return {type(example): example for example in examples}


def connection_in(state, role):
    conn = Connection(role, now_s=0.0)
    conn.state = state
    return conn


def test_the_table_is_complete_and_every_state_is_reached():
    assert set(TRANSITIONS) == {(role, state) for role in Role for state in State}
    reached, queue = {State.START, State.ERROR}, deque([State.START])
    while queue:
        state = queue.popleft()
        for role in Role:
            for after in set(TRANSITIONS[role, state].values()) - reached:
                reached.add(after)
                queue.append(after)
    assert reached == set(State)


def test_both_sides_can_beat_exactly_where_they_are_live():
    for state in State:
        both = all(next_state(role, state, m.Heartbeat) is not None for role in Role)
        assert both == (state in LIVE)


def test_every_unfinished_state_lets_the_worker_give_its_reason():
    for state in State:
        if state not in FINISHED | {State.WORKER_LEFT}:
            assert next_state(Role.WORKER, state, m.Error) is State.CLOSED


@pytest.mark.parametrize(("sender", "state", "message", "after"), LEGAL)
def test_legal_messages_lead_both_ends_to_the_same_state(sender, state, message, after, example_of):
    # hellos and proofs have contents to check: tests/wire/test_connection.py
    sending = connection_in(state, sender)
    (data,) = sending.send(example_of[message])
    assert sending.state is after
    if message in (m.Hello, m.Auth) or state is State.ERROR:
        return
    receiving = connection_in(state, sender.peer)
    receiving.receive_data(data, now_s=0.0)
    assert receiving.next_event() == example_of[message]
    assert receiving.state is after


@pytest.mark.parametrize(("sender", "state", "message"), ILLEGAL)
def test_illegal_messages_are_neither_sent_nor_taken(sender, state, message, example_of):
    sending = connection_in(state, sender)
    with pytest.raises(LocalProtocolError, match=message.__name__):
        sending.send(example_of[message])
    assert sending.state in (State.ERROR, State.CLOSED)
    if state in FINISHED:
        return
    receiving = connection_in(state, sender.peer)
    receiving.receive_data(framing.frame(*codec.encode(example_of[message])), now_s=0.0)
    with pytest.raises(RemoteProtocolError):
        receiving.next_event()
    assert receiving.state is State.ERROR
    with pytest.raises(RemoteProtocolError, match="given up"):
        receiving.next_event()
