"""Strict, memory-mapped reading of safetensors checkpoints, one tensor at a time.

A model is built twice by the same code: first against a `WeightPlan`, which records the names and
shapes it takes without reading any; `Checkpoint.check` compares that with the files' headers, so
everything missing, left over or mis-shaped is reported at once; then against the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.models.config import ModelConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_STORED_DTYPES = {"F32", "F16", "BF16"}
# Buffers that old checkpoints saved; rope tables are computed from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_MAX_NAMED = 8


class WeightPlan:
    """A `TensorSource` of shapes only: records what is taken and returns meta tensors."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Records the tensor.

        Raises:
            ValueError: the model takes it twice, a bug in the model's file.
        """
        if name in self.shapes:
            raise ValueError(f"tensor {name} is taken twice")
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")


class Checkpoint:
    """The tensors of a model directory, in the dtypes that they are stored in. A context manager;
    tensors stay valid after it closes.
    """

    def __init__(self, directory: str | Path, config: ModelConfig) -> None:
        self._directory = Path(directory)
        self._config = config
        self._files: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}  # our name -> (file, name in the file)
        self._untaken: set[str] = set()
        self._open()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def _open(self) -> None:
        """Opens all files and maps tensor names; reads headers only."""
        indexed: dict[str, str] = {}
        if (self._directory / _SINGLE).exists():
            files = [_SINGLE]
        elif (self._directory / _INDEX).exists():
            indexed = self._read_index()
            files = sorted(set(indexed.values()))
        else:
            raise ConfigError(self._no_weights())
        missing = [name for name in files if not (self._directory / name).is_file()]
        if missing:
            raise ConfigError(
                f"{self._directory}: {len(missing)} of {len(files)} weight files that {_INDEX} "
                f"names are missing: {', '.join(missing)}"
            )
        found: dict[str, str] = {}
        for file in files:
            try:
                self._files[file] = safe_open(self._directory / file, framework="pt", device="cpu")
                names = list(self._files[file].keys())
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{self._directory / file} is damaged or cut short: {error}"
                ) from error
            for name in names:
                if name in found:
                    raise ConfigError(f"tensor {name} is in both {found[name]} and {file}")
                found[name] = file
        if indexed:
            self._compare_index(indexed, found)
        for name, file in found.items():
            ours = self._our_name(name)
            if ours in self._where:
                raise ConfigError(f"tensors {self._where[ours][1]} and {name} both mean {ours}")
            if ours is not None:
                self._where[ours] = (file, name)
        self._untaken = set(self._where)

    def _read_index(self) -> dict[str, str]:
        path = self._directory / _INDEX
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{path} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{path} puts tensor {name} in {file!r}, which is no file name")
        return weight_map

    def _compare_index(self, indexed: dict[str, str], found: dict[str, str]) -> None:
        absent = [f"{n} ({file})" for n, file in indexed.items() if found.get(n) != file]
        if absent:
            raise ConfigError(
                f"{self._directory}: tensors are not in the file that {_INDEX} names: "
                f"{_some(absent)}"
            )
        unlisted = [f"{n} ({file})" for n, file in found.items() if n not in indexed]
        if unlisted:
            raise ConfigError(
                f"{self._directory}: tensors are not listed in {_INDEX}: {_some(unlisted)}"
            )

    def _no_weights(self) -> str:
        if any(self._directory.glob("pytorch_model*.bin")):
            return (
                f"{self._directory} holds pytorch_model.bin weights only, which are not loaded; "
                "convert them to safetensors (in transformers: save_pretrained)"
            )
        return f"{self._directory} holds neither {_SINGLE} nor {_INDEX}"

    def _our_name(self, name: str) -> str | None:
        if name.startswith(self._config.ignored) or name.endswith(_IGNORED_SUFFIXES):
            return None
        for old, new in self._config.renames:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def check(self, plan: WeightPlan, *, embeddings: str) -> None:
        """Compares headers with what a model will take; reads no tensor but a doubled tied head.

        Raises:
            ConfigError: naming the tensors that are missing, left over or mis-shaped.
        """
        if self._config.tie_word_embeddings and _HEAD in self._where:
            self._drop_tied_head(embeddings)
        missing = sorted(plan.shapes.keys() - self._where.keys())
        if missing:
            raise ConfigError(f"{self._directory} lacks {_count(missing)}: {_some(missing)}")
        extra = sorted(self._where.keys() - plan.shapes.keys())
        if extra:
            raise ConfigError(
                f"{self._directory} holds {_count(extra)} that "
                f"{self._config.architecture} does not use: {_some(self._labels(extra))}"
            )
        wrong = []
        for name, shape in plan.shapes.items():
            file, stored = self._where[name]
            header = self._files[file].get_slice(stored)
            if tuple(header.get_shape()) != shape:
                wrong.append(f"{stored} ({file}) is {header.get_shape()}, not {list(shape)}")
            elif header.get_dtype() not in _STORED_DTYPES:
                wrong.append(f"{stored} ({file}) has dtype {header.get_dtype()}, not a float")
        if wrong:
            raise ConfigError(f"{self._directory} does not fit its config.json: {_some(wrong)}")

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor, mapped from its file where no rounding was asked for.

        Raises:
            ConfigError: it is missing, was taken before, has another shape or is not finite.
        """
        if name not in self._untaken:
            state = "was taken twice" if name in self._where else "is missing"
            raise ConfigError(f"{self._directory}: tensor {name} {state}")
        tensor = self._read(name)
        file, stored = self._where[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"{self._directory / file}: tensor {stored} is {list(tensor.shape)}, "
                f"not {list(shape)}"
            )
        # One pass without temporaries: NaN and infinity both survive into the extremes.
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(tensor)):
            raise ConfigError(
                f"{self._directory / file}: tensor {stored} holds values that are not finite"
            )
        self._untaken.remove(name)
        return tensor

    def finish(self) -> int:
        """Returns how many tensors were taken.

        Raises:
            ConfigError: some were not.
        """
        if self._untaken:
            left = sorted(self._untaken)
            raise ConfigError(f"{self._directory}: {_count(left)} were not loaded: {_some(left)}")
        return len(self._where)

    def _read(self, name: str) -> Tensor:
        file, stored = self._where[name]
        try:
            return self._files[file].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._directory / file}: tensor {stored}: {error}") from error

    def _drop_tied_head(self, embeddings: str) -> None:
        """Accepts a copy of the embeddings saved as the head; it is not loaded."""
        if embeddings in self._where and not torch.equal(self._read(embeddings), self._read(_HEAD)):
            raise ConfigError(
                f"{self._directory}: tie_word_embeddings is true, but {_HEAD} differs from "
                f"{embeddings}; set it to false to use both"
            )
        del self._where[_HEAD]
        self._untaken.discard(_HEAD)

    def _labels(self, names: Iterable[str]) -> list[str]:
        return [f"{self._where[name][1]} ({self._where[name][0]})" for name in names]


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
