"""A data plane without a kernel: a fake session whose outputs say which rows made them."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from fastdecode_rdma.transport._pump import Pump

from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import CacheFullError, FastDecodeError
from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.transport.serve import DataPlane
from fastdecode_rdma.wire.messages import SlotPlan

EPOCH = 0x1122334455667788
ATTEND = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
STORE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def floats(address: int, *shape: int) -> np.ndarray:
    """A view of fp32 values at an address."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(shape)


def expected_output(rows: np.ndarray, layer: int, out_width: int) -> np.ndarray:
    """What the fake kernel returns for [q | k | v] rows."""
    return rows[:, :out_width] * 2 + rows[:, -1:] + layer


@dataclass
class FakeSession:
    """Stands in for worker.session.AttentionSession; `fail_at` makes one layer fail with a code."""

    geometry: AttentionGeometry
    delay_s: float = 0.0
    full: bool = False
    fail_at: dict[int, int] = field(default_factory=dict)
    begun: list[tuple[int, int, list[tuple[int, ...]]]] = field(default_factory=list)
    attended: list[tuple[int, int, int]] = field(default_factory=list)
    stored: list[tuple[int, int, int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def begin_step(self, table: int, step: int, entries: np.ndarray) -> None:
        assert entries.dtype == ENTRY_DTYPE
        self.begun.append((table, step, [tuple(entry) for entry in entries.tolist()]))
        if self.full:
            raise CacheFullError("no room: 7 bytes needed, 3 free")

    def free(self, handles: list[int]) -> None:
        self.calls.append(("free", list(handles)))

    def fork(self, src: int, dst: int, length: int) -> None:
        self.calls.append(("fork", src, dst, length))
        if src == 404:
            raise FastDecodeError("unknown sequence 404")

    def export_range(self, handle: int, start: int, stop: int) -> bytes:
        self.calls.append(("export", handle, start, stop))
        if handle == 404:
            raise FastDecodeError("unknown sequence 404")
        return bytes(range(256)) * (stop - start)

    def import_range(self, handle: int, start: int, data: bytes) -> None:
        self.calls.append(("import", handle, start, len(data), data[:4]))

    def _attend(
        self, ctx: int, table: int, layer: int, rows: int, qkv: int, out: int, status: int
    ) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        self.attended.append((table, layer, rows))
        if layer in self.fail_at:
            return self.fail_at[layer]
        width, out_width = self.geometry.row_width(layer), self.geometry.out_width(layer)
        sent = floats(qkv, rows, width)
        floats(out, rows, out_width)[:] = expected_output(sent, layer, out_width)
        flags = (ctypes.c_uint8 * rows).from_address(status)
        flags[:] = [int(not np.isfinite(row).all()) for row in sent]
        return 0

    def _store(
        self, ctx: int, table: int, layer: int, entry: int, offset: int, count: int, k: int, v: int
    ) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        group = self.geometry.group_of(layer)
        shape = (count, group.num_kv_heads * group.head_dim)
        self.stored.append(
            (table, layer, entry, offset, floats(k, *shape).copy(), floats(v, *shape).copy())
        )
        return self.fail_at.get(layer, 0)

    def native(self) -> SimpleNamespace:
        attend, store = ATTEND(self._attend), STORE(self._store)
        return SimpleNamespace(
            attend_addr=ctypes.cast(attend, ctypes.c_void_p).value,
            store_addr=ctypes.cast(store, ctypes.c_void_p).value,
            ctx_addr=0,
            keep=(attend, store),
        )


class Rig:
    """A pump with row buffers and any number of fake workers, each over a socket pair or local."""

    def __init__(self, geometry: AttentionGeometry, *, timeout_s: float = 5.0) -> None:
        self.geometry = geometry
        self.sizes = FrameSizes.of(geometry)
        self.pump = Pump(self.sizes, timeout_s=timeout_s)
        self.sessions: list[FakeSession] = []
        self.peers: list[socket.socket | None] = []
        self.planes: list[DataPlane | None] = []
        self.threads: list[threading.Thread] = []
        self.ends: dict[int, BaseException | None] = {}
        self.send, self.recv, self.status = [], [], []
        for table in range(2):
            self.send.append(np.zeros((geometry.max_rows, geometry.max_row_width), np.float32))
            self.recv.append(np.zeros((geometry.max_rows, geometry.max_out_width), np.float32))
            self.status.append(np.zeros(geometry.max_rows, np.uint8))
            buffers = (self.send[table], self.recv[table], self.status[table])
            send, recv, status = (buffer.ctypes.data for buffer in buffers)
            self.pump.set_buffers(table, send=send, recv=recv, status=status, owner=buffers)

    def add_local(self, **options: object) -> FakeSession:
        """Adds a worker that the pump calls directly."""
        session = FakeSession(self.geometry, **options)
        entry = session.native()
        self.pump.add_local(
            f"local{len(self.sessions)}",
            attend=entry.attend_addr,
            store=entry.store_addr,
            ctx=entry.ctx_addr,
            begin=session.begin_step,
            owner=(session, entry),
        )
        self.sessions.append(session)
        self.peers.append(None)
        self.planes.append(None)
        return session

    def add_raw(
        self,
        *,
        epoch: int = EPOCH,
        latency_slots: int = 8,
        bulk_slots: int = 4,
        plane=None,
        pair=None,
    ) -> socket.socket:
        """Adds a port whose other end the test plays itself; `pair`: the connected sockets."""
        ours, theirs = pair or socket.socketpair()
        theirs.settimeout(5.0)
        self.pump.add_stream(
            f"raw{len(self.sessions)}",
            ours.detach(),
            epoch=epoch,
            latency_slots=latency_slots,
            bulk_slots=bulk_slots,
            plane=plane,
        )
        self.sessions.append(FakeSession(self.geometry))
        self.peers.append(theirs)
        self.planes.append(None)
        return theirs

    def add_stream(
        self,
        *,
        latency_slots: int = 8,
        bulk_slots: int = 4,
        worker_epoch: int = EPOCH,
        planes=(None, None),
        pair=None,
        **options,
    ) -> FakeSession:
        """Adds a worker that serves on a thread; `planes`: the engine's and the worker's."""
        index = len(self.sessions)
        theirs = self.add_raw(
            latency_slots=latency_slots, bulk_slots=bulk_slots, plane=planes[0], pair=pair
        )
        theirs.settimeout(None)
        session = self.sessions[index] = FakeSession(self.geometry, **options)
        slots = SlotPlan(
            latency_slots, bulk_slots, self.sizes.latency_bytes, self.sizes.max_bulk_bytes
        )
        plane = self.planes[index] = DataPlane(
            theirs.fileno(), worker_epoch, slots, session, plane=planes[1]
        )

        def serve() -> None:
            try:
                plane.run()
                self.ends[index] = None
            except FastDecodeError as error:
                self.ends[index] = error
            finally:
                theirs.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.threads.append(thread)
        return session

    def begin(self, step: int, rows: list[int], *, table: int = 0) -> None:
        """Begins a step with one decode entry per row on every worker; rows[w] rows on worker w."""
        assignments = []
        for worker, count in enumerate(rows):
            entries = np.zeros(count, ENTRY_DTYPE)
            entries["handle"] = np.arange(count) + 100 * worker
            entries["kv_len_before"] = step
            entries["q_len"] = 1
            assignments.append((worker, entries))
        self.pump.begin(table, step, assignments)

    def begin_upload(self, step: int, tokens: int, *, worker: int = 0, table: int = 2) -> None:
        """Begins an upload of one sequence."""
        entries = np.array([(7, 0, tokens, 1)], ENTRY_DTYPE)
        self.pump.begin(table, step, [(worker, entries)])

    def fill(self, num_rows: int, layer: int, *, table: int = 0, seed: int = 0) -> np.ndarray:
        """Puts random rows of a layer into the send buffer; returns what should come back."""
        width = self.geometry.row_width(layer)
        rows = np.random.default_rng((seed, layer, table)).standard_normal((num_rows, width))
        packed = self.send[table].reshape(-1)[: num_rows * width].reshape(num_rows, width)
        packed[:] = rows
        return expected_output(packed, layer, self.geometry.out_width(layer))

    def received(self, num_rows: int, layer: int, *, table: int = 0) -> np.ndarray:
        """The outputs of a layer in the receive buffer."""
        width = self.geometry.out_width(layer)
        return self.recv[table].reshape(-1)[: num_rows * width].reshape(num_rows, width).copy()

    def run_step(self, step: int, rows: list[int], *, table: int = 0) -> None:
        """Runs a whole step and checks every layer."""
        self.begin(step, rows, table=table)
        for layer in range(self.geometry.num_layers):
            expected = self.fill(sum(rows), layer, table=table, seed=step)
            self.pump.exchange(table, layer)
            np.testing.assert_array_equal(self.received(sum(rows), layer, table=table), expected)

    def close(self) -> None:
        self.pump.close()
        for peer in self.peers:
            if peer is not None and peer.fileno() >= 0:
                with_suppress(lambda peer=peer: peer.shutdown(socket.SHUT_RDWR))
        for thread in self.threads:
            thread.join(5.0)
            assert not thread.is_alive()
        self.planes.clear()  # each ends with its last reference
        self.ends.clear()  # which an error's frames may hold
        for peer in self.peers:
            if peer is not None:
                peer.close()


def with_suppress(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError:
        return


def make_geometry(*, max_rows: int = 24, num_layers: int = 4) -> AttentionGeometry:
    """Two kinds of layers in turn, so that every layer's rows have another width than the last."""
    even = KVGroup(tuple(range(0, num_layers, 2)), 4, 2, 16)
    odd = KVGroup(tuple(range(1, num_layers, 2)), 2, 1, 8, window=4)
    return AttentionGeometry((even, odd), 0.25, "fp32", max_rows, 4096)


@pytest.fixture
def geometry() -> AttentionGeometry:
    return make_geometry()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(geometry: AttentionGeometry | None = None, **options: object) -> Rig:
        rigs.append(Rig(geometry or make_geometry(), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def new_geometry() -> Callable[..., AttentionGeometry]:
    return make_geometry


@pytest.fixture
def epoch() -> int:
    return EPOCH
