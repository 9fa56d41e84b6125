"""What a data plane costs whole decode steps: tokens/s over tcp and shm beside the embedded worker.

    python bench/bench_planes_decode.py --model DIR [--batch 32] [--rounds 9] [--json F]

One generator per plane, each in a process of its own with its worker, kept alive; a round runs the
embedded worker, then tcp, then shm, and the next round the other way round, so that whatever else
the machine does hits all alike. The figure is the median over rounds of the ratio within one. Bars:
tcp at least 0.90, shm at least 0.95. A load average above the cores' number, or rounds of the
embedded worker that differ by more than a quarter, mean that nothing was measured: exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from bench_decode import Child

PLANES = ("embedded", "tcp", "shm")
BARS = {"tcp": 0.90, "shm": 0.95}
SPREAD = 0.25


def measure(
    argv: list[str], batch: int, rounds: int, planes: tuple[str, ...] = PLANES
) -> dict[str, list[dict[str, float]]]:
    """Returns the figures of every round, by plane; one round before them warms up."""
    children = {plane: Child(plane, argv) for plane in planes}
    found: dict[str, list[dict[str, float]]] = {plane: [] for plane in planes}
    try:
        for number in range(rounds + 1):
            for plane in planes if number % 2 else planes[::-1]:
                figures = children[plane].run(batch)
                if number:
                    found[plane].append(figures)
            print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        for child in children.values():
            child.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9, help="pairs (9)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    found = measure(["--model", args.model], args.batch, args.rounds)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    base = [run["tokens_per_s"] for run in found["embedded"]]
    spread = (max(base) - min(base)) / statistics.median(base)
    ratios = {}
    for plane, runs in found.items():
        rates = [run["tokens_per_s"] for run in runs]
        ratios[plane] = statistics.median(
            one / other for one, other in zip(rates, base, strict=True)
        )
        parts = ", ".join(
            f"{name} {statistics.median(run[f'{name}_s'] for run in runs):.2f} s"
            for name in ("dense", "attention", "transport", "python")
        )
        print(
            f"{plane:<9} {statistics.median(rates):8.1f} tokens/s ({min(rates):.0f} to "
            f"{max(rates):.0f})   {ratios[plane]:.3f} of embedded   {parts}"
        )
    is_loaded = load > cores + 1 or spread > SPREAD
    for plane, bar in BARS.items():
        word = "met" if ratios[plane] >= bar else "MISSED"
        print(f"{'not measured' if is_loaded else word}: {plane} {ratios[plane]:.3f} >= {bar}")
    print(f"load average {load:.2f} on {cores} CPUs, embedded rounds differ by {spread:.0%}")
    if args.json is not None:
        args.json.write_text(json.dumps({"load": load, "runs": found, "ratios": ratios}, indent=1))
    if is_loaded:
        return 2
    return 0 if all(ratios[plane] >= bar for plane, bar in BARS.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
