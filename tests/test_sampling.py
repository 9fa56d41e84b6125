"""Sampling against direct float64 computations; known answers of the random generator."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from fastdecode_rdma import _sampling, sampling
from fastdecode_rdma.logit_rules import LogitState, RuleCompiler
from fastdecode_rdma.sampling import MAX_TEMPERATURE, ROW, philox4x32, sample, uniforms
from fastdecode_rdma.sequence import SamplingParams

VOCAB = 1000


def logits_of(num_rows: int, vocab: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def draw(logits: torch.Tensor, params: SamplingParams, *, seed: int = 1, **more):
    rows = len(logits)
    return sample(logits, [params] * rows, [seed] * rows, list(range(rows)), [0] * rows, **more)


EOS = 7


def state_of(
    params: SamplingParams,
    *,
    vocab: int = VOCAB,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> LogitState | None:
    compiler = RuleCompiler(vocab_size=vocab, eos_ids=[EOS], encode=None)
    rules = compiler.compile(params)
    return None if rules is None else rules.start(np.array(prompt, np.int64), list(output))


class Remembered:
    """A state that computes once: for many rows of the same logits."""

    is_active = True

    def __init__(self, state: LogitState) -> None:
        self._state = state
        self._result: np.ndarray | None = None

    def apply_(self, logits: np.ndarray) -> None:
        if self._result is None:
            self._state.apply_(logits)
            self._result = logits.copy()
        logits[:] = self._result


def oracle_logits(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Everything before temperature, token by token in float64."""
    x = row.astype(np.float64)
    for token in range(len(x)):
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        for word in params.bad_words:
            before = list(word[:-1])
            if word[-1] == token and list(output)[len(output) - len(before) :] == before:
                is_allowed = False
        if len(output) < params.min_tokens and token in (*params.stop_token_ids, EOS):
            is_allowed = False
        if not is_allowed:
            x[token] = -np.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if params.logits_processors:
            x[token] *= 0.5  # what `halve` does
        if token in prompt or token in output:
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * list(output).count(token)
        x[token] -= params.presence_penalty * (token in output)
    return x


def halve(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits / 2


def oracle_distribution(
    row: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> np.ndarray:
    """vLLM's rules and filters by sorting everything, in float64."""
    return oracle_filters(oracle_logits(row, params, prompt, output), params)


def oracle_filters(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    x = logits.astype(np.float64) / params.temperature
    keep = np.ones(len(x), dtype=bool)
    if params.min_p:
        keep &= x >= x.max() + math.log(params.min_p)
    if params.top_k > 0:
        values = np.sort(np.where(keep, x, -np.inf))[::-1]
        keep &= x >= values[min(params.top_k, len(x)) - 1]
    p = np.where(keep, np.exp(x - x.max()), 0.0)
    p /= p.sum()
    if params.top_p < 1.0:
        order = np.argsort(-x, kind="stable")
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
        SamplingParams(repetition_penalty=1.6),
        SamplingParams(repetition_penalty=0.7),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(frequency_penalty=-0.3),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(presence_penalty=-1.5),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3),
        SamplingParams(min_tokens=8, stop_token_ids=[5, 38]),
        SamplingParams(bad_words=[[5], [38, 14], [14, 38], [1, 14, 14, 38]]),
        SamplingParams(logit_bias={0: 3.0, 1: -2.0, 59: 6.0}),
        SamplingParams(allowed_token_ids=[3, 5, 14, 38, 40, 41]),
        SamplingParams(logits_processors=[halve]),
        SamplingParams(
            temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.3,
            frequency_penalty=0.2, presence_penalty=0.2, min_tokens=9, stop_token_ids=[5],
            bad_words=[[14, 38]], logit_bias={38: 2.0}, logits_processors=[halve],
            allowed_token_ids=range(0, 60, 2),
        ),
    ],
    ids=lambda p: ",".join(
        f"{f.name}={getattr(p, f.name)}"
        for f in dataclasses.fields(p)
        if getattr(p, f.name) != f.default and f.name != "logits_processors"
    ),
)  # fmt: skip
def test_distribution_by_chi_square(params):
    """20,000 draws of one row; cells of fewer than 5 expected draws are pooled."""
    draws = 20_000
    prompt, output = [1, 2, 3, 38, 38], [5, 40, 14, 5, 5, 14]
    row = logits_of(1, 60, seed=3)
    expected = oracle_distribution(row[0].numpy(), params, prompt, output) * draws
    state = state_of(params, vocab=60, prompt=prompt, output=output)
    states = None if state is None else [Remembered(state)] * 500
    counts = np.zeros(60)
    for start in range(0, draws, 500):
        result = sample(
            row.repeat(500, 1), [params] * 500, [11] * 500, range(start, start + 500), [0] * 500,
            states=states,
        )  # fmt: skip
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


def test_rows_under_rules_are_copies_and_their_neighbours_untouched():
    logits = logits_of(3, seed=12)
    before = logits.clone()
    best = int(logits[1].argmax())
    params = [SamplingParams(temperature=0.0, logprobs=2, logit_bias={best: -100.0})] * 3
    states = [None, state_of(params[1]), None]
    result = sample(logits, params, [0] * 3, [0] * 3, [0] * 3, states=states)
    assert torch.equal(logits, before)
    assert result.token_ids[0] == int(before[0].argmax()) and result.errors == {}
    assert result.token_ids[1] == int(before[1].topk(2).indices[1])
    # log-probabilities are the model's own, before all rules
    exact = torch.log_softmax(before[1].double(), dim=0)
    assert result.logprobs[1] == pytest.approx(exact[result.token_ids[1]].item(), abs=1e-5)
    assert set(result.top_logprobs[1]) == set(before[1].topk(2).indices.tolist())
    assert result.top_logprobs[1][result.token_ids[1]].rank == 2


def test_a_row_whose_rules_leave_nothing_fails_alone():
    def forbid(output_ids: list[int], logits: torch.Tensor) -> None:
        logits.fill_(-torch.inf)

    params = [SamplingParams(logprobs=1, logits_processors=[forbid] * (row == 1)) for row in (0, 1)]
    states = [state_of(each) for each in params]
    assert states[0] is None
    result = sample(logits_of(2, seed=13), params, [0] * 2, [0] * 2, [0] * 2, states=states)
    assert list(result.errors) == [1] and result.finite == [True, True]
    assert "no token is left to choose: relax logits_processors" in str(result.errors[1])
    assert result.token_ids[1] == -1 and result.token_ids[0] >= 0
    assert result.logprobs[1] is None and result.logprobs[0] is not None


def test_a_nan_of_the_model_shows_under_every_mask():
    """Not even where the token that has it is forbidden."""
    logits = logits_of(2, seed=14)
    logits[1, 4] = float("nan")
    params = [SamplingParams(allowed_token_ids=[1, 2], temperature=0.0)] * 2
    result = sample(
        logits, params, [0] * 2, [0] * 2, [0] * 2, states=[state_of(each) for each in params]
    )
    assert result.finite == [True, False] and result.token_ids[1] == -1
    assert result.errors == {}


def test_samples_of_one_request_differ():
    logits = logits_of(1, seed=10).repeat(8, 1)
    result = sample(logits, [SamplingParams()] * 8, [3] * 8, [0] * 8, list(range(8)))
    assert len(set(result.token_ids)) > 1


# -- the kernel against sorting everything


def oracle_picks(
    row: np.ndarray, params: SamplingParams, noise: np.ndarray
) -> list[tuple[int, float]]:
    """Tokens, and how far each uniform number is from the border of two tokens."""
    p = oracle_filters(row, params)
    order = np.arange(len(row))
    if params.top_k > 0 or params.top_p < 1.0:
        order = np.lexsort((order, -row))
    cumulative = np.cumsum(p[order])
    places = np.searchsorted(cumulative / cumulative[-1], noise, side="right")
    margins = [float(np.abs(cumulative / cumulative[-1] - uniform).min()) for uniform in noise]
    return list(zip(order[np.minimum(places, len(row) - 1)].tolist(), margins, strict=True))


def shapes_of_logits(vocab: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(vocab)
    normal = generator.normal(size=vocab)
    masked = np.where(generator.random(vocab) < 0.5, -np.inf, normal * 3)
    masked[vocab // 2] = 1.0
    peaked = normal.copy()
    peaked[vocab // 3] = 40.0
    shapes = {
        "usual": normal * 3, "flat": normal * 0.01, "equal": np.zeros(vocab),
        "ties": np.round(normal * 2), "masked": masked, "peaked": peaked, "huge": normal * 1e37,
        "signed zeros": np.where(normal > 0, 0.0, -0.0), "tiny": normal * 1e-38,
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in shapes.items()}


@pytest.fixture(params=_sampling.ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    draw(logits_of(1), SamplingParams())  # binds the kernel: the best set is chosen
    best = max(i for i in range(len(_sampling.ISA_NAMES)) if _sampling.set_isa(i))
    assert _sampling.set_isa(min(best, _sampling.ISA_NAMES.index(request.param)))
    yield request.param
    assert _sampling.set_isa(best)


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 63, 64, 65, 1000, 1025, 20_011])
def test_the_kernel_draws_what_the_oracle_draws(vocab: int, isa: str) -> None:
    """Except where rounding decides: a uniform number within 1e-5 of the border of two tokens
    (weights are fp32, with an error of some 1e-6 for exponents near 30)."""
    kinds = [
        {}, {"temperature": 0.3}, {"temperature": 30.0, "min_p": 0.3}, {"top_k": 1}, {"top_k": 50},
        {"top_p": 0.9}, {"top_p": 0.999, "temperature": 3.0}, {"min_p": 0.05, "top_p": 0.95},
        {"top_k": 300, "top_p": 0.5, "temperature": 0.1}, {"top_k": 20, "min_p": 0.01},
        {"top_k": 10**30, "top_p": 1e-300}, {"temperature": 1e300},
    ]  # fmt: skip
    num_draws = 4 if vocab > 10_000 else 20
    excepted = 0
    for row in shapes_of_logits(vocab).values():
        for values in kinds:
            params = SamplingParams(**values)
            if params.temperature > MAX_TEMPERATURE:
                params = dataclasses.replace(params, temperature=MAX_TEMPERATURE)
            logits = torch.from_numpy(row).repeat(num_draws, 1)
            result = draw(logits, SamplingParams(**values), seed=vocab)
            noise = uniforms([vocab] * num_draws, [0] * num_draws, range(num_draws))
            picks = oracle_picks(row, params, noise)
            for token, (expected, margin) in zip(result.token_ids, picks, strict=True):
                assert token == expected or margin < 1e-5, (values, token, expected, margin)
                excepted += token != expected
    print(f"{excepted} draws excepted")
    assert excepted <= 5


def test_the_kernel_reads_rows_as_they_are_written() -> None:
    assert ROW.itemsize == _sampling.ROW_BYTES


def test_the_last_uniform_number_takes_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding lifts the target to the total, or beyond."""
    monkeypatch.setattr(sampling, "uniforms", lambda *_: [1.0])
    row = torch.tensor([[1.0, 3.0, -torch.inf, 2.0, -torch.inf]])
    for params, last in [
        (SamplingParams(), 3), (SamplingParams(min_p=0.9), 1), (SamplingParams(top_k=2), 3),
        (SamplingParams(top_p=0.99), 0), (SamplingParams(top_p=0.1), 1),
    ]:  # fmt: skip
        assert draw(row, params).token_ids == [last]
        wide = torch.full((1, 5000), -torch.inf)
        wide[0, 1000:1005] = row[0]
        assert draw(wide, params).token_ids == [1000 + last]


def test_rows_that_are_parts_of_a_larger_tensor_are_read_by_their_stride() -> None:
    whole = logits_of(6, seed=15)
    assert (
        draw(whole[::2], SamplingParams()).token_ids
        == draw(whole[::2].contiguous(), SamplingParams()).token_ids
    )


def test_altered_rows_stay_in_memory_that_is_kept() -> None:
    scratch = sampling.Scratch()
    logits = logits_of(3, seed=16)
    params = [SamplingParams(logit_bias={5: 100.0})] * 3
    states = [state_of(params[0]), None, state_of(params[2])]
    args = (logits, params, [1] * 3, [0] * 3, [0] * 3)
    fresh = sample(*args, states=states)
    places = set()
    for _ in range(3):
        kept = sample(*args, states=states, scratch=scratch)
        places.add(scratch.rows(2, VOCAB).ctypes.data)
        assert kept.token_ids == fresh.token_ids and kept.token_ids[::2] == [5, 5]
    assert len(places) == 1


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        ISA_NAMES, philox = _sampling.ISA_NAMES, _sampling.philox
        bind_team, set_isa = _sampling.bind_team, _sampling.set_isa

        @staticmethod
        def sample(rows: int, num_rows: int, vocab_size: int, num_threads: int) -> None:
            first = ctypes.cast(rows, ctypes.POINTER(ctypes.c_int64))
            first[ROW.fields["token"][1] // 8] = sampling.NO_MEMORY

    monkeypatch.setattr(sampling, "_sampling", Exhausted)
    with pytest.raises(MemoryError, match="no memory to sort"):
        draw(logits_of(1), SamplingParams(top_k=3))
