"""`fastdecode plan`: what hardware does with a model, before anybody buys or loads anything."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.catalogue import listing
from fastdecode_rdma.perfmodel.planner import (
    GpuAlone,
    Plan,
    Workload,
    make_plan,
    plan_gpu_alone,
)
from fastdecode_rdma.perfmodel.roles import GPU_BANDWIDTH_SHARE, GPU_MEMORY_SHARE
from fastdecode_rdma.perfmodel.shapes import WEIGHT_BYTES
from fastdecode_rdma.perfmodel.sources import (
    Source,
    add_source_arguments,
    seconds_of,
    source_of,
)

SCHEMA_VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_source_arguments(parser)
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="(%(default)s)")
    parser.add_argument(
        "--prompt", type=int, default=1, metavar="TOKENS", help="of the length (%(default)s)"
    )
    parser.add_argument("--latency-limit", metavar="TIME", help="of a whole sequence, like 60s")
    parser.add_argument(
        "--all-at-once", action="store_true",
        help="sequences start together: memory must hold their ends",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list-hardware", action="store_true", help="print the catalogue")


def workload_of(args: argparse.Namespace) -> Workload:
    """Checks the options.

    Raises:
        ConfigError: they cannot be used.
    """
    if not 2 <= args.length <= 1 << 27:
        raise ConfigError(f"--length must be 2 to 2^27, got {args.length}")
    limit = args.latency_limit and seconds_of(args.latency_limit, "--latency-limit")
    return Workload(args.length, args.prompt, limit, stabilised=not args.all_at_once)


def gpu_alone_of(source: Source, work: Workload) -> GpuAlone | None:
    """What the dense device would do by itself; None where it is not known to be a GPU."""
    hardware = source.hardware
    if hardware is None or not hardware.dense.is_gpu:
        return None
    count = hardware.num_dense
    weights = source.model.shape.params * WEIGHT_BYTES[source.weight_dtype]
    return plan_gpu_alone(
        source.model, work,
        room_bytes=GPU_MEMORY_SHARE * hardware.dense.memory_bytes * count - weights,
        bytes_per_s=GPU_BANDWIDTH_SHARE * hardware.dense.bytes_per_s * count,
    )  # fmt: skip


def plan_json(plan: Plan, source: Source, work: Workload) -> dict[str, Any]:
    """Returns a plan with units in its keys."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": source.model.shape.name,
        "hardware": source.text,
        "kv_cache_dtype": source.model.kv_dtype,
        "workload": asdict(work),
        "minibatch": plan.point.minibatch,
        **asdict(plan.point),
        "binds": plan.binds,
        "num_workers": plan.num_workers,
        "workers_needed": plan.workers_needed,
        "kv_bytes": plan.kv_bytes,
        "kv_capacity_bytes": plan.kv_capacity_bytes,
        "max_seqs": plan.max_seqs,
        "one_more_worker_tokens_per_s": plan.one_more,
        "gpu_alone": None if plan.gpu_alone is None else asdict(plan.gpu_alone),
        "gpu_alone_is_faster": plan.gpu_alone_is_faster,
    }


def plan_text(plan: Plan, source: Source, work: Workload) -> str:
    """Returns a plan for people."""
    point, model = plan.point, source.model
    kv_token = model.shape.kv_token_bytes(model.kv_dtype) * model.shape.num_layers
    rows = [
        ("mini-batch", f"{point.minibatch} sequences, {point.num_minibatches} in flight"),
        ("workers", f"{plan.num_workers}; {plan.workers_needed:.1f} would keep up with the dense "
                    "side"),
        ("memory", f"KV-cache {plan.kv_bytes / 1e9:.1f} of {plan.kv_capacity_bytes / 1e9:.1f} GB, "
                   f"{kv_token / 1024:.1f} KiB a token"),
        ("throughput", f"{point.tokens_per_s:.4g} tokens/s"),
        ("latency", f"{point.step_s * 1e3:.4g} ms a token, {point.sequence_s:.3g} s a sequence"),
        ("a layer", f"{_ms(point.layer_s)}: dense {_ms(point.dense_s)}, attention "
                    f"{_ms(point.attention_s)}, network {_ms(point.network_s)}, one after the "
                    f"other {_ms(point.cycle_s)}"),
        ("binds", plan.binds),
    ]  # fmt: skip
    gain = plan.one_more / point.tokens_per_s - 1
    rows.append(("one more", f"worker: {plan.one_more:.4g} tokens/s ({gain:+.1%})"))
    alone = plan.gpu_alone
    beside = "" if alone is None else f"; beside the weights on the GPU alone: {alone.num_seqs}"
    rows.append(("fit", f"{plan.max_seqs} sequences{beside}"))
    if alone is not None:
        rows.append(("GPU alone", f"{alone.tokens_per_s:.4g} tokens/s"))
    lines = [f"{model.shape.name} on {source.text}, sequences of {work.length} tokens"]
    lines += [f" {name:<11} {text}" for name, text in rows]
    if plan.gpu_alone_is_faster:
        lines.append(" a GPU-only engine is likely faster here")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def run(args: argparse.Namespace) -> int:
    """Prints a plan, or the catalogue.

    Raises:
        ConfigError: an option cannot be used, or nothing can run.
    """
    if args.list_hardware:
        print(listing())
        return 0
    source, work = source_of(args), workload_of(args)
    plan = make_plan(source.model, work, gpu_alone=gpu_alone_of(source, work))
    if args.json:
        print(json.dumps(plan_json(plan, source, work), indent=1))
    else:
        print(plan_text(plan, source, work))
    return 0
