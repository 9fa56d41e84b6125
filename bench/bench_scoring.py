"""Scoring: exactness beside transformers, speed beside lm-eval's own model and the GEMMs alone.

    python bench/bench_scoring.py --model DIR --text alice29.txt [--sentences 500] [--first 0]
        [--only check|spread|speed] [--rounds 3] [--batch-sizes 1,4,16,64] [--json FILE]

The text (of PyPI's brotli 1.2.1: tests/testdata/alice29.txt of its source distribution) is cut into
sentences.

check: every token of loglikelihood (a sentence's second half after its first), of
loglikelihood_rolling and of prompt_logprobs within 1e-3 of transformers in float32, and the flags
of greedy tokens wherever the two most probable ones are further apart than twice that.
spread: a sentence alone, among all and in reversed order within 1e-4 per token, and with
deterministic=True the same bits. Either fails with exit status 1.
speed: rounds alternate between all that is compared, so that a busy machine slows each of them. The
floor multiplies the weights by as many rows as there are tokens, CHUNK_TOKENS at a time, and does
nothing else. Needs lm-eval and accelerate.
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
import transformers
from gemm_floor import GemmFloor
from lm_eval.models.huggingface import HFLM

from fastdecode_rdma import Generator, Loglikelihood
from fastdecode_rdma.engine.dense_pass import CHUNK_TOKENS

LIMIT = 1e-3
"""Of a token's log-probability beside transformers."""

MARGIN = 2 * LIMIT
"""Between the two most probable tokens, above which greedy flags must agree."""

SPREAD = 1e-4
"""Of a token's log-probability between batches."""


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


class Oracle:
    """transformers, one sequence at a time; keeps the worst of all comparisons."""

    def __init__(self, path: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.worst: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.flags = self.wrong_flags = 0

    def logprobs(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each token but the first: its log-probability, whether it is the most probable one,
        and by how much the most probable one leads."""
        fed = torch.tensor([ids])
        with torch.no_grad():
            found = torch.log_softmax(self.model(fed[:, :-1]).logits[0].double(), -1)
        top = torch.topk(found, 2, -1)
        return (
            found.gather(1, fed[0, 1:, None])[:, 0].numpy(),
            (top.indices[:, 0] == fed[0, 1:]).numpy(),
            (top.values[:, 0] - top.values[:, 1]).numpy(),
        )

    def compare(self, kind: str, own: np.ndarray, got: list[float] | np.ndarray) -> None:
        """Takes the log-probabilities of the last tokens of a sequence."""
        error = float(np.abs(own[len(own) - len(got) :] - got).max())
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        self.tokens[kind] = self.tokens.get(kind, 0) + len(got)

    def compare_flags(self, is_greedy: np.ndarray, margins: np.ndarray, got: np.ndarray) -> None:
        """Takes flags, those that do not hang on rounding."""
        clear = margins > MARGIN
        self.flags += int(clear.sum())
        self.wrong_flags += int((is_greedy != got)[clear].sum())


def halves(sentence: str) -> tuple[str, str]:
    """A sentence cut before a word, near the middle."""
    place = sentence.index(" ", len(sentence) // 3)
    return sentence[:place], sentence[place:]


def check(gen: Generator, sentences: list[str], path: str, prefix: int) -> dict[str, Any]:
    """Compares every token with transformers, one sentence at a time."""
    rolling = gen.loglikelihood_rolling(sentences)
    pairs = gen.loglikelihood([halves(sentence) for sentence in sentences])
    prompts = gen.prompt_logprobs(sentences, 1)
    oracle = Oracle(path)
    for text, pair, prompt in zip(rolling, pairs, prompts, strict=True):
        own, is_greedy, margins = oracle.logprobs([prefix, *text.token_ids])
        oracle.compare("rolling", own, text.token_logprobs)
        if margins.min() > MARGIN:
            oracle.flags += 1
            oracle.wrong_flags += bool(is_greedy.all()) != text.is_greedy
        own, is_greedy, margins = oracle.logprobs(text.token_ids)
        oracle.compare("prompt_logprobs", own, prompt.logprobs[1:])
        oracle.compare_flags(is_greedy, margins, prompt.is_greedy[1:])
        oracle.compare("loglikelihood", own, pair.token_logprobs)
        last = slice(len(own) - len(pair.token_ids), None)
        if margins[last].min() > MARGIN:
            oracle.flags += 1
            oracle.wrong_flags += bool(is_greedy[last].all()) != pair.is_greedy
    figures: dict[str, Any] = {}
    for kind, worst in oracle.worst.items():
        figures[f"{kind}: worst of {oracle.tokens[kind]} tokens"] = worst
    return {**figures, "greedy flags compared": oracle.flags, "wrong flags": oracle.wrong_flags}


def spread(gen: Generator, sentences: list[str]) -> float:
    """The largest difference of a token among all, alone and in reversed order."""
    worst = 0.0
    pairs = [("", sentence) for sentence in sentences]
    results = gen.loglikelihood(pairs)
    alone = [gen.loglikelihood([pair])[0] for pair in pairs]
    backwards = gen.loglikelihood(pairs[::-1])[::-1]
    for other in (alone, backwards):
        for one, two in zip(results, other, strict=True):
            worst = max(
                worst, float(np.abs(np.subtract(one.token_logprobs, two.token_logprobs)).max())
            )
    return worst


def exactness(args: argparse.Namespace, gen: Generator, sentences: list[str]) -> bool:
    """Prints what was asked for of check and spread; returns whether all is within the limits."""
    figures: dict[str, Any] = {}
    is_good = True
    if args.only in (None, "check"):
        figures |= check(gen, sentences, args.model, prefix_of(gen))
        errors = [value for name, value in figures.items() if "worst" in name]
        is_good = max(errors) < LIMIT and not figures["wrong flags"]
    if args.only in (None, "spread"):
        figures["largest spread"] = default = spread(gen, sentences)
        with Generator.from_pretrained(args.model, deterministic=True) as exact:
            figures["largest spread, deterministic"] = bits = spread(exact, sentences)
        is_good = is_good and default < SPREAD and bits == 0.0
    for name, value in figures.items():
        print(f"{name:44} {value}")
    print("within the limits" if is_good else "NOT within the limits")
    return is_good


def prefix_of(gen: Generator) -> int:
    """The token before what has no context: BOS, else EOS."""
    tokenizer = gen.tokenizer
    assert tokenizer is not None
    bos = tokenizer.bos_token_id
    prefix = tokenizer.eos_token_id if bos is None else bos
    assert prefix is not None
    return prefix


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def speed(args: argparse.Namespace, gen: Generator, sentences: list[str]) -> dict[str, Any]:
    """Times all that is compared in turn, and prints medians."""
    pairs = [("", sentence) for sentence in sentences]
    results = gen.loglikelihood(pairs)
    harness = Harness(args.model, prefix_of(gen), results)
    tokens = sum(len(result.token_ids) for result in results)
    floor = GemmFloor(args.model, ("packed", "torch"))
    seconds: dict[str, list[float]] = {"ours": [], "floor": []}
    for _ in range(args.rounds):
        seconds["ours"].append(timed(lambda: gen.loglikelihood(pairs)))
        seconds["floor"].append(tokens / floor.tokens_per_s(CHUNK_TOKENS))
        for size in (int(size) for size in args.batch_sizes.split(",")):
            taken = timed(lambda size=size: harness.score(size))
            seconds.setdefault(f"hf batch {size}", []).append(taken)
    report(tokens, seconds)
    return {"sentences": len(pairs), "tokens": tokens, "seconds": seconds}


def main() -> int:
    """Prints what was asked for; with --json the times, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="sentences to leave out before them")
    parser.add_argument("--only", choices=("check", "spread", "speed"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", default="1,4,16,64")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = args.text.read_text("latin-1")
    sentences = cut_into_sentences(text, args.first + args.sentences)[args.first :]
    is_good = True
    with Generator.from_pretrained(args.model) as gen:
        if args.only != "speed":
            is_good = exactness(args, gen, sentences)
        if args.only in (None, "speed"):
            figures = speed(args, gen, sentences)
            if args.json is not None:
                args.json.write_text(json.dumps(figures))
    return 0 if is_good else 1


def report(tokens: int, seconds: dict[str, list[float]]) -> None:
    """Prints medians of times, and of what ours is of the others in the same round."""
    print(f"{tokens} tokens")
    print(f"{'':16}{'median s':>10}{'tokens/s':>10}{'ours is':>9}")
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = statistics.median(a / b for a, b in zip(times, seconds["ours"], strict=True))
        print(f"{name:16}{median:10.2f}{tokens / median:10.0f}{ratio:8.2f}x")


if __name__ == "__main__":
    sys.exit(main())
