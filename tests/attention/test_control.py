"""What the engine's end of a control connection makes of heartbeats."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from fastdecode_rdma.attention.control import ControlLink
from fastdecode_rdma.errors import WorkerLostError
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import NEED_DATA, Connection
from fastdecode_rdma.wire.messages import Role


class Ends:
    """A greeted control connection: `link` is the engine's end, `beat` comes from the worker's."""

    def __init__(self) -> None:
        engine, self.worker_sock = socket.socketpair()
        now_s = time.monotonic()
        conn = Connection(Role.ENGINE, now_s=now_s)
        self.worker = Connection(Role.WORKER, now_s=now_s)
        for sender, receiver, make in (
            (conn, self.worker, lambda end: end.hello(bytes(32))),
            (self.worker, conn, lambda end: end.hello(bytes(32))),
            (conn, self.worker, Connection.proof),
            (self.worker, conn, Connection.proof),
        ):
            receiver.receive_data(b"".join(sender.send(make(sender))), now_s=now_s)
            assert receiver.next_event() is not NEED_DATA
        self.link = ControlLink(engine, conn)

    def beat(self, progress: int, pending: int) -> None:
        self.worker_sock.sendall(b"".join(self.worker.send(m.Heartbeat(progress, pending))))
        assert self.link.beat(readable=True)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.link.close()
    made.worker_sock.close()


def test_a_late_answer_is_told_by_what_the_worker_does(ends, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_s(seconds: float, progress: int, pending: int) -> None:
        now[0] += seconds
        ends.beat(progress, pending)

    pass_s(0.1, 4, 0)
    assert "reports no work" in ends.link.delay_reason(5.0)
    assert ends.link.delay_reason(0.9) == ""  # too short a wait for heartbeats to know of it
    pass_s(0.3, 5, 1)
    for progress in (7, 9, 11):
        pass_s(1.9, progress, 1)
        assert "busy and gets on: allow it a longer timeout_s" in ends.link.delay_reason(3.0)
    for seconds in (1.0, 2.0, 3.0):
        pass_s(1.0, 11, 1)
        reason = ends.link.delay_reason(3.0)
        assert ("it is stuck: no progress for 3.0 s" in reason) == (seconds == 3.0), reason
    pass_s(0.2, 12, 0)
    assert "reports no work" in ends.link.delay_reason(3.0)


def test_a_stuck_worker_is_named_as_stuck(connect, serve, monkeypatch):
    driver = connect([serve().url], timeout_s=1.3)
    driver.run([(0, [1])], 0)
    monkeypatch.setattr(
        "fastdecode_rdma.worker.session.AttentionSession.begin_step",
        lambda self, table, step, entries: time.sleep(2.5),
    )
    with pytest.raises(WorkerLostError, match=r"did not answer within 1\.3 s; it is stuck") as late:
        driver.run([(0, [1])], 1)
    assert str(late.value).count("attention worker") == 1
