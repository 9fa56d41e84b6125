"""Sampling against direct float64 computations; known answers of the random generator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastdecode_rdma.sampling import philox4x32, sample, uniforms
from fastdecode_rdma.sequence import SamplingParams

VOCAB = 1000


def logits_of(num_rows: int, vocab: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def draw(logits: torch.Tensor, params: SamplingParams, *, seed: int = 1, **more):
    rows = len(logits)
    return sample(logits, [params] * rows, [seed] * rows, list(range(rows)), [0] * rows, **more)


def oracle_distribution(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """vLLM's filters by sorting everything, in float64."""
    x = row.astype(np.float64) / params.temperature
    keep = np.ones(len(x), dtype=bool)
    if params.min_p:
        keep &= x >= x.max() + math.log(params.min_p)
    if params.top_k > 0:
        values = np.sort(np.where(keep, x, -np.inf))[::-1]
        keep &= x >= values[min(params.top_k, len(x)) - 1]
    p = np.where(keep, np.exp(x - x.max()), 0.0)
    p /= p.sum()
    if params.top_p < 1.0:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0.0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The vectors published with Random123."""
    got = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert tuple(got[0].tolist()) == expected


def test_uniforms_depend_on_each_of_their_three_arguments():
    base = uniforms([5], [0], [0])[0]
    others = [
        uniforms([6], [0], [0])[0],
        uniforms([5 + (1 << 32)], [0], [0])[0],
        uniforms([5], [1], [0])[0],
        uniforms([5], [0], [1])[0],
    ]
    assert base not in others and len(set(others)) == 4
    assert uniforms([-1], [0], [0])[0] == uniforms([(1 << 64) - 1], [0], [0])[0]


def test_uniforms_are_uniform():
    values = uniforms([9] * 20_000, [0] * 20_000, list(range(20_000)))
    assert (values >= 0).all() and (values < 1).all()
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.zeros(3, VOCAB)
    logits[1, [7, 900]] = 2.0
    logits[2, [999]] = 2.0
    result = draw(logits, SamplingParams(temperature=0.0))
    assert result.token_ids == [0, 7, 999]
    assert result.logprobs is None and result.top_logprobs is None
    assert result.finite == [True] * 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, min_p=0.02),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=12, top_p=0.7, temperature=1.5),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.1),
        SamplingParams(top_p=0.95, min_p=0.05),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_distribution_by_chi_square(params):
    """20,000 draws of one row; cells of fewer than 5 expected draws are pooled."""
    draws = 20_000
    row = logits_of(1, 60, seed=3)
    expected = oracle_distribution(row[0].numpy(), params) * draws
    counts = np.zeros(60)
    for start in range(0, draws, 500):
        result = sample(
            row.repeat(500, 1), [params] * 500, [11] * 500, range(start, start + 500), [0] * 500
        )
        counts += np.bincount(result.token_ids, minlength=60)
    assert counts[expected == 0].sum() == 0
    small = (expected > 0) & (expected < 5)
    cells = [(counts[i], expected[i]) for i in np.flatnonzero(expected >= 5)]
    if expected[small].sum() >= 5:
        cells.append((counts[small].sum(), expected[small].sum()))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    degrees = len(cells) - 1
    # Wilson-Hilferty: the 99.9 % point of chi-square.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(top_k=4, logprobs=0),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=5.0, top_p=0.999),  # a nucleus wider than the first guess
    SamplingParams(top_k=50, top_p=0.5, min_p=0.01, logprobs=2),
    SamplingParams(min_p=0.2),
]


@pytest.mark.parametrize("batch", [7, 128])
def test_a_row_does_not_depend_on_its_neighbours(batch):
    vocab = 5000
    logits = logits_of(batch, vocab, seed=4)
    params = [MIXED[row % len(MIXED)] for row in range(batch)]
    seeds = [row * 31 for row in range(batch)]
    positions = [row % 5 for row in range(batch)]
    together = sample(logits, params, seeds, positions, [0] * batch)
    for row in range(batch):
        alone = sample(
            logits[row : row + 1].clone(), [params[row]], [seeds[row]], [positions[row]], [0]
        )
        assert alone.token_ids[0] == together.token_ids[row]
        if params[row].logprobs is not None:
            assert alone.logprobs[0] == together.logprobs[row]  # to the last bit
            assert alone.top_logprobs[0] == together.top_logprobs[row]
        else:
            assert together.logprobs[row] is None


def test_number_of_threads_changes_nothing():
    logits = logits_of(16, 20_000, seed=5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([draw(logits, params).token_ids for params in MIXED])
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_ties_at_the_top_k_border_all_stay():
    """As in vLLM: a token equal to the k-th best is kept."""
    logits = torch.zeros(400, 50)
    logits[:, :3] = 4.0
    logits[:, 0] = 5.0
    tokens = set(draw(logits, SamplingParams(top_k=2)).token_ids)
    assert tokens == {0, 1, 2}


def test_extreme_filters_leave_the_best_token():
    logits = logits_of(50, seed=6)
    best = logits.argmax(dim=1).tolist()
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-4, top_p=0.5),
    ):
        assert draw(logits, params).token_ids == best
    wide = draw(logits, SamplingParams(top_k=10**6))
    assert all(0 <= token < VOCAB for token in wide.token_ids)


def test_logprobs_are_log_softmax_of_the_raw_logits():
    logits = logits_of(4, seed=7)
    params = SamplingParams(temperature=0.5, top_k=3, logprobs=5)
    result = draw(logits, params)
    exact = torch.log_softmax(logits.double(), dim=1)
    for row in range(4):
        token = result.token_ids[row]
        top = result.top_logprobs[row]
        assert next(iter(top)) == token
        assert top[token].logprob == result.logprobs[row]
        assert top[token].rank == int((exact[row] > exact[row, token]).sum()) + 1
        best = torch.topk(exact[row], 5)
        assert set(best.indices.tolist()) <= set(top) and len(top) in (5, 6)
        for rank, other in enumerate(best.indices.tolist(), start=1):
            assert top[other].rank == rank
        for other, entry in top.items():
            # fp32 exp and a 1000-term sum: a few units in the last place of values near 10.
            assert entry.logprob == pytest.approx(exact[row, other].item(), abs=1e-5)


def test_all_logprobs_sum_to_one():
    result = draw(logits_of(1, seed=8), SamplingParams(logprobs=-1))
    top = result.top_logprobs[0]
    assert len(top) == VOCAB
    assert sum(math.exp(entry.logprob) for entry in top.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", MIXED, ids=range(len(MIXED)))
def test_logits_that_are_not_finite_give_no_token(bad, params):
    logits = logits_of(4, seed=9)
    logits[2, 77] = bad
    result = draw(logits, params)
    assert result.finite == [True, True, False, True]
    assert result.token_ids[2] == -1
    logits[2] = -torch.inf
    assert draw(logits, params).finite == [True, True, False, True]


def test_minus_infinity_is_an_allowed_logit():
    logits = torch.full((30, 20), -torch.inf)
    logits[:, [4, 9]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=5)):
        result = draw(logits, params)
        assert all(result.finite) and set(result.token_ids) == {4, 9}


def test_min_tokens_forbids_every_stop_until_then():
    logits = torch.zeros(3, 20)
    logits[:, 5] = 9.0
    logits[:, 6] = 8.0
    logits[:, 7] = 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[6])
    assert draw(logits, params, eos_ids=[5]).token_ids == [7, 7, 5]
    free = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert draw(logits, free, eos_ids=[5]).token_ids == [5, 5, 5]


def test_samples_of_one_request_differ():
    logits = logits_of(1, seed=10).repeat(8, 1)
    result = sample(logits, [SamplingParams()] * 8, [3] * 8, [0] * 8, list(range(8)))
    assert len(set(result.token_ids)) > 1
