"""The order of a decode step's operations on a device that runs ahead of its host.

A device has one stream of operations, in order: segments of the model (captured graphs), stores to
and waits for *doorbells*. A mini-batch has one doorbell: two 64-bit counters in memory that device
and host both see, which only ever grow. When a segment has packed the rows of exchange n, the
device stores request = n; the host's pump sees it, sends the rows, gathers the outputs and stores
reply = n; the next segment waits for that. So a whole step is enqueued at once, and Python is not
needed between its layers.

A step that is given up is *poisoned*: the host sets the highest bit of the replies, every wait
falls through, and the stream drains. What it computes is worthless; the step is begun anew with
higher numbers, after `reset`.

`SimulatedDevice` is a device under a clock of its own: it shows that the order is right, and how
long a step takes, without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from fastdecode_rdma.errors import LocalProtocolError

POISON = 1 << 63


class Segment(Enum):
    """What runs between two exchanges."""

    FIRST = "embedding, before attention of layer 0"
    MIDDLE = "after attention of a layer, before attention of the next"
    LAST = "after attention of the last layer"
    HEAD = "head, over the rows of all mini-batches"


@dataclass(slots=True)
class Doorbell:
    """The counters of one mini-batch, and the last number given out."""

    request: int = 0
    reply: int = 0
    issued: int = 0

    def issue(self) -> int:
        """Returns the number of the next exchange."""
        self.issued += 1
        return self.issued

    def is_answered(self, number: int) -> bool:
        """Whether a wait for that reply is over: it is there, or the step was given up."""
        return bool(self.reply & POISON) or self.reply >= number

    def poison(self) -> None:
        """Lets every wait fall through."""
        self.reply |= POISON

    def reset(self) -> None:
        """After the stream has drained: counters go on behind all numbers given out, so that what a
        late pump may still store of the old step answers no wait of a new one."""
        self.request = self.reply = self.issued


class Stream(Protocol):
    """What a device must offer. Nothing waits here: all is queued, and runs in this order."""

    def launch(self, segment: Segment, mini_batch: int, layer: int) -> None:
        """Runs a segment; `layer` is the one whose rows it packs, or that it ends with."""

    def store_request(self, mini_batch: int, number: int) -> None:
        """Stores to a doorbell, behind all that was packed before (system-scope release)."""

    def wait_reply(self, mini_batch: int, number: int) -> None:
        """Waits in the stream until the doorbell's reply is that number or more, or poisoned."""


def enqueue_step(stream: Stream, doorbells: Sequence[Doorbell], num_layers: int) -> None:
    """Queues one step of as many mini-batches as there are doorbells.

    Raises:
        LocalProtocolError: a doorbell is poisoned: the last step has not been drained and reset.
    """
    if any(bell.reply & POISON for bell in doorbells):
        raise LocalProtocolError("the last step was given up: drain the stream and reset it first")
    for mini_batch, bell in enumerate(doorbells):
        stream.launch(Segment.FIRST, mini_batch, 0)
        stream.store_request(mini_batch, bell.issue())
    for layer in range(1, num_layers):
        for mini_batch, bell in enumerate(doorbells):
            stream.wait_reply(mini_batch, bell.issued)
            stream.launch(Segment.MIDDLE, mini_batch, layer)
            stream.store_request(mini_batch, bell.issue())
    for mini_batch, bell in enumerate(doorbells):
        stream.wait_reply(mini_batch, bell.issued)
        stream.launch(Segment.LAST, mini_batch, num_layers - 1)
    stream.launch(Segment.HEAD, -1, num_layers)


@dataclass(frozen=True, slots=True)
class Ran:
    """One operation of a simulated device or of its pump, and when, in seconds."""

    what: str  # a Segment's name, or "ATTENTION"
    mini_batch: int
    layer: int
    start_s: float
    end_s: float


@dataclass
class SimulatedDevice:
    """A stream, its pump and its workers under a fake clock.

    segment_s(segment): how long a segment runs. attend_s(mini_batch): how long the workers take for
    one layer; all of them serve one mini-batch at a time, in the order of requests. latency_s: from
    a request to the workers' start, and from their end to the reply. poison_at_s: when the host
    gives the step up; None: never.
    """

    doorbells: Sequence[Doorbell]
    segment_s: Callable[[Segment], float]
    attend_s: Callable[[int], float]
    latency_s: float = 0.0
    poison_at_s: float | None = None
    now_s: float = 0.0
    ran: list[Ran] = field(default_factory=list)
    _workers_free_s: float = 0.0
    _replies: dict[tuple[int, int], float] = field(default_factory=dict)
    _layers: dict[int, int] = field(default_factory=dict)  # whose rows are packed, by mini-batch
    _pending: set[int] = field(default_factory=set)  # rows that are with the workers

    def launch(self, segment: Segment, mini_batch: int, layer: int) -> None:
        """Runs a segment now.

        Raises:
            LocalProtocolError: it would pack rows or read outputs that the workers still have.
        """
        if not self._is_poisoned() and (
            mini_batch in self._pending or (segment is Segment.HEAD and self._pending)
        ):
            raise LocalProtocolError(f"{segment.name} of mini-batch {mini_batch} does not wait")
        start, self.now_s = self.now_s, self.now_s + self.segment_s(segment)
        self._layers[mini_batch] = layer
        self.ran.append(Ran(segment.name, mini_batch, layer, start, self.now_s))

    def store_request(self, mini_batch: int, number: int) -> None:
        """Rings; the pump has the workers attend as soon as they are free.

        Raises:
            LocalProtocolError: the counter would not grow.
        """
        bell = self.doorbells[mini_batch]
        if number <= bell.request:
            raise LocalProtocolError(f"request {number} after {bell.request}")
        bell.request = number
        self._pending.add(mini_batch)
        start = max(self.now_s + self.latency_s, self._workers_free_s)
        end = self._workers_free_s = start + self.attend_s(mini_batch)
        self._replies[mini_batch, number] = end + self.latency_s
        self.ran.append(Ran("ATTENTION", mini_batch, self._layers[mini_batch], start, end))

    def wait_reply(self, mini_batch: int, number: int) -> None:
        """Lets the clock go on to the reply, or to the moment when the step is given up.

        Raises:
            LocalProtocolError: nobody would ever answer.
        """
        bell = self.doorbells[mini_batch]
        if bell.is_answered(number):
            return
        due = self._replies.get((mini_batch, number))
        if due is None and self.poison_at_s is None:
            raise LocalProtocolError(f"a wait for reply {number}, which was not asked for")
        if self.poison_at_s is not None and (due is None or due > self.poison_at_s):
            self.now_s = max(self.now_s, self.poison_at_s)
            for each in self.doorbells:
                each.poison()
            return
        self.now_s = max(self.now_s, due or 0.0)
        bell.reply = number
        self._pending.discard(mini_batch)

    def _is_poisoned(self) -> bool:
        return any(bell.reply & POISON for bell in self.doorbells)
