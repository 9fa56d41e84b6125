"""Scoring speed and exactness, beside lm-eval's own model, transformers, and the GEMMs alone.

    python bench/bench_scoring.py --model DIR --text alice29.txt [--sentences 500] [--rounds 3]
                                  [--batch-sizes 1,4,16,64] [--skip-check] [--json FILE]

The text (of PyPI's brotli 1.2.1: tests/testdata/alice29.txt of its source distribution) is cut into
sentences, each scored after the prefix token. Rounds alternate between all that is compared, so
that a busy machine slows each of them. The floor multiplies the weights by as many rows as there
are tokens, CHUNK_TOKENS at a time, and does nothing else. Needs lm-eval and accelerate.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gemm_floor import GemmFloor
from lm_eval.models.huggingface import HFLM

from fastdecode_rdma import Generator, Loglikelihood
from fastdecode_rdma.engine.dense_pass import CHUNK_TOKENS

MARGIN = 2e-3
"""Between the two most probable tokens, above which greedy flags must agree."""


def cut_into_sentences(text: str, count: int) -> list[str]:
    """The first `count` sentences of at least three words, on one line each."""
    flat = re.sub(r"\s+", " ", text)
    sentences = [s for s in re.split(r"(?<=[.!?]['\")]) |(?<=[.!?]) ", flat) if s.count(" ") >= 2]
    if len(sentences) < count:
        raise SystemExit(f"the text has {len(sentences)} sentences, {count} are wanted")
    return sentences[:count]


class Harness:
    """lm-eval's own model over the same tokens."""

    def __init__(self, path: str, prefix: int, results: list[Loglikelihood]) -> None:
        self.model = HFLM(path, dtype="float32", device="cpu", batch_size=1)
        self.requests = [(None, [prefix], result.token_ids) for result in results]

    def score(self, batch_size: int) -> list[tuple[float, bool]]:
        """Scores all, `batch_size` at a time, the longest first."""
        self.model.batch_size_per_gpu = batch_size
        return self.model._loglikelihood_tokens(self.requests, disable_tqdm=True)


def check(results: list[Loglikelihood], model: torch.nn.Module, prefix: int) -> dict[str, Any]:
    """Compares every token with transformers, one sentence at a time."""
    worst, flags, disagree = 0.0, 0, 0
    for result in results:
        ids = torch.tensor([[prefix, *result.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[:, :-1]).logits[0].double(), -1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(own - result.token_logprobs).max()))
        top = torch.topk(logprobs, 2, -1)
        if float((top.values[:, 0] - top.values[:, 1]).min()) > MARGIN:
            flags += 1
            disagree += bool((top.indices[:, 0] == ids[0, 1:]).all()) != result.is_greedy
    return {"worst_token_error": worst, "flags_compared": flags, "flags_wrong": disagree}


def spread(gen: Generator, sentences: list[str], results: list[Loglikelihood]) -> float:
    """The largest difference of a token scored alone and in reversed order."""
    worst = 0.0
    alone = [gen.loglikelihood([("", sentence)])[0] for sentence in sentences]
    backwards = gen.loglikelihood([("", s) for s in sentences[::-1]])[::-1]
    for other in (alone, backwards):
        for one, two in zip(results, other, strict=True):
            worst = max(
                worst, float(np.abs(np.subtract(one.token_logprobs, two.token_logprobs)).max())
            )
    return worst


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    """Prints one table; with --json the figures, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", default="1,4,16,64")
    parser.add_argument("--skip-check", action="store_true", help="measure times only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    sentences = cut_into_sentences(args.text.read_text("latin-1"), args.sentences)
    pairs = [("", sentence) for sentence in sentences]
    figures: dict[str, Any] = {"sentences": len(pairs)}
    with Generator.from_pretrained(args.model) as gen:
        results = gen.loglikelihood(pairs)
        tokenizer = gen.tokenizer
        assert tokenizer is not None
        prefix = (
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        )
        assert prefix is not None
        harness = Harness(args.model, prefix, results)
        figures["tokens"] = tokens = sum(len(result.token_ids) for result in results)
        if not args.skip_check:
            figures |= check(results, harness.model.model, prefix)
            figures["alone_or_reversed"] = spread(gen, sentences, results)
            with Generator.from_pretrained(args.model, deterministic=True) as exact:
                figures["alone_or_reversed_deterministic"] = spread(
                    exact, sentences, exact.loglikelihood(pairs)
                )
        floor = GemmFloor(args.model, ("packed", "torch"))
        seconds: dict[str, list[float]] = {"ours": [], "floor": []}
        for _ in range(args.rounds):
            seconds["ours"].append(timed(lambda: gen.loglikelihood(pairs)))
            seconds["floor"].append(tokens / floor.tokens_per_s(CHUNK_TOKENS))
            for size in sizes:
                taken = timed(lambda size=size: harness.score(size))
                seconds.setdefault(f"hf batch {size}", []).append(taken)
    report(figures, seconds)
    if args.json is not None:
        args.json.write_text(json.dumps({**figures, "seconds": seconds}))
    return 0


def report(figures: dict[str, Any], seconds: dict[str, list[float]]) -> None:
    """Prints medians, and ours beside the others."""
    for name, value in figures.items():
        print(f"{name:34} {value}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{'':16}{'median s':>10}{'tokens/s':>10}{'ours is':>9}")
    for name, median in medians.items():
        rate, ratio = figures["tokens"] / median, median / medians["ours"]
        print(f"{name:16}{median:10.2f}{rate:10.0f}{ratio:8.2f}x")


if __name__ == "__main__":
    sys.exit(main())
