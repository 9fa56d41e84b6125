"""Sampling parameters end to end: the same tokens whatever happens around, and failures alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdecode_rdma import (
    ConfigError,
    FastDecodeError,
    Generator,
    RequestOutput,
    SamplingError,
    SamplingParams,
    ops,
)
from fastdecode_rdma import logprobs as logprobs_module
from fastdecode_rdma.engine import setup
from fastdecode_rdma.worker.limits import default_memory

BLOCK = 2 * 3 * 64 * 2 * 16 * 4  # K and V, layers, tokens, heads, head_dim, fp32: the tiny llama's
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


def sharpen(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on all it is given."""
    return logits * (1 + 0.01 * ((len(prompt_ids) + sum(output_ids)) % 7))


DRAWN = SamplingParams(max_tokens=40, temperature=0.9, seed=11, logprobs=1, ignore_eos=True)
SEVEN = [
    replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    replace(DRAWN, min_tokens=20, stop_token_ids=range(0, 300, 3), top_p=0.95),
    replace(DRAWN, bad_words=["a", [5, 6], [7]], logit_bias={9: 4.0, 20: -3.0}),
    replace(DRAWN, logits_processors=[sharpen], top_k=40, min_p=0.001),
    replace(DRAWN, n=2, frequency_penalty=1.0, allowed_token_ids=range(60, 200)),
    replace(GREEDY, repetition_penalty=1.5, logprobs=0, max_tokens=40),
    DRAWN,
]
PROMPTS = [f"prompt number {i} " * (i + 1) for i in range(7)]


def results(outputs: list[RequestOutput]) -> list[list[tuple[list[int], list[float]]]]:
    """Ids and log-probabilities, to the last bit."""
    return [
        [
            (s.token_ids, [top[i].logprob for top, i in zip(s.logprobs, s.token_ids, strict=True)])
            for s in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    with Generator.from_pretrained(
        tiny_models("llama"), deterministic=True, max_model_len=256, kv_cache_dtype="fp32"
    ) as made:
        yield made
        assert not made._parts.engine.has_work()


@pytest.fixture(scope="module")
def usual(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    """Not deterministic, but with the packed GEMM, as measured on most machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "measure_gemm", lambda *_, **__: ops.GemmChoice("packed"))
        made = Generator.from_pretrained(
            tiny_models("llama"), max_model_len=256, kv_cache_dtype="fp32"
        )
    with made:
        yield made


@pytest.fixture(scope="module")
def expected(gen: Generator) -> list[list[tuple[list[int], list[float]]]]:
    """Each request alone."""
    each = zip(PROMPTS, SEVEN, strict=True)
    return [results(gen.complete([prompt], params))[0] for prompt, params in each]


# -- the same tokens


def test_alone_without_deterministic(usual: Generator, expected: list) -> None:
    each = zip(PROMPTS, SEVEN, strict=True)
    assert [results(usual.complete([prompt], params))[0] for prompt, params in each] == expected


@pytest.mark.parametrize("mode", ["gen", "usual"])
def test_in_a_batch_of_seven(mode: str, request: pytest.FixtureRequest, expected: list) -> None:
    gen = request.getfixturevalue(mode)
    assert results(gen.complete(PROMPTS, SEVEN)) == expected
    lengths = {len(sample[0]) for request in expected for sample in request}
    assert max(lengths) == 40 and min(lengths) < 40  # some ended by a stop token


@pytest.mark.parametrize("mode", ["gen", "usual"])
def test_after_neighbours_were_cancelled(
    mode: str, request: pytest.FixtureRequest, expected: list
) -> None:
    gen = request.getfixturevalue(mode)
    neighbours = gen.generate(PROMPTS * 2, replace(DRAWN, presence_penalty=1.0, max_tokens=100))
    for _ in range(20):
        next(neighbours)
    mine = gen.generate(PROMPTS, SEVEN)
    ids: dict[tuple[int, int], list[int]] = {}
    for number, event in enumerate(mine):
        ids.setdefault((event.request_index, event.sample_index), []).append(event.token_id)
        if number == 40:
            neighbours.close()
    assert ids == {
        (request, sample): tokens
        for request, samples in enumerate(expected)
        for sample, (tokens, _) in enumerate(samples)
    }


@pytest.mark.parametrize("num_workers", [1, 3])
def test_on_workers_and_after_one_was_killed(
    num_workers: int,
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list],
    expected: list,
) -> None:
    workers = start_workers(num_workers)
    with Generator.from_pretrained(
        tiny_models("llama"), workers=[w.address for w in workers],
        deterministic=True, max_model_len=256, kv_cache_dtype="fp32",
    ) as gen:  # fmt: skip
        assert results(gen.complete(PROMPTS, SEVEN)) == expected
        if num_workers == 1:
            return
        ids: dict[tuple[int, int], list[int]] = {}
        for number, event in enumerate(gen.generate(PROMPTS, SEVEN)):
            ids.setdefault((event.request_index, event.sample_index), []).append(event.token_id)
            if number == 100:
                workers[1].kill()
        assert gen.stats().recoveries == 1
        assert ids == {
            (request, sample): tokens
            for request, samples in enumerate(expected)
            for sample, (tokens, _) in enumerate(samples)
        }


def test_after_preemptions(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, expected: list
) -> None:
    limit = replace(default_memory(), value=9 * BLOCK)
    monkeypatch.setattr(setup, "default_memory", lambda: limit)
    with Generator.from_pretrained(
        tiny_models("llama"), deterministic=True, max_model_len=256, kv_cache_dtype="fp32"
    ) as tight:
        assert results(tight.complete(PROMPTS, SEVEN)) == expected
        assert tight.stats().num_preemptions_total > 0


# -- what the parameters do


def test_bad_words_do_not_come(gen: Generator) -> None:
    (free,) = gen.complete("some text", GREEDY)[0].outputs
    ids = free.token_ids
    words = [ids[:1], ids[3:6]]  # what it would say
    (held,) = gen.complete("some text", replace(GREEDY, bad_words=words))[0].outputs
    assert ids[0] not in held.token_ids
    runs = [held.token_ids[i : i + 3] for i in range(len(held.token_ids) - 2)]
    assert ids[3:6] not in runs
    # as text: a byte-level vocabulary, so every word of three letters is three tokens
    steer = [next(t for t in range(300) if gen.tokenizer.decode([t]) == c) for c in "abc"]

    def want(output_ids: list[int], logits: torch.Tensor) -> None:
        logits[steer[len(output_ids) % 3]] += 1000

    spoken = replace(GREEDY, max_tokens=6, logits_processors=[want])
    assert gen.complete("x", spoken)[0].outputs[0].text == "abcabc"
    kept = gen.complete("x", replace(spoken, bad_words=["abc"]))[0].outputs[0]
    assert kept.text.startswith("ab") and "abc" not in kept.text


def test_a_strong_bias_or_one_allowed_token_forces_it(gen: Generator) -> None:
    for params in (
        replace(GREEDY, allowed_token_ids=[42]),
        replace(DRAWN, logit_bias={42: 100.0}, top_k=1),
    ):
        (sample,) = gen.complete("x", params)[0].outputs
        assert set(sample.token_ids) == {42}


def test_an_explicit_stop_stops_even_where_end_tokens_are_ignored(gen: Generator) -> None:
    eos = 257
    params = replace(GREEDY, logit_bias={eos: 100.0})
    assert len(gen.complete("x", params)[0].outputs[0].token_ids) == 30
    (sample,) = gen.complete("x", replace(params, stop_token_ids=[eos]))[0].outputs
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([eos], "stop", eos)
    (sample,) = gen.complete("x", replace(params, ignore_eos=False))[0].outputs
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([eos], "stop", None)
    (sample,) = gen.complete("x", replace(params, ignore_eos=False, min_tokens=4))[0].outputs
    assert len(sample.token_ids) == 5 and sample.token_ids.index(eos) == 4


# -- failures


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"stop_token_ids": range(300), "min_tokens": 1}, "min_tokens=1 forbids every stop"),
        ({"allowed_token_ids": [3], "bad_words": [[3]]}, "bad_words forbid all allowed"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids holds 300, which is outside"),
        ({"bad_words": [[1, 300]]}, "bad_words holds 300"),
        ({"logit_bias": {300: 1.0}}, "logit_bias holds 300"),
        ({"stop_token_ids": [300]}, "stop_token_ids holds 300"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_call(
    gen: Generator, params: dict[str, object], complaint: str
) -> None:
    before = gen.stats().prompt_tokens_total
    with pytest.raises(ConfigError, match=f"prompt 1: .*{complaint}"):
        gen.complete(["a", "b"], [GREEDY, replace(GREEDY, **params)])
    assert gen.stats().prompt_tokens_total == before


def test_more_logprobs_than_memory_allows_are_refused_at_the_call(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "MAX_VALUES", 300 * 8)
    whole = replace(GREEDY, logprobs=-1, max_tokens=4, n=2)
    for sample in gen.complete("x", whole)[0].outputs:
        assert [len(top) for top in sample.logprobs] == [300] * 4
    for params in (replace(whole, max_tokens=5), replace(whole, max_tokens=None)):
        with pytest.raises(ConfigError, match=r"logprobs=-1 of .* at most 2400 are given"):
            gen.complete("x", params)
    with pytest.raises(ConfigError, match="prompt_logprobs=50 of 200 tokens is 10000 values"):
        gen.complete("x" * 200, replace(GREEDY, prompt_logprobs=50))
    assert gen.complete("x", replace(GREEDY, logprobs=20, max_tokens=200))[0].outputs


def test_a_processor_that_fails_fails_its_request_alone(gen: Generator) -> None:
    def late(output_ids: list[int], logits: torch.Tensor) -> None:
        if len(output_ids) == 5:
            raise KeyError("oops")

    def fill(output_ids: list[int], logits: torch.Tensor) -> None:
        if output_ids:
            logits.fill_(torch.nan)

    bad = [
        replace(DRAWN, n=2, logits_processors=[late]),
        replace(DRAWN, logits_processors=[fill]),
        replace(DRAWN, logits_processors=[lambda o, row: row[:5]]),
        replace(DRAWN, allowed_token_ids=[3, 4], bad_words=[[4], [3, 3]]),
    ]
    alone = results(gen.complete("a", DRAWN))
    outputs = gen.complete(["a"] * 5, [*bad, DRAWN], on_error="event")
    assert results(outputs[4:]) == alone
    complaints = [
        "request 0, output token 5: logits processor .*late raised KeyError: 'oops'",
        "request 1, output token 1: logits processor .*fill left a logit of nan",
        r"request 2, output token 0: .* a tensor of shape \[5\]; expected \[300\]",
        "request 3, output token 1: no token is left to choose: relax allowed_token_ids or bad",
    ]
    for output, complaint in zip(outputs, complaints, strict=False):
        with pytest.raises(SamplingError, match=complaint):
            raise output.error
    assert isinstance(outputs[0].error.__cause__, KeyError)
    assert isinstance(outputs[0].error, FastDecodeError)
    assert len(outputs[0].outputs[0].token_ids) == 5  # what had come is kept
    with pytest.raises(SamplingError, match="KeyError"):
        gen.complete(["a", "b"], [DRAWN, bad[0]])
    assert results(gen.complete("a", DRAWN)) == alone  # and the generator goes on


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda row: row.to("meta"), "cannot be read"),
        (lambda row: (_ for _ in ()).throw(Unprintable()), "raised Unprintable: .its text cannot"),
        (
            lambda row: (_ for _ in ()).throw(ValueError("two\nlines")),
            "raised ValueError: two lines",
        ),
    ],
)
def test_no_processor_ends_the_engine(
    gen: Generator, result: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    bad = SamplingParams(max_tokens=3, logits_processors=[lambda ids, row: result(row)])
    other = gen.submit("abc", replace(GREEDY, max_tokens=5))
    with pytest.raises(SamplingError, match=message) as caught:
        gen.submit("abc", bad).result(20)
    assert "\n" not in str(caught.value)
    assert len(other.result(20).outputs[0].token_ids) == 5


def test_a_processor_that_asks_its_own_generator_is_told_so(gen: Generator) -> None:
    def ask(ids: list[int], row: torch.Tensor) -> None:
        gen.complete(["abc"], replace(GREEDY, max_tokens=1))

    handle = gen.submit("abc", SamplingParams(max_tokens=3, logits_processors=[ask]))
    with pytest.raises(SamplingError, match="must not call the generator that runs it"):
        handle.result(20)
    assert gen.complete(["abc"], replace(GREEDY, max_tokens=2))[0].finished


def test_a_sparse_row_is_read(gen: Generator) -> None:
    params = replace(GREEDY, max_tokens=3, logits_processors=[lambda ids, row: row.to_sparse()])
    plain = gen.complete(["abc"], replace(GREEDY, max_tokens=3))[0].outputs[0].token_ids
    assert gen.complete(["abc"], params)[0].outputs[0].token_ids == plain
