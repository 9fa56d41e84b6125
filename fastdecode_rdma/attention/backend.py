"""The engine's side of attention: all workers behind one object, one C call per layer.

Row buffers: per decode table one send and one receive buffer at a fixed address, long enough for
max_rows rows of the widest layer. A message's rows lie packed at the layer's own width from the
base address on; a worker's rows are a contiguous range of them, decided once in `begin_step`.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fastdecode_rdma.config import NUM_DECODE_TABLES, AttentionGeometry
from fastdecode_rdma.errors import ConfigError, WorkerLostError
from fastdecode_rdma.transport._pump import Pump
from fastdecode_rdma.transport.base import FrameSizes, PortTimeout, Transport
from fastdecode_rdma.transport.pinned import Pins
from fastdecode_rdma.wire.frame import (
    FrameKind,
    pack_fork,
    pack_handles,
    pack_import,
    pack_range,
)

_NUMPY_DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""numpy has no bfloat16: its rows are raw 16-bit words, to be viewed by whoever computes."""


@dataclass(frozen=True)
class WorkerInfo:
    """What is known of a worker. `capacity_bytes` is its whole KV limit, shared by its engines;
    `fallback_reason` says why better planes than `transport` are not used, where one was free to
    choose, `transport_detail` over what it goes where there is more to say; `pinned` and
    `gpudirect` whether a GPU maps the row buffers and an adapter the GPU's memory, or why not."""

    name: str
    capacity_bytes: int
    num_threads: int
    isa: str
    transport: str
    block_tokens: int
    seg_tokens: int
    alive: bool = True
    fallback_reason: str = ""
    transport_detail: str = ""
    pinned: str = ""
    gpudirect: str = ""


class WorkerLink(ABC):
    """A worker that an engine has opened a session on."""

    transport: Transport
    info: WorkerInfo

    @abstractmethod
    def on_lost(self, tell: Callable[[str], None]) -> None:
        """`tell(reason)` is called once, on any thread, when the worker falls silent or leaves."""

    @abstractmethod
    def delay_reason(self, waited_s: float) -> str:
        """Says what is known of an answer that did not come in `waited_s`: whether the worker is
        busy, stuck, or was never asked; nothing where that is not known."""

    @abstractmethod
    def close(self) -> None:
        """Ends the session. Idempotent, bounded, never raises with a dead peer."""


class AttentionBackend:
    """Drives the workers of one engine; used by the engine's thread only.

    A worker that is lost, or owes an answer for longer than `timeout_s`, stays lost:
    `WorkerLostError` names it by its number, the others go on, and the step can be begun again
    under a new number without it. The backend owns the workers and closes them.
    """

    def __init__(
        self,
        workers: Sequence[WorkerLink],
        geometry: AttentionGeometry,
        *,
        timeout_s: float = 60.0,
        pins: Pins | None = None,
    ) -> None:
        """`pins`: of the GPU that computes the rows; None: none does."""
        if not workers:
            raise ConfigError("an engine needs at least one attention worker")
        self.geometry = geometry
        self.pins = Pins() if pins is None else pins
        self._timeout_s = timeout_s
        self._pump = Pump(FrameSizes.of(geometry), timeout_s=timeout_s)
        self._workers: list[WorkerLink] = []
        self._closed = False
        self._numbering = threading.Lock()  # which link a number stands for
        dtype = _NUMPY_DTYPES[geometry.wire_dtype]
        rows, tables = geometry.max_rows, range(NUM_DECODE_TABLES)
        self.send_rows = [_pages((rows, geometry.max_row_width), dtype) for _ in tables]
        self.recv_rows = [_pages((rows, geometry.max_out_width), dtype) for _ in tables]
        self.row_status = [_pages((rows,), np.uint8) for _ in tables]
        for table in tables:
            buffers = (self.send_rows[table], self.recv_rows[table], self.row_status[table])
            send, recv, status = (buffer.ctypes.data for buffer in buffers)
            for buffer in buffers:
                self.pins.pin(buffer.ctypes.data, buffer.nbytes)
            self._pump.set_buffers(table, send=send, recv=recv, status=status, owner=buffers)
        for worker in workers:
            self.add_worker(worker)

    def add_worker(self, worker: WorkerLink) -> int:
        """Adds an opened worker; returns its number, which is the one it had if it was lost before.
        Its counters then go on, and nothing is left of the old session."""
        for number, link in enumerate(self._workers):
            if link.info.name == worker.info.name and self._pump.is_lost(number):
                link.close()  # now, as to close is to mark the number lost
        with self._numbering:
            index = worker.transport.attach(self._pump)
            self._workers[index : index + 1] = [worker]
        worker.on_lost(partial(self._mark_lost, index, worker))
        return index

    def _mark_lost(self, index: int, worker: WorkerLink, reason: str) -> None:
        """Called by any thread; late news of an old session says nothing of the new one."""
        with self._numbering:
            if self._workers[index] is worker:
                self._pump.mark_lost(index, reason)

    @property
    def num_workers(self) -> int:
        """Different workers ever added, lost ones included."""
        return len(self._workers)

    # -- steps

    def begin_step(self, table: int, step: int, assignments: list[tuple[int, np.ndarray]]) -> None:
        """Begins a step. `assignments`: (worker number, entries of config.ENTRY_DTYPE), a worker at
        most once; rows lie in this order. Does not wait for the workers' answers.

        Raises:
            WorkerLostError: the step is aborted on all workers.
            LocalProtocolError: too many rows, or a step number that the table had already.
        """
        try:
            self._pump.begin(table, step, assignments)
        except PortTimeout as late:
            self._lose(late)

    def exchange(self, table: int, layer: int) -> None:
        """Sends the rows of one layer and waits for the attention outputs, in one call.

        Raises:
            WorkerLostError, StepError: they name the worker; the step is aborted on all workers.
            LocalProtocolError: no step is under way on this table.
        """
        try:
            self._pump.exchange(table, layer)
        except PortTimeout as late:
            self._lose(late)

    def submit(self, table: int, layer: int) -> None:
        """Sends the rows of one layer; they must not change before `collect`. Never waits.

        Raises: as exchange.
        """
        self._pump.submit(table, layer)

    def collect(self, table: int, layer: int) -> None:
        """Waits for the outputs of the layer submitted last.

        Raises: as exchange.
        """
        try:
            self._pump.collect(table, layer)
        except PortTimeout as late:
            self._lose(late)

    def abort(self, table: int) -> None:
        """Gives up the step of a table on all workers, in whatever state it is. Never waits."""
        self._pump.abort(table)

    def wait_ready(self, worker: int, table: int) -> None:
        """Waits until a worker has accepted the step begun last.

        Raises: as exchange; StepError with CACHE_FULL when the worker has no room.
        """
        try:
            self._pump.wait_ready(worker, table)
        except PortTimeout as late:
            self._lose(late)

    def store_kv(
        self,
        worker: int,
        table: int,
        layer: int,
        entry: int,
        offset: int,
        k_ptr: int,
        v_ptr: int,
        count: int,
    ) -> None:
        """Streams `count` k rows and v rows ([count, Hkv*D] of the wire dtype, contiguous, by
        address) to positions kv_len_before + offset + i of an upload entry. Credits are waited for;
        the rows are no longer read when this returns.

        Raises: as exchange.
        """
        try:
            self._pump.store(worker, table, layer, entry, offset, k_ptr, v_ptr, count)
        except PortTimeout as late:
            self._lose(late)

    # -- sequences

    def free(self, worker: int, handles: Sequence[int]) -> None:
        """Frees sequences on a worker, behind all that was sent before.

        Raises: as exchange.
        """
        self._post(worker, FrameKind.FREE, pack_handles(handles))

    def fork(self, worker: int, src: int, dst: int, length: int) -> None:
        """Makes `dst` share the first `length` tokens of `src`.

        Raises: as exchange; a refusal by a remote worker is raised by the next call that waits.
        """
        self._post(worker, FrameKind.FORK, pack_fork(src, dst, length))

    def export_range(self, worker: int, handle: int, start: int, stop: int) -> bytes:
        """Returns tokens start .. stop of a sequence in stored form.

        Raises: as exchange.
        """
        return self._request(worker, FrameKind.EXPORT, pack_range(handle, start, stop))

    def import_range(self, worker: int, handle: int, start: int, data: bytes) -> None:
        """Puts exported tokens into a sequence, from token `start` on.

        Raises: as exchange.
        """
        self._request(worker, FrameKind.IMPORT, pack_import(handle, start, data))

    def _post(self, worker: int, kind: FrameKind, payload: bytes) -> None:
        self._check_alive(worker)
        try:
            self._workers[worker].transport.post(kind, payload)
        except PortTimeout as late:
            self._lose(late)

    def _request(self, worker: int, kind: FrameKind, payload: bytes) -> bytes:
        self._check_alive(worker)
        try:
            return self._workers[worker].transport.request(kind, payload)
        except PortTimeout as late:
            return self._lose(late)

    def is_embedded(self, worker: int) -> bool:
        """Says whether a worker lives in this process."""
        return self._workers[worker].info.transport == "loopback"

    def give_up(self, worker: int, reason: str) -> None:
        """Treats a worker as lost from now on."""
        self._pump.mark_lost(worker, reason)

    def _check_alive(self, worker: int) -> None:
        if self._closed:
            raise WorkerLostError(
                self._workers[worker].info.name, "the engine is closed", worker_index=worker
            )

    def _lose(self, late: PortTimeout) -> bytes:
        """A worker that is late once would be late again: it is given up, as a dead one is."""
        index = late.worker_index
        name = self._workers[index].info.name
        reason = str(late).removeprefix(f"attention worker {name} ")
        if why := self._workers[index].delay_reason(self._timeout_s):
            reason = f"{reason}; {why}"
        self._pump.mark_lost(index, reason)
        raise WorkerLostError(name, reason, worker_index=index) from late

    # -- state

    def info(self, worker: int) -> WorkerInfo:
        """Returns what is known of a worker, and whether it is alive."""
        known = self._workers[worker].info
        return replace(
            known,
            alive=not self._closed and not self._pump.is_lost(worker),
            pinned=self.pins.state,
            gpudirect=self.pins.gpudirect(known.transport),
        )

    def infos(self) -> list[WorkerInfo]:
        """Returns what is known of all workers, by number."""
        return [self.info(worker) for worker in range(len(self._workers))]

    def stats(self) -> list[dict[str, int]]:
        """Returns the counters of every worker (transport._pump.Pump.stats)."""
        return [self._pump.stats(worker) for worker in range(len(self._workers))]

    def kernel_s(self, worker: int, table: int) -> float:
        """Returns what a worker's kernel took for the layer that `collect` waited for last, 0 if it
        had no rows in it."""
        return self._pump.kernel_ns(worker, table) / 1e9

    def close(self) -> None:
        """Ends all sessions. Idempotent, bounded, never raises with dead peers."""
        if self._closed:
            return
        self._closed = True
        self._pump.close()
        for worker in self._workers:
            worker.close()
        self.pins.release()  # nothing is under way any more; the pages go with their arrays


def _pages(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Returns zeros on pages of their own: one registration for verbs, at an address that stays."""
    count = int(np.prod(shape))
    pages = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
    return np.frombuffer(pages, dtype=dtype, count=count).reshape(shape)
