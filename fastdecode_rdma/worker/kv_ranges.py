"""The bytes of an exported token range: what EXPORT gives and IMPORT takes.

Little-endian: magic, fingerprint of geometry and KV dtype, start, stop; then per KV group its first
token (a window group gives only what its ring still holds) and the stored elements,
[layer][K|V][kv head][token][head_dim].
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.config import AttentionGeometry, StepCode
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.worker.attention import BLOCK_TOKENS, block_bytes, ring_blocks
from fastdecode_rdma.worker.kv_dtypes import kv_dtype

_HEADER = struct.Struct("<4sIQQ")
_FIRST = struct.Struct("<Q")
_MAGIC = b"FDKV"


class StepRefusedError(FastDecodeError):
    """The session cannot do what was asked; nothing has changed. `code` goes over the wire."""

    def __init__(self, code: StepCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class KVRange:
    """Tokens [start, stop); per KV group the first token there is and the raw bytes from it on."""

    start: int
    stop: int
    groups: tuple[tuple[int, np.ndarray], ...]


def token_bytes(geometry: AttentionGeometry, group: int) -> int:
    """Returns the bytes of one token in all layers of a KV group."""
    return block_bytes(geometry, geometry.groups[group]) // BLOCK_TOKENS


def _fingerprint(geometry: AttentionGeometry) -> int:
    shape = (geometry.groups, kv_dtype(geometry.kv_dtype).name)
    return zlib.crc32(repr(shape).encode())


def pack_range(
    geometry: AttentionGeometry, start: int, stop: int, groups: Iterable[tuple[int, np.ndarray]]
) -> bytes:
    """Returns the exported form of a range."""
    parts = [_HEADER.pack(_MAGIC, _fingerprint(geometry), start, stop)]
    for first, data in groups:
        parts += [_FIRST.pack(first), data.tobytes()]
    return b"".join(parts)


def parse_range(geometry: AttentionGeometry, start: int, data: bytes) -> KVRange:
    """Returns views of an exported range, which must begin at token `start`.

    Raises:
        StepRefusedError: the data is damaged, of another geometry, or of other tokens.
    """

    def refuse(why: str) -> StepRefusedError:
        return StepRefusedError(StepCode.PROTOCOL, f"import of {len(data)} bytes: {why}")

    if len(data) < _HEADER.size:
        raise refuse("too short")
    magic, fingerprint, data_start, stop = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise refuse("this is no exported range")
    if fingerprint != _fingerprint(geometry):
        raise refuse("it was exported under another model geometry or KV dtype")
    if data_start != start or not start <= stop <= geometry.max_model_len:
        raise refuse(f"it holds tokens {data_start} to {stop}, wanted were {start} on")
    at, groups = _HEADER.size, []
    for index, group in enumerate(geometry.groups):
        if len(data) < at + _FIRST.size:
            raise refuse("too short")
        (first,) = _FIRST.unpack_from(data, at)
        at += _FIRST.size
        most = ring_blocks(group) * BLOCK_TOKENS if group.window is not None else stop
        if not start <= first <= stop or stop - first > most:
            raise refuse(f"KV group {index} begins at token {first}")
        if first > start and group.window is None:
            raise refuse(f"KV group {index} has no window but begins at token {first}")
        nbytes = (stop - first) * token_bytes(geometry, index)
        if len(data) < at + nbytes:
            raise refuse("too short")
        groups.append((first, np.frombuffer(data, dtype=np.uint8, count=nbytes, offset=at)))
        at += nbytes
    if at != len(data):
        raise refuse(f"{len(data) - at} bytes too many")
    return KVRange(start, stop, tuple(groups))
