"""Every plane behind one interface, and a peer on each that the test plays by hand."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastdecode_rdma.transport._pump import ShmPlane, shm_segment_bytes

from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.transport.serve import DataPlane
from fastdecode_rdma.transport.shm import make_segment
from fastdecode_rdma.transport.tcp import prepare_socket
from fastdecode_rdma.wire.frame import HEADER_BYTES, Frame, FrameKind
from fastdecode_rdma.wire.messages import SlotPlan

ENGINE, WORKER = 0, 1
EPOCH = 0x1122334455667788
ENTRY_BYTES, BIG, NOWHERE = 128, 256, 257
BULK = (FrameKind.KV_ROWS, FrameKind.EXPORT, FrameKind.IMPORT)


class StreamPeer:
    """One end of a stream, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(5.0)

    def send(self, head: bytes, payload: bytes = b"") -> None:
        self.sock.sendall(head + payload)

    def receive(self) -> tuple[Frame, bytes]:
        frame = Frame.decode(self._take(HEADER_BYTES))
        return frame, self._take(frame.nbytes)

    def _take(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self.sock.recv(nbytes - len(data))
            assert part, "the pump hung up"
            data += part
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


class Lane:
    """Where one direction's headers and slots lie; written down again, so that a change shows."""

    def __init__(self, at: int, side: int, slots: SlotPlan, sizes: FrameSizes) -> None:
        counts = [slots.num_latency, slots.num_bulk]
        self.slot_bytes = [pages(slots.latency_nbytes), pages(slots.bulk_nbytes)]
        self.entries = 2 * sum(counts) if side == ENGINE else counts[0]
        if side == WORKER:
            counts[1] = 0
        self.counts = counts
        self.entry_at = at
        at += pages(self.entries * ENTRY_BYTES)
        self.slot_at = [at, at + counts[0] * self.slot_bytes[0]]
        self.big_at = self.slot_at[1] + counts[1] * self.slot_bytes[1]
        self.end = self.big_at + pages(sizes.max_cold_bytes)
        self.entry, self.next_slot, self.count = 0, [0, 0], 0

    def take_slot(self, kind: int, nbytes: int) -> int:
        """Slots in turn: a peer that sends by hand never has as many frames under way."""
        bulk = int(kind in BULK)
        if not nbytes:
            return NOWHERE
        if nbytes > self.slot_bytes[bulk] or not self.counts[bulk]:
            return BIG
        slot = self.next_slot[bulk]
        self.next_slot[bulk] = (slot + 1) % self.counts[bulk]
        return slot

    def place(self, kind: int, slot: int) -> int:
        bulk = int(kind in BULK)
        return self.big_at if slot == BIG else self.slot_at[bulk] + slot * self.slot_bytes[bulk]

    def here(self) -> int:
        return self.entry_at + self.entry * ENTRY_BYTES

    def advance(self) -> None:
        self.entry = (self.entry + 1) % self.entries
        self.count += 1


class ShmPeer:
    """One side of a segment, by hand."""

    PUBLISHED, RELEASED, SLEEPING = 0, 64, 128

    def __init__(
        self, sock: socket.socket, segment: int, side: int, slots: SlotPlan, sizes: FrameSizes
    ) -> None:
        self.sock, self.side = sock, side
        engine = Lane(4096, ENGINE, slots, sizes)
        self.lanes = (engine, Lane(engine.end, WORKER, slots, sizes))
        assert self.lanes[1].end == shm_segment_bytes(slots, sizes)
        self.memory = mmap.mmap(segment, self.lanes[1].end)

    def word(self, lane: int, what: int) -> int:
        at = 192 * lane + what
        return int.from_bytes(self.memory[at : at + 4], "little")

    def set_word(self, lane: int, what: int, value: int) -> None:
        at = 192 * lane + what
        self.memory[at : at + 4] = (value % (1 << 32)).to_bytes(4, "little")

    def write(self, head: bytes, payload: bytes = b"", *, slot: int | None = None) -> None:
        """Puts a frame where it belongs without publishing it; `slot`: a lie about its place."""
        lane = self.lanes[self.side]
        kind = int.from_bytes(head[4:6], "little")
        if slot is None:
            slot = lane.take_slot(kind, len(payload))
            at = lane.place(kind, slot)
            self.memory[at : at + len(payload)] = payload
        at = lane.here()
        self.memory[at : at + ENTRY_BYTES] = head + slot.to_bytes(4, "little") + bytes(60)
        lane.advance()

    def publish(self) -> None:
        self.set_word(self.side, self.PUBLISHED, self.lanes[self.side].count)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it may have hung up
            self.sock.send(b"!")

    def send(self, head: bytes, payload: bytes = b"") -> None:
        self.write(head, payload)
        self.publish()

    def receive(self, *, release: bool = True) -> tuple[Frame, bytes]:
        side = 1 - self.side
        lane = self.lanes[side]
        deadline = time.monotonic() + 5.0
        while self.word(side, self.PUBLISHED) == lane.count:
            assert time.monotonic() < deadline, "no frame came"
            time.sleep(0.0005)
        at = lane.here()
        frame = Frame.decode(self.memory[at : at + HEADER_BYTES])
        slot = int.from_bytes(self.memory[at + HEADER_BYTES : at + HEADER_BYTES + 4], "little")
        at = lane.place(frame.kind, slot)
        payload = self.memory[at : at + frame.nbytes] if frame.nbytes else b""
        lane.advance()
        if release:
            self.set_word(side, self.RELEASED, lane.count)
            self.wake()
        return frame, payload

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.memory.close()


@dataclass
class Ends:
    """A connected pair on one plane: engine first. `peer(side)` plays a side by hand."""

    pair: tuple[socket.socket, socket.socket]
    planes: tuple[Any, Any]
    peer: Callable[[int], Any]


def stream_ends(slots: SlotPlan, sizes: FrameSizes) -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for sock in (ours, theirs):
        prepare_socket(sock)
    return Ends((ours, theirs), (None, None), lambda side: StreamPeer((ours, theirs)[side]))


def shm_ends(slots: SlotPlan, sizes: FrameSizes) -> Ends:
    pair = socket.socketpair()
    segment = make_segment(shm_segment_bytes(slots, sizes))
    try:
        planes = [ShmPlane(segment, slots, sizes, is_engine=side == ENGINE) for side in range(2)]
        peers = [ShmPeer(pair[side], segment, side, slots, sizes) for side in range(2)]
    finally:
        os.close(segment)
    return Ends(pair, (planes[0], planes[1]), lambda side: peers[side])


CARRIERS: dict[str, Callable[[SlotPlan, FrameSizes], Ends]] = {
    "tcp": stream_ends,
    "shm": shm_ends,
}
"""A plane that needs a device adds its row where there is one."""


@dataclass
class Contract:
    """A rig and one plane: `add` gives it workers."""

    rig: Any
    plane: str
    latency_slots: int = 8
    bulk_slots: int = 4
    chunk_head: int = 0  # bytes that the plane adds to a frame that fits into one message
    num_rounds: int = 12  # of the longest frames: more than there are slots

    def slots(self) -> SlotPlan:
        sizes = self.rig.sizes
        return SlotPlan(
            self.latency_slots, self.bulk_slots, sizes.latency_bytes, sizes.max_bulk_bytes
        )

    def ends(self) -> Ends:
        return CARRIERS[self.plane](self.slots(), self.rig.sizes)

    def add(self, **options: Any) -> Any:
        """Adds a worker that serves on a thread, or is called directly; returns its session."""
        if self.plane == "loopback":
            return self.rig.add_local(**options)
        ends = self.ends()
        return self.rig.add_stream(
            latency_slots=self.latency_slots,
            bulk_slots=self.bulk_slots,
            planes=ends.planes,
            pair=ends.pair,
            **options,
        )

    def add_raw(self, **options: Any) -> Any:
        """Adds a worker that the test plays by hand."""
        ends = self.ends()
        self.rig.add_raw(
            latency_slots=self.latency_slots,
            bulk_slots=self.bulk_slots,
            plane=ends.planes[ENGINE],
            pair=ends.pair,
            **options,
        )
        return ends.peer(WORKER)

    def serve(self, ends: Ends, session: Any = None) -> tuple[Any, Callable[[], Any]]:
        """Serves a session at the worker's end; returns it, and what waits for its end and says
        how it came."""
        session = session or type(self.rig.sessions[0])(self.rig.geometry)
        sock = ends.pair[WORKER]
        sock.settimeout(None)
        plane = DataPlane(sock.fileno(), EPOCH, self.slots(), session, plane=ends.planes[WORKER])
        ended: list[Any] = []

        def run() -> None:
            try:
                plane.run()
                ended.append(None)
            except FastDecodeError as error:
                ended.append(error)
            finally:
                sock.close()

        thread = threading.Thread(target=run)
        thread.start()

        def end() -> Any:
            thread.join(5)
            assert not thread.is_alive()
            return ended[0]

        return session, end


@pytest.fixture(params=["loopback", *CARRIERS])
def contract(request: pytest.FixtureRequest, make_rig: Callable[..., Any]) -> Iterator[Any]:
    """Returns a function that makes a contract on this plane."""
    return lambda geometry=None, *, timeout_s=5.0, **slots: Contract(
        make_rig(geometry, timeout_s=timeout_s), request.param, **slots
    )


@pytest.fixture(params=list(CARRIERS))
def connected(request: pytest.FixtureRequest, make_rig: Callable[..., Any]) -> Any:
    """The same for planes with a peer that can lie, fall silent or die."""
    return lambda geometry=None, *, timeout_s=5.0, **slots: Contract(
        make_rig(geometry, timeout_s=timeout_s), request.param, **slots
    )


@pytest.fixture
def shared(make_rig: Callable[..., Any]) -> Any:
    """The same for shared memory."""
    return lambda geometry=None, *, timeout_s=5.0, **slots: Contract(
        make_rig(geometry, timeout_s=timeout_s), "shm", **slots
    )
