"""The 64-byte header of data-plane frames, as cython/frame.h lays it out, and the cold payloads.

Python reads and writes only cold frames (step tables, free, fork, export, import); the pump builds
the others in C. A test keeps the two layouts equal.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.errors import RemoteProtocolError

MAGIC = int.from_bytes(b"FDR1", "little")
NO_TABLE = 0xFFFF
MAX_TEXT_BYTES = 1024
"""Longest text of an error frame."""

_HEADER = struct.Struct("<IHHQIIIIQiIIIQ")
HEADER_BYTES = _HEADER.size
_FORK = struct.Struct("<QQQ")
_RANGE = struct.Struct("<QQQ")
_IMPORT = struct.Struct("<QQ")
_U64 = struct.Struct("<Q")


class FrameKind(enum.IntEnum):
    """What a frame asks or answers; engine to worker below 16."""

    BEGIN_STEP = 1
    ATTEND = 2
    KV_ROWS = 3
    FREE = 4
    FORK = 5
    EXPORT = 6
    IMPORT = 7
    BENCH_PING = 8
    BENCH_DATA = 9
    BENCH_READ = 10
    ATTEND_REPLY = 16
    CREDIT = 17
    STEP_READY = 18
    STEP_ERROR = 19
    EXPORT_REPLY = 20
    IMPORT_REPLY = 21
    BENCH_REPLY = 22


@dataclass(slots=True)
class Frame:
    """A header. `consumed_*` count frames done with since the start; `offset` is the first token of
    K/V rows, or the nanoseconds that an attention kernel took."""

    kind: int
    table: int
    epoch: int
    sequence: int
    step: int = 0
    layer: int = 0
    rows: int = 0
    nbytes: int = 0
    status: int = 0
    consumed_latency: int = 0
    consumed_bulk: int = 0
    entry: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        """Returns the 64 bytes."""
        return _HEADER.pack(
            MAGIC,
            self.kind,
            self.table,
            self.epoch,
            self.sequence,
            self.step,
            self.layer,
            self.rows,
            self.nbytes,
            self.status,
            self.consumed_latency,
            self.consumed_bulk,
            self.entry,
            self.offset,
        )

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Returns the header in 64 bytes.

        Raises:
            RemoteProtocolError: they are no header.
        """
        if len(data) != HEADER_BYTES:
            raise RemoteProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
        magic, *fields = _HEADER.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError("these bytes are no frame")
        return cls(*fields)


def _unpack(layout: struct.Struct, data: bytes, what: str) -> tuple[int, ...]:
    if len(data) != layout.size:
        raise RemoteProtocolError(f"{what} takes {layout.size} bytes, not {len(data)}")
    return layout.unpack(data)


def pack_handles(handles: Sequence[int]) -> bytes:
    """Returns the payload of FREE."""
    return np.asarray(handles, dtype="<u8").tobytes()


def unpack_handles(data: bytes) -> np.ndarray:
    """Returns the handles of FREE, uint64.

    Raises:
        RemoteProtocolError: it is no whole number of them.
    """
    if len(data) % _U64.size:
        raise RemoteProtocolError(f"{len(data)} bytes are no list of handles")
    return np.frombuffer(data, dtype="<u8")


def pack_fork(src: int, dst: int, length: int) -> bytes:
    """Returns the payload of FORK."""
    return _FORK.pack(src, dst, length)


def unpack_fork(data: bytes) -> tuple[int, ...]:
    """Returns (src, dst, length) of FORK.

    Raises:
        RemoteProtocolError: the payload has another length.
    """
    return _unpack(_FORK, data, "FORK")


def pack_range(handle: int, start: int, stop: int) -> bytes:
    """Returns the payload of EXPORT."""
    return _RANGE.pack(handle, start, stop)


def unpack_range(data: bytes) -> tuple[int, ...]:
    """Returns (handle, start, stop) of EXPORT.

    Raises:
        RemoteProtocolError: the payload has another length.
    """
    return _unpack(_RANGE, data, "EXPORT")


def pack_import(handle: int, start: int, data: bytes) -> bytes:
    """Returns the payload of IMPORT: where the stored bytes belong, then the bytes."""
    return _IMPORT.pack(handle, start) + data


def unpack_import(data: bytes) -> tuple[int, int, bytes]:
    """Returns (handle, start, stored bytes) of IMPORT.

    Raises:
        RemoteProtocolError: the payload is too short.
    """
    if len(data) < _IMPORT.size:
        raise RemoteProtocolError(f"IMPORT takes {_IMPORT.size} bytes or more, not {len(data)}")
    handle, start = _IMPORT.unpack_from(data)
    return handle, start, data[_IMPORT.size :]
