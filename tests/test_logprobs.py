"""Log-probabilities by the kernel against float64, and what is made of them only when wanted."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fastdecode_rdma import _sampling, logprobs
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.logprobs import (
    NO_MEMORY,
    SCORE,
    TOP,
    TopLogprobs,
    bind_kernel,
    check_amount,
    score,
)
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.sampling import sample
from fastdecode_rdma.sequence import Logprob, SamplingParams

TOLERANCE = 1e-5
"""exp in fp32 errs by some 1e-7 of each term; logits up to 20 are rounded to 1e-6."""


@pytest.fixture(params=_sampling.ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    bind_kernel()  # the best set is chosen
    best = max(i for i in range(len(_sampling.ISA_NAMES)) if _sampling.set_isa(i))
    assert _sampling.set_isa(min(best, _sampling.ISA_NAMES.index(request.param)))
    yield request.param
    assert _sampling.set_isa(best)


def scored(row: np.ndarray, token_id: int, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result for one row [V]: SCORE, and TOP [num_top]."""
    rows, top = np.zeros(1, SCORE), np.zeros(num_top, TOP)
    rows["logits"], rows["top"] = row.ctypes.data, top.ctypes.data
    rows["token"], rows["num_top"] = token_id, num_top
    score(rows, len(row))
    return rows[0], top


def shapes_of_logits(vocab: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(vocab)
    normal = generator.normal(size=vocab)
    masked = np.where(generator.random(vocab) < 0.5, -np.inf, normal * 3)
    masked[vocab // 2] = 1.0
    shapes = {
        "usual": normal * 3, "equal": np.zeros(vocab), "ties": np.round(normal * 2),
        "masked": masked, "rising": np.linspace(-5, 5, vocab), "huge": normal * 1e37,
        "falling": np.linspace(5, -5, vocab), "signed zeros": np.where(normal > 0, 0.0, -0.0),
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in shapes.items()}


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 65, 1025, 20_011])
def test_the_kernel_scores_what_sorting_everything_scores(vocab: int, isa: str) -> None:
    for name, row in shapes_of_logits(vocab).items():
        exact = row.astype(np.float64)
        exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        order = np.lexsort((np.arange(vocab), -row))
        ranks = 1 + np.searchsorted(-row[order], -row, side="left")
        for num_top in sorted({0, 1, min(5, vocab), min(1500, vocab), vocab}):
            token_id = (num_top * 7) % vocab
            own, top = scored(row, token_id, num_top)
            assert own["rank"] == ranks[token_id], (name, num_top)
            assert own["logprob"] == pytest.approx(exact[token_id], abs=TOLERANCE)
            chosen = order[:num_top]
            assert np.array_equal(top["token"], chosen), (name, num_top)
            assert np.array_equal(top["rank"], ranks[chosen]), (name, num_top)
            np.testing.assert_allclose(top["logprob"], exact[chosen], rtol=1e-6, atol=TOLERANCE)
            if token_id in chosen:
                assert top["logprob"][chosen.tolist().index(token_id)] == own["logprob"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_none(bad: float, isa: str) -> None:
    row = shapes_of_logits(100)["usual"]
    row[99] = bad
    own, top = scored(row, 3, 2)
    assert np.isnan(own["logprob"]) and own["rank"] == 0 and not top["token"].any()


def test_the_kernel_reads_rows_as_they_are_written() -> None:
    assert (SCORE.itemsize, TOP.itemsize) == (_sampling.SCORE_BYTES, _sampling.TOP_BYTES)


def test_sampled_tokens_and_prompt_tokens_have_the_same_values() -> None:
    """To the last bit: a prompt is scored as its tokens would have been when sampled."""
    logits = torch.from_numpy(np.stack([*shapes_of_logits(5000).values()]))
    params = SamplingParams(temperature=0.0, logprobs=9)
    num_rows = len(logits)
    sampled = sample(logits, [params] * num_rows, *[[0] * num_rows] * 3)
    ids = np.array([0, *sampled.token_ids])
    prompt = PromptLogprobs(ids, 9, 5000, None)
    prompt.fill_(0, logits.numpy())
    assert [dict(top) for top in sampled.top_logprobs] == prompt[1:]
    assert sampled.logprobs == prompt.logprobs[1:].tolist()


def test_nothing_is_made_before_somebody_looks() -> None:
    decoded = []

    def decode(token_id: int) -> str:
        decoded.append(token_id)
        return f"<{token_id}>"

    top = TopLogprobs(4, -2.0, 3, np.array([(-0.5, 9, 1), (-1.5, 2, 2), (-2.0, 4, 3)], TOP))
    top.decode_token = decode
    assert (top.token_id, top.logprob, top.rank, decoded) == (4, -2.0, 3, [])
    expected = {
        4: Logprob(-2.0, 3, "<4>"), 9: Logprob(-0.5, 1, "<9>"), 2: Logprob(-1.5, 2, "<2>"),
    }  # fmt: skip
    assert top == expected and list(top.items()) == list(expected.items())
    assert top[9].decoded_token == "<9>" and 5 not in top and len(top) == 3
    assert repr(top) == repr(expected)
    assert decoded == [4, 9, 2]  # once each
    for copied in (copy.deepcopy(top), pickle.loads(pickle.dumps(top))):
        assert type(copied) is dict and copied == expected
    assert json.dumps({token_id: entry.logprob for token_id, entry in top.items()})


def test_what_is_beyond_reason_is_refused_with_both_numbers() -> None:
    for num_top, num_tokens, vocab_size in [
        (None, 1 << 40, 150_000), (20, 1 << 40, 150_000), (-1, 100, 150_000), (-1, 50_000, 300),
        (10**9, 50_000, 300), (-1, 1 << 40, 20),
    ]:  # fmt: skip
        check_amount("logprobs", num_top, num_tokens, vocab_size)
    with pytest.raises(ConfigError) as info:
        check_amount("logprobs", -1, 1000, 150_000)
    assert str(info.value) == (
        "logprobs=-1 of 1000 tokens is 150000000 values, at most 16777216 are given: for that many "
        "tokens use up to 16777"
    )
    with pytest.raises(ConfigError, match=r"use up to 20$"):
        check_amount("prompt_logprobs", 21, 10**6, 150_000)


def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDECODE_ISA", "sse9")
    with pytest.raises(ConfigError, match="FASTDECODE_ISA='sse9' is unknown"):
        bind_kernel.__wrapped__()


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        @staticmethod
        def score(rows: int, num_rows: int, vocab_size: int, num_threads: int) -> None:
            kept["rank"] = NO_MEMORY

    bind_kernel()
    kept = np.zeros(2, SCORE)
    monkeypatch.setattr(logprobs, "_sampling", Exhausted)
    with pytest.raises(MemoryError, match="no memory to sort"):
        score(kept, 10)
