"""How events get from the engine thread to whoever waits, without the engine waiting for anybody.

The engine appends to a list and rings who has left a bell. A consumer that is slow or gone costs
the memory of its own request's events, at most n * max_tokens of them, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fastdecode_rdma.errors import FastDecodeError, RequestCancelledError
from fastdecode_rdma.sequence import TokenEvent

Ring = Callable[[], object]


class Inbox:
    """What the engine has said of one request. No locks: each operation on a list or deque is
    atomic, and who waits looks once more after it has left its bell.

    events: all so far, or those not taken yet. ends: how it ended; the first entry counts, None
    means that all went well.
    """

    def __init__(self, events: list[TokenEvent] | deque[TokenEvent]) -> None:
        self.events = events
        self.ends: list[FastDecodeError | None] = []
        self.unfinished = 0
        self.courier: Courier | None = None
        self.abandon: Callable[[], object] | None = None
        self._bells: deque[Ring] = deque()
        self._end_bells: deque[Ring] = deque()

    def put(self, events: list[TokenEvent]) -> None:
        """Takes the events of one step; called by the engine thread."""
        if self.ends:
            return
        if self.courier is not None and self.courier.is_closed():
            self.end(RequestCancelledError("the event loop of its stream was closed"))
            return
        self.events.extend(events)
        for event in events:
            if event.finish_reason is not None:
                self.unfinished -= 1
        if self.unfinished:
            _ring_all(self._bells)
        else:
            self.end(None)

    def fail(self, index: int, error: FastDecodeError) -> None:
        """Takes the error that ended the request; called by the engine thread."""
        self.end(error)

    def end(self, how: FastDecodeError | None) -> bool:
        """Ends the request, in the engine too where it came from elsewhere. False if it was over
        already."""
        self.ends.append(how)
        abandon, self.abandon = self.abandon, None  # and no cycle keeps the request's memory
        if abandon is not None and isinstance(how, RequestCancelledError):
            abandon()
        _ring_all(self._bells)
        _ring_all(self._end_bells)
        return self.ends[0] is how

    def has_news(self, num_seen: int) -> bool:
        """Whether there is more than `num_seen` events, or the end."""
        return len(self.events) > num_seen or bool(self.ends)

    def leave_bell(self, ring: Ring, *, for_end: bool = False) -> None:
        """Has `ring` called once, at the next event or the end. Then look again, and wait."""
        (self._end_bells if for_end else self._bells).append(ring)

    def leave_end_bell(self, ring: Ring) -> None:
        """Has `ring` called exactly once: at the end, or now if that is past."""
        self._end_bells.append(ring)
        if self.ends:
            _ring_all(self._end_bells)

    def take_bell(self, ring: Ring) -> None:
        """Takes a bell back, if it has not rung."""
        for bells in (self._bells, self._end_bells):
            with suppress(ValueError):
                bells.remove(ring)


def _ring_all(bells: deque[Ring]) -> None:
    # Those that are there now: who was rung may be back with another bell before this is done, and
    # has seen the news.
    for _ in range(len(bells)):
        try:
            ring = bells.popleft()
        except IndexError:  # another thread has rung it
            return
        ring()


class Courier:
    """Wakes futures of one event loop from other threads.

    However many streams a step serves, it enters the event loop once: each entry is a system call
    that gives the interpreter to another thread, and the engine would wait to get it back.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = weakref.ref(event_loop)
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_called = False

    @classmethod
    def of(cls, event_loop: asyncio.AbstractEventLoop) -> Courier:
        """Returns the one that streams on an event loop share."""
        with _couriers_lock:
            courier = _couriers.get(id(event_loop))
            if courier is None or not courier.serves(event_loop):
                courier = _couriers[id(event_loop)] = cls(event_loop)
            return courier

    def serves(self, event_loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it wakes futures of that event loop."""
        return self._event_loop() is event_loop

    def is_closed(self) -> bool:
        """Whether nobody can be woken any more."""
        event_loop = self._event_loop()
        return event_loop is None or event_loop.is_closed()

    def wake(self, future: asyncio.Future[None]) -> None:
        """Wakes who waits for a future, from any thread; does nothing if the loop is closed."""
        event_loop = self._event_loop()
        if event_loop is None or event_loop.is_closed():
            return
        self._ready.append(future)
        if self._is_called:
            return
        self._is_called = True
        try:
            event_loop.call_soon_threadsafe(self._wake_ready)
        except RuntimeError:  # closed this moment: its streams end with their next event
            self._is_called = False
            self._ready.clear()

    def _wake_ready(self) -> None:
        self._is_called = False  # first: who comes from now on calls again
        while self._ready:
            future = self._ready.popleft()
            if not future.done():
                future.set_result(None)


# By the event loop's id; they live as long as a stream does, as what they hold keeps loops alive.
_couriers: weakref.WeakValueDictionary[int, Courier] = weakref.WeakValueDictionary()
_couriers_lock = threading.Lock()
