"""Writes safetensors files piece by piece, so that no more than one piece is in memory.

Layout: u64 little-endian header length | JSON header, space-padded to 8 bytes | tensor data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdecode_rdma.config import DTYPE_BYTES
from fastdecode_rdma.hub.files import write_json

_SAFETENSORS_NAME = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the output: its name, its shape and our short dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def encode_elements(values: np.ndarray, dtype: str) -> bytes:
    """Returns fp32 `values` as little-endian bytes of `dtype`, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "fp32":
        return values.tobytes()
    if dtype == "fp16":
        return values.astype("<f2").tobytes()
    bits = values.view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding would carry a NaN's mantissa into infinity: keep NaN a (quiet) NaN.
    rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return rounded.astype("<u2").tobytes()


def write_checkpoint(
    directory: Path,
    tensors: Sequence[TensorSpec],
    pieces: Callable[[TensorSpec], Iterable[np.ndarray]],
    *,
    max_shard_bytes: int,
) -> None:
    """Writes `tensors` to one file, or to several with an index when they exceed a shard.

    `pieces(spec)` yields fp32 arrays whose elements, one after another, are the tensor's.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(directory / "model.safetensors", shards[0], pieces)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard, pieces)
        weight_map.update({spec.name: name for spec in shard})
    total = sum(spec.nbytes for spec in tensors)
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _split(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in tensors:
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _write_file(
    path: Path,
    tensors: Sequence[TensorSpec],
    pieces: Callable[[TensorSpec], Iterable[np.ndarray]],
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in tensors:
        header[spec.name] = {
            "dtype": _SAFETENSORS_NAME[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in tensors:
            written = sum(file.write(encode_elements(p, spec.dtype)) for p in pieces(spec))
            if written != spec.nbytes:
                raise ValueError(f"{spec.name}: {written} bytes produced, {spec.nbytes} declared")
