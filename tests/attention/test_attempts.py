"""A data plane that can be set up in more than one way, as RDMA over several pairs of ports."""

from __future__ import annotations

import time

import pytest

from fastdecode_rdma import transport
from fastdecode_rdma.attention import remote
from fastdecode_rdma.transport.base import Attempt, PlaneUnavailable


@pytest.fixture
def failing(monkeypatch):
    """The first `count` attempts fail; returns the list of all attempts."""

    def install(count: int, *, last: bool = False) -> list[Attempt]:
        attempts: list[Attempt] = []

        def open_transport(address, *args, attempt, **options):
            attempts.append(attempt)
            if len(attempts) <= count:
                more = not (last and len(attempts) == count)
                raise PlaneUnavailable(f"{address}: pair {len(attempts)} is mute", try_again=more)
            return transport.open_transport(address, *args, attempt=attempt, **options)

        monkeypatch.setattr(remote, "open_transport", open_transport)
        return attempts

    return install


def test_the_next_way_knows_why_the_ones_before_failed(serve, connect, failing):
    served = [serve(), serve()]
    attempts = failing(2)
    driver = connect([each.url for each in served])
    driver.run([(0, [1]), (1, [2])], 0)
    assert attempts == [
        Attempt(0),
        Attempt(0, ("pair 1 is mute",)),
        Attempt(0, ("pair 1 is mute", "pair 2 is mute")),
        Attempt(1),
    ]
    deadline_s = time.monotonic() + 5
    while any(each.server.status().num_sessions != 1 for each in served):
        assert time.monotonic() < deadline_s  # attempts that failed leave none
        time.sleep(0.01)


def test_when_no_way_is_left_each_reason_is_told(serve, connect, failing):
    served = serve()
    failing(2, last=True)
    with pytest.raises(PlaneUnavailable, match="pair 1 is mute; pair 2 is mute") as caught:
        connect([served.url])
    assert str(caught.value).startswith(served.url)
