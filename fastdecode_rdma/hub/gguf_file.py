"""Reads GGUF files: metadata as plain Python, tensors memory-mapped, dequantised row by row.

The headers are parsed here: the `gguf` package's reader makes several numpy arrays per vocabulary
entry (25 s for the 262144 tokens of Gemma 3, against 0.3 s). What it is needed for is its knowledge
of the quantised formats.

Layout, little-endian: "GGUF" | version u32 | tensors u64 | pairs u64 | pairs | tensor infos | data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError

_MISSING = object()
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# Far above any model; a broken count must not start a loop of 2^60 rounds.
_MAX_ENTRIES = 1 << 24
_MAX_DIMENSIONS = 4


def import_gguf() -> ModuleType:
    """Returns the `gguf` package, which is an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import gguf
    except ImportError as exc:
        raise ConfigError(
            "converting GGUF files needs the 'gguf' package: pip install gguf"
        ) from exc
    return gguf


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor. `shape` has the outermost dimension first; `rows` are its packed bytes,
    uint8 [prod(shape[:-1]), bytes of a row] (a quantised block never crosses a row)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    type_id: int
    rows: np.ndarray

    def dequantize(self, index: slice | np.ndarray) -> np.ndarray:
        """Returns the given rows as fp32 [rows, shape[-1]].

        Raises:
            ConfigError: the installed `gguf` package cannot dequantise this type, or the values are
                not finite.
        """
        gguf = import_gguf()
        packed = np.ascontiguousarray(self.rows[index])
        try:
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType(self.type_id))
        except NotImplementedError as exc:
            raise ConfigError(
                f"tensor {self.name!r} has type {self.type_name}, which the installed gguf package "
                "cannot dequantise"
            ) from exc
        if not np.isfinite(values).all():
            raise ConfigError(f"tensor {self.name!r} holds values that are not finite")
        return values


class GGUFFile:
    """One GGUF file: metadata by key, tensors by name.

    Raises:
        ConfigError: the file is missing, broken or truncated, or is one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"no such file: {path}")
        self.path = path
        self._metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(view))
        except (struct.error, ValueError, TypeError, ArithmeticError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"{path} is not a whole GGUF file: {exc}") from exc
        if self.get("split.count", 1) > 1:
            raise ConfigError(
                f"{path} is one of {self.get('split.count')} parts; join them first "
                "(llama-gguf-split --merge)"
            )

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Returns the value of a metadata key.

        Raises:
            ConfigError: the key is absent and no default was given.
        """
        if key in self._metadata:
            return self._metadata[key]
        if default is _MISSING:
            raise ConfigError(f"{self.path}: the GGUF metadata lacks {key!r}")
        return default

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def arch(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a metadata key of this architecture: "block_count" reads "llama.block_count"."""
        return self.get(f"{self.architecture}.{key}", default)

    def arch_count(self, key: str, default: int | None = None) -> int:
        """Returns a metadata key of this architecture that counts something.

        Raises:
            ConfigError: it is absent without a default, or no positive integer.
        """
        value = self.arch(key) if default is None else self.arch(key, default)
        if isinstance(value, list):
            raise ConfigError(f"{self.path}: {key} that differs by layer is not supported")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {key} must be a positive integer, got {value!r}")
        return value

    def tensor(self, name: str) -> GGUFTensor:
        """Returns a tensor by name.

        Raises:
            ConfigError: there is no such tensor.
        """
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file (its first bytes are not 'GGUF')")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise ConfigError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_pairs = cursor.count(), cursor.count()
        for _ in range(num_pairs):
            key = cursor.string()
            self._metadata[key] = cursor.value(cursor.number("<I"))
        infos = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.number("<I")
            if not 1 <= num_dims <= _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
            # The file lists the fastest dimension first.
            shape = tuple(reversed([cursor.number("<Q") for _ in range(num_dims)]))
            infos.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
        alignment = self.get("general.alignment", 32)
        data_start = -(-cursor.offset // alignment) * alignment
        whole = np.frombuffer(cursor.view, dtype=np.uint8)
        for name, shape, type_id, offset in infos:
            self.tensors[name] = _map_tensor(whole, data_start + offset, name, shape, type_id)


class _Cursor:
    """Reads values one after another; running off the end raises."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.offset = 0

    def take(self, nbytes: int) -> bytes:
        data = self.view[self.offset : self.offset + nbytes]
        if len(data) != nbytes:
            raise ValueError(f"it ends at byte {len(self.view)}")
        self.offset += nbytes
        return data

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.view, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def count(self) -> int:
        count = self.number("<Q")
        if count > _MAX_ENTRIES:
            raise ValueError(f"a count of {count} at byte {self.offset - 8}")
        return count

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element = self.number("<I")
            count = self.count()
            if element == _STRING:
                return [self.string() for _ in range(count)]
            return self._numbers(element, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at byte {self.offset}")
        dtype = _SCALARS[kind]
        values = np.frombuffer(self.take(dtype.itemsize * count), dtype=dtype)
        if kind == _FLOAT32 and count == 1:
            # 1e-5 is stored as 9.99999974e-06: give back the decimal that was meant.
            return [float(str(values[0]))]
        return values.tolist()


def _map_tensor(
    whole: np.ndarray, start: int, name: str, shape: tuple[int, ...], type_id: int
) -> GGUFTensor:
    gguf = import_gguf()
    try:
        quantization = gguf.GGMLQuantizationType(type_id)
    except ValueError as exc:
        raise ConfigError(
            f"tensor {name!r} has type number {type_id}, which the installed gguf package does not "
            "know"
        ) from exc
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    if shape[-1] % block_len or 0 in shape:
        raise ValueError(f"tensor {name!r} of type {quantization.name} has shape {shape}")
    num_rows = math.prod(shape[:-1])
    row_bytes = shape[-1] // block_len * block_bytes
    if start + num_rows * row_bytes > whole.size:
        raise ValueError(f"tensor {name!r} lies past its end at byte {whole.size}")
    rows = whole[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)
    return GGUFTensor(name, shape, quantization.name, type_id, rows)
