"""Stored forms of K and V: one row here, one loader and one `case` in cython/attention_simd.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.config import DTYPE_BYTES, dtype_name


@dataclass(frozen=True)
class KVDtype:
    """One stored form.

    `code` is its number in cython/attention.h, `unit_roundoff` the largest relative error of
    rounding a normal number, `storage` the numpy dtype of the raw elements.
    """

    name: str
    code: int
    itemsize: int
    unit_roundoff: float
    storage: np.dtype
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


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


def _native(name: str, code: int, mantissa_bits: int, storage: str) -> KVDtype:
    dtype = np.dtype(storage)
    return KVDtype(
        name,
        code,
        DTYPE_BYTES[name],
        2.0 ** -(mantissa_bits + 1),
        dtype,
        _encode_native(dtype),
        _decode_native,
    )


KV_DTYPES: dict[str, KVDtype] = {
    "fp32": _native("fp32", 0, 23, "<f4"),
    "fp16": _native("fp16", 1, 10, "<f2"),
    "bf16": KVDtype("bf16", 2, 2, 2.0**-8, np.dtype("<u2"), _encode_bf16, _decode_bf16),
}


def kv_dtype(name: str) -> KVDtype:
    """Returns the stored form of that name ("fp16", "float16", "half", ...).

    Raises:
        ConfigError: there is no such form.
    """
    return KV_DTYPES[dtype_name(name, allowed=tuple(KV_DTYPES))]
