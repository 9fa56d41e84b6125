"""`Generator` from outside, on tiny models: shapes of input, batching, seeds, stopping, text."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import ConfigError, FastDecodeError, Generator, RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    """One deterministic generator with 4 seats for all tests that leave it as they found it."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with Generator.from_pretrained(
        tiny_models("llama"),
        deterministic=True,
        max_num_seqs=4,
        max_model_len=128,
        chat_template=template,
        kv_cache_dtype="fp32",
    ) as made:
        yield made
        assert not made._parts.engine.has_work()


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


# -- shapes of input


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("hi", ["hi"]),
        ([5, 6], [None]),
        ((5, 6), [None]),
        (np.array([5, 6]), [None]),
        ([{"role": "user", "content": "x"}], [None]),
        (["hi", [5, 6], [{"role": "user", "content": "x"}]], ["hi", None, None]),
        ([np.array([5]), "hi"], [None, "hi"]),
        ([[5, 6]], [None]),
        (np.array([[5, 6], [7, 8]]), [None, None]),
        ((p for p in ["a", [5]]), ["a", None]),
        ([], []),
        (iter([]), []),
    ],
)  # fmt: skip
def test_shapes_of_prompts(gen: Generator, prompts: object, texts: list[str | None]) -> None:
    outputs = gen.complete(prompts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert [output.index for output in outputs] == list(range(len(texts)))
    for output in outputs:
        assert output.finished and output.error is None
        assert len(output.outputs[0].token_ids) == 12
        assert all(
            isinstance(i, int) for i in output.prompt_token_ids + output.outputs[0].token_ids
        )


def test_one_or_one_per_prompt_of_parameters(gen: Generator) -> None:
    @dataclass(frozen=True)
    class Mine(SamplingParams):
        """A subclass is as good."""

    each = [replace(GREEDY, max_tokens=3), Mine(max_tokens=5, ignore_eos=True)]
    for given in (each, tuple(each), iter(each)):
        assert [len(ids) for ids in ids_of(gen.complete(["a", "b"], given))] == [3, 5]
    assert [len(ids) for ids in ids_of(gen.complete(iter("ab"), iter(each)))] == [3, 5]
    assert [len(ids) for ids in ids_of(gen.complete("a", each[:1]))] == [3]


@pytest.mark.parametrize(
    ("prompts", "params", "complaint"),
    [
        (["a", "", [300]], None, "prompt 1: the prompt is empty.*; prompt 2: token id 300"),
        (["a"], 5, "expected SamplingParams, got int"),
        (["a"], SamplingParams, "expected SamplingParams, got type"),
        (["a"], "greedy", "expected SamplingParams, got str"),
        (["a"], {"n": 1}, "expected SamplingParams, got dict"),
        (["a", "b"], [GREEDY], "got 2 prompts and only 1 sampling params"),
        (["a"], SamplingParams(n=5), "prompt 0: n=5 is more than max_num_seqs=4"),
        (["a"], SamplingParams(min_tokens=1, stop_token_ids=[300]), "stop_token_ids holds 300"),
        ({"a": 1}, None, "a dict is a prompt if it has"),
        ({"a"}, None, "set is no prompt"),
        (b"a", None, "bytes is no prompt"),
        (None, None, "NoneType is no prompt"),
        ([1, 2.5], None, "prompt 1: float is no prompt"),
        ([True], None, "prompt 0: bool is no prompt"),
        (["ok", "\ud800"], None, "prompt 1: the prompt is no valid text"),
        ([[1] * 128], None, "has 128 tokens and max_model_len is 128"),
        ([[2**70]], None, "is outside the vocabulary"),
    ],
)  # fmt: skip
def test_mistakes_are_named_at_the_call_and_nothing_starts(
    gen: Generator, prompts: object, params: object, complaint: str
) -> None:
    before = gen.stats().prompt_tokens_total
    for call in (gen.generate, gen.complete):
        with pytest.raises(ConfigError, match=complaint):
            call(prompts, params)
    assert not gen._parts.engine.has_work()
    assert gen.stats().prompt_tokens_total == before


@pytest.mark.parametrize("on_error", ["ignore", None, [], 1])
def test_on_error_is_checked_by_both(gen: Generator, on_error: object) -> None:
    for call in (gen.generate, gen.complete):
        with pytest.raises(ConfigError, match=r"on_error must be one of \('raise', 'event'\)"):
            call("a", on_error=on_error)


def test_lazily_bad_prompts_fail_alone(gen: Generator) -> None:
    def prompts() -> Iterator[object]:
        yield from ["a", 5, "b", [300], ""]

    outputs = gen.complete(prompts(), GREEDY, on_error="event")
    assert [output.error is None for output in outputs] == [True, False, True, False, False]
    assert [len(output.outputs) for output in outputs] == [1, 0, 1, 0, 0]
    assert not outputs[1].finished and "prompt 1: int is no prompt" in str(outputs[1].error)
    events = list(gen.generate(prompts(), GREEDY, on_error="event"))
    assert [e.request_index for e in events if e.finish_reason == "error"] == [1, 3, 4]
    assert sum(e.finish_reason == "length" for e in events) == 2
    seen = []
    with pytest.raises(ConfigError, match=r"^prompt 1: int is no prompt"):
        for event in gen.generate(prompts(), GREEDY):
            seen.append(event)
    assert len(seen) == 24  # the good ones ran to their end first
    # nothing but bad ones: their events must not be lost
    assert [o.error is None for o in gen.complete(iter([5, 6]), on_error="event")] == [False] * 2
    assert len(list(gen.generate(iter([5] * 30), on_error="event"))) == 30


def test_lengths_up_to_the_last_token_that_fits(gen: Generator) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)  # max_tokens: the room left
    for length, room in ((126, 2), (127, 1), (1, 127)):
        (output,) = gen.complete([[9] * length], params)
        assert len(output.outputs[0].token_ids) == room
        assert output.outputs[0].finish_reason == "length"
    huge = replace(params, max_tokens=10**30, min_tokens=10**20)
    assert len(ids_of(gen.complete([[9] * 120], huge))[0]) == 8
    for length in (128, 129):
        with pytest.raises(ConfigError, match=f"prompt 1: the prompt has {length} tokens"):
            gen.generate([[9], [9] * length])


# -- batching


def test_more_prompts_than_seats_of_different_lengths(gen: Generator) -> None:
    lengths = [1, 30, 2, 7, 1, 12, 3, 3, 25, 1, 6]
    prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(len(lengths))]
    params = [
        SamplingParams(max_tokens=n, temperature=0.7 * (i % 2), seed=i, logprobs=1, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    together = gen.complete(prompts, params)
    assert [len(ids) for ids in ids_of(together)] == lengths
    for index in range(len(lengths)):
        (alone,) = gen.complete(prompts[index], params[index])
        assert alone.outputs == together[index].outputs
    assert gen.complete(iter(prompts), params) == together  # lazily pulled, the same


def test_a_finished_sequence_leaves_and_a_waiting_one_enters(gen: Generator) -> None:
    params = [replace(GREEDY, max_tokens=n) for n in (40, 40, 40, 2, 2, 2)]
    finished: list[int] = []
    running_at_end_of: dict[int, set[int]] = {}
    started: set[int] = set()
    for event in gen.generate([[i + 1] for i in range(6)], params):
        started.add(event.request_index)
        if event.finish_reason is not None:
            finished.append(event.request_index)
            running_at_end_of[event.request_index] = started - set(finished)
    assert finished == [3, 4, 5, 0, 1, 2]
    assert running_at_end_of[3] == {0, 1, 2}  # 4 and 5 had no seat yet
    assert running_at_end_of[5] == {0, 1, 2}


def test_n_samples_prefill_once_and_seeds_reproduce(gen: Generator) -> None:
    prompt, params = list(range(20)), SamplingParams(n=3, max_tokens=8, seed=5, ignore_eos=True)
    before = gen.stats().prompt_tokens_total
    (first,) = gen.complete(prompt, params)
    assert gen.stats().prompt_tokens_total - before == 20
    samples = [tuple(sample.token_ids) for sample in first.outputs]
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert len(set(samples)) == 3  # noise differs by sample
    (again,) = gen.complete(prompt, params)
    assert again.outputs == first.outputs and again.seed == 5
    in_batch = gen.complete(["other", prompt, "another"], [GREEDY, params, GREEDY])[1]
    assert in_batch.outputs == first.outputs
    # one sample alone has the noise of sample 0
    assert ids_of(gen.complete(prompt, replace(params, n=1))) == [list(samples[0])]
    assert ids_of(gen.complete(prompt, replace(params, seed=6))) != [list(s) for s in samples]


def test_the_drawn_seed_reproduces_the_result(gen: Generator) -> None:
    params = SamplingParams(n=2, max_tokens=10, ignore_eos=True)
    first, other = gen.complete(["same", "same"], params)
    assert first.seed != other.seed and ids_of([first]) != ids_of([other])
    (again,) = gen.complete("same", replace(params, seed=first.seed))
    assert again.outputs == first.outputs


def test_the_generators_seed_makes_unseeded_requests_reproducible(
    tiny_models: Callable[..., Path],
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    runs = []
    for seed in (3, 3, 4):
        with Generator.from_pretrained(tiny_models("llama"), deterministic=True, seed=seed) as gen:
            runs.append(ids_of(gen.complete(["a", "b"], params) + gen.complete("c", params)))
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("seed", [-1, -(1 << 63), (1 << 64) - 1, 0])
def test_any_seed_of_64_bits(gen: Generator, seed: int) -> None:
    params = SamplingParams(max_tokens=5, seed=seed, ignore_eos=True)
    assert ids_of(gen.complete("a", params)) == ids_of(gen.complete("a", params))


# -- stopping and text


def test_texts_of_events_concatenate_to_the_decoded_ids(gen: Generator) -> None:
    params = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)
    for skip in (True, False):
        mine = replace(params, skip_special_tokens=skip)
        texts: dict[tuple[int, int], str] = {}
        for event in gen.generate(["a", "b"], mine):
            key = event.request_index, event.sample_index
            texts[key] = texts.get(key, "") + event.text
        outputs = gen.complete(["a", "b"], mine)
        for output in outputs:
            for sample in output.outputs:
                assert texts[output.index, sample.index] == sample.text
                assert sample.text == gen.tokenizer.decode(
                    sample.token_ids, skip_special_tokens=skip
                )


def printable_run(gen: Generator) -> tuple[str, list[int], str]:
    """A prompt whose greedy answer has printable characters, with ids and text."""
    for number in range(50):
        prompt = f"prompt {number}"
        (sample,) = gen.complete(prompt, replace(GREEDY, max_tokens=40))[0].outputs
        at = [i for i in range(8, 30) if all(0x21 <= ord(c) < 0x7F for c in sample.text[i : i + 2])]
        if at and sample.text.find(sample.text[at[0] : at[0] + 2]) == at[0]:
            return prompt, sample.token_ids, sample.text
    raise AssertionError("no printable answer")


def test_stop_strings_cut_the_text_and_end_the_sequence(gen: Generator) -> None:
    prompt, ids, text = printable_run(gen)
    at = next(
        i for i in range(8, 30)
        if all(0x21 <= ord(c) < 0x7F for c in text[i : i + 2]) and text.find(text[i : i + 2]) == i
    )  # fmt: skip
    stop = text[at : at + 2]  # a byte-level vocabulary: always across two tokens
    params = replace(GREEDY, max_tokens=40, stop=(stop, "never there"))
    (sample,) = gen.complete(prompt, params)[0].outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[:at], "stop", stop)
    assert len(sample.token_ids) < len(ids) and sample.token_ids == ids[: len(sample.token_ids)]
    events = list(gen.generate(prompt, params))
    assert "".join(event.text for event in events) == text[:at]  # nothing leaks ahead
    (kept,) = gen.complete(prompt, replace(params, include_stop_str_in_output=True))[0].outputs
    assert kept.text == text[: at + 2]
    # a stop string that only begins is given out in the end
    (held,) = gen.complete(prompt, replace(params, stop=(stop + "\0never",)))[0].outputs
    assert held.text == text and held.finish_reason == "length"


def test_stop_token_ids_eos_and_min_tokens(gen: Generator) -> None:
    _, ids, _ = printable_run(gen)
    prompt = printable_run(gen)[0]
    stop_id = ids[5]
    first = ids.index(stop_id)
    params = replace(GREEDY, max_tokens=20, stop_token_ids=(stop_id,))
    (sample,) = gen.complete(prompt, params)[0].outputs
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (
        ids[: first + 1], "stop", stop_id,
    )  # fmt: skip
    (longer,) = gen.complete(prompt, replace(params, min_tokens=first + 5))[0].outputs
    assert len(longer.token_ids) >= first + 5
    assert stop_id not in longer.token_ids[: first + 5]


def test_an_end_of_sequence_ends_unless_ignored(tiny_models: Callable[..., Path]) -> None:
    plain = tiny_models("llama")
    with Generator.from_pretrained(plain, deterministic=True) as gen:
        (free,) = gen.complete("abc", replace(GREEDY, max_tokens=20))[0].outputs
    eos = free.token_ids[4]
    first = free.token_ids.index(eos)
    # the same weights, another end of sequence
    ended = tiny_models("llama-eos", eos_token_id=[257, eos])
    with Generator.from_pretrained(ended, deterministic=True) as gen:
        params = SamplingParams(max_tokens=20, temperature=0.0)
        (sample,) = gen.complete("abc", params)[0].outputs
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (
            free.token_ids[: first + 1], "stop", None,
        )  # fmt: skip
        (ignored,) = gen.complete("abc", replace(params, ignore_eos=True))[0].outputs
        assert ignored.token_ids == free.token_ids and ignored.finish_reason == "length"


def test_logprobs_sum_and_are_normalised(gen: Generator) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=2, logprobs=3, ignore_eos=True)
    (sample,) = gen.complete("abc", params)[0].outputs
    chosen = [top[i].logprob for top, i in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen), rel=1e-12)
    for top, token_id in zip(sample.logprobs, sample.token_ids, strict=True):
        assert 3 <= len(top) <= 4 and token_id in top
        assert {entry.rank for entry in top.values()} >= {1, 2, 3}
        assert all(isinstance(entry.decoded_token, str) for entry in top.values())
    (whole,) = gen.complete("abc", replace(params, logprobs=-1))[0].outputs
    for top in whole.logprobs:
        assert len(top) == 300
        assert sum(math.exp(entry.logprob) for entry in top.values()) == pytest.approx(1, abs=1e-5)
    (none,) = gen.complete("abc", replace(params, logprobs=None))[0].outputs
    assert none.token_ids == sample.token_ids
    assert none.logprobs is None and none.cumulative_logprob is None
    (only,) = gen.complete("abc", replace(params, logprobs=0))[0].outputs
    assert [list(top) for top in only.logprobs] == [[i] for i in sample.token_ids]


def test_a_progress_bar_counts_requests(gen: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    gen.complete(["a", "b"], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        gen.complete(["a", ""], GREEDY, use_tqdm=True)
    gen.complete(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""  # no bar for what was refused, none unless asked


# -- threads and ends


def test_four_threads_at_once_get_what_each_would_alone(gen: Generator) -> None:
    params = SamplingParams(max_tokens=15, seed=3, ignore_eos=True)
    prompts = [[f"{thread} {i}" for i in range(5)] for thread in range(4)]
    expected = [gen.complete(mine, params) for mine in prompts]
    got: list[object] = [None] * 4

    def run(thread: int) -> None:
        got[thread] = gen.complete(prompts[thread], params)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == expected


def test_after_close_every_call_says_so(tiny_models: Callable[..., Path]) -> None:
    gen = Generator.from_pretrained(tiny_models("llama"))
    stream = gen.generate("abc", replace(GREEDY, max_tokens=400))
    next(stream)
    gen.close()
    gen.close()
    with pytest.raises(FastDecodeError, match="the generator was closed"):
        list(stream)
    assert list(stream) == []
    for call in (gen.generate, gen.complete):
        for prompts in ("a", iter("a"), []):
            with pytest.raises(FastDecodeError, match="the generator is closed"):
                call(prompts)
    assert gen.stats().generation_tokens_total >= 1  # what is known stays known


def test_a_close_in_another_thread_ends_an_iteration(tiny_models: Callable[..., Path]) -> None:
    gen = Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2)
    closer = threading.Timer(0.2, gen.close)
    endless = ("abc" for _ in iter(int, 1))
    closer.start()
    with pytest.raises(FastDecodeError, match=r"generator (is|was) closed"):
        for _ in gen.generate(endless, GREEDY):
            pass
    closer.join(10)


def test_a_generator_that_is_dropped_ends_its_thread(tiny_models: Callable[..., Path]) -> None:
    def num_engines() -> int:
        return sum(thread.name == "fastdecode-engine" for thread in threading.enumerate())

    before = num_engines()
    gen = Generator.from_pretrained(tiny_models("llama"))
    gen.complete("a", GREEDY)
    assert num_engines() == before + 1
    del gen
    assert num_engines() == before


def test_samples_that_no_worker_could_hold_together_are_refused_at_the_call(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    (worker,) = start_workers(1, memory="16MiB")
    with Generator.from_pretrained(
        path, workers=[worker.address], kv_cache_dtype="fp32", max_model_len=4096, max_num_seqs=64
    ) as gen:
        params = SamplingParams(n=16, max_tokens=1, temperature=0.0)
        with pytest.raises(
            ConfigError, match=r"prompt 1: n=16 samples of a prompt of 2000 tokens need"
        ):
            gen.generate([[1], [1] * 2000], params)
        assert len(gen.complete([[1] * 100], params)[0].outputs) == 16
