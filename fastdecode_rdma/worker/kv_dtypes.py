"""Stored forms of K and V: one row here and in config.KV_ROW_BYTES, one loader and the `case`s of
cython/attention_quant.h and attention_simd.h.

These are the oracle of the kernel: they give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.config import KV_ROW_BYTES, kv_dtype_name

INT4_GROUP = 32
"""Values of a row that share a scale and a minimum."""

_TINY = np.float32(1e-35)
"""Values of this size are zero: their scale has no finite inverse (FD_QUANT_TINY)."""


@dataclass(frozen=True)
class KVDtype:
    """One stored form.

    `code` is its number in cython/attention.h. `unit_roundoff` is the largest error of rounding,
    relative to the number itself (normal numbers), for int8 to the largest magnitude of the row,
    for int4 to the range of the group. `storage` is the numpy dtype of the raw elements.
    `encode` takes fp32 [..., head_dim]; `decode` gives it back (int4: padded to a multiple of 16).
    Float forms keep the shape; the others give bytes [..., row_bytes(head_dim)].
    """

    name: str
    code: int
    unit_roundoff: float
    storage: np.dtype
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]

    @property
    def is_quantized(self) -> bool:
        return self.name.startswith("int")

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token's K (or V) of one head."""
        return KV_ROW_BYTES[self.name](head_dim)


def _encode_native(storage: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    def encode(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # too large becomes infinite, as in the kernel
            return values.astype(storage)

    return encode


def _decode_native(stored: np.ndarray) -> np.ndarray:
    return stored.astype(np.float32)


def _encode_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds fp32 to nearest even; not-a-number stays so."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _decode_bf16(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _encode_int8(values: np.ndarray) -> np.ndarray:
    """[scale fp32][values int8], scale = largest magnitude / 127; one for the whole row."""
    values = np.asarray(values, np.float32)
    finite = np.isfinite(values).all(-1, keepdims=True)
    largest = np.abs(np.where(finite, values, 0)).max(-1, keepdims=True)
    used = largest >= _TINY
    scale = np.where(used, largest / np.float32(127), np.float32(0))
    inverse = np.float32(127) / np.where(used, largest, np.float32(1))
    rounded = np.rint(np.where(finite & used, values, 0) * inverse).astype(np.int8)
    scale = np.where(finite, scale, np.float32(np.nan)).astype("<f4")
    return np.concatenate([np.ascontiguousarray(scale).view(np.uint8), rounded.view(np.uint8)], -1)


def _decode_int8(stored: np.ndarray) -> np.ndarray:
    scale = np.ascontiguousarray(stored[..., :4]).view("<f4")
    return np.ascontiguousarray(stored[..., 4:]).view(np.int8).astype(np.float32) * scale


def _bf16_below(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 at or below each fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    away = (values < 0) & (bits & 0xFFFF != 0)
    return ((bits + np.where(away, np.uint32(0x10000), np.uint32(0))) & 0xFFFF0000).view(np.float32)


def _encode_int4(values: np.ndarray) -> np.ndarray:
    """Groups of 32: [minimum bf16, scale bf16][nibbles]; 8 bytes hold 16 values, low ones first."""
    values = np.asarray(values, np.float32)
    groups = range(0, values.shape[-1], INT4_GROUP)
    return np.concatenate([_encode_group(values[..., at : at + INT4_GROUP]) for at in groups], -1)


def _encode_group(values: np.ndarray) -> np.ndarray:
    finite = np.isfinite(values).all(-1, keepdims=True)
    values = np.where(finite, values, np.float32(0))
    with np.errstate(over="ignore"):
        minimum = _bf16_below(values.min(-1, keepdims=True) + np.float32(0))  # no -0
        scale = -_bf16_below(-((values.max(-1, keepdims=True) - minimum) / np.float32(15)))
    scale = np.where(scale < _TINY, np.float32(0), scale)
    finite &= np.isfinite(minimum) & np.isfinite(scale)
    used = finite & (scale > 0)
    inverse = np.float32(1) / np.where(used, scale, np.float32(1))
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.where(used, (values - minimum) * inverse, np.float32(0))
    nibbles = np.rint(np.clip(steps, 0, 15)).astype(np.uint8)
    padded = np.zeros((*values.shape[:-1], -(-values.shape[-1] // 16) * 16), np.uint8)
    padded[..., : values.shape[-1]] = nibbles
    halves = padded.reshape(*values.shape[:-1], -1, 2, 8)
    packed = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*values.shape[:-1], -1)
    pair = np.concatenate([minimum, scale], -1)
    pair = np.where(finite, pair, np.float32(np.nan))
    pair_bits = (np.ascontiguousarray(pair).view(np.uint32) >> 16).astype("<u2")
    return np.concatenate([pair_bits.view(np.uint8), packed], -1)


def _decode_int4(stored: np.ndarray) -> np.ndarray:
    group_bytes = 4 + INT4_GROUP // 2
    groups = range(0, stored.shape[-1], group_bytes)
    return np.concatenate([_decode_group(stored[..., at : at + group_bytes]) for at in groups], -1)


def _decode_group(stored: np.ndarray) -> np.ndarray:
    pair = _decode_bf16(np.ascontiguousarray(stored[..., :4]).view("<u2"))
    packed = stored[..., 4:].reshape(*stored.shape[:-1], -1, 1, 8)
    nibbles = np.concatenate([packed & 15, packed >> 4], -2).reshape(*stored.shape[:-1], -1)
    with np.errstate(over="ignore"):  # the largest numbers may round to infinity
        return nibbles.astype(np.float32) * pair[..., 1:] + pair[..., :1]


def _native(name: str, code: int, mantissa_bits: int, storage: str) -> KVDtype:
    dtype = np.dtype(storage)
    return KVDtype(
        name, code, 2.0 ** -(mantissa_bits + 1), dtype, _encode_native(dtype), _decode_native
    )


_BYTES = np.dtype(np.uint8)

KV_DTYPES: dict[str, KVDtype] = {
    "fp32": _native("fp32", 0, 23, "<f4"),
    "fp16": _native("fp16", 1, 10, "<f2"),
    "bf16": KVDtype("bf16", 2, 2.0**-8, np.dtype("<u2"), _encode_bf16, _decode_bf16),
    "int8": KVDtype("int8", 3, 0.5 / 127, _BYTES, _encode_int8, _decode_int8),
    "int4": KVDtype("int4", 4, 0.5 / 15, _BYTES, _encode_int4, _decode_int4),
}


def kv_dtype(name: str) -> KVDtype:
    """Returns the stored form of that name ("fp16", "float16", "half", "int8", ...).

    Raises:
        ConfigError: there is no such form.
    """
    return KV_DTYPES[kv_dtype_name(name)]
