"""FCFS beside skip-join MLFQ on a live engine: mixed lengths, Poisson arrivals, above capacity.

    python bench/bench_policies.py --model DIR [--requests 96] [--seats 8] [--load 1.5] [--rounds 3]
        [--json FILE]

Both policies get the same requests at the same moments; rounds alternate between them. Most answers
are short, some are long, and longer than the prompts, as in conversations: short ones that wait
behind long ones are what a preemptive policy is for. Where prompts take most of the time it has
nothing to offer (prompts of 8 to 192 and answers of 43 tokens on average: 1.1 times FCFS's mean),
and far above capacity, where all wait, less (--load 3).

`load` is the arrival rate over the rate at which the engine serves them all when they come at once,
measured first. Latency per token is a request's time from its arrival to its last token over its
tokens.

Exit status 1 unless MLFQ's mean is at most 0.6 of FCFS's (median of rounds), preemption moved no KV
(nothing spilled, brought back, computed again or evicted) and every token and log-probability of a
sample is, bit for bit, what the request gets alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

from fastdecode_rdma import Generator, RequestOutput, SamplingParams

POLICIES = ("fcfs", "skip_join_mlfq")
LIMIT = 0.6
SHORT, LONG = (8, 48), (128, 384)
SHARE_LONG = 0.25
PROMPT = (8, 96)
SAMPLE = 6
"""Requests that are compared with themselves alone."""

Request = tuple[list[int], SamplingParams]


def make_requests(count: int, vocab_size: int, rng: random.Random) -> list[Request]:
    """Prompts and answers of mixed lengths."""
    requests = []
    for seed in range(count):
        low, high = LONG if rng.random() < SHARE_LONG else SHORT
        ids = [rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT))]
        params = SamplingParams(
            max_tokens=rng.randint(low, high), temperature=0.8, seed=seed, ignore_eos=True,
            detokenize=False, logprobs=0,
        )  # fmt: skip
        requests.append((ids, params))
    return requests


def serve(
    gen: Generator, requests: list[Request], arrivals: list[float]
) -> tuple[list[float], list[RequestOutput]]:
    """Submits each at its moment; returns latencies per token in seconds, and the results."""
    finished = [0.0] * len(requests)
    handles = []
    start = time.perf_counter()
    for index, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        handle = gen.submit(*request)

        def done(index: int = index) -> None:
            finished[index] = time.perf_counter() - start

        handle.add_done_callback(done)
        handles.append(handle)
    results = [handle.result() for handle in handles]
    while not all(finished):  # the last callback may come after the last result
        time.sleep(0.001)
    latencies = [
        (end - arrival) / len(result.outputs[0].token_ids)
        for end, arrival, result in zip(finished, arrivals, results, strict=True)
    ]
    return latencies, results


def bits_of(result: RequestOutput) -> tuple[object, object]:
    """Ids and log-probabilities."""
    output = result.outputs[0]
    return output.token_ids, output.cumulative_logprob


def check_sample(gen: Generator, requests: list[Request], results: list[RequestOutput]) -> int:
    """Returns how many of a sample differ from what they get alone."""
    step = max(1, len(requests) // SAMPLE)
    return sum(
        bits_of(gen.complete([requests[i][0]], requests[i][1])[0]) != bits_of(results[i])
        for i in range(0, len(requests), step)
    )


def main() -> int:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    requests = make_requests(args.requests, vocab_size, rng)
    options = {"max_num_seqs": args.seats, "max_model_len": 512, "deterministic": True}
    gens = {
        policy: Generator.from_pretrained(args.model, scheduler=policy, **options)
        for policy in POLICIES
    }
    prompts, params = zip(*requests, strict=True)
    start = time.perf_counter()
    gens["fcfs"].complete(list(prompts), list(params))
    served_s = time.perf_counter() - start
    rate = args.load * len(requests) / served_s
    print(f"{len(requests)} requests served in {served_s:.1f} s; arriving at {rate:.2f} a second")
    means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    wrong, moved = 0, 0
    for number in range(args.rounds):
        gaps = [rng.expovariate(rate) for _ in requests]
        arrivals = [sum(gaps[:i]) for i in range(len(gaps))]
        for policy in POLICIES if number % 2 else POLICIES[::-1]:
            before = gens[policy].stats()
            latencies, results = serve(gens[policy], requests, arrivals)
            after = gens[policy].stats()
            means[policy].append(statistics.mean(latencies))
            wrong += check_sample(gens[policy], requests, results)
            for name in ("spilled_bytes", "restored_bytes", "num_preemptions_total"):
                moved += getattr(after, name) - getattr(before, name)
            ordered = sorted(latencies)
            print(
                f"round {number + 1} {policy:<15} mean {1e3 * means[policy][-1]:8.1f} ms a token, "
                f"median {1e3 * statistics.median(ordered):8.1f}, "
                f"p95 {1e3 * ordered[int(0.95 * len(ordered))]:8.1f}",
                flush=True,
            )
    for gen in gens.values():
        gen.close()
    ratios = [b / a for a, b in zip(means["fcfs"], means["skip_join_mlfq"], strict=True)]
    ratio = statistics.median(ratios)
    load = os.getloadavg()[0]
    print(f"mlfq / fcfs, median of rounds: {ratio:.3f} (at most {LIMIT}); load average {load:.2f}")
    print(f"KV bytes moved and jobs evicted: {moved}; sampled requests that differ: {wrong}")
    if args.json is not None:
        content = {"means_s": means, "ratio": ratio, "moved": moved, "wrong": wrong, "load": load}
        args.json.write_text(json.dumps(content, indent=1))
    return int(ratio > LIMIT or moved > 0 or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
