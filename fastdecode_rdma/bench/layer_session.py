"""Sessions on several workers that exchange the rows of one decode layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.attention.remote import Opening, RemoteWorker
from fastdecode_rdma.config import (
    DTYPE_BYTES,
    ENTRY_DTYPE,
    ENTRY_UPLOAD,
    AttentionGeometry,
)
from fastdecode_rdma.transport._pump import Pump, bench_exchange
from fastdecode_rdma.transport.address import parse_url
from fastdecode_rdma.transport.base import FrameSizes, plan_slots
from fastdecode_rdma.wire.frame import FrameKind, pack_handles
from fastdecode_rdma.wire.messages import OpenBench

ROWS, UPLOAD = 0, 2
"""Step tables: of attention, and of K/V that is written before."""


@dataclass(frozen=True)
class Exchanges:
    """Nanoseconds of many exchanges: until all rows had left, until all replies were in; of each
    worker until its reply was in, and of its kernel. `pump_ns`: of our own code per message."""

    scatter: np.ndarray  # [N]
    total: np.ndarray  # [N]
    arrived: np.ndarray  # [N, workers]
    kernel: np.ndarray  # [N, workers]
    pump_ns: float
    bytes_out: int
    bytes_in: int


def bench_opening(
    geometry: AttentionGeometry, url: str, *, force: bool
) -> Callable[[str], Opening]:
    """Returns what to ask a peer for: frames without a kernel."""
    bulk_bytes = parse_url(url).options.get("bulk_bytes")
    slots = plan_slots(geometry, bulk_bytes=None if bulk_bytes is None else int(bulk_bytes))
    return lambda plane: OpenBench(geometry, slots, plane, force)


class LayerSession:
    """One pump over all workers. `with_kernel`: sessions that hold K/V of `length` tokens a
    sequence; else replies come at once."""

    def __init__(
        self,
        urls: Sequence[str],
        geometry: AttentionGeometry,
        *,
        with_kernel: bool,
        token: bytes | None,
        force: bool,
        timeout_s: float,
    ) -> None:
        """Raises: as RemoteWorker.connect."""
        self.geometry = geometry
        self.with_kernel = with_kernel
        self._pump = Pump(FrameSizes.of(geometry), timeout_s=timeout_s)
        self.workers: list[RemoteWorker] = []
        self._step = 0
        self._held: list[tuple[int, np.ndarray]] = []
        heartbeats = Heartbeats()
        try:
            for index, url in enumerate(urls):
                opening = None if with_kernel else bench_opening(geometry, url, force=force)
                worker = RemoteWorker.connect(
                    url, geometry, heartbeats=heartbeats, token=token, worker_index=index,
                    opening=opening,
                )  # fmt: skip
                self.workers.append(worker)
                port = worker.transport.attach(self._pump)
                worker.on_lost(lambda why, port=port: self._pump.mark_lost(port, why))
        except BaseException:
            self.close()
            raise
        self._buffers = self._make_buffers()

    def _make_buffers(self) -> tuple[np.ndarray, ...]:
        """Rows of ordinary size: neither zeros nor what would overflow."""
        item = DTYPE_BYTES[self.geometry.wire_dtype]
        values = np.random.default_rng(0).standard_normal(
            (self.geometry.max_rows, self.geometry.max_row_width), np.float32
        )
        send = as_wire(values, self.geometry.wire_dtype)
        recv = np.zeros((len(send), self.geometry.max_out_width * item), np.uint8)
        status = np.zeros(len(send), np.uint8)
        buffers = (send, recv, status)
        addresses = dict(
            zip(("send", "recv", "status"), (b.ctypes.data for b in buffers), strict=True)
        )
        self._pump.set_buffers(ROWS, owner=buffers, **addresses)
        return buffers

    def begin(self, batch: int, length: int) -> list[int]:
        """Begins a step of one token of each of `batch` sequences that hold `length - 1`, spread
        evenly; returns rows per worker.

        Raises:
            WorkerError: a worker refused, as for want of memory, or was lost.
        """
        count = len(self.workers)
        rows = [batch // count + (i < batch % count) for i in range(count)]
        first = [1 + sum(rows[:i]) for i in range(count)]
        for port, handles in self._held:
            self._pump.post(port, FrameKind.FREE, payload=pack_handles(handles.tolist()))
        if self.with_kernel and length > 1:
            self._upload(rows, first, length - 1)
        self._step += 1
        steps = _steps(rows, first, kv_len_before=length - 1, q_len=1)
        self._held = [(port, entries["handle"].copy()) for port, entries in steps]
        self._pump.begin(ROWS, self._step, steps)
        for port, _ in steps:
            self._pump.wait_ready(port, ROWS)
        return rows

    def _upload(self, rows: Sequence[int], first: Sequence[int], tokens: int) -> None:
        group = self.geometry.groups[0]
        width = group.num_kv_heads * group.head_dim
        values = np.random.default_rng(1).standard_normal((2, tokens, width), np.float32)
        k, v = (as_wire(half, self.geometry.wire_dtype) for half in values)
        self._step += 1
        steps = _steps(rows, first, q_len=tokens, flags=ENTRY_UPLOAD)
        self._pump.begin(UPLOAD, self._step, steps)
        for port, num in enumerate(rows):
            for entry in range(num):
                for layer in range(self.geometry.num_layers):
                    self._pump.store(
                        port, UPLOAD, layer, entry, 0, k.ctypes.data, v.ctypes.data, tokens
                    )

    def upload_seconds(self, nbytes: int) -> float:
        """Streams about so many bytes of K/V rows to the first worker; returns the time until it
        has taken them all."""
        group = self.geometry.groups[0]
        row_bytes = group.num_kv_heads * group.head_dim * DTYPE_BYTES[self.geometry.wire_dtype]
        tokens = max(1, nbytes // (2 * row_bytes))
        rows = np.zeros((2, tokens, row_bytes), np.uint8)
        self._step += 2
        start_s = time.perf_counter()
        self._pump.begin(UPLOAD, self._step, _steps([1], [1], q_len=tokens, flags=ENTRY_UPLOAD))
        self._pump.store(0, UPLOAD, 0, 0, 0, rows[0].ctypes.data, rows[1].ctypes.data, tokens)
        self._pump.begin(UPLOAD, self._step + 1, _steps([1], [1], flags=ENTRY_UPLOAD))
        self._pump.wait_ready(0, UPLOAD)  # frames are served in order
        self._step += 1
        return time.perf_counter() - start_s

    def exchange(self, iterations: int, rows: Sequence[int]) -> Exchanges:
        """Runs one layer's exchange so often, the layers in turn, and times its parts.

        Raises:
            WorkerError: a worker was lost or refused.
        """
        count = len(self.workers)
        out = np.zeros((iterations, 2 + 2 * count), np.uint64)
        before = [self._pump.stats(port) for port in range(count)]
        for i in range(iterations):
            bench_exchange(self._pump, ROWS, i % self.geometry.num_layers, out[i : i + 1])
        after = [self._pump.stats(port) for port in range(count)]
        grown = {
            key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True))
            for key in ("pump_ns", "messages")
        }
        sizes = FrameSizes.of(self.geometry)
        busy = [port for port in range(count) if rows[port]]
        return Exchanges(
            out[:, 0], out[:, 1], out[:, 2:][:, busy], out[:, 2 + count :][:, busy],
            grown["pump_ns"] / max(1, grown["messages"]),
            sum(rows) * sizes.row_bytes[0], sum(rows) * (sizes.out_bytes[0] + 1),
        )  # fmt: skip

    def close(self) -> None:
        """Ends all sessions; idempotent."""
        for worker in self.workers:
            worker.close()
        self._pump.close()


def _steps(
    rows: Sequence[int], first: Sequence[int], **fields: int
) -> list[tuple[int, np.ndarray]]:
    """Step tables of the workers that have sequences, with the same in all lines."""
    steps = []
    for port, (start, num) in enumerate(zip(first, rows, strict=True)):
        entries = np.zeros(num, ENTRY_DTYPE)
        entries["handle"] = np.arange(start, start + num)
        for name, value in fields.items():
            entries[name] = value
        if num:
            steps.append((port, entries))
    return steps


def as_wire(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns float32 rows in the dtype of the wire; bf16 as uint16."""
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "fp16" else np.ascontiguousarray(values)


def warm_up(session: LayerSession, rows: Sequence[int], seconds: float) -> None:
    """Exchanges for a while."""
    end_s = time.monotonic() + seconds
    session.exchange(5, rows)
    while time.monotonic() < end_s:
        session.exchange(5, rows)
