"""The way of events to who waits: no ring is lost, none is too many, a dead loop stops nobody."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable

from fastdecode_rdma.errors import FastDecodeError, RequestCancelledError
from fastdecode_rdma.inbox import Courier, Inbox
from fastdecode_rdma.sequence import TokenEvent


def event(finish_reason: str | None = None) -> TokenEvent:
    return TokenEvent(
        request_index=0, sample_index=0, token_id=5, text="x", logprob=None, top_logprobs=None,
        finish_reason=finish_reason, stop_reason=None,
    )  # fmt: skip


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)


def test_a_bell_rings_once_and_that_for_the_end_only_then() -> None:
    inbox, rung = Inbox([]), []
    inbox.unfinished = 1
    inbox.leave_bell(lambda: rung.append("event"))
    inbox.leave_bell(lambda: rung.append("end"), for_end=True)
    taken_back = rung.clear
    inbox.leave_bell(taken_back)
    inbox.take_bell(taken_back)
    inbox.take_bell(taken_back)
    inbox.put([event()])
    inbox.put([event()])
    assert rung == ["event"] and not inbox.ends and inbox.has_news(1) and not inbox.has_news(2)
    inbox.put([event("length")])
    assert rung == ["event", "end"] and inbox.ends == [None] and inbox.has_news(3)


def test_a_bell_left_while_others_ring_waits_for_the_next_event() -> None:
    """Its owner has seen the news: ringing it at once would go on for as long as it comes back."""
    inbox, rung = Inbox([]), []

    def comes_back() -> None:
        rung.append("event")
        if len(rung) < 10:
            inbox.leave_bell(comes_back)

    inbox.unfinished = 2
    inbox.leave_bell(comes_back)
    for number in (1, 2):
        inbox.put([event()])
        assert len(rung) == number


def test_the_first_end_counts_and_nothing_comes_after() -> None:
    abandoned: list[str] = []
    inbox = Inbox(deque())
    inbox.unfinished, inbox.abandon = 1, lambda: abandoned.append("cancel")
    assert inbox.end(RequestCancelledError("mine"))
    assert not inbox.end(RequestCancelledError("too late"))
    inbox.put([event("length")])
    inbox.fail(0, FastDecodeError("closed"))
    assert str(inbox.ends[0]) == "mine" and not inbox.events and abandoned == ["cancel"]
    finished = Inbox([])
    finished.unfinished, finished.abandon = 2, lambda: abandoned.append("never")
    finished.put([event("stop"), event("length")])
    assert not finished.end(RequestCancelledError("too late"))
    assert finished.ends[0] is None and abandoned == ["cancel"]


def test_a_waiter_never_misses_a_ring() -> None:
    """The dangerous moment: an event between the look at the list and the bell."""
    inbox, read = Inbox([]), []
    inbox.unfinished, total = 1, 20_000

    def consume() -> None:
        seen = 0
        bell = threading.Semaphore(0)
        while seen < total:
            inbox.leave_bell(bell.release)
            if inbox.has_news(seen):
                inbox.take_bell(bell.release)
            elif not bell.acquire(timeout=10):
                return  # a lost ring
            seen = len(inbox.events)
        read.append(seen)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(total):
        inbox.put([event()])
    for thread in threads:
        thread.join(30)
    assert read == [total] * 3


def test_many_wake_ups_enter_the_event_loop_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        courier, entered = Courier.of(loop), []
        enter = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda call: (entered.append(call), enter(call))
        assert Courier.of(loop) is courier and courier.serves(loop) and not courier.is_closed()
        for number in (1, 2):
            futures = [loop.create_future() for _ in range(20)]
            futures[3].cancel()
            in_thread(lambda futures=futures: [courier.wake(future) for future in futures])
            assert len(entered) == number  # the loop stood still meanwhile
            done = await asyncio.gather(*futures, return_exceptions=True)
            assert sum(outcome is None for outcome in done) == 19

    asyncio.run(main())


def test_a_closed_loop_is_noticed_and_not_kept() -> None:
    loop = asyncio.new_event_loop()
    courier = Courier.of(loop)
    courier.wake(loop.create_future())  # it will never come to that
    loop.close()
    assert courier.is_closed()
    courier.wake(loop.create_future())
    inbox, abandoned = Inbox(deque()), []
    inbox.unfinished, inbox.courier = 1, courier
    inbox.abandon = lambda: abandoned.append("cancel")
    inbox.put([event()])
    assert abandoned == ["cancel"] and isinstance(inbox.ends[0], RequestCancelledError)
    gone = weakref.ref(loop)
    del loop, courier, inbox
    gc.collect()
    assert gone() is None


def test_a_loop_that_closes_at_the_wrong_moment_raises_nothing() -> None:
    loop = asyncio.new_event_loop()
    courier, future = Courier.of(loop), loop.create_future()
    loop.is_closed = lambda: False  # it was open when looked at
    loop.close()
    courier.wake(future)
    courier.wake(future)
    assert not future.done()
    del loop.is_closed
