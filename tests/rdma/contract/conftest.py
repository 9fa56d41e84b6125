"""The contract of data planes (tests/transport/planes), over real queue pairs of each binding."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastdecode_rdma.transport._rdma import CHUNK_HEAD_BYTES, SENT

from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.transport.rdma_bindings import find_binding
from fastdecode_rdma.transport.rdma_endpoint import Endpoint
from fastdecode_rdma.transport.rdma_limits import NUM_SLOTS, SLOT_BYTES
from fastdecode_rdma.wire.frame import HEADER_BYTES, Frame
from fastdecode_rdma.wire.messages import SlotPlan

PATIENCE_S = 20.0  # the guest emulates its processor
EVERY_BINDING = (
    "rows_of_every_number", "cold_payloads_of_every_length", "arrive_in_order", "slow_worker_holds",
    "planes_mix", "hangs_up_between", "silent_worker", "engine_that_ends", "comes_back",
)  # fmt: skip
NO_SLOT, SEQUENCE = 255, 0xFFFFFF


def _fixtures_of_planes() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "transport/planes/conftest.py"
    spec = importlib.util.spec_from_file_location("rdma_planes_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_planes = _fixtures_of_planes()


class QueuePeer:
    """One end of a queue pair, by hand: chunks, immediate values and credits written down again."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint) -> None:
        self.sock, self.endpoint = sock, endpoint
        self.queue, self.memory = endpoint.queue, endpoint.memory
        self.chunks_sent = self.credited = self.posted = self.completed = 0
        self.consumed = self.told = 0
        self.arrived: deque[int] = deque()  # bytes of the chunks that nobody has taken
        self.is_dead = False  # it hung up: what is sent goes nowhere

    def send(self, head: bytes, payload: bytes = b"") -> None:
        data, room = head + payload, SLOT_BYTES - CHUNK_HEAD_BYTES
        for at in range(0, len(data), room):
            self._until(lambda: self.chunks_sent - self.credited < NUM_SLOTS)
            slot = self.chunks_sent % NUM_SLOTS
            part = data[at : at + room]
            chunk = self.consumed.to_bytes(CHUNK_HEAD_BYTES, "little") + part
            place = slot * SLOT_BYTES
            self.memory[place : place + len(chunk)] = chunk
            self.told = self.consumed
            self._write(slot, len(chunk), slot << 24 | (self.chunks_sent & SEQUENCE))
            self.chunks_sent += 1
        self._until(lambda: self.completed == self.posted)

    def receive(self) -> tuple[Frame, bytes]:
        data = self._take_chunk()
        frame = Frame.decode(data[:HEADER_BYTES])
        while len(data) < HEADER_BYTES + frame.nbytes:
            data += self._take_chunk()
        return frame, data[HEADER_BYTES:]

    def _take_chunk(self) -> bytes:
        self._until(lambda: bool(self.arrived))
        assert self.arrived, "the pump hung up"
        place = (NUM_SLOTS + self.consumed % NUM_SLOTS) * SLOT_BYTES
        data = self.memory[place + CHUNK_HEAD_BYTES : place + self.arrived.popleft()]
        self.consumed += 1
        self.queue.receive(1)
        if self.consumed - self.told >= NUM_SLOTS // 2:
            self.told = self.consumed
            self._write(0, 0, NO_SLOT << 24 | (self.consumed & SEQUENCE))
        return data

    def _write(self, slot: int, nbytes: int, imm: int) -> None:
        self.posted += 1
        self.queue.write(slot, nbytes, imm, self.posted)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not done() and not self.is_dead:
            assert time.monotonic() < deadline_s, "nothing came"
            for kind, status, imm, nbytes, count in self.queue.poll(16):
                self._completed(kind, status, imm, nbytes, count)

    def _completed(self, kind: int, status: int, imm: int, nbytes: int, count: int) -> None:
        if status:
            self.is_dead = True
        elif kind == SENT:
            self.completed = count
        elif imm >> 24 == NO_SLOT:
            self.credited = imm & SEQUENCE
            self.queue.receive(1)
        else:
            place = (NUM_SLOTS + (imm >> 24)) * SLOT_BYTES
            self.credited = int.from_bytes(self.memory[place : place + 4], "little")
            self.arrived.append(nbytes)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.endpoint.close()


class PlanesWhenAsked:
    """Planes by side: a side that is played by hand has none, as a plane owns its queue pair."""

    def __init__(self, endpoints: tuple[Endpoint, Endpoint]) -> None:
        self._endpoints = endpoints

    def __getitem__(self, side: int) -> Any:
        return self._endpoints[side].slots().plane()


@pytest.fixture(params=["native", "pyverbs", "ibverbs"])
def connected(
    request: pytest.FixtureRequest,
    make_endpoints: Callable[..., Any],
    make_rig: Callable[..., Any],  # the rigs end first
) -> Callable[..., Any]:
    """Returns a function that makes a contract on this plane; see tests/transport/planes."""
    binding = find_binding({"FASTDECODE_VERBS": request.param})

    def ends(slots: SlotPlan, sizes: FrameSizes) -> Any:
        pair = socket.socketpair()
        endpoints = make_endpoints(binding, binding)
        peers: dict[int, QueuePeer] = {}

        def peer(side: int) -> QueuePeer:
            return peers.setdefault(side, QueuePeer(pair[side], endpoints[side]))

        return _planes.Ends(pair, PlanesWhenAsked(endpoints), peer)

    _planes.CARRIERS["rdma"] = ends
    return lambda geometry=None, *, timeout_s=5.0, **slots: _planes.Contract(
        make_rig(geometry, timeout_s=timeout_s),
        "rdma",
        chunk_head=CHUNK_HEAD_BYTES,
        num_rounds=3,
        **slots,
    )


@pytest.fixture
def epoch() -> int:
    return _planes.EPOCH


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of bindings in Python, which are slower by far, only what goes through their calls: the rest
    is decided above the queue pair, and with the first binding."""
    here = Path(__file__).resolve().parent
    items[:] = [
        item
        for item in items
        if here not in item.path.parents
        or "[native" in item.name
        or any(words in item.name for words in EVERY_BINDING)
    ]


@pytest.fixture
def contract(connected: Callable[..., Any]) -> Callable[..., Any]:
    return connected
