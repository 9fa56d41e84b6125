"""Gathers what engine, workers and operators have counted into `GeneratorStats`."""

from __future__ import annotations

from collections.abc import Mapping

from fastdecode_rdma.config import DTYPE_ALIASES
from fastdecode_rdma.engine.setup import EngineParts
from fastdecode_rdma.stats import GeneratorStats, WorkerStats


def model_info(parts: EngineParts) -> dict[str, object]:
    """Returns what the numbers of a result depend on, beside the model."""
    geometry, options = parts.backend.geometry, parts.options
    names = {short: name for name, short in reversed(DTYPE_ALIASES.items())}
    return {
        "model_dtype": names[geometry.wire_dtype],
        "kv_cache_dtype": geometry.kv_dtype,
        "quantization": options.quantization,
        "deterministic": options.deterministic,
        "isa": parts.ops.isa,
    }


def take_stats(
    parts: EngineParts, *, model_name: str, num_waiting: int, elapsed_s: float
) -> GeneratorStats:
    """Returns a snapshot; any thread may ask, also after the end."""
    engine, counters = parts.engine, parts.engine.counters
    spilled = engine.spiller.counters
    num_workers = engine.placement.num_workers  # first: the backend may know of one more by now
    counted = parts.backend.stats()
    workers = tuple(_worker(parts, index, counted[index]) for index in range(num_workers))
    living = [worker for worker in workers if worker.is_alive]
    # workers attend at the same time: the busiest one is what the engine waited for
    attention_s = max((worker.kernel_s for worker in workers), default=0.0)
    dense_s, exchange_s = engine.runner.model_s, engine.runner.exchange_s
    python_s = counters.step_s - counters.prefill_s - dense_s - exchange_s
    # Differences of what is counted at different moments of a step: a scraper takes a counter that
    # went back for a restart.
    parts.python_s = max(parts.python_s, python_s)
    parts.transport_s = max(parts.transport_s, exchange_s - attention_s)
    return GeneratorStats(
        model_name=model_name,
        num_requests_running=engine.scheduler.num_running,
        num_requests_waiting=num_waiting,
        kv_cache_usage=_share(
            sum(worker.kv_cache_bytes for worker in living),
            sum(worker.kv_cache_capacity_bytes for worker in living),
        ),
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.tokens,
        num_preemptions_total=counters.preemptions,
        request_success_total=dict(counters.finished),
        time_to_first_token_seconds=counters.time_to_first_token.snapshot(),
        inter_token_latency_seconds=counters.inter_token_latency.snapshot(),
        e2e_request_latency_seconds=counters.e2e_request_latency.snapshot(),
        recoveries=counters.recoveries,
        steps=counters.steps,
        elapsed_s=elapsed_s,
        dense_s=dense_s,
        attention_s=attention_s,
        transport_s=parts.transport_s,
        python_s=parts.python_s,
        prefill_s=counters.prefill_s,
        workers=workers,
        gemm={
            f"{n}x{k} {dtype}": choice.backend
            for (n, k, dtype), choice in parts.ops.gemm_choices.copy().items()
        },
        isa=parts.ops.isa,
        notes=tuple(parts.notes),
        wait_s=exchange_s,
        num_mini_batches=engine.chooser.current,
        mini_batch_reason=engine.chooser.reason,
        scheduler=parts.options.scheduler,
        max_load_tokens=parts.options.max_load_tokens or 0,
        kv_spills=spilled.spilled,
        kv_restores=spilled.restored,
        kv_recomputes=spilled.recomputed,
        spilled_bytes=spilled.bytes_out,
        restored_bytes=spilled.bytes_in,
        spill_faults=spilled.faults,
        spill_copy_s=spilled.copy_s,
        spill_restore_s=spilled.restore_s,
        spill_wait_s=spilled.wait_s,
    )


def _worker(parts: EngineParts, index: int, counted: Mapping[str, int]) -> WorkerStats:
    info, placement = parts.backend.info(index), parts.engine.placement
    used, capacity = placement.used_bytes(index), placement.capacity_bytes(index)
    return WorkerStats(
        worker=index,
        address=info.name,
        transport=info.transport,
        fallback_reason=info.fallback_reason,
        transport_detail=info.transport_detail,
        pinned=info.pinned,
        gpudirect=info.gpudirect,
        is_alive=info.alive,
        kv_cache_usage=_share(used, capacity),
        kv_cache_bytes=used,
        kv_cache_capacity_bytes=capacity,
        load_tokens=parts.engine.loads.get(index, 0),
        messages=counted["messages"],
        bytes_sent=counted["bytes_sent"],
        bytes_received=counted["bytes_received"],
        pump_s=counted["pump_ns"] / 1e9,
        io_s=counted["io_ns"] / 1e9,
        wait_s=counted["wait_ns"] / 1e9,
        kernel_s=counted["kernel_ns"] / 1e9,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
