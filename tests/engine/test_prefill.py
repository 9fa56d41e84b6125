"""Log-probabilities of the prompt: against transformers, alone and in batches, after losses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import (
    ConfigError,
    FastDecodeError,
    Generator,
    Logprob,
    RequestOutput,
    SamplingParams,
)
from fastdecode_rdma.engine.prefill import PrefillItem, PrefillJob, split_into_scores
from fastdecode_rdma.prompt_logprobs import PromptLogprobs

TOLERANCE = 4e-4
"""Logits may differ by 2e-4, and the logarithm of their sum by as much again."""

SCORE = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
Entries = list[dict[int, Logprob] | None]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def check(entries: Entries, ids: list[int], logits: torch.Tensor, num_top: int) -> None:
    """Compares with an oracle's logits [T, V]."""
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    vocab_size = expected.shape[1]
    count = vocab_size if num_top < 0 else num_top
    assert len(entries) == len(ids) and entries[0] is None
    for place in range(1, len(ids)):
        row, entry, own = expected[place - 1], entries[place], ids[place]
        values = {token_id: value.logprob for token_id, value in entry.items()}
        assert next(iter(entry)) == own
        assert len(entry) in (count, count + 1)
        errors = [abs(value - row[token_id]) for token_id, value in values.items()]
        assert max(errors) < TOLERANCE, f"token {place}: {max(errors)}"
        for value in entry.values():  # as many are above it, unless too close to tell
            above = [np.count_nonzero(row > value.logprob + s * TOLERANCE) for s in (1, -1)]
            assert above[0] <= value.rank - 1 <= above[1]
        top = sorted((v for v in entry.values() if v.rank <= count), key=lambda v: v.rank)
        assert len(top) >= count
        if top:
            best = np.sort(row)[::-1][: len(top)]
            assert np.abs(best - [v.logprob for v in top]).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_several_prompts_at_once_match_transformers(
    name: str, tiny_models: Callable[..., Path], hf_logits: Callable[..., torch.Tensor]
) -> None:
    path = tiny_models(name)  # gemma3 has a window of 20
    prompts = [prompt(1), prompt(2, 1), prompt(37, 2), prompt(300, 3), prompt(90, 4)]
    tops = [5, 1, -1, 5, 0]
    with Generator.from_pretrained(path) as gen:
        outputs = gen.complete(prompts, [replace(SCORE, prompt_logprobs=k) for k in tops])
        assert (
            gen.complete(prompts[2], replace(SCORE, prompt_logprobs=None))[0].prompt_logprobs
            is None
        )
        text = gen.tokenizer.token_text
        for output, ids, num_top in zip(outputs, prompts, tops, strict=True):
            check(output.prompt_logprobs, ids, hf_logits(path, ids), num_top)
            for entry in output.prompt_logprobs[1:]:
                assert all(value.decoded_token == text(i) for i, value in entry.items())


@pytest.mark.parametrize("name", ["llama-prefill", "gemma3-prefill"])
def test_prompts_longer_than_a_chunk(
    name: str, tiny_models: Callable[..., Path], hf_logits: Callable[..., torch.Tensor]
) -> None:
    path = tiny_models(name, max_position_embeddings=2048)
    prompts = [prompt(1100), prompt(600, 1), prompt(513, 2)]
    with Generator.from_pretrained(path) as gen:
        outputs = gen.complete(prompts, replace(SCORE, prompt_logprobs=1))
    for output, ids in zip(outputs, prompts, strict=True):
        check(output.prompt_logprobs, ids, hf_logits(path, ids), 1)


def test_smollm2_matches_transformers(
    smollm2_dir: Path, hf_logits: Callable[..., torch.Tensor]
) -> None:
    with Generator.from_pretrained(smollm2_dir) as gen:
        encode = gen.tokenizer.encode
        texts = ["The capital of France is Paris, and that of Italy is Rome.", "def f(x):\n" * 20]
        prompts = [encode(text) for text in texts] + [encode("Hello")[:1]]
        assert len(prompts[1]) > 100 and len(prompts[2]) == 1
        tops = [5, 0, 1]
        outputs = gen.complete(prompts, [replace(SCORE, prompt_logprobs=k) for k in tops])
    for output, ids, num_top in zip(outputs, prompts, tops, strict=True):
        check(output.prompt_logprobs, ids, hf_logits(smollm2_dir, ids), num_top)


# -- the same whatever else runs


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    with Generator.from_pretrained(
        tiny_models("gemma3"), deterministic=True, max_num_batched_tokens=300
    ) as made:
        yield made
        assert not made._parts.engine.has_work()


def scores(outputs: list[RequestOutput]) -> list[Entries]:
    return [output.prompt_logprobs for output in outputs]


def test_the_same_bits_alone_and_in_a_batch_and_with_several_samples(gen: Generator) -> None:
    prompts = [prompt(length, length) for length in (3, 200, 90, 1, 40, 250, 17)]
    params = replace(SCORE, prompt_logprobs=2, max_tokens=8)
    alone = [scores(gen.complete(ids, params))[0] for ids in prompts]
    assert scores(gen.complete(prompts, params)) == alone
    several = replace(params, n=3, temperature=1.0, seed=1)
    assert scores(gen.complete(prompts, several)) == alone


@pytest.mark.parametrize("deterministic", [True, False])
def test_overlapping_prompts_in_both_orders(
    deterministic: bool, tiny_models: Callable[..., Path]
) -> None:
    longer = prompt(120)
    shorter, other = longer[:70], longer[:60] + prompt(30, 1)
    with Generator.from_pretrained(
        tiny_models("llama"), deterministic=deterministic, max_num_batched_tokens=100
    ) as gen:
        results = []
        for order in ([longer, shorter, other], [other, shorter, longer]):
            outputs = gen.complete([*order, order[0]], replace(SCORE, prompt_logprobs=1))
            if deterministic:
                assert scores(outputs)[0] == scores(outputs)[3]
            results.append({len(output.prompt_token_ids): output for output in outputs})
    tolerance = 0.0 if deterministic else TOLERANCE
    for length in (120, 70, 90):
        first, second = (result[length].prompt_logprobs for result in results)
        assert values(first) == pytest.approx(values(second), abs=tolerance, rel=0)
    for result in results:
        whole, part = result[120].prompt_logprobs, result[70].prompt_logprobs
        assert values(whole)[:69] == pytest.approx(values(part), abs=tolerance, rel=0)
        other_part = result[90].prompt_logprobs
        assert values(whole)[:59] == pytest.approx(values(other_part)[:59], abs=tolerance, rel=0)


def values(entries: Entries) -> list[float]:
    """The log-probabilities of the prompt's own tokens."""
    return [next(iter(entry.values())).logprob for entry in entries[1:]]


def test_a_stream_has_them_on_the_first_event_of_each_request(gen: Generator) -> None:
    prompts = [prompt(50), prompt(20, 1), prompt(9, 2)]
    params = [
        replace(SCORE, n=2, seed=1, temperature=1.0, max_tokens=4),
        replace(SCORE, prompt_logprobs=None),
        replace(SCORE, detokenize=False),
    ]
    seen: set[int] = set()
    for event in gen.generate(prompts, params):
        is_first = event.request_index not in seen
        seen.add(event.request_index)
        assert (event.prompt_logprobs is not None) == (is_first and event.request_index != 1)
        if event.prompt_logprobs is not None:
            assert isinstance(event.prompt_logprobs, PromptLogprobs)
            assert len(event.prompt_logprobs) == len(prompts[event.request_index])
            text = next(iter(event.prompt_logprobs[1].values())).decoded_token
            assert (text is None) == (event.request_index == 2)
    assert seen == {0, 1, 2}


def test_a_worker_lost_while_they_are_computed_or_afterwards(
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt(200), prompt(60, 1), prompt(130, 2), prompt(33, 3)]
    params = replace(SCORE, max_tokens=30, n=2, seed=1, temperature=1.0, prompt_logprobs=1)
    path = tiny_models("llama")
    with Generator.from_pretrained(path, deterministic=True) as gen:
        expected = gen.complete(prompts, params)
    workers = start_workers(3, memory="64MiB")
    addresses = [worker.address for worker in workers]
    score, begun = PrefillJob._score, []

    def lose_a_worker_first(self: PrefillJob, hidden: torch.Tensor) -> Iterator[int]:
        if not begun:
            workers[self.items[0].worker].kill()
        begun.append(len(self.items))
        yield from score(self, hidden)

    monkeypatch.setattr(PrefillJob, "_score", lose_a_worker_first)
    got: dict[int, list[Entries]] = {index: [] for index in range(len(prompts))}
    ids: dict[tuple[int, int], list[int]] = {}
    with Generator.from_pretrained(path, workers=addresses, deterministic=True) as gen:
        for event in gen.generate(prompts, params):
            if event.prompt_logprobs is not None:
                got[event.request_index].append(list(event.prompt_logprobs))
            ids.setdefault((event.request_index, event.sample_index), []).append(event.token_id)
            if sum(map(len, ids.values())) == 40:
                alive = [w for w in workers if w.process.poll() is None]
                if len(alive) == 2:
                    alive[0].kill()
        assert gen.stats().recoveries == 2
    assert len(begun) > 1
    assert got == {output.index: [output.prompt_logprobs] for output in expected}
    for output in expected:
        for sample in output.outputs:
            assert ids[output.index, sample.index] == sample.token_ids


def test_logits_that_overflow_fail_the_request(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token's logits are sound; those of one prompt are not."""
    fill = PromptLogprobs.fill_

    def overflow(self: PromptLogprobs, start: int, logits: np.ndarray) -> None:
        if len(self) == 5:
            logits[2, 7] = np.inf
        fill(self, start, logits)

    monkeypatch.setattr(PromptLogprobs, "fill_", overflow)
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        bad, good = gen.complete([prompt(5), prompt(6)], SCORE, on_error="event")
        assert isinstance(bad.error, FastDecodeError) and not bad.finished
        assert "request 0: non-finite logits of the prompt" in str(bad.error)
        assert good.finished and good.prompt_logprobs is not None
        assert gen.stats().num_requests_running == 0


def test_more_values_than_can_be_given_are_refused_at_the_call(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdecode_rdma.logprobs.MAX_VALUES", 1200)
    params = replace(SCORE, prompt_logprobs=-1)
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        assert len(gen.complete(prompt(4), params)[0].prompt_logprobs) == 4
        assert gen.complete(prompt(120), replace(SCORE, prompt_logprobs=10))[0].finished
        complaint = "prompt 1: prompt_logprobs=-1 of 5 tokens is 1500 values.*up to 240"
        with pytest.raises(ConfigError, match=complaint):
            gen.generate([prompt(4), prompt(5)], params)


# -- parts


def test_the_rows_to_score_are_packed_and_leave_out_the_last() -> None:
    def item(length: int, *, wanted: bool = True) -> PrefillItem:
        ids = np.zeros(length, np.int64)
        return PrefillItem((1,), 0, ids, PromptLogprobs(ids, 0, 10, None) if wanted else None)

    items = [item(1), item(4), item(9, wanted=False), item(2), item(12), item(1)]
    places = {id(each): place for place, each in enumerate(items)}
    batches = [
        [(places[id(each)], start, stop) for each, start, stop in batch]
        for batch in split_into_scores(items, 5)
    ]
    assert batches == [[(1, 0, 3), (3, 0, 1), (4, 0, 1)], [(4, 1, 6)], [(4, 6, 11)]]
    assert list(split_into_scores([item(7, wanted=False)], 5)) == []


def test_decoding_goes_on_while_a_long_prompt_is_scored(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's rows count against the budget of a step, as those of the layers do."""
    path = tiny_models("llama-wide", vocab_size=5000, max_position_embeddings=1024)
    monkeypatch.setattr("fastdecode_rdma.engine.prefill.SCORE_ELEMENTS", 50 * 5000)
    with Generator.from_pretrained(path, max_num_batched_tokens=64) as gen:
        first = gen.generate([[1, 2]], replace(SCORE, max_tokens=100, prompt_logprobs=None))
        next(first)
        before = gen.stats().steps
        gen.complete(prompt(900), replace(SCORE, max_tokens=1))
        # a row of the head costs 14 times as much as one of a layer: 50 of them fill a step
        assert gen.stats().steps - before >= 900 // 50
        first.close()


MEMORY = """
import sys
import numpy as np
from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.engine.prefill import PrefillItem, PrefillJob, peak_bytes, score_bytes
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.worker.kvcache import MemoryBudget, kv_bytes

model = load_model(sys.argv[1], CpuOps(num_threads=2, deterministic=True))
config, length, num_top = model.config, 1200, 3
geometry = AttentionGeometry(config.kv_groups, config.scale, "bf16", 8, config.max_model_len)
backend = AttentionBackend([LocalWorker(geometry, MemoryBudget(1 << 30), num_threads=2)], geometry)

def run(handle, ids, scores):
    job = PrefillJob(model, backend, [PrefillItem((handle,), 0, ids, scores)])
    for _ in job.cells(handle):
        pass

def status(key):
    lines = open('/proc/self/status').read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

ids = np.random.default_rng(0).integers(0, 300, length)
run(1, ids[:600], None)
before = status('VmRSS')
open('/proc/self/clear_refs', 'w').write('5')  # resets the peak
scores = PromptLogprobs(ids, num_top, config.vocab_size, None)
run(2, ids, scores)
slab = max(1 << 24, kv_bytes(geometry, length))
allowed = peak_bytes(length, model) + score_bytes(length, num_top, model) + slab + (8 << 20)
assert scores.is_finite
print(status('VmHWM') - before, allowed, 4 * length * config.vocab_size)
"""


def test_scoring_stays_within_the_stated_memory(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_models("llama-vocab", vocab_size=100_000, max_position_embeddings=2048)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used, allowed, all_logits = map(int, done.stdout.split())
    assert used <= allowed < all_logits / 3, done.stdout
