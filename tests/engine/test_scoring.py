"""Scoring jobs: what is shared is run once, any packing gives the same numbers, little memory."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import FastDecodeError, Generator, GeneratorClosedError, SamplingParams
from fastdecode_rdma.engine import scoring
from fastdecode_rdma.engine.scoring import ScoreItem, ScoreJob, split_into_jobs
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.prompt_logprobs import PromptLogprobs

TOLERANCE = 1e-4
"""Of a log-probability: sums of 48 to 80 terms in fp32 over 3 to 7 layers, logits up to 30."""

FAMILIES = {
    "llama": "grouped heads",
    "gemma3": "windows in most layers, norms of q and k",
    "gemma2": "soft caps of scores and logits, windows in every other layer",
    "opt": "learned positions, biases",
}


@pytest.fixture(autouse=True, scope="module")
def tiny_matrices(one_thread: None) -> None:
    """One thread of torch's."""


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def item(tokens: list[int], first: int = 1, num_top: int = 1) -> ScoreItem:
    return ScoreItem(PromptLogprobs(np.array(tokens), num_top, 300, None), first)


def tree(seed: int = 0) -> list[tuple[list[int], int]]:
    """Contexts with several continuations, one inside another, equal ones, single tokens."""
    long, short = ids(90, seed), ids(12, seed + 1)
    made = [([*long, *ids(n, seed + 2 + n)], len(long)) for n in (1, 1, 2, 9, 30)]
    made += [([*short, *ids(n, seed + 50 + n)], len(short)) for n in (1, 2, 3)]
    made += [(long[:40], 7), (long[:41], 40), (long[:41], 40), (ids(2, seed + 90), 1)]
    return [*made, ([*long[:60], *ids(25, seed + 91)], 60)]


def run(model: object, items: list[ScoreItem], max_tokens: int = 1 << 13) -> int:
    """Scores all; returns how many rows were run."""
    rows = 0
    for members in split_into_jobs(items, max_tokens):
        job = ScoreJob(model, members)
        rows += job.num_rows
        for _ in job.cells():
            pass
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_attention_gives_what_transformers_gives(
    family: str, tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    path = tiny_models(family)
    monkeypatch.setattr(scoring, "CHUNK_TOKENS", 32)  # sequences are cut at borders of cells
    model = load_model(path, CpuOps(num_threads=1))
    wanted = tree()
    items = [item(tokens, first) for tokens, first in wanted]
    assert run(model, items) < sum(len(tokens) - 1 for tokens, _ in wanted) / 2
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    for (tokens, first), scored in zip(wanted, items, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([tokens[:-1]])).logits[0].double()
        expected = torch.log_softmax(logits, -1)
        own = expected[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        np.testing.assert_allclose(
            scored.logprobs.logprobs[first:], own[first - 1 :], atol=TOLERANCE
        )
        assert np.isnan(scored.logprobs.logprobs[:first]).all() and scored.is_finite
        top = torch.topk(expected, 2, -1).values
        clear = (top[:, 0] - top[:, 1] > 2 * TOLERANCE).numpy()[first - 1 :]
        greedy = (expected.argmax(-1).numpy() == np.array(tokens[1:]))[first - 1 :]
        assert clear.mean() > 0.9
        assert np.array_equal(scored.logprobs.is_greedy[first:][clear], greedy[clear])


@pytest.mark.parametrize("deterministic", [False, True])
def test_alone_in_any_batch_and_in_any_order(
    deterministic: bool, tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_models("gemma3"), CpuOps(num_threads=1, deterministic=deterministic))
    wanted = [*tree(), *tree(200)]

    def scores(order: list[int], max_tokens: int) -> list[np.ndarray]:
        items = {place: item(*wanted[place]) for place in order}
        run(model, list(items.values()), max_tokens)
        return [items[place].logprobs.logprobs[wanted[place][1] :] for place in range(len(wanted))]

    everything = list(range(len(wanted)))
    together = scores(everything, 1 << 13)
    alone = []
    for tokens, first in wanted:
        single = item(tokens, first)
        run(model, [single])
        alone.append(single.logprobs.logprobs[first:])
    shuffled = random.Random(1).sample(everything, len(everything))
    monkeypatch.setattr(scoring, "CHUNK_TOKENS", 24)
    for other in (alone, scores(shuffled, 1 << 13), scores(everything[::-1], 100)):
        for one, two in zip(together, other, strict=True):
            if deterministic:
                assert np.array_equal(one, two)
            else:
                np.testing.assert_allclose(one, two, atol=TOLERANCE)


def test_jobs_keep_to_the_budget_and_share_what_comes_before() -> None:
    context = ids(50)
    items = [item([*context, 7, n], 50) for n in range(9)]
    jobs = list(split_into_jobs(items[::-1], 60))
    # inputs are the same for all: one runs 51 tokens, each other costs its place in the results
    assert [len(job) for job in jobs] == [9]
    assert [each.num_shared for each in jobs[0]] == [0, *[51] * 8]
    apart = [item(ids(30, seed)) for seed in range(4)]
    assert [len(job) for job in split_into_jobs(apart, 60)] == [2, 2]
    assert [len(job) for job in split_into_jobs(apart, 10)] == [1, 1, 1, 1]  # longer than allowed
    assert list(split_into_jobs([], 10)) == []


def test_a_context_with_many_answers_is_run_once(tiny_models: Callable[..., Path]) -> None:
    model = load_model(tiny_models("llama"), CpuOps(num_threads=1))
    context = ids(200)
    one_token = [item([*context, n], 200) for n in range(300)]
    assert run(model, one_token) == 200
    total = sum(np.exp(each.logprobs.logprobs[200]) for each in one_token)
    assert total == pytest.approx(1, abs=1e-6)  # together they are the whole distribution
    assert sum(each.logprobs.is_greedy[200] for each in one_token) == 1


# -- beside generation


@pytest.fixture
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    with Generator.from_pretrained(
        tiny_models("llama"), max_num_batched_tokens=64, deterministic=True
    ) as made:
        yield made


def test_generation_and_scoring_do_not_disturb_each_other(gen: Generator) -> None:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    prompts = [ids(30, seed) for seed in range(5)]
    pairs = [(tokens[:first], tokens[first:]) for tokens, first in tree() * 3]
    answers = [o.outputs[0].token_ids for o in gen.complete(prompts, params)]
    scores = gen.loglikelihood(pairs)
    heard: list[object] = []

    def score() -> None:
        heard.append(gen.loglikelihood(pairs))

    threads = [threading.Thread(target=score) for _ in range(3)]
    stream = gen.generate(prompts, params)
    next(stream)
    for thread in threads:
        thread.start()
    got: list[list[int]] = [[] for _ in prompts]
    for event in stream:
        got[event.request_index].append(event.token_id)
    for thread in threads:
        thread.join(30)
    assert [tokens[-len(each) :] for tokens, each in zip(answers, got, strict=True)] == got
    assert heard == [scores] * 3


def test_a_small_task_need_not_wait_for_a_large_one(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "JOB_TOKENS", 64)
    large_is_done = threading.Event()

    def score() -> None:
        gen.loglikelihood([(ids(60, seed), [1]) for seed in range(200)])
        large_is_done.set()

    thread = threading.Thread(target=score)
    thread.start()
    gen.loglikelihood([([1], [2])])
    assert not large_is_done.is_set()
    thread.join(60)
    assert large_is_done.is_set()


def test_a_failure_ends_the_call_and_nothing_else(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ScoreJob.cells

    def broken(self: ScoreJob) -> Iterator[int]:
        yield next(cells(self))
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ScoreJob, "cells", broken)
        with pytest.raises(FastDecodeError, match="scoring failed: MemoryError: no room"):
            gen.loglikelihood([([1], [2])])
    assert gen.loglikelihood([([1], [2])])[0].logprob < 0
    assert gen.complete([[1, 2]], SamplingParams(max_tokens=3))[0].finished


def test_closing_and_dying_are_heard(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    cells = ScoreJob.cells

    def slow(self: ScoreJob) -> Iterator[int]:
        for cost in cells(self):
            begun.set()
            threading.Event().wait(0.02)
            yield cost

    monkeypatch.setattr(ScoreJob, "cells", slow)
    heard: list[FastDecodeError] = []

    def score() -> None:
        try:
            gen.loglikelihood([(ids(400, seed), [1]) for seed in range(50)])
        except FastDecodeError as error:
            heard.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    assert begun.wait(30)
    gen.close()
    thread.join(10)
    assert [type(error) for error in heard] == [GeneratorClosedError]
    with pytest.raises(GeneratorClosedError):
        gen.loglikelihood([([1], [2])])


def test_who_gives_up_waiting_takes_the_work_back(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    pairs = [(ids(400, seed), [1]) for seed in range(50)]
    with monkeypatch.context() as patch:
        patch.setattr("fastdecode_rdma.scoring.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gen.loglikelihood(pairs)
    assert gen.loglikelihood([([1], [2])])[0].logprob < 0
    assert not gen._loop._side_tasks


MEMORY = """
import sys
import numpy as np
from fastdecode_rdma.engine.scoring import ScoreItem, ScoreJob, split_into_jobs
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.prompt_logprobs import PromptLogprobs

model = load_model(sys.argv[1], CpuOps(num_threads=2, deterministic=True))
vocab_size = model.config.vocab_size

def run(length):
    ids = np.random.default_rng(0).integers(0, vocab_size, length + 1)
    scores = PromptLogprobs(ids, 1, vocab_size, None)
    for items in split_into_jobs([ScoreItem(scores, 1)], 1 << 13):
        for _ in ScoreJob(model, items).cells():
            pass
    assert np.isfinite(scores.logprobs[1:]).all()

def status(key):
    lines = open('/proc/self/status').read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

run(8)
before = status('VmRSS')
open('/proc/self/clear_refs', 'w').write('5')  # resets the peak
run(8000)
print(status('VmHWM') - before)
"""


def test_a_large_vocabulary_takes_little_memory(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    """All logits of 8000 tokens would be 4 GB."""
    path = tiny_models(
        "llama-vocabulary", vocab_size=128_000, max_position_embeddings=8192, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 64 MiB of logits, as much for the kernel's sorting, the rest is small; 1 GiB is allowed
    assert int(done.stdout) < 200 << 20
