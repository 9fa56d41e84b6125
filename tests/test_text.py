"""Text from end to end: what a generator streams against the ids that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdecode_rdma import Chat, ConfigError, Generator, SamplingParams
from fastdecode_rdma.sequence import TokenEvent

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for d in documents or [] %}{{ d.text }}
{%- endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    """Tokens are bytes: 0 to 255, then <s>, </s> and <pad>."""
    with Generator.from_pretrained(
        tiny_models("llama"), max_num_seqs=4, max_model_len=128, chat_template=TEMPLATE
    ) as made:
        yield made


def letters(gen: Generator, text: str) -> list[int]:
    return gen.tokenizer.encode(text)


@pytest.fixture(scope="module")
def alphabet(gen: Generator) -> SamplingParams:
    """Random texts of a few letters and of parts of two emoji."""
    allowed = sorted({*letters(gen, "ab \n"), *letters(gen, "😀"), *letters(gen, "é")})
    return SamplingParams(temperature=1.0, seed=3, max_tokens=60, allowed_token_ids=allowed)


def by_sample(events: list[TokenEvent]) -> dict[tuple[int, int], list[TokenEvent]]:
    samples: dict[tuple[int, int], list[TokenEvent]] = {}
    for event in events:
        samples.setdefault((event.request_index, event.sample_index), []).append(event)
    return samples


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_are_the_decode_of_the_ids(
    gen: Generator, alphabet: SamplingParams, skip: bool
) -> None:
    """Over the whole vocabulary, special tokens and broken characters included."""
    wild = SamplingParams(
        n=2, temperature=2.0, seed=5, max_tokens=60, ignore_eos=True, skip_special_tokens=skip
    )
    for params in (wild, alphabet):
        samples = by_sample(list(gen.generate(["a", "é", [1]], params)))
        assert len(samples) == 3 * params.n
        for events in samples.values():
            ids = [event.token_id for event in events]
            text = "".join(event.text for event in events)
            assert text == gen.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def test_stop_strings_cut_the_same_text(gen: Generator) -> None:
    """For strings of every length: text before it, nothing of it leaks, the reason names it."""
    few = {"temperature": 1.0, "seed": 3, "allowed_token_ids": letters(gen, "abc \n")}
    (whole,) = gen.complete("a", SamplingParams(max_tokens=60, **few))[0].outputs
    text = whole.text
    assert len(text) == 60 and whole.finish_reason == "length"
    for start, length in ((2, 1), (5, 2), (7, 3), (30, 5), (40, 20)):
        stop = text[start : start + length]
        before = text[: text.index(stop)]
        for include in (False, True):
            params = SamplingParams(
                max_tokens=60, stop=["never", stop], include_stop_str_in_output=include, **few
            )
            so_far = ""
            for event in gen.generate("a", params):
                so_far += event.text
                assert (before + stop * include).startswith(so_far)
            assert so_far == before + stop * include
            assert (event.finish_reason, event.stop_reason) == ("stop", stop)


def test_max_tokens_releases_what_was_held_back(gen: Generator, alphabet: SamplingParams) -> None:
    (whole,) = gen.complete("a", alphabet)[0].outputs
    count = 20
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=count, allowed_token_ids=alphabet.allowed_token_ids,
        stop=[gen.tokenizer.decode(whole.token_ids[:count]) + "and more"],
    )  # fmt: skip
    events = list(gen.generate("a", params))
    assert [event.token_id for event in events] == whole.token_ids[:count]
    assert all(not event.text for event in events[:-1])
    assert events[-1].text == gen.tokenizer.decode(whole.token_ids[:count])
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("length", None)


def test_end_of_sequence_releases_what_was_held_back(gen: Generator) -> None:
    """The model may only say "ab", or end: the text before the end is whole."""
    allowed = [*letters(gen, "ab"), *gen.tokenizer.eos_token_ids]
    params = SamplingParams(temperature=1.0, allowed_token_ids=allowed, stop="abx", max_tokens=100)
    outputs = [output for r in gen.complete(["a"] * 20, params) for output in r.outputs]
    assert {output.finish_reason for output in outputs} == {"stop"}
    for output in outputs:
        assert output.text == gen.tokenizer.decode(output.token_ids)
        assert output.stop_reason is None
    assert any(output.text.endswith(("a", "ab")) for output in outputs)


def test_without_detokenizing_there_is_no_text(gen: Generator, alphabet: SamplingParams) -> None:
    (whole,) = gen.complete("a", alphabet)[0].outputs
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, logprobs=2, detokenize=False,
        allowed_token_ids=alphabet.allowed_token_ids,
    )  # fmt: skip
    (bare,) = gen.complete("a", params)[0].outputs
    assert bare.token_ids == whole.token_ids and bare.text == ""
    decoded = {entry.decoded_token for step in bare.logprobs for entry in step.values()}
    assert decoded == {None}
    with pytest.raises(ConfigError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_a_chat_is_a_prompt_like_any_other(gen: Generator) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    chat = Chat(
        CHAT, tools=[{"n": "ü"}], documents=[{"text": "D"}], chat_template_kwargs={"mood": "!"}
    )
    as_dict = {
        "messages": CHAT, "tools": [{"n": "ü"}], "documents": [{"text": "D"}],
        "chat_template_kwargs": {"mood": "!"},
    }  # fmt: skip
    text = 'user:hi;{"n": "ü"}D!>'
    prompts = [chat, as_dict, text, {"prompt": text}, {"prompt_token_ids": letters(gen, text)}]
    results = gen.complete(prompts, greedy)
    assert [result.prompt for result in results] == [None, None, text, text, None]
    assert len({tuple(result.prompt_token_ids) for result in results}) == 1
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    assert gen.complete(chat, greedy)[0].prompt_token_ids == results[0].prompt_token_ids
    opened = gen.complete(Chat(CHAT, continue_final_message=True), greedy)[0]
    assert gen.tokenizer.decode(opened.prompt_token_ids) == "user:hi"


def test_a_prompt_that_is_too_long_fails_alone(gen: Generator) -> None:
    """At the limit, one under, one over; in a lazy source only they fail."""
    lengths = [126, 127, 128, 129, 1]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
    results = gen.complete(([7] * length for length in lengths), greedy, on_error="event")
    assert [len(r.outputs[0].token_ids) if r.finished else 0 for r in results] == [2, 1, 0, 0, 2]
    assert "the prompt has 129 tokens and max_model_len is 128" in str(results[3].error)
    with pytest.raises(ConfigError, match=r"prompt 2: the prompt has 128.*; prompt 3: .* has 129"):
        gen.complete([[7] * length for length in lengths], greedy)
