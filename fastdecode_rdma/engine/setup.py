"""Builds an engine: options checked, model loaded, workers connected, cache sized."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from fastdecode_rdma.attention.backend import AttentionBackend, WorkerLink
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.attention.placement import BLOCK_TOKENS
from fastdecode_rdma.attention.remote import CONNECT_TIMEOUT_S, RemoteWorker, open_sessions
from fastdecode_rdma.config import AttentionGeometry, kv_dtype_name
from fastdecode_rdma.engine.admission import CautiousPlacement
from fastdecode_rdma.engine.core import Engine
from fastdecode_rdma.engine.options import GeneratorOptions, as_path
from fastdecode_rdma.engine.reconnect import Reconnector
from fastdecode_rdma.engine.sampling_defaults import SamplingDefaults
from fastdecode_rdma.engine.spill_tiers import FileTier, SpillTier, WorkerTier
from fastdecode_rdma.engine.state import EngineOptions
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import DecoderModel, ModelConfig, load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.scheduler import SchedulerOptions, make_scheduler
from fastdecode_rdma.tokenizer import Tokenizer
from fastdecode_rdma.transport.address import parse_url, require_plane
from fastdecode_rdma.transport.profile import read_profile
from fastdecode_rdma.wire.token_file import find_token
from fastdecode_rdma.worker.limits import default_memory
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.preparation import find_nodes

logger = logging.getLogger(__name__)

REPLAY_ROWS = 64
"""Rows a step has at least, so that a recovered sequence replays many generated tokens per step."""
MAX_WORKER_WAIT_S = 10.0
"""How long the engine waits for a worker to come back when it has none left."""


@dataclass(slots=True)
class EngineParts:
    """A built engine with what must be closed after it."""

    model: DecoderModel
    engine: Engine
    backend: AttentionBackend
    ops: CpuOps
    options: GeneratorOptions
    reconnector: Reconnector
    sampling_defaults: SamplingDefaults
    notes: list[str] = field(default_factory=list)
    closed: bool = False
    python_s: float = 0.0  # as reported last
    transport_s: float = 0.0

    @property
    def worker_wait_s(self) -> float:
        """How long the engine waits for a worker when it has none left."""
        return min(self.options.timeout_s, MAX_WORKER_WAIT_S)

    def reconnect(self) -> None:
        """Has lost workers brought back, and takes in those that are. Never waits."""
        for address in self.engine.take_lost():
            if self.options.workers is not None:
                self.reconnector.lost(address)
        for link in self.reconnector.take():
            self.engine.take_back(self.backend.add_worker(link), link.info.capacity_bytes)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if not self.closed:
            self.closed = True
            self.reconnector.close()
            self.engine.spiller.close()
            self.backend.close()


def build_engine(
    directory: Path, options: GeneratorOptions, tokenizer: Tokenizer | None
) -> EngineParts:
    """Loads the model of `directory` and connects its workers.

    Raises:
        ConfigError: the model or an option cannot be used. TransportError: a worker is not there.
    """
    config = ModelConfig.from_hf(directory)
    sampling_defaults = SamplingDefaults(directory)
    eos_token_ids = union_of_eos(config, options, tokenizer)
    if tokenizer is not None:
        tokenizer.check_vocab_size(config.vocab_size)
    max_model_len = options.max_model_len or config.max_model_len
    kv_dtype = (
        config.dtype if options.kv_cache_dtype == "auto" else kv_dtype_name(options.kv_cache_dtype)
    )
    geometry = AttentionGeometry(
        groups=config.kv_groups,
        scale=config.scale,
        softcap=config.attn_softcap,
        kv_dtype=kv_dtype,
        max_rows=max(options.max_num_seqs, REPLAY_ROWS),
        max_model_len=max_model_len,
    )
    # workers first: a wrong address is told at once, not after the weights are loaded
    urls = _urls(options)
    links = _open_workers(urls, options, geometry)
    backend = AttentionBackend(links, geometry, timeout_s=options.timeout_s)
    try:
        ops = CpuOps(deterministic=options.deterministic, quantization=options.quantization)
        model = load_model(directory, ops, max_model_len=max_model_len)
        engine, notes = _assemble(model, backend, options, tokenizer, eos_token_ids)
    except BaseException:
        backend.close()
        raise
    # a worker's name leaves out the options of the address that it was given by
    by_name = {str(parse_url(url)): url for url in urls}
    reconnector = Reconnector(lambda name: _connect([by_name[name]], options, geometry)[0])
    return EngineParts(
        model, engine, backend, ops, options, reconnector, sampling_defaults, notes=notes
    )


def union_of_eos(
    config: ModelConfig, options: GeneratorOptions, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Returns what ends a sequence by config.json, generation_config.json, tokenizer or argument.

    Files name ids that a model does not have (-1 for none, a token that was never trained): those
    are left out. The caller's own are not.
    """
    outside = [i for i in options.eos_token_id if i >= config.vocab_size]
    if outside:
        raise ConfigError(
            f"eos_token_id holds {outside[0]}, which is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    ids = {*config.eos_token_ids, *options.eos_token_id}
    if tokenizer is not None:
        ids |= tokenizer.eos_token_ids
    return frozenset(i for i in ids if 0 <= i < config.vocab_size)


def _open_workers(
    urls: list[str], options: GeneratorOptions, geometry: AttentionGeometry
) -> list[WorkerLink]:
    """Opens a session on every worker, or embeds one."""
    if options.workers is None:
        num_threads = torch.get_num_threads()
        nodes, said = find_nodes(num_threads)
        if said:
            logger.info(said)
        budget = MemoryBudget(default_memory().value, nodes)
        return [LocalWorker(geometry, budget, num_threads=num_threads)]
    return list(_connect(urls, options, geometry))


def _urls(options: GeneratorOptions) -> list[str]:
    urls = [require_plane(url, options.require) for url in options.workers or ()]
    if options.profile is None:
        return urls
    profile = read_profile(options.profile)
    return [profile.apply(url) for url in urls]


def _connect(
    addresses: Sequence[str], options: GeneratorOptions, geometry: AttentionGeometry
) -> list[RemoteWorker]:
    token = find_token(options.token_file)
    timeout_s = min(options.timeout_s, CONNECT_TIMEOUT_S)
    return open_sessions(addresses, geometry, token=token, timeout_s=timeout_s)


def _assemble(
    model: DecoderModel,
    backend: AttentionBackend,
    options: GeneratorOptions,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
) -> tuple[Engine, list[str]]:
    """Returns the engine, and notes on what was lowered to fit."""
    geometry = backend.geometry
    infos = [backend.info(worker) for worker in range(backend.num_workers)]
    placement = CautiousPlacement(geometry, [info.capacity_bytes for info in infos])
    notes: list[str] = []
    max_model_len = geometry.max_model_len
    longest = placement.longest_sequence()
    if longest < max_model_len:
        if options.max_model_len is not None or longest < 2:
            raise ConfigError(
                f"max_model_len={max_model_len} needs {placement.bytes_for(max_model_len)} bytes "
                "of KV-cache on one worker and the largest has "
                f"{placement.largest_capacity()}; lower it to {longest} or give a worker more "
                "--memory"
            )
        notes.append(f"max_model_len lowered from {max_model_len} to {longest}: workers' memory")
        logger.warning(notes[-1])
        max_model_len = longest
    scheduler = make_scheduler(
        options.scheduler,
        SchedulerOptions(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_load_tokens=options.max_load_tokens,
            block_tokens=BLOCK_TOKENS,
        ),
        options.scheduler_options,
    )
    engine = Engine(
        model,
        backend,
        placement,
        scheduler,
        EngineOptions(
            max_model_len=max_model_len,
            max_rows=geometry.max_rows,
            max_num_batched_tokens=options.max_num_batched_tokens,
            deterministic=options.deterministic,
            timeout_s=options.timeout_s,
            eos_token_ids=eos_token_ids,
            num_mini_batches=(
                None if options.num_mini_batches == "auto" else int(options.num_mini_batches)
            ),
            decode_token=None if tokenizer is None else cache(tokenizer.token_text),
        ),
        _make_tier(backend, placement, options),
    )
    return engine, notes


def _make_tier(
    backend: AttentionBackend, placement: CautiousPlacement, options: GeneratorOptions
) -> SpillTier | None:
    if options.spill_dir is not None:
        return FileTier(as_path("spill_dir", options.spill_dir))
    return None if options.spill_to is None else WorkerTier(backend, placement)
