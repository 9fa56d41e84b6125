"""PromptLogprobs against float64 log-softmax: values, ranks, ties, the shape of a list."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from fastdecode_rdma import prompt_logprobs
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.sequence import Logprob

TOLERANCE = 1e-5
"""exp in fp32 errs by some 1e-7 of each term; logits up to 20 are rounded to 1e-6."""


def make(
    logits: np.ndarray, ids: list[int], num_top: int, *, pieces: tuple[int, ...] = ()
) -> PromptLogprobs:
    """Fills from logits [L-1, V], in pieces that begin at the places given."""
    made = PromptLogprobs(np.array(ids), num_top, logits.shape[1], lambda i: f"<{i}>")
    edges = [0, *pieces, len(logits)]
    for start, stop in pairwise(edges):
        made.fill_(start, logits[start:stop].astype(np.float32))
    return made


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Rounded to fp32, so that the oracle sees what we see."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, vocab_size)) * 6).astype(np.float32).astype(np.float64)


def oracle(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab_size", [2, 50, 300_000])
@pytest.mark.parametrize("num_top", [0, 1, 5, -1])
def test_values_and_ranks_match_the_oracle(vocab_size: int, num_top: int) -> None:
    rows = 40 if vocab_size < 1000 else 3
    logits = random_logits(rows, vocab_size)
    ids = np.random.default_rng(1).integers(0, vocab_size, rows + 1).tolist()
    if num_top == -1 and vocab_size > 1000:
        num_top = 1000  # all of it is a matter of small vocabularies here
    made = make(logits, ids, num_top)
    expected = oracle(logits)
    assert len(made) == rows + 1 and made[0] is None and made.is_finite
    count = vocab_size if num_top == -1 else min(num_top, vocab_size)
    for place, entry in enumerate(made):
        if not place:
            assert entry is None
            continue
        row, own = expected[place - 1], ids[place]
        assert next(iter(entry)) == own
        best = np.argsort(-row, kind="stable")[:count].tolist()
        assert set(entry) == {own, *best}
        assert [i for i in entry if i != own] == [i for i in best if i != own]
        for token_id, value in entry.items():
            assert value.logprob == pytest.approx(row[token_id], abs=TOLERANCE)
            assert value.rank == 1 + np.count_nonzero(row > row[token_id])
            assert value.decoded_token == f"<{token_id}>"


def test_ties_share_a_rank_and_the_lowest_ids_are_kept() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]] * 2)
    made = make(logits, [0, 4, 3], 2)
    assert [(i, v.rank) for i, v in made[1].items()] == [(4, 1), (1, 1), (2, 1)]
    assert [(i, v.rank) for i, v in made[2].items()] == [(3, 4), (1, 1), (2, 1)]
    everything = make(logits, [0, 4, 3], -1)
    ranks = {1: 1, 2: 1, 4: 1, 3: 4, 5: 4, 0: 6}
    assert {i: v.rank for i, v in everything[2].items()} == ranks
    assert sum(math.exp(v.logprob) for v in everything[1].values()) == pytest.approx(1)


def test_it_reads_like_a_list() -> None:
    logits = random_logits(4, 10)
    made = make(logits, [3, 1, 4, 1, 5], 1)
    assert made[-1] == made[4] == list(made)[4] == next(reversed(made))
    assert made[1:3] == [made[1], made[2]] and made[:1] == [None]
    assert made[::2] == [made[0], made[2], made[4]]
    with pytest.raises(IndexError):
        made[5]
    assert repr(made) == "PromptLogprobs(5 tokens, top 1)"
    assert math.isnan(made.logprobs[0]) and made.ranks[0] == 0
    assert made.logprobs[1:].tolist() == [
        made[place][token_id].logprob for place, token_id in enumerate([1, 4, 1, 5], 1)
    ]


def test_one_token_and_no_tokenizer() -> None:
    assert list(PromptLogprobs(np.array([7]), 5, 10, None)) == [None]
    made = PromptLogprobs(np.array([7, 1]), 0, 3, None)
    made.fill_(0, np.zeros((1, 3), np.float32))
    assert made[1] == {1: Logprob(pytest.approx(-math.log(3)), 1, None)}


@pytest.mark.parametrize(("rows", "vocab_size"), [(200, 300), (7, 70_001), (5, 9000)])
def test_a_rows_bits_do_not_depend_on_the_rows_computed_with_it(rows: int, vocab_size: int) -> None:
    logits = random_logits(rows, vocab_size)
    ids = np.random.default_rng(2).integers(0, vocab_size, rows + 1).tolist()
    whole = make(logits, ids, 3)
    for pieces in ((1,), (rows - 1,), tuple(range(1, rows))):
        apart = make(logits, ids, 3, pieces=pieces)
        assert np.array_equal(apart.logprobs[1:], whole.logprobs[1:])
        assert list(apart) == list(whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_noticed_and_harms_no_other_row(bad: float) -> None:
    logits = random_logits(3, 20)
    sound = make(logits, [0, 1, 2, 3], 4)
    logits[1, 6] = bad
    made = make(logits, [0, 1, 2, 3], 4)
    assert sound.is_finite and not made.is_finite
    assert made[1] == sound[1] and made[3] == sound[3]
    logits[1] = -math.inf
    assert not make(logits, [0, 1, 2, 3], 4).is_finite


def test_no_python_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """4000 tokens of a small vocabulary are one call of the kernel, not thousands."""
    calls = []
    score = prompt_logprobs.score

    def counting(rows: np.ndarray, vocab_size: int) -> None:
        calls.append(len(rows))
        score(rows, vocab_size)

    monkeypatch.setattr(prompt_logprobs, "score", counting)
    logits = random_logits(4000, 300)
    make(logits, [0] * 4001, 0)
    assert calls == [4000]
