"""Bringing lost workers back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fastdecode_rdma.engine import reconnect
from fastdecode_rdma.engine.reconnect import Reconnector
from fastdecode_rdma.errors import TransportError


class Link:
    """A session that only knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_address_is_tried_with_growing_delays_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "FIRST_DELAY_S", 0.02)
    tries: list[tuple[str, float]] = []
    link = Link()

    def connect(address: str) -> Link:
        tries.append((address, time.monotonic()))
        if address == "a" and sum(each == "a" for each, _ in tries) < 4:
            raise TransportError("refused")
        return link if address == "a" else Link()

    reconnector = Reconnector(connect)
    assert reconnector.take() == []
    reconnector.lost("a")
    reconnector.lost("b")
    back: list[Link] = []
    wait_for(lambda: back.extend(reconnector.take()) or len(back) == 2)
    assert link in back
    times = [when for address, when in tries if address == "a"]
    assert len(times) == 4 and sum(address == "b" for address, _ in tries) == 1
    assert times[3] - times[2] > 1.5 * (times[1] - times[0])
    wait_for(lambda: not reconnector._tried)  # nothing to do, no thread
    reconnector.lost("b")
    wait_for(lambda: reconnector._back)
    reconnector.close()


def test_closing_closes_what_nobody_took_and_what_comes_too_late() -> None:
    links: list[Link] = []

    def connect(address: str) -> Link:
        if address == "slow":
            time.sleep(0.3)
        links.append(Link())
        return links[-1]

    reconnector = Reconnector(connect)
    reconnector.lost("fast")
    wait_for(lambda: reconnector._back)
    reconnector.lost("slow")
    time.sleep(0.2)  # the try is under way
    reconnector.close()
    reconnector.close()
    wait_for(lambda: len(links) == 2 and all(link.closed for link in links))
    reconnector.lost("late")
    assert reconnector.take() == [] and not reconnector._tried


def test_an_address_that_does_not_answer_holds_up_nobody() -> None:
    hang = threading.Event()

    def connect(address: str) -> Link:
        assert hang.wait(10)
        raise TransportError("no answer")

    reconnector = Reconnector(connect)
    reconnector.lost("gone")
    time.sleep(0.2)  # the try is under way
    slowest_s = 0.0
    for _ in range(100):
        started = time.monotonic()
        assert reconnector.take() == []
        reconnector.lost("gone")
        slowest_s = max(slowest_s, time.monotonic() - started)
    assert slowest_s < 0.05
    started = time.monotonic()
    reconnector.close()
    assert time.monotonic() - started < 0.05
    hang.set()
    wait_for(lambda: not reconnector._tried)


def test_an_address_that_does_not_answer_delays_no_other() -> None:
    hang, link = threading.Event(), Link()

    def connect(address: str) -> Link:
        if address == "gone":
            assert hang.wait(10)
            raise TransportError("no answer")
        return link

    reconnector = Reconnector(connect)
    reconnector.lost("gone")
    time.sleep(0.2)  # the try is under way
    reconnector.lost("restarted")
    wait_for(lambda: reconnector.take() == [link])
    assert reconnector._tried == {"gone"}
    reconnector.close()
    hang.set()
    wait_for(lambda: not reconnector._tried)
