"""The iterator of `generate`: lazy pulling, leaving early, two at once, threads, interrupts."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode_rdma import FastDecodeError, Generator, SamplingParams

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=60_000)  # minutes: it ends because it is cancelled
SEATS = 4


@pytest.fixture(scope="module")
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    with Generator.from_pretrained(
        tiny_models("llama-long", max_position_embeddings=1 << 17),
        deterministic=True,
        max_num_seqs=SEATS,
    ) as made:
        yield made


def memory_is_free(gen: Generator) -> bool:
    """Nothing lives, neither in the engine nor in its embedded worker."""
    stats = gen._parts.backend._workers[0].session.stats()
    booked = gen._parts.engine.placement.used_bytes(0)
    return (gen._parts.engine.has_work(), stats["sequences"], stats["kv_bytes_used"], booked) == (
        0,
    ) * 4


def wait_until_free(gen: Generator) -> None:
    deadline = time.monotonic() + 5
    while True:
        stats = gen.stats()
        held = stats.num_requests_running + stats.num_requests_waiting
        if memory_is_free(gen) and not held:
            return
        assert time.monotonic() < deadline, "something was not freed"
        time.sleep(0.005)


class Source:
    """An endless source of prompts that counts how many were pulled, and by which threads."""

    def __init__(self) -> None:
        self.pulled = 0
        self.threads: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[str]:
        while True:
            self.pulled += 1
            self.threads.add(threading.current_thread())
            yield f"prompt {self.pulled}"


def test_an_endless_source_is_pulled_only_as_far_as_needed(gen: Generator) -> None:
    source = Source()
    lookahead = SEATS + SEATS // 4 + 1
    stream = gen.generate(source, GREEDY)
    assert source.pulled == lookahead
    finished = 0
    for event in stream:
        finished += event.finish_reason is not None
        assert source.pulled <= lookahead + finished
        if finished == 20:
            break
    assert source.pulled >= 20
    stream.close()
    wait_until_free(gen)
    pulled = source.pulled
    time.sleep(0.05)
    assert source.pulled == pulled
    assert source.threads == {threading.current_thread()}


def test_a_source_that_raises_ends_the_loop_with_its_error_and_frees(gen: Generator) -> None:
    def source() -> Iterator[str]:
        yield from "abcdefgh"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        for _ in gen.generate(source(), GREEDY):
            pass
    wait_until_free(gen)

    def at_once() -> Iterator[str]:
        yield "a"
        raise KeyError("at once")

    with pytest.raises(KeyError, match="at once"):
        gen.generate(at_once(), GREEDY)
    with pytest.raises(KeyError, match="mine"):
        gen.complete(source(), GREEDY)
    gc.collect()  # the first one's traceback held its stream
    wait_until_free(gen)


def test_leaving_the_loop_early_frees_at_once(gen: Generator) -> None:
    for event in gen.generate([f"{i}" * (i + 1) for i in range(9)], LONG):
        if event.request_index == 2:
            break
    wait_until_free(gen)
    with gen.generate("abc", LONG) as stream:
        next(stream)
        assert not memory_is_free(gen)
    wait_until_free(gen)
    assert list(stream) == []
    stream.close()


def test_leaving_during_a_long_prefill_frees_at_once(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    with Generator.from_pretrained(path, max_num_batched_tokens=1, max_model_len=1 << 15) as gen:
        stream = gen.generate([1] * 20_000, GREEDY)  # one cell per step
        while gen._parts.engine._prefills._running is None:
            time.sleep(0.001)
        time.sleep(0.01)
        stream.close()
        wait_until_free(gen)
        assert gen._parts.engine._prefills._running is None
        assert gen.stats().prompt_tokens_total == 0
        assert len(gen.complete("abc", GREEDY)[0].outputs[0].token_ids) == 10


def test_one_of_two_that_share_a_prefill_may_leave(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    with Generator.from_pretrained(
        path, max_num_batched_tokens=4096, max_model_len=8192, deterministic=True
    ) as gen:
        expected = gen.complete([[2] * 2000], GREEDY)[0].outputs
        for _ in range(5):
            leaving = gen.generate([[1] * 2000], GREEDY)
            staying = gen.generate([[2] * 2000], GREEDY)
            leaving.close()
            assert [event.token_id for event in staying] == expected[0].token_ids
            wait_until_free(gen)


def test_an_iterator_that_is_dropped_cancels(gen: Generator) -> None:
    stream = gen.generate(["a", "b"], LONG)
    next(stream)
    del stream
    wait_until_free(gen)
    gen.generate("never looked at", LONG)
    wait_until_free(gen)


def test_cancelling_some_leaves_the_others_alone(gen: Generator) -> None:
    params = replace(GREEDY, max_tokens=60, temperature=0.8, seed=4)
    expected = gen.complete(["x", "y"], params)
    stream = gen.generate(["x", "y"], params)
    texts = ["", ""]
    for number, event in enumerate(stream):
        texts[event.request_index] += event.text
        if number % 10 == 0:
            other = gen.generate(["p", "q", "r"], LONG)
            next(other)
            other.close()
    assert texts == [output.outputs[0].text for output in expected]
    wait_until_free(gen)


def test_two_iterators_interleaved_share_the_batch(gen: Generator) -> None:
    params = [replace(GREEDY, seed=i, temperature=1.0, max_tokens=20) for i in range(2)]
    expected = [gen.complete(["a", "b"], mine) for mine in params]
    steps = gen.stats().steps
    streams = [gen.generate(["a", "b"], mine) for mine in params]
    got: list[list[list[int]]] = [[[], []], [[], []]]
    for pair in itertools.zip_longest(*streams):
        for number, event in enumerate(pair):
            got[number][event.request_index].append(event.token_id)
    assert got == [[o.outputs[0].token_ids for o in outputs] for outputs in expected]
    assert gen.stats().steps - steps < 2 * 19  # not one after the other


def test_an_interrupt_in_the_consumer_leaves_the_generator_usable(gen: Generator) -> None:
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(gen.generate(["a", "b"], LONG)):
            if number == 5:
                raise KeyboardInterrupt
    gc.collect()
    wait_until_free(gen)

    def interrupted() -> Iterator[str]:
        yield from ("a", "b", "c", "d", "e", "f", "g")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gen.complete(interrupted(), GREEDY)
    wait_until_free(gen)
    assert len(gen.complete("a", GREEDY)[0].outputs[0].token_ids) == 10


def test_ctrl_c_while_waiting_and_an_exit_without_close(tiny_models: Callable[..., Path]) -> None:
    script = f"""
import _thread, threading
from fastdecode_rdma import Generator, SamplingParams
gen = Generator.from_pretrained({str(tiny_models("llama"))!r})
params = SamplingParams(max_tokens=400, ignore_eos=True)
threading.Timer(0.3, _thread.interrupt_main).start()
try:
    for _ in gen.generate(("a" for _ in iter(int, 1)), params):
        pass
except KeyboardInterrupt:
    print("interrupted")
print(len(gen.complete("a", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
stream = gen.generate(["a", "b"], params)
next(stream)
print("leaving")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.returncode) == (["interrupted", "5", "leaving"], 0)
    assert done.stderr == ""


def test_an_iterator_may_be_handed_to_another_thread(gen: Generator) -> None:
    expected = gen.complete(["a", "b"], GREEDY)
    stream = gen.generate(["a", "b"], GREEDY)
    got: list[int] = []

    def consume() -> None:
        got.extend(event.token_id for event in stream if event.request_index == 1)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(30)
    assert got == expected[1].outputs[0].token_ids


def test_closing_many_times_while_others_iterate_never_hangs(
    tiny_models: Callable[..., Path],
) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        gen = Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2)
        outcomes: list[str] = []

        def iterate(gen: Generator = gen, outcomes: list[str] = outcomes) -> None:
            try:
                for _ in gen.generate(("x" for _ in iter(int, 1)), GREEDY):
                    pass
            except FastDecodeError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=iterate) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(delay)
        start = time.monotonic()
        gen.close()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - start < 5
        assert len(outcomes) == 3 and all("closed" in text for text in outcomes)
