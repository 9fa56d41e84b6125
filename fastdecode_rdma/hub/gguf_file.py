"""A GGUF model, in one file or in parts: checked metadata, and tensors dequantised row by row.

The tensors are memory-mapped. What the `gguf` package is needed for is its knowledge of the
quantised formats.
"""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_header import Header, MalformedError, TensorInfo, read_header

_MISSING = object()
# No model has more of anything that is counted; larger numbers would only overflow elsewhere.
_MAX_COUNT = (1 << 31) - 1
_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
# Formats that llama.cpp once wrote and no longer reads.
_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


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
    type_id: int
    rows: np.ndarray

    def dequantize(self, index: slice | np.ndarray) -> np.ndarray:
        """Returns the given rows as fp32 [rows, shape[-1]].

        Raises:
            ConfigError: they hold values that are not finite.
        """
        gguf = import_gguf()
        packed = np.ascontiguousarray(self.rows[index])
        with np.errstate(all="ignore"):  # of damaged weights; what comes out is looked at below
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType(self.type_id))
        if not np.isfinite(values).all():
            raise ConfigError(f"tensor {self.name!r} holds values that are not finite")
        return values


class GGUFFile:
    """One GGUF model: metadata by key, tensors by name.

    `path` may be any one of the parts that llama-gguf-split makes; the others lie beside it.

    Raises:
        ConfigError: a file is missing, broken, truncated or big-endian, or holds a tensor in a
            format that cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, view = _open(path)
        self._metadata = header.metadata
        parts = [(path, header, view)]
        if self.count("split.count", 1) > 1:
            parts = [(part, *_open(part)) for part in self._part_paths()]
            self._metadata = parts[0][1].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for number, (part, part_header, part_view) in enumerate(parts):
            self._check_part(part, part_header, number=number, num_parts=len(parts))
            whole = np.frombuffer(part_view, dtype=np.uint8)
            for info in part_header.tensors:
                if info.name in self.tensors:
                    raise ConfigError(f"{part}: tensor {info.name[:80]!r} is in another part too")
                self.tensors[info.name] = _map_tensor(part, whole, info)
        self._check_types()
        expected = self.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ConfigError(
                f"{path}: the parts hold {len(self.tensors)} tensors, {expected!r:.80} are expected"
            )

    # -- metadata

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
        return self.text("general.architecture")

    def text(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a text, or the default. Raises ConfigError when it is something else."""
        return self._typed(key, default, str, "a text")

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a bool, or the default. Raises ConfigError when it is something else."""
        return self._typed(key, default, bool, "true or false")

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts. Raises ConfigError when it is something else."""
        values = self._typed(key, _MISSING, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self.path}: {key} must be a list of texts")
        return values

    def numbers(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a list of finite numbers, or the default. Raises ConfigError otherwise."""
        values = self._typed(key, default, list, "a list of numbers")
        if values is not default and not all(_is_number(value) for value in values):
            raise ConfigError(f"{self.path}: {key} must be a list of finite numbers")
        return values

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a positive number, or the default. Raises ConfigError otherwise."""
        value = self.get(key, default)
        if value is default or (_is_number(value) and value > 0):
            return value
        raise ConfigError(f"{self.path}: {key} must be a positive number, got {value!r:.80}")

    def count(self, key: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """Returns an integer of at least `least`, or the default.

        A list with one entry per layer counts as its entry where all are the same.

        Raises:
            ConfigError: it is absent without a default, or no such integer.
        """
        value = self.get(key, default)
        if value is default:
            return default
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise ConfigError(f"{self.path}: {key} that differs by layer is not supported")
            value = value[0]
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not least <= value <= _MAX_COUNT:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(f"{self.path}: {key} must be {wanted}, got {value!r:.80}")
        return value

    def arch_key(self, key: str) -> str:
        """Returns the full name of a key of this architecture: "llama.block_count"."""
        return f"{self.architecture}.{key}"

    # -- tensors

    def tensor(self, name: str) -> GGUFTensor:
        """Returns a tensor by name.

        Raises:
            ConfigError: there is no such tensor.
        """
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]

    def _typed(self, key: str, default: Any, kind: type, wanted: str) -> Any:
        value = self.get(key, default)
        if value is default or isinstance(value, kind):
            return value
        raise ConfigError(f"{self.path}: {key} must be {wanted}, got {value!r:.80}")

    def _part_paths(self) -> list[Path]:
        count = self.count("split.count")
        match = _PART_NAME.fullmatch(self.path.name)
        if match is None or int(match[3]) != count:
            raise ConfigError(
                f"{self.path} is one of {count} parts, so its name must end in "
                f"-00001-of-{count:05d}.gguf; name the parts as they were, in one folder"
            )
        names = [f"{match[1]}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
        missing = [name for name in names if not (self.path.parent / name).is_file()]
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise ConfigError(f"{self.path} is one of {count} parts; missing beside it: {shown}")
        return [self.path.parent / name for name in names]

    def _check_part(self, path: Path, header: Header, *, number: int, num_parts: int) -> None:
        found = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 1))
        if num_parts > 1 and found != (number, num_parts):
            raise ConfigError(
                f"{path}: by its name it is part {number + 1} of {num_parts}, but it says "
                f"split.no {found[0]!r:.80} (from 0) of {found[1]!r:.80}"
            )

    def _check_types(self) -> None:
        """Refuses what cannot be dequantised before anything is written."""
        gguf = import_gguf()
        for type_id, name in {t.type_id: t.name for t in self.tensors.values()}.items():
            quantization = gguf.GGMLQuantizationType(type_id)
            block = np.zeros((1, gguf.GGML_QUANT_SIZES[quantization][1]), dtype=np.uint8)
            try:
                gguf.dequantize(block, quantization)
            except NotImplementedError as exc:
                raise ConfigError(
                    f"tensor {name!r} has type {quantization.name}, which the installed gguf "
                    "package cannot dequantise"
                ) from exc


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _open(path: Path) -> tuple[Header, mmap.mmap]:
    if not path.exists():
        raise ConfigError(f"no such file: {path}")
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file; name a .gguf file")
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return read_header(view), view
    except MalformedError as exc:
        raise ConfigError(f"{path} is not a whole GGUF file: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except ValueError as exc:  # an empty file has nothing to map
        raise ConfigError(f"{path} is not a whole GGUF file: it is empty") from exc


def _map_tensor(path: Path, whole: np.ndarray, info: TensorInfo) -> GGUFTensor:
    gguf = import_gguf()
    try:
        quantization = gguf.GGMLQuantizationType(info.type_id)
    except ValueError as exc:
        known = _REMOVED_TYPES.get(info.type_id)
        name = f"type {known}, which was removed from GGUF" if known else "a type that"
        tail = "" if known else " the installed gguf package does not know"
        raise ConfigError(
            f"{path}: tensor {info.name[:80]!r} has {name}{tail} (number {info.type_id}); "
            "take another quantisation of the model"
        ) from exc
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    what = f"{path} is not a whole GGUF file: tensor {info.name[:80]!r}"
    if info.shape[-1] % block_len or 0 in info.shape:
        raise ConfigError(f"{what} of type {quantization.name} has shape {info.shape}")
    num_rows = math.prod(info.shape[:-1])
    row_bytes = info.shape[-1] // block_len * block_bytes
    end = info.start + num_rows * row_bytes
    if end > whole.size:
        raise ConfigError(f"{what} ends at byte {end}, the file at byte {whole.size}")
    rows = whole[info.start : end].reshape(num_rows, row_bytes)
    return GGUFTensor(info.name, info.shape, info.type_id, rows)
