"""What every transport offers, and the sizes that both ends of a data plane agree on.

The classic five calls of a slot transport (acquire, post, poll, release, close) are split by who
makes them. For the frames of every layer the pump makes them in C, and each has become implicit:
*acquire* is the row range of the table's send buffer that `Pump.begin` fixes for a whole step,
*post* is `Pump.submit`, *poll* is `Pump.collect`, which receives in place, and *release* is the
count of consumed frames in the next header. What Python calls is this:

    port = transport.attach(pump)      gives the pump the connection; hot frames run without Python
    transport.post(kind, payload)      one cold frame (FREE, FORK), behind everything sent before
    transport.request(kind, payload)   one cold frame and its reply (EXPORT, IMPORT)
    transport.close()                  idempotent, bounded

Memory: row buffers belong to the engine's backend, have fixed addresses, and may be overwritten
after `collect` of that table has returned or failed and the next `begin` has. Payloads of cold
frames belong to the caller and are no longer read when the call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastdecode_rdma.config import DTYPE_BYTES, ENTRY_DTYPE, AttentionGeometry, StepCode
from fastdecode_rdma.errors import (
    CacheFullError,
    ConfigError,
    ProtocolError,
    TransportError,
    TransportTimeout,
)
from fastdecode_rdma.wire.messages import SlotPlan

if TYPE_CHECKING:
    import socket

    from fastdecode_rdma.transport._pump import Plane, Pump

NUM_LATENCY_SLOTS = 8
"""Two mini-batches with a step table and a layer each, and room for FREE and FORK."""

NUM_BULK_SLOTS = 4
BULK_BYTES = 1 << 20
"""K/V rows of one frame: long enough to hide a frame's cost, short enough to stay in L2."""

COLD_BYTES = 16 << 20
"""Longest payload that carries no rows: step tables, exported and imported K/V."""

MAX_BUFFER_BYTES = 1 << 36
"""A worker refuses models whose row buffers could need more address space than this."""


class PlaneUnavailable(TransportError):
    """This data plane cannot be used between these two; another one may. Says why. `try_again`:
    there are more ways to set this one up."""

    def __init__(self, message: str, *, try_again: bool = False) -> None:
        super().__init__(message)
        self.try_again = try_again


@dataclass(frozen=True)
class Attempt:
    """Which worker of its engine a plane is set up for, and why earlier attempts failed."""

    worker_index: int = 0
    failed: tuple[str, ...] = ()


class PortTimeout(TransportTimeout):
    """A worker did not answer in time; `worker_index` is its number."""

    def __init__(self, message: str, *, worker_index: int) -> None:
        super().__init__(message)
        self.worker_index = worker_index


class NativeEntry(Protocol):
    """The C entry points of an attention session, as addresses (cython/entry.h)."""

    attend_addr: int
    store_addr: int
    ctx_addr: int


class Session(Protocol):
    """What a data plane needs of worker.session.AttentionSession."""

    geometry: AttentionGeometry

    def begin_step(self, table: int, step: int, entries: np.ndarray) -> None: ...

    def free(self, handles: np.ndarray) -> None: ...

    def fork(self, src: int, dst: int, length: int) -> None: ...

    def export_range(self, handle: int, start: int, stop: int) -> bytes: ...

    def import_range(self, handle: int, start: int, data: bytes) -> None: ...

    def native(self) -> NativeEntry: ...


class PlaneHost(ABC):
    """A data plane besides TCP, as a worker offers it to engines. Callable from any thread."""

    name: str
    listener: socket.socket | None = None
    """Where data sockets of this plane come in; None: at the worker's TCP port."""

    @abstractmethod
    def offer(self) -> bytes:
        """Returns what an engine must know to use the plane."""

    def admit(self, sock: socket.socket) -> str | None:
        """Returns the name, for the log, of who came to `listener`; None to hang up."""
        return None

    @abstractmethod
    def accept(
        self, details: bytes, fd: int | None, slots: SlotPlan, sizes: FrameSizes
    ) -> tuple[Plane, bytes]:
        """Returns the worker's end of one connection, and what the engine must know of it. The
        engine has proved itself; `details` is its end, `fd` a descriptor that it sent along and
        that stays the caller's.

        Raises:
            TransportError: it cannot be set up; the engine is told why.
        """

    @abstractmethod
    def close(self) -> None:
        """Takes no more engines. Idempotent."""


class Transport(ABC):
    """One worker's data plane, seen from the engine. Used by one thread at a time."""

    scheme: str
    """The first part of its addresses."""

    @abstractmethod
    def attach(self, pump: Pump) -> int:
        """Hands the connection to the pump and returns its port number. Called once."""

    @abstractmethod
    def post(self, kind: int, payload: bytes) -> None:
        """Sends one cold frame; returns when it has left, not when the worker has served it.

        A refusal by the worker is reported by the next call that waits for it.

        Raises:
            WorkerLostError, PortTimeout, StepError
        """

    @abstractmethod
    def request(self, kind: int, payload: bytes) -> bytes:
        """Sends one cold frame and returns the payload of its reply.

        Raises:
            StepError: the worker refused it.
            WorkerLostError, PortTimeout: no reply came.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the connection. Idempotent, bounded, never raises with a dead peer."""


@dataclass(frozen=True)
class FrameSizes:
    """Bytes that frames of a model may have; both ends work them out of geometry and slots."""

    row_bytes: tuple[int, ...]  # [num_layers] one [q | k | v] row
    out_bytes: tuple[int, ...]  # [num_layers] one output row
    kv_bytes: tuple[int, ...]  # [num_layers] one k row
    max_rows: int
    max_bulk_bytes: int
    max_cold_bytes: int = COLD_BYTES

    @classmethod
    def of(cls, geometry: AttentionGeometry, *, bulk_bytes: int | None = None) -> FrameSizes:
        """Returns the sizes for a model; `bulk_bytes` is what the handshake agreed on."""
        item = DTYPE_BYTES[geometry.wire_dtype]
        groups = [geometry.group_of(layer) for layer in range(geometry.num_layers)]
        kv = tuple(group.num_kv_heads * group.head_dim * item for group in groups)
        return cls(
            row_bytes=tuple(group.row_width * item for group in groups),
            out_bytes=tuple(group.out_width * item for group in groups),
            kv_bytes=kv,
            max_rows=geometry.max_rows,
            max_bulk_bytes=max(BULK_BYTES, 2 * max(kv)) if bulk_bytes is None else bulk_bytes,
        )

    @property
    def latency_bytes(self) -> int:
        """The longest attention frame in either direction."""
        return self.max_rows * max(max(self.row_bytes), max(self.out_bytes) + 1)

    @property
    def buffer_bytes(self) -> int:
        """What a worker allocates for the frames of a session, besides its KV-cache."""
        return 2 * self.latency_bytes + self.max_bulk_bytes


def plan_slots(geometry: AttentionGeometry, *, bulk_bytes: int | None = None) -> SlotPlan:
    """Returns the slots that an engine asks a worker for; `bulk_bytes`: K/V rows of one frame,
    of which one fits in any case.

    Raises:
        ConfigError: they are longer than a frame may be.
    """
    sizes = FrameSizes.of(geometry)
    if bulk_bytes is not None:
        if bulk_bytes > COLD_BYTES:
            raise ConfigError(f"bulk_bytes must be at most {COLD_BYTES}, got {bulk_bytes}")
        sizes = FrameSizes.of(geometry, bulk_bytes=max(bulk_bytes, 2 * max(sizes.kv_bytes)))
    return SlotPlan(NUM_LATENCY_SLOTS, NUM_BULK_SLOTS, sizes.latency_bytes, sizes.max_bulk_bytes)


def check_slots(geometry: AttentionGeometry, plan: SlotPlan) -> SlotPlan:
    """Returns the slots that a worker grants: what was asked for, within bounds.

    Raises:
        ConfigError: the model's frames do not fit into them, or need too much memory.
    """
    sizes = FrameSizes.of(geometry, bulk_bytes=plan.bulk_nbytes)
    if not (1 <= plan.num_latency <= 256 and 1 <= plan.num_bulk <= 256):
        raise ConfigError(
            f"a session needs 1 to 256 slots of each class, got {plan.num_latency} and "
            f"{plan.num_bulk}"
        )
    if plan.latency_nbytes < sizes.latency_bytes:
        raise ConfigError(
            f"a latency slot must hold {sizes.latency_bytes} bytes ({geometry.max_rows} rows), "
            f"got {plan.latency_nbytes}"
        )
    if not 2 * max(sizes.kv_bytes) <= plan.bulk_nbytes <= max(COLD_BYTES, 2 * max(sizes.kv_bytes)):
        raise ConfigError(
            f"a bulk slot must hold {2 * max(sizes.kv_bytes)} to {COLD_BYTES} bytes, got "
            f"{plan.bulk_nbytes}"
        )
    if 2 * sizes.latency_bytes > MAX_BUFFER_BYTES:
        raise ConfigError(
            f"row buffers of {2 * sizes.latency_bytes} bytes are too large: lower max_rows"
        )
    return plan


def step_code(error: Exception) -> StepCode:
    """Returns the code that carries an error of a session over the wire."""
    code = getattr(error, "code", None)  # StepError and the session's own refusals carry one
    if isinstance(code, StepCode | int):
        return StepCode(code)
    if isinstance(error, CacheFullError):
        return StepCode.CACHE_FULL
    if isinstance(error, ProtocolError):
        return StepCode.PROTOCOL
    if isinstance(error, ConfigError):
        return StepCode.RANGE
    return StepCode.INTERNAL


def decode_entries(data: bytes) -> np.ndarray:
    """Returns the step table in a BEGIN_STEP payload.

    Raises:
        ConfigError: it is no whole number of entries.
    """
    if len(data) % ENTRY_DTYPE.itemsize:
        raise ConfigError(f"{len(data)} bytes are no step table")
    return np.frombuffer(data, dtype=ENTRY_DTYPE)
