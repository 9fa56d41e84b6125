"""Measured profiles: what `fastdecode profile` writes and the planner and simulator read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.perfmodel.model import (
    DenseTable,
    Network,
    Overlap,
    ServingModel,
    TimeTable,
    WorkerRate,
)
from fastdecode_rdma.perfmodel.shapes import ModelShape

SCHEMA_VERSION = 1
KIND = "fastdecode-performance-profile"


@dataclass(frozen=True)
class MeasuredWorker:
    """One worker. rates: by KV dtype, (token_s, row_s, exchange_s); see model.WorkerRate."""

    address: str
    capacity_bytes: float
    rates: Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Measured:
    """A profile: times of the model's dense side and of its workers."""

    shape: ModelShape
    dense: DenseTable
    workers: tuple[MeasuredWorker, ...]
    network: Network
    wire_bytes: float
    overlap: Overlap
    fixed_step_s: float

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """KV dtypes that every worker was measured with."""
        return tuple(
            name for name in self.workers[0].rates if all(name in w.rates for w in self.workers)
        )

    def serving_model(self, kv_dtype: str, *, num_workers: int | None = None) -> ServingModel:
        """Returns the model of the measured machines; with another number of workers, the measured
        ones again in turn.

        Raises:
            ConfigError: the KV dtype was not measured.
        """
        if kv_dtype not in self.kv_dtypes:
            raise ConfigError(
                f"the profile has no figures for KV dtype {kv_dtype!r}: it has "
                f"{', '.join(self.kv_dtypes)}"
            )
        count = len(self.workers) if num_workers is None else num_workers
        if count < 1:
            raise ConfigError(f"--num-workers must be at least 1, got {count}")
        chosen = [self.workers[i % len(self.workers)] for i in range(count)]
        rates = []
        for worker in chosen:
            token_s, row_s, exchange_s = worker.rates[kv_dtype]
            rates.append(WorkerRate(token_s, worker.capacity_bytes, row_s, exchange_s))
        return ServingModel(
            self.shape, self.dense, tuple(rates), self.network, kv_dtype, self.wire_bytes,
            num_minibatches=1 if self.overlap is Overlap.SHARED else 2, overlap=self.overlap,
            fixed_step_s=self.fixed_step_s,
        )  # fmt: skip


def write_measured(path: Path, measured: Measured, found: Mapping[str, Any]) -> None:
    """Writes a profile; `found` is kept beside it, for people."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "model": asdict(measured.shape),
        "dense": {
            "block_s": measured.dense.block.points,
            "head_s": measured.dense.head.points,
            "causal_token2_s": measured.dense.causal_token2_s,
        },
        "workers": [asdict(worker) for worker in measured.workers],
        "network": asdict(measured.network),
        "wire_bytes": measured.wire_bytes,
        "overlap": measured.overlap.value,
        "fixed_step_s": measured.fixed_step_s,
        **found,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_measured(path: str | os.PathLike[str]) -> Measured:
    """Returns the profile in a file.

    Raises:
        ConfigError: there is none, or it holds what cannot be; says what.
    """
    file = Path(path).expanduser()
    content = read_json(file)
    version = content.get("schema_version")
    if content.get("kind") != KIND or version != SCHEMA_VERSION:
        raise ConfigError(
            f"{file} is no performance profile of version {SCHEMA_VERSION}: `fastdecode profile` "
            "writes them"
        )
    try:
        return _measured(content)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged: {type(error).__name__} {error}") from None


def _measured(content: Mapping[str, Any]) -> Measured:
    dense, network = content["dense"], content["network"]
    workers = [
        MeasuredWorker(
            str(entry["address"]),
            _number(entry["capacity_bytes"], "capacity_bytes"),
            {name: _three(rates) for name, rates in entry["rates"].items()},
        )
        for entry in content["workers"]
    ]
    if not workers or not all(worker.rates for worker in workers):
        raise ConfigError("no worker was measured")
    upload = network["upload_bytes_per_s"]
    return Measured(
        shape=ModelShape(**content["model"]),
        dense=DenseTable(
            _table(dense["block_s"]), _table(dense["head_s"]),
            _number(dense["causal_token2_s"], "causal_token2_s"),
        ),
        workers=tuple(workers),
        network=Network(
            _number(network["bytes_per_s"], "bytes_per_s", above=0),
            _number(network["worker_bytes_per_s"], "worker_bytes_per_s", above=0),
            _number(network["round_trip_s"], "round_trip_s"),
            None if upload is None else _number(upload, "upload_bytes_per_s", above=0),
        ),
        wire_bytes=_number(content["wire_bytes"], "wire_bytes", above=0),
        overlap=Overlap(content["overlap"]),
        fixed_step_s=_number(content["fixed_step_s"], "fixed_step_s"),
    )  # fmt: skip


def _table(points: Any) -> TimeTable:
    return TimeTable(tuple((_number(x, "rows"), _number(y, "seconds")) for x, y in points))


def _three(rates: Any) -> tuple[float, float, float]:
    token_s, row_s, exchange_s = rates
    return (
        _number(token_s, "token_s", above=0), _number(row_s, "row_s"),
        _number(exchange_s, "exchange_s"),
    )  # fmt: skip


def _number(value: Any, name: str, *, above: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if value < 0 or (above is not None and value <= above):
        raise ConfigError(f"{name} must be positive, got {value!r}")
    return float(value)
