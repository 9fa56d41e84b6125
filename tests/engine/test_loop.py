"""The engine thread: failures reach everybody, close is bounded, a dead thread hangs nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode_rdma import FastDecodeError, Generator, SamplingParams
from fastdecode_rdma import stream as stream_module
from fastdecode_rdma.engine import loop as loop_module

GREEDY = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture
def gen(tiny_models: Callable[..., Path]) -> Iterator[Generator]:
    with Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2) as made:
        yield made


def break_decode(gen: Generator, error: BaseException, *, after_steps: int) -> None:
    run = gen._parts.engine.runner.run
    steps = iter(range(after_steps))

    def broken(*args: object) -> object:
        if next(steps, None) is None:
            raise error
        return run(*args)

    gen._parts.engine.runner.run = broken


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit("boom"), MemoryError("boom")])
def test_an_exception_in_the_engine_reaches_every_caller_and_all_later_ones(
    gen: Generator, error: BaseException
) -> None:
    break_decode(gen, error, after_steps=40)
    heard: list[FastDecodeError] = []

    def call(on_error: str) -> None:
        try:
            # more prompts than seats: some are running, some wait, some are not submitted yet
            outputs = gen.complete(["a", "b", "c", "d", "e"], GREEDY, on_error=on_error)
            heard.extend(output.error for output in outputs)
        except FastDecodeError as caught:
            heard.append(caught)

    threads = [threading.Thread(target=call, args=(how,)) for how in ("raise", "raise", "event")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(heard) >= 3
    for failure in heard:
        assert str(failure) == f"the engine failed: {type(error).__name__}: boom"
        assert failure.__cause__ is error
    for call_again in (gen.generate, gen.complete):
        with pytest.raises(FastDecodeError, match=r"the engine failed: .*boom"):
            call_again("a")
    gen.close()
    with pytest.raises(FastDecodeError, match=r"the engine failed: .*boom"):
        gen.complete("a")


def test_a_failing_end_of_a_failed_engine_still_tells_everybody(gen: Generator) -> None:
    def cannot(*args: object) -> None:
        raise OSError("and cannot free either")

    break_decode(gen, RuntimeError("boom"), after_steps=3)
    gen._parts.backend.free = cannot
    with pytest.raises(FastDecodeError, match="boom"):
        gen.complete(["a", "b", "c"], GREEDY)


def test_a_dead_engine_thread_hangs_nobody(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "WAIT_S", 0.05)

    def dies_silently(error: FastDecodeError) -> None:
        """The worst case: the thread ends, and told nobody."""

    gen._parts.engine.fail_all = dies_silently
    break_decode(gen, RuntimeError("boom"), after_steps=3)
    with pytest.raises(FastDecodeError, match="boom"):
        gen.complete("a", GREEDY)


def test_close_ends_a_long_prefill_between_two_cells(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    gen = Generator.from_pretrained(path, max_num_batched_tokens=1 << 20, max_model_len=1 << 15)
    events = gen.generate([1] * 30_000, GREEDY)  # one step would compute all of it
    while gen._parts.engine._prefills._running is None:
        time.sleep(0.001)
    start = time.monotonic()
    gen.close()
    assert time.monotonic() - start < 2.0
    with pytest.raises(FastDecodeError, match="the generator was closed"):
        next(events)


def test_close_is_bounded_when_a_step_never_ends(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "CLOSE_GRACE_S", 0.2)
    gen = Generator.from_pretrained(tiny_models("llama"))
    goes_on = threading.Event()
    run = gen._parts.engine.runner.run

    def stuck(*args: object) -> object:
        goes_on.wait(10)
        return run(*args)

    gen._parts.engine.runner.run = stuck
    events = gen.generate("a", GREEDY)
    next(events)
    start = time.monotonic()
    gen.close()
    assert time.monotonic() - start < 1.0
    goes_on.set()  # the step finds its connections closed
    with pytest.raises(FastDecodeError):
        list(events)


def test_an_idle_engine_sleeps(gen: Generator) -> None:
    gen.complete("a", replace(GREEDY, max_tokens=3))
    steps = []
    gen._parts.engine.step = lambda: steps.append(1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1 and steps == []
