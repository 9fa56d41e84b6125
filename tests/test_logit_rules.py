"""Rules on logits: each against a direct formula, their order, and every way to fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fastdecode_rdma.errors import ConfigError, SamplingError
from fastdecode_rdma.logit_rules import LogitState, RuleCompiler
from fastdecode_rdma.sequence import SamplingParams

VOCAB = 50
EOS = 7


def compiler_of(
    encode: Callable[[str], Sequence[int]] | None = None, eos_ids: Sequence[int] = (EOS,)
) -> RuleCompiler:
    return RuleCompiler(vocab_size=VOCAB, eos_ids=eos_ids, encode=encode)


def start(
    prompt: Sequence[int] = (), output: list[int] | None = None, **params: object
) -> LogitState:
    rules = compiler_of().compile(SamplingParams(**params))
    assert rules is not None
    return rules.start(np.array(prompt, np.int64), [] if output is None else output)


def applied(state: LogitState, logits: np.ndarray) -> np.ndarray:
    changed = logits.copy()
    assert state.apply_(changed) == int(changed.argmax())
    return changed


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 4


def forbidden(state: LogitState) -> set[int]:
    return set(np.flatnonzero(np.isneginf(applied(state, np.zeros(VOCAB, np.float32)))).tolist())


# -- what does nothing


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, seed=3, logprobs=3),
        SamplingParams(stop_token_ids=[3], stop="x", ignore_eos=True, max_tokens=4),
        SamplingParams(min_tokens=3, ignore_eos=True),
        SamplingParams(logit_bias={}, bad_words=[], logits_processors=[]),
        SamplingParams(repetition_penalty=1, presence_penalty=0, frequency_penalty=0),
    ],
    ids=range(6),
)
def test_parameters_that_change_no_logits_have_no_rules(params: SamplingParams) -> None:
    assert compiler_of().compile(params) is None


def test_min_tokens_alone_ends_with_them() -> None:
    output: list[int] = []
    state = start(output=output, min_tokens=2, stop_token_ids=[6])
    assert state.is_active and forbidden(state) == {6, EOS}
    output.append(1)
    assert state.is_active
    output.append(1)
    assert not state.is_active


def test_min_tokens_does_not_forbid_an_end_token_that_is_ignored() -> None:
    assert forbidden(start(min_tokens=2, ignore_eos=True, stop_token_ids=[6])) == {6}


def test_end_tokens_beyond_the_vocabulary_are_left_alone() -> None:
    rules = compiler_of(eos_ids=[EOS, VOCAB]).compile(SamplingParams(min_tokens=1))
    assert rules is not None and forbidden(rules.start(np.array([1]), [])) == {EOS}


# -- penalties


def direct_penalties(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The formulas over the whole vocabulary, in fp32."""
    counts = np.bincount(np.array(output, np.int64), minlength=VOCAB).astype(np.float32)
    seen = counts > 0
    seen[list(prompt)] = True
    factor = np.float32(params.repetition_penalty)
    x = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    x = x - np.float32(params.frequency_penalty) * counts
    return x - np.float32(params.presence_penalty) * (counts > 0)


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]


@pytest.mark.parametrize("values", PENALTIES, ids=str)
def test_penalties_are_exact_at_every_step(values: dict[str, float], logits: np.ndarray) -> None:
    """To the last bit, and whether counted token by token or all at once (as after a replay)."""
    generator = np.random.default_rng(2)
    prompt = generator.integers(0, VOCAB, 9).tolist()
    params = SamplingParams(**values)
    output: list[int] = []
    state = start(prompt, output, **values)
    for token in generator.integers(0, VOCAB, 100).tolist():
        expected = direct_penalties(logits, params, prompt, output)
        assert np.array_equal(applied(state, logits), expected)
        assert np.array_equal(applied(start(prompt, output, **values), logits), expected)
        output.append(token)
    assert np.array_equal(applied(state, logits), direct_penalties(logits, params, prompt, output))


def test_counting_does_not_repeat_what_was_counted() -> None:
    """A step looks at the tokens that are new, not at the whole output."""

    class Watched(list):
        looked_at = 0

        def __getitem__(self, index):
            part = super().__getitem__(index)
            self.looked_at += len(part)
            return part

    output = Watched()
    state = start([1], output, presence_penalty=1.0)
    for step in range(50):
        applied(state, np.zeros(VOCAB, np.float32))
        output.append(step % VOCAB)
    assert output.looked_at == 49


def test_more_distinct_tokens_than_there_is_room_for_at_first() -> None:
    rules = RuleCompiler(vocab_size=1000, eos_ids=[], encode=None).compile(
        SamplingParams(frequency_penalty=1.0)
    )
    assert rules is not None
    output = list(range(900)) + [5] * 3
    state = rules.start(np.array([1, 2]), output)
    changed = applied(state, np.zeros(1000, np.float32))
    assert changed[5] == -4 and (changed[:5] == -1).all() and (changed[900:] == 0).all()


# -- bad words


def test_bad_words_forbid_the_token_that_would_complete_them() -> None:
    words = [[3], [4, 5], [4, 5, 6], [5, 5, 8], [9, 4]]
    cases = {
        (): {3},
        (4,): {3, 5},
        (4, 5): {3, 6},
        (5, 5): {3, 8},
        (4, 5, 5): {3, 8},
        (1, 9): {3, 4},
        (5,): {3},  # 6 only after 4, 5; 8 only after 5, 5
        (4, 1): {3},
    }
    for output, expected in cases.items():
        assert forbidden(start([4, 5, 9], list(output), bad_words=words)) == expected, output


def test_the_prompt_begins_no_bad_word() -> None:
    """As in vLLM: only what was generated counts."""
    assert forbidden(start([4], [], bad_words=[[4, 5]])) == set()


def test_strings_are_forbidden_with_and_without_a_space_before() -> None:
    table = {
        "one": [1], " one": [2],  # a token each
        "two": [3, 4], " two": [5, 4],  # as many tokens
        "six": [6, 8], " six": [9],  # fewer with the space
        "ten": [10], " ten": [11, 10],  # the space apart: the plain one forbids it already
        "far": [12], " far": [VOCAB + 3],  # a token that the model does not have
    }  # fmt: skip
    params = SamplingParams(bad_words=["one", "two", " six", "ten", "far"])
    rules = compiler_of(table.__getitem__).compile(params)
    assert rules is not None
    assert rules.forbidden.tolist() == [1, 2, 9, 10, 12]
    assert rules.endings == {3: [([3], 4)], 5: [([5], 4)], 6: [([6], 8)]}


@pytest.mark.parametrize(
    ("encode", "complaint"),
    [
        (None, "bad_words as text need a tokenizer"),
        (lambda text: [], "bad_words holds 'x', which has no tokens"),
    ],
)
def test_words_without_tokens_are_refused(
    encode: Callable[[str], Sequence[int]] | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        compiler_of(encode).compile(SamplingParams(bad_words=["x"]))


def test_a_word_that_is_no_text_is_refused() -> None:
    def encode(text: str) -> list[int]:
        raise ConfigError("the prompt is no valid text")

    with pytest.raises(ConfigError, match=r"bad_words holds '\\ud800', which is no valid text"):
        compiler_of(encode).compile(SamplingParams(bad_words=["\ud800"]))


# -- logit_bias, allowed_token_ids


def test_bias_and_allowed_tokens(logits: np.ndarray) -> None:
    biased = applied(start(logit_bias={3: 2.5, "4": -100}), logits)
    expected = logits.copy()
    expected[3] += np.float32(2.5)
    expected[4] -= np.float32(100)
    assert np.array_equal(biased, expected)
    kept = applied(start(allowed_token_ids=[2, 9, 2]), logits)
    assert np.array_equal(np.flatnonzero(np.isfinite(kept)), [2, 9])
    assert np.array_equal(kept[[2, 9]], logits[[2, 9]])


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCAB]},
        {"allowed_token_ids": [1, VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
        {"bad_words": [[1, VOCAB]]},
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_named(params: dict[str, object]) -> None:
    complaint = f"{next(iter(params))} holds 50, which is outside the vocabulary of 50"
    with pytest.raises(ConfigError, match=complaint):
        compiler_of().compile(SamplingParams(**params))


# -- logits processors


def test_processors_change_in_place_or_return(logits: np.ndarray) -> None:
    def add(output_ids: list[int], row: torch.Tensor) -> None:
        assert row.shape == (VOCAB,) and row.dtype == torch.float32
        row[len(output_ids)] += 1

    def double(prompt_ids: list[int], output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
        assert (prompt_ids, output_ids) == ([8, 9], [4])
        return (row * 2).double()

    changed = applied(start([8, 9], [4], logits_processors=[add, double]), logits)
    expected = logits.copy()
    expected[1] += 1
    assert np.array_equal(changed, expected * 2)


def test_every_kind_of_callable(logits: np.ndarray) -> None:
    class Adder:
        def __call__(self, output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
            return row + 1

    def scaled(output_ids: list[int], row: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return row * factor

    def starred(*ids: object) -> torch.Tensor:
        assert len(ids) == 2
        return ids[-1] + 1

    def grad(output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
        return row + torch.nn.Parameter(torch.ones(()))

    halved = functools.partial(scaled, factor=0.5)
    processors = [Adder(), scaled, halved, starred, lambda o, row: row.flip(0), grad]
    changed = applied(start(logits_processors=processors), logits)
    assert np.array_equal(changed, ((logits + 1) / 2 + 1)[::-1] + 1)


def test_the_lists_that_processors_get_grow_and_are_not_made_anew(logits: np.ndarray) -> None:
    """A copy per token would cost O(length) at every step."""
    seen: list[list[int]] = []
    output: list[int] = []

    def note(prompt_ids: list[int], output_ids: list[int], row: torch.Tensor) -> None:
        assert (prompt_ids, output_ids) == ([8, 9], output)
        assert output_ids is not output
        seen.append(output_ids)

    state = start([8, 9], output, logits_processors=[note, note])
    for token_id in range(5):
        applied(state, logits)
        output.append(token_id)
    assert len(seen) == 10 and all(ids is seen[0] for ids in seen)


def test_processors_cannot_reach_the_sequence(logits: np.ndarray) -> None:
    """The ids they are given are copies, and other rows keep their own logits."""
    output = [1, 2]

    def vandal(output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
        output_ids.clear()
        return row.flip(0)

    state = start([1], output, logits_processors=[vandal])
    first = applied(state, logits)
    assert output == [1, 2] and np.array_equal(first, logits[::-1])


def boom(output_ids: list[int], row: torch.Tensor) -> None:
    raise ValueError("no")


def leave(output_ids: list[int], row: torch.Tensor) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("processor", "complaint"),
    [
        (boom, "processor boom raised ValueError: no"),
        (leave, "processor leave raised SystemExit: 3"),
        (lambda o, r: r[:-1], r"returned a tensor of shape \[49\]; expected \[50\]"),
        (lambda o, r: r[None], r"returned a tensor of shape \[1, 50\]; expected \[50\]"),
        (lambda o, r: r.tolist(), "returned list; expected a tensor or None"),
        (lambda o, r: r.numpy(), "returned ndarray; expected a tensor or None"),
        (lambda o, r: r + 1j, "returned a tensor of torch.complex64"),
        (lambda o, r: r * float("nan"), "left a logit of nan"),
        (lambda o, r: r.index_fill_(0, torch.tensor([3]), torch.inf), "left a logit of inf"),
        (lambda o, r: r.double() * 1e300, "left a logit of inf"),
        (lambda o, r: r.fill_(-torch.inf), "no token is left to choose: relax logits_processors"),
    ],
)
def test_processors_that_fail_are_named(
    processor: Callable[..., object], complaint: str, logits: np.ndarray
) -> None:
    with pytest.raises(SamplingError, match=complaint) as caught:
        applied(start(logits_processors=[processor]), logits)
    if "raised" in complaint:
        assert isinstance(caught.value.__cause__, (ValueError, SystemExit))


# -- nothing left


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (
            {"min_tokens": 1, "stop_token_ids": range(VOCAB)},
            "min_tokens=1 forbids every stop, and all tokens that are allowed are stops",
        ),
        ({"min_tokens": 1, "allowed_token_ids": [EOS]}, "min_tokens=1 forbids every stop"),
        (
            {"allowed_token_ids": [3, 4], "bad_words": [[4], [3]]},
            "bad_words forbid all allowed ones",
        ),
        ({"bad_words": [[i] for i in range(VOCAB)]}, "bad_words forbid all"),
    ],
    ids=str,
)
def test_what_leaves_no_first_token_is_refused_at_once(
    params: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        compiler_of().compile(SamplingParams(**params))


def test_what_leaves_no_later_token_names_its_causes(logits: np.ndarray) -> None:
    state = start(output=[3], allowed_token_ids=[3, 4], bad_words=[[4], [3, 3]])
    with pytest.raises(SamplingError, match=r"relax allowed_token_ids or bad_words$"):
        state.apply_(logits.copy())
    state = start(output=[], min_tokens=2, allowed_token_ids=[3, EOS], bad_words=[[3, 3]])
    assert state.apply_(logits.copy()) == 3
    state = start(output=[3], min_tokens=2, allowed_token_ids=[3, EOS], bad_words=[[3, 3]])
    with pytest.raises(SamplingError, match="min_tokens=2"):
        state.apply_(logits.copy())


def test_a_penalty_that_overflows_is_named(logits: np.ndarray) -> None:
    state = start([int(logits.argmax())], [], repetition_penalty=1e-40)
    with pytest.raises(SamplingError, match="repetition_penalty=1e-40 makes a logit of inf"):
        state.apply_(logits.copy())


# -- order, and compiling


def test_the_order_is_vllms(logits: np.ndarray) -> None:
    """Masks, bias, processors, repetition, frequency and presence: no two of them commute here."""
    logits[[1, 2, 3]] = [4.0, -4.0, 5.0]
    seen: list[np.ndarray] = []

    def square(output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
        seen.append(row.numpy().copy())
        return torch.where(row.isfinite(), row.abs().square() * row.sign(), row)

    values = {
        "allowed_token_ids": [1, 2, 3], "bad_words": [[3]], "logit_bias": {1: 1.0, 2: -1.0, 3: 9.0},
        "logits_processors": [square], "repetition_penalty": 2.0, "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
    }  # fmt: skip
    changed = applied(start([1], [2, 2], **values), logits)
    assert changed[1] == (4 + 1) ** 2 / 2
    assert changed[2] == -((4 + 1) ** 2) * 2 - 2 * 0.5 - 0.25
    assert np.isneginf(changed[3]) and np.isneginf(changed[4:]).all()
    assert np.isneginf(seen[0][3]) and seen[0][1] == 5


def test_parameters_are_compiled_once_per_object() -> None:
    compiler = compiler_of()
    params = [SamplingParams(presence_penalty=0.1) for _ in range(100)]
    first = [compiler.compile(each) for each in params]
    assert len({id(rules) for rules in first}) == 100  # equal ones are not looked for
    assert compiler.compile(params[-1]) is first[-1]
