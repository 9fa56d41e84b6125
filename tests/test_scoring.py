"""Log-likelihoods by the lm-evaluation-harness's rules: every edge case, and a real model."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import ConfigError, FastDecodeError, Generator, Loglikelihood, SamplingParams
from fastdecode_rdma.engine.scoring import ScoreItem
from fastdecode_rdma.score_text import ScoreEncoder, rolling_spans
from fastdecode_rdma.tokenizer import Tokenizer

BOS, EOS = 256, 257


@pytest.fixture(autouse=True, scope="module")
def tiny_matrices(one_thread: None) -> None:
    """One thread of torch's."""


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    """Bytes are tokens; there is an EOS and no BOS. The model sees 64 tokens."""
    with Generator.from_pretrained(
        tiny_models("llama"), max_model_len=64, deterministic=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def with_bos(
    tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Generator]:
    """The same model with a tokenizer that puts BOS before each text."""
    path = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(tiny_models("llama"), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    with Generator.from_pretrained(path, max_model_len=64, deterministic=True) as made:
        yield made


def encode(text: str) -> list[int]:
    """The byte tokens of ASCII without spaces at the ends of the alphabet: printable ones first."""
    return [ord(char) - 33 if char != " " else 220 for char in text]


def given(gen: Generator, context: list[int], continuation: list[int]) -> Loglikelihood:
    return gen.loglikelihood([(context, continuation)])[0]


# -- pairs


def test_text_is_scored_as_its_tokens(gen: Generator) -> None:
    assert gen.tokenizer.encode("ab c") == encode("ab c")
    result = gen.loglikelihood([("ab", " cd")])[0]
    assert result == given(gen, encode("ab"), encode(" cd"))
    assert result.token_ids == encode(" cd") and len(result.token_logprobs) == 3
    assert result.logprob == sum(result.token_logprobs) and result.num_truncated == 0
    logprobs = gen.prompt_logprobs("ab cd")[0].logprobs
    assert np.array_equal(logprobs[2:], result.token_logprobs)  # case of overlapping prompts


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(gen: Generator) -> None:
    moved, plain = gen.loglikelihood([("ab \n ", "c"), ("ab", " \n c")])
    assert moved == plain and moved.token_ids[:1] == encode(" ")


@pytest.mark.parametrize("context", ["", "  "])
def test_without_a_context_the_prefix_token_comes_first(gen: Generator, context: str) -> None:
    result = gen.loglikelihood([(context, "cd")])[0]
    assert result == given(gen, [EOS], encode(context + "cd"))
    other = gen.loglikelihood([(context, "cd")], prefix_token_id=BOS)[0]
    assert other == given(gen, [BOS], encode(context + "cd")) and other != result
    assert given(gen, [], encode("cd")) == given(gen, [EOS], encode("cd"))


def test_a_prefix_token_that_is_there_already_is_not_repeated(with_bos: Generator) -> None:
    gen = with_bos
    expected = given(gen, [BOS], encode("cd"))
    assert gen.loglikelihood([("", "cd"), ("", "<s>cd")]) == [expected, expected]
    assert given(gen, [], [BOS, *encode("cd")]) == expected
    # in rolling text, too: the tokenizer's own BOS would be a second one
    assert gen.loglikelihood_rolling(["cd", "<s>cd", [BOS, *encode("cd")]]) == [expected] * 3


def test_special_tokens_follow_the_tokenizer_or_the_argument(
    gen: Generator, with_bos: Generator
) -> None:
    pair = ("ab", "c")
    expected = given(gen, [BOS, *encode("ab")], encode("c"))
    assert with_bos.loglikelihood([pair])[0] == expected
    assert with_bos.loglikelihood([("<s>ab", "c")])[0] == expected  # a chat template's own BOS
    without = with_bos.loglikelihood([pair], add_special_tokens=False)[0]
    assert without == gen.loglikelihood([pair])[0] != expected


def test_what_is_done_about_bos_is_told_once(
    gen: Generator, with_bos: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fastdecode_rdma.scoring"):
        for each in (gen, with_bos):
            each._scorer._has_told = False
            each.loglikelihood([("a", "b")])
            each.loglikelihood([("a", "b")])
    assert [record.getMessage().split("scoring: ")[1] for record in caplog.records] == [
        "without a context the prefix token is 257 (</s>); before a context the tokenizer does not "
        "add it",
        "without a context the prefix token is 256 (<s>); before a context the tokenizer adds it",
    ]


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 7])
def test_what_is_too_long_is_cut_at_the_left(gen: Generator, extra: int) -> None:
    """64 tokens are seen, and the last of the continuation need not be."""
    ids = np.random.default_rng(extra + 5).integers(0, 300, 65 + extra).tolist()
    result = given(gen, ids[:-3], ids[-3:])
    cut = max(0, extra)
    assert result.num_truncated == cut and result.token_ids == ids[-3:]
    kept = given(gen, ids[cut:-3], ids[-3:])
    assert kept.num_truncated == 0 and kept.token_logprobs == result.token_logprobs
    shorter = gen.loglikelihood([(ids[:-3], ids[-3:])], max_length=16)[0]
    assert shorter.num_truncated == 48 + extra
    assert shorter.token_logprobs == given(gen, ids[-17:-3], ids[-3:]).token_logprobs


def test_a_continuation_as_long_as_the_model_sees(gen: Generator) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 64).tolist()
    result = given(gen, encode("abc"), ids)
    assert result.num_truncated == 2 and len(result.token_ids) == 64
    assert result.token_logprobs == given(gen, encode("c"), ids).token_logprobs
    with pytest.raises(ConfigError, match=r"pair 0: the continuation has 65 tokens.*at most 64"):
        given(gen, encode("abc"), [*ids, 1])


def test_greedy_is_what_greedy_decoding_gives(gen: Generator) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answer = gen.complete([encode("abc")], greedy)[0].outputs[0].token_ids
    assert given(gen, encode("abc"), answer).is_greedy
    for place in range(6):
        other = [*answer[:place], (answer[place] + 1) % 300, *answer[place + 1 :]]
        assert not given(gen, encode("abc"), other).is_greedy


def test_arrays_and_generators_are_taken_and_order_is_kept(gen: Generator) -> None:
    pairs = [(np.array([n]), torch.tensor([n + 1, n])) for n in (9, 3, 7, 3)]
    results = gen.loglikelihood(pair for pair in pairs)
    assert [r.token_ids for r in results] == [[10, 9], [4, 3], [8, 7], [4, 3]]
    assert results[1] == results[3] and gen.loglikelihood([]) == []


BAD_PAIRS = [
    (("a", ""), "the continuation is empty"),
    (([1], []), "the continuation is empty"),
    (("", ""), "the continuation is empty"),
    (("", "</s>"), "the continuation is empty"),  # the prefix token itself
    ("ab", r"expected \(context, continuation\), got str"),
    (("a", "b", "c"), "got 3 values"),
    (("a", [1]), "both as text or both as token ids"),
    (([1], [300]), "token id 300 at place 0 is outside the vocabulary of 300"),
    (([1], [0.5]), "must be a list of integers"),
    ((None, None), "expected text or token ids, got NoneType"),
    (("a", "\ud800"), "lone surrogates"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_PAIRS, ids=range(len(BAD_PAIRS)))
def test_bad_pairs_are_named_and_need_not_stop_the_others(
    gen: Generator, bad: object, message: str
) -> None:
    pairs = [("a", "b"), bad, ("a", "b")]
    with pytest.raises(ConfigError, match=f"^pair 1: .*{message}"):
        gen.loglikelihood(pairs)
    good, failed, again = gen.loglikelihood(pairs, on_error="event")
    assert good == again and good.error is None
    assert isinstance(failed.error, ConfigError) and math.isnan(failed.logprob)
    assert failed.token_ids == [] and not failed.is_greedy


def test_bad_arguments(gen: Generator) -> None:
    for arguments, message in (
        ({"max_length": 65}, r"max_length must be 1 .. 64"),
        ({"max_length": True}, "max_length must be"),
        ({"prefix_token_id": 300}, "prefix_token_id must be a token id below 300"),
        ({"on_error": "ignore"}, "on_error must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            gen.loglikelihood([("a", "b")], **arguments)
    with pytest.raises(ConfigError, match=r"expected a list of .* pairs, got str"):
        gen.loglikelihood("ab")
    with pytest.raises(ConfigError, match="k must be -1"):
        gen.prompt_logprobs("ab", -2)


def test_logits_that_are_no_numbers_fail_their_own_pair(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    finite = ScoreItem.is_finite.fget
    assert finite is not None
    bad = lambda self: finite(self) and self.logprobs.token_ids[0] != 9  # noqa: E731
    monkeypatch.setattr(ScoreItem, "is_finite", property(bad))
    failed, good = gen.loglikelihood([([9], [1]), ([8], [1])], on_error="event")
    assert "pair 0: the model's logits are not finite" in str(failed.error) and not good.error
    with pytest.raises(FastDecodeError, match="pair 0: the model's logits"):
        gen.loglikelihood([([9], [1])])


def test_without_a_tokenizer_ids_are_scored(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models("llama"), tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink()
    with Generator.from_pretrained(tmp_path / "bare", max_model_len=64) as bare:
        assert bare.loglikelihood([([1], [2])])[0].logprob < 0
        with pytest.raises(ConfigError, match="pair 0: text needs a tokenizer"):
            bare.loglikelihood([("a", "b")])
        with pytest.raises(ConfigError, match="give prefix_token_id"):
            bare.loglikelihood([([], [2])])
        assert bare.loglikelihood([([], [2])], prefix_token_id=3)[0].logprob < 0


# -- rolling text


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 19, 20, 21, 57])
def test_windows_score_every_token_once_with_all_the_context_there_is(length: int) -> None:
    ids = list(range(1, length + 1))
    spans = rolling_spans(np.array([0, *ids]), 10)
    assert [token for s in spans for token in s.ids[s.first :].tolist()] == ids
    assert all(len(s.ids) - 1 <= 10 for s in spans)
    assert all(len(s.ids) - 1 == 10 for s in spans[1:])


def test_a_text_is_the_sum_of_its_windows(gen: Generator) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 150).tolist()
    result = gen.loglikelihood_rolling([ids], max_length=60)[0]
    parts = [
        given(gen, [EOS], ids[:60]),
        given(gen, ids[59:60], ids[60:120]),
        given(gen, ids[89:120], ids[120:]),  # the last reaches back
    ]
    assert result.token_logprobs == [value for part in parts for value in part.token_logprobs]
    assert result.token_ids == ids and result.num_truncated == 0
    assert result.logprob == pytest.approx(sum(part.logprob for part in parts))


def test_an_empty_text_has_nothing_to_score(gen: Generator) -> None:
    empty, text = gen.loglikelihood_rolling(["", "ab"])
    assert empty == Loglikelihood(0.0, is_greedy=True) and text.logprob < 0


# -- prompts


def test_prompt_logprobs_are_those_of_the_sampling_parameter(gen: Generator) -> None:
    prompts = ["abcdef", encode("xyz"), "a"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    expected = [output.prompt_logprobs for output in gen.complete(prompts, params)]
    assert [list(each) for each in gen.prompt_logprobs(prompts, 3)] == expected
    assert list(gen.prompt_logprobs("abcdef", 3)[0]) == expected[0]
    assert len(gen.prompt_logprobs(["ab"], -1)[0][1]) == 300
    with pytest.raises(ConfigError, match="prompt 1: the prompt is empty"):
        gen.prompt_logprobs(["a", ""], 1)


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_that_overlap_give_equal_numbers_in_both_orders(gen: Generator, order: int) -> None:
    prompts = [encode("abcdefgh"), encode("abcd"), encode("abcdxy")]
    alone = [gen.prompt_logprobs([prompt], 2)[0] for prompt in prompts]
    together = gen.prompt_logprobs(prompts[::order], 2)[::order]
    for one, two in zip(alone, together, strict=True):
        assert list(one) == list(two)


# -- a real model

SENTENCES = [
    "Alice was beginning to get very tired of sitting by her sister on the bank.",
    "“Oh dear! Oh dear! I shall be too late!”",
    "Down, down, down. Would the fall never come to an end?",
    "   It was the White Rabbit, trotting slowly back again,\n\nand looking anxiously about.",
    "Grüße, 日本語 and 😀 are text, too.",
]
LIMIT = 1e-3


@pytest.mark.parametrize("pair", [("The inter", "national law"), ("x =", "= 3"), ("One ", "two")])
def test_a_token_across_the_border_is_split_as_by_the_harness(
    pair: tuple[str, str], smollm2_dir: Path
) -> None:
    tokenizer = Tokenizer.from_directory(smollm2_dir)
    assert tokenizer is not None
    encoder = ScoreEncoder(
        tokenizer, vocab_size=49152, max_length=64, prefix_token_id=None, add_special_tokens=None
    )
    (span,) = encoder.pair(pair)
    context = pair[0].rstrip()
    whole, alone = tokenizer.encode("".join(pair)), tokenizer.encode(context)
    assert span.ids.tolist() == [*alone, *whole[len(alone) :]]
    assert span.first == len(alone) and (whole[: len(alone)] == alone) == (pair[0] == "One ")


def test_a_real_model_scores_as_transformers_does(smollm2_dir: Path) -> None:
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_dir, dtype=torch.float32, attn_implementation="eager"
    )
    with Generator.from_pretrained(smollm2_dir, max_model_len=512) as gen:
        rolling = gen.loglikelihood_rolling(SENTENCES)
        pairs = gen.loglikelihood([(text[:20], text[20:]) for text in SENTENCES])
        prompts = gen.prompt_logprobs(SENTENCES, 2)
        assert gen.tokenizer.bos_token_id is not None
        prefix = gen.tokenizer.bos_token_id
    worst, greedy_seen = 0.0, 0
    for text, scored, pair, prompt in zip(SENTENCES, rolling, pairs, prompts, strict=True):
        ids = gen.tokenizer.encode(text)
        assert scored.token_ids == ids == prompt.token_ids.tolist()
        assert pair.token_ids == ids[len(ids) - len(pair.token_ids) :]
        context = gen.tokenizer.encode(text[:20].rstrip())  # at times cut within a token
        for sequence, got in (
            ([prefix, *ids], scored.token_logprobs),
            ([*context, *pair.token_ids], pair.token_logprobs),
            (ids, prompt.logprobs[1:]),
        ):
            fed = torch.tensor([sequence])
            with torch.no_grad():
                logprobs = torch.log_softmax(oracle(fed).logits[0, :-1].double(), -1)
            own = logprobs.gather(1, fed[0, 1:, None])[:, 0].numpy()[-len(got) :]
            worst = max(worst, float(np.abs(own - got).max()))
        top = torch.topk(logprobs, 2, -1)
        for place, (values, tokens) in enumerate(zip(*map(torch.Tensor.tolist, top), strict=True)):
            if values[0] - values[1] > 2 * LIMIT:
                best = [t for t, v in prompt[place + 1].items() if v.rank == 1]
                assert best == tokens[:1]
                greedy_seen += ids[place + 1] == tokens[0]
    assert worst < LIMIT and greedy_seen > 5
