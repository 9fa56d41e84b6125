"""`build_processor`: batch inference over a Ray dataset, in the shape of ray.data.llm's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.ray.engines import ERROR_COLUMN, EngineSpec, TableEngine
from fastdecode_rdma.ray.workers import WorkerPool
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.worker.limits import parse_memory

Row = dict[str, Any]


@dataclass(frozen=True)
class FastDecodeProcessorConfig:
    """How a dataset is processed; names are ray.data.llm's where it has them.

    model_source: a model directory, at the same path on every node.
    engine_kwargs: arguments of `Generator.from_pretrained`.
    concurrency: engines, each an actor of Ray Data.
    num_workers: attention workers, actors on the cluster's CPUs that all engines share; 0 embeds
        one in each engine. worker_memory: KV-cache of each, such as "4GiB"; worker_threads: kernel
        threads of each. None takes a node's, divided by its workers.
    sampling_params: what holds where a row has none, over the model's own defaults.
    batch_size: rows of a batch; max_concurrent_batches: those that an engine answers at once.
    should_continue_on_error: a row that fails has the reason in `__inference_error__` (empty where
        all went well); else it ends the dataset.
    engine_cpus, worker_cpus: what each takes in Ray's account; num_gpus: of an engine, None is one
        where the cluster has enough of them.

    Raises:
        ConfigError: a value is out of range.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 1
    num_workers: int = 0
    worker_memory: str | None = None
    worker_threads: int | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    max_concurrent_batches: int = 6
    should_continue_on_error: bool = True
    engine_cpus: float = 1.0
    worker_cpus: float = 1.0
    num_gpus: float | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("concurrency", 1),
            ("num_workers", 0),
            ("batch_size", 1),
            ("max_concurrent_batches", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        SamplingParams.from_dict(self.sampling_params)
        if self.worker_memory is not None:
            parse_memory(self.worker_memory)
        for name in ("workers", "token_file"):
            if name in self.engine_kwargs:
                raise ConfigError(f"engine_kwargs has {name!r}; num_workers starts workers here")

    def start_workers(self) -> WorkerPool | None:
        """Starts the attention workers, if there are to be any.

        Raises:
            ConfigError: the cluster has no room for them.
        """
        if not self.num_workers:
            return None
        memory = self.worker_memory
        return WorkerPool(
            self.num_workers,
            memory_bytes=None if memory is None else parse_memory(memory),
            num_threads=self.worker_threads,
            num_cpus=self.worker_cpus,
        )

    def map_engines(
        self,
        dataset: Dataset,
        engine: type,
        pool: WorkerPool | None,
        *,
        batch_size: int,
        **arguments: Any,
    ) -> Dataset:
        """Returns the dataset that engines of a class make of `dataset`."""
        spec = EngineSpec(
            self.model_source,
            () if pool is None else tuple(pool.addresses),
            b"" if pool is None else pool.token,
            self.engine_kwargs,
        )
        compute, more = self._compute()
        return dataset.map_batches(
            engine,
            compute=compute,
            batch_size=batch_size,
            batch_format="pyarrow",
            fn_constructor_kwargs={"spec": spec, **arguments},
            num_cpus=self.engine_cpus,
            num_gpus=self._gpus(),
            **more,
        )

    def _compute(self) -> tuple[ActorPoolStrategy, dict[str, int]]:
        """The pool of engines, and what older Rays (before 2.60 or so) want to be told beside it:
        how many calls an actor takes at once."""
        at_once = self.max_concurrent_batches
        options = {"size": self.concurrency, "max_tasks_in_flight_per_actor": 2 * at_once}
        name = "max_concurrent_calls_per_actor"
        if name in inspect.signature(ActorPoolStrategy).parameters:
            return ActorPoolStrategy(**options, **{name: at_once}), {}
        return ActorPoolStrategy(**options), {"max_concurrency": at_once}

    def _gpus(self) -> float | None:
        if self.num_gpus is not None:
            return self.num_gpus
        return 1.0 if ray.cluster_resources().get("GPU", 0) >= self.concurrency else None


class FastDecodeProcessor:
    """Processes datasets: `processor(dataset)` is a lazy dataset. Its workers start with the first
    one and run until `close()`, the end of a `with` block or of the program."""

    def __init__(
        self,
        config: FastDecodeProcessorConfig,
        preprocess: Callable[[Row], Row] | None,
        postprocess: Callable[[Row], Row] | None,
    ) -> None:
        self.config = config
        self._preprocess = preprocess
        self._postprocess = postprocess
        self.pool: WorkerPool | None = None

    def __call__(self, dataset: Dataset) -> Dataset:
        """Returns what becomes of a dataset."""
        if self.pool is None:
            self.pool = self.config.start_workers()
        if self._preprocess is not None:
            dataset = dataset.map(_adding(self._preprocess))
        dataset = self.config.map_engines(
            dataset,
            TableEngine,
            self.pool,
            batch_size=self.config.batch_size,
            sampling_params=self.config.sampling_params,
            raise_errors=not self.config.should_continue_on_error,
        )
        if self._postprocess is not None:
            dataset = dataset.map(_sparing_failures(self._postprocess))
        return dataset

    def close(self) -> None:
        """Ends the attention workers. Idempotent."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> FastDecodeProcessor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def build_processor(
    config: FastDecodeProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> FastDecodeProcessor:
    """Returns a processor of Ray datasets.

    preprocess: a row -> what to add to it: `prompt` (text or token ids) or `messages`, and
        `sampling_params`. postprocess: a row with its answer (`generated_text`,
        `generated_tokens`, `num_input_tokens`, `num_generated_tokens`, `finish_reason`,
        `stop_reason`) -> the row of the result; without one, all columns stay. Rows that failed
        pass it by.
    """
    return FastDecodeProcessor(config, preprocess, postprocess)


def _adding(function: Callable[[Row], Row]) -> Callable[[Row], Row]:
    """What adds to a row what the user's function makes of it."""

    def preprocess(row: Row) -> Row:
        return {**row, **function(dict(row))}

    return preprocess


def _sparing_failures(function: Callable[[Row], Row]) -> Callable[[Row], Row]:
    """What turns a row that succeeded into what the user's function makes of it."""

    def postprocess(row: Row) -> Row:
        if row[ERROR_COLUMN]:
            return row
        return {**function(row), ERROR_COLUMN: ""}

    return postprocess
