"""`fastdecode simulate`: a trace on predicted hardware, with the policies of the engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma.bench.interconnect_report import check_plot
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.simulate import Outcome, Simulation
from fastdecode_rdma.perfmodel.sources import add_source_arguments, source_of
from fastdecode_rdma.perfmodel.traces import SHAREGPT, Lengths, Request, make_trace, read_trace
from fastdecode_rdma.scheduler import POLICIES, check_policy, make_scheduler

SCHEMA_VERSION = 1
MAX_LOAD_POINTS = 1000
"""Points of the load over time that are kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_source_arguments(parser)
    for flag, text in (
        ("--trace", "requests: JSON lines or .csv with prompt_len, output_len [, arrival_s]"),
        ("--plot", "draw the load over time into this file (matplotlib)"),
        ("--json", "write the figures here"),
    ):
        parser.add_argument(flag, type=Path, metavar="FILE", help=text)
    for flag, number, text in (
        ("--num", 1000, "requests, without --trace"),
        ("--length", 1024, "tokens of each, prompt included"),
        ("--prompt", 16, "tokens of each prompt"),
        ("--max-num-seqs", 256, "sequences that run at once"),
        ("--max-num-batched-tokens", 2048, "prompt tokens of a step"),
        ("--seed", 0, "of all that is drawn"),
    ):
        parser.add_argument(flag, type=int, default=number, help=f"{text} (%(default)s)")
    parser.add_argument(
        "--lengths", choices=("fixed", "sharegpt"), default="fixed",
        help="sharegpt: log-normal, mean 161 tokens in and 338 out (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, metavar="PER_S", help="arrivals; none: all at once")
    parser.add_argument(
        "--cv", type=float, default=1.0, help="of their gaps: 1 is Poisson, else Gamma (1)"
    )
    parser.add_argument("--scheduler", default="fcfs", help=f"of {', '.join(POLICIES)} (fcfs)")
    parser.add_argument("--max-load-tokens", type=int, metavar="N", help="cached tokens of a step")
    parser.add_argument("--minibatches", type=int, choices=(1, 2), help="in flight (2)")


def requests_of(args: argparse.Namespace) -> list[Request]:
    """Returns the trace that the options name.

    Raises:
        ConfigError: they cannot be used.
    """
    if args.trace is not None:
        return read_trace(args.trace, rate_per_s=args.rate, cv=args.cv, seed=args.seed)
    if args.lengths == "sharegpt":
        prompts, outputs = (Lengths(mean, sigma) for mean, sigma in SHAREGPT)
    else:
        if not 1 <= args.prompt < args.length <= 1 << 24:
            raise ConfigError(
                f"--prompt must be at least 1 and less than --length, got {args.prompt} and "
                f"{args.length}"
            )
        prompts, outputs = Lengths(args.prompt), Lengths(args.length - args.prompt)
    return make_trace(args.num, prompts, outputs, rate_per_s=args.rate, cv=args.cv, seed=args.seed)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Returns the figures of a run, units in their keys."""
    loads = outcome.loads
    busy_s = sum(load.step_s for load in loads)
    return {
        "num_requests": len(outcome.requests),
        "tokens_per_s": outcome.tokens_per_s,
        "makespan_s": outcome.makespan_s,
        "latency_per_token_s": _spread(outcome.latency_per_token_s),
        "time_to_first_token_s": _spread(outcome.time_to_first_token_s),
        "num_steps": len(loads),
        "num_preemptions": outcome.num_preemptions,
        "mean_decoded": sum(load.num_decoded * load.step_s for load in loads) / busy_s,
        "mean_cached_tokens": sum(load.cached_tokens * load.step_s for load in loads) / busy_s,
        "max_cached_tokens": max(load.cached_tokens for load in loads),
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p95": p95, "p99": p99}


def load_over_time(outcome: Outcome) -> list[dict[str, float]]:
    """Returns evenly chosen steps: when, how long, what was decoded, who ran and waited."""
    every = -(-len(outcome.loads) // MAX_LOAD_POINTS)
    return [vars(load) for load in outcome.loads[::every]]


def print_summary(found: dict[str, Any], text: str) -> None:
    """Prints the figures for people."""
    print(text)
    print(f" {found['num_requests']} requests in {found['makespan_s']:.4g} s, "
          f"{found['tokens_per_s']:.4g} tokens/s, {found['num_steps']} steps, "
          f"{found['num_preemptions']} preemptions")  # fmt: skip
    print(f" {'':<22}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}")
    for key, name in (
        ("latency_per_token_s", "latency per token [s]"),
        ("time_to_first_token_s", "first token [s]"),
    ):
        print(f" {name:<22}" + "".join(f"{found[key][part]:>10.4g}" for part in found[key]))
    print(f" decoded at once: mean {found['mean_decoded']:.4g} sequences over "
          f"{found['mean_cached_tokens']:.4g} cached tokens, most "
          f"{found['max_cached_tokens']}")  # fmt: skip


def plot(outcome: Outcome, path: Path) -> None:
    """Draws cached tokens, sequences running and waiting over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = load_over_time(outcome)
    times = [point["start_s"] for point in points]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    above.plot(times, [point["cached_tokens"] for point in points])
    above.set_ylabel("cached tokens decoded over")
    for key in ("num_decoded", "num_running", "num_waiting"):
        below.plot(times, [point[key] for point in points], label=key.removeprefix("num_"))
    below.set_ylabel("sequences")
    below.set_xlabel("seconds")
    below.legend()
    figure.savefig(path)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints.

    Raises:
        ConfigError: an option cannot be used.
    """
    check_policy(args.scheduler)
    check_plot(args.plot)
    source, requests = source_of(args), requests_of(args)
    model = source.model
    if args.minibatches is not None:
        model = model.with_minibatches(args.minibatches)
    outcome = Simulation(
        model, requests, lambda options: make_scheduler(args.scheduler, options),
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
        max_load_tokens=args.max_load_tokens,
    ).run()  # fmt: skip
    found = summary(outcome)
    print_summary(found, f"{model.shape.name} on {source.text}, {args.scheduler}")
    if args.json is not None:
        content = {
            "schema_version": SCHEMA_VERSION, "model": model.shape.name, "hardware": source.text,
            "scheduler": args.scheduler, "seed": args.seed, **found,
            "load": load_over_time(outcome),
        }  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot is not None:
        plot(outcome, args.plot)
    return 0
