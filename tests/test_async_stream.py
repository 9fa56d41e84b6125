"""`Generator.stream`: `async for` on one loop or many, cancelled, left, slow, or cut off."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode_rdma import (
    AsyncEventStream,
    FastDecodeError,
    Generator,
    GeneratorClosedError,
    QueueFullError,
    SamplingParams,
)

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=60_000)  # minutes: it ends because it is cancelled
SEATS, MAX_WAITING = 4, 40


@pytest.fixture(scope="module")
def gen(long_generator: Callable[..., Generator]) -> Generator:
    return long_generator(max_num_seqs=SEATS, max_waiting=MAX_WAITING)


async def ids_of(stream: AsyncIterator) -> list[int]:
    return [event.token_id async for event in stream]


def test_events_are_those_of_generate(gen: Generator) -> None:
    params = replace(GREEDY, n=2, temperature=0.9, seed=5, logprobs=2)
    expected = list(gen.generate("abc", params))

    async def main() -> list:
        stream = gen.stream("abc", params)
        assert isinstance(stream, AsyncEventStream)
        events = [event async for event in stream]
        assert stream.done() and not stream.cancelled() and not stream.cancel()
        assert [event async for event in stream] == []  # read once
        return events

    assert asyncio.run(main()) == expected


def test_twenty_at_once_enter_the_event_loop_once_per_step(gen: Generator) -> None:
    prompts = [[i + 1] for i in range(20)]
    params = replace(GREEDY, max_tokens=30, temperature=0.8, seed=1)
    expected = [output.outputs[0].token_ids for output in gen.complete(prompts, params)]
    calls: list[str] = []

    async def main() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        enter = loop.call_soon_threadsafe

        def counted(*args: object, **kwargs: object) -> object:
            calls.append(threading.current_thread().name)
            return enter(*args, **kwargs)

        loop.call_soon_threadsafe = counted
        return await asyncio.gather(*(ids_of(gen.stream(p, params)) for p in prompts))

    fewest = 600  # events: a step delivers prefilled and decoded tokens apart, to 4 streams
    for _ in range(3):  # on a busy machine the loop may be done with one before the next is rung
        steps = gen.stats().steps
        calls.clear()
        assert asyncio.run(main()) == expected
        steps = gen.stats().steps - steps
        assert set(calls) == {"fastdecode-engine"}
        assert len(calls) <= 4 * steps + 20, (len(calls), steps)
        fewest = min(fewest, len(calls))
    assert fewest < 500


def test_cancelling_the_task_cancels_the_request(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    async def waits(stream: AsyncEventStream, started: asyncio.Event) -> None:
        async for _ in stream:
            started.set()

    async def is_busy(stream: AsyncEventStream, started: asyncio.Event) -> None:
        async with stream:
            async for _ in stream:
                started.set()
                await asyncio.sleep(60)  # at a client that reads slowly, say

    async def is_busy_and_careless(started: asyncio.Event) -> None:
        async for _ in gen.stream("abc", LONG):
            started.set()
            await asyncio.sleep(60)

    async def main() -> None:
        for kind in (waits, is_busy, is_busy_and_careless):
            started = asyncio.Event()
            stream = None
            if kind is is_busy_and_careless:
                task = asyncio.create_task(kind(started))
            else:
                stream = gen.stream("abc", LONG)
                task = asyncio.create_task(kind(stream, started))
            await asyncio.wait_for(started.wait(), 10)
            assert gen.stats().num_requests_running == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if stream is not None:
                assert stream.cancelled()
            await asyncio.to_thread(wait_until_free, gen)

    asyncio.run(main())


def test_a_task_that_never_started_to_read_is_cancelled_too(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    async def main() -> None:
        task = asyncio.create_task(ids_of(gen.stream("abc", LONG)))
        task.cancel()  # before its first step
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    wait_until_free(gen)


def test_leaving_the_loop_frees_in_every_way_there_is(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    async def breaks() -> None:
        async for _ in gen.stream("abc", LONG):
            break

    async def raises() -> None:
        with pytest.raises(KeyError):
            async for _ in gen.stream("abc", LONG):
                raise KeyError

    async def closes() -> None:
        stream = gen.stream("abc", LONG)
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert await ids_of(stream) == []

    async def leaves_a_block() -> None:
        async with gen.stream("abc", LONG) as stream:
            await anext(stream)
        async with aclosing(gen.stream("abc", LONG)) as stream:
            await anext(stream)

    async def drops() -> None:
        gen.stream("abc", LONG)

    async def times_out() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ids_of(gen.stream("abc", LONG)), 0.05)

    async def wraps() -> None:  # as a web framework does
        texts = (event.text async for event in gen.stream("abc", LONG))
        await anext(texts)
        await texts.aclose()

    async def is_cancelled_by_hand() -> None:
        stream = gen.stream("abc", LONG)
        threading.Timer(0.05, stream.cancel).start()
        assert len(await ids_of(stream)) < 60_000

    for way in (
        breaks, raises, closes, leaves_a_block, drops, times_out, wraps, is_cancelled_by_hand,
    ):  # fmt: skip
        asyncio.run(way())
        wait_until_free(gen)


def test_a_stream_with_a_name_outlives_its_loop_unless_a_block_ends_it(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    async def main() -> None:
        stream = gen.stream("abc", LONG)
        async for _ in stream:
            break
        assert not stream.done() and (await anext(stream)).finish_reason is None
        async with stream as events:
            async for _ in events:
                break
        assert stream.cancelled() and events is stream
        await asyncio.to_thread(wait_until_free, gen)

    asyncio.run(main())


def test_several_event_loops_in_several_threads(gen: Generator) -> None:
    params = [replace(GREEDY, temperature=0.8, seed=seed, max_tokens=40) for seed in range(4)]
    expected = [[o.outputs[0].token_ids for o in gen.complete(["a", "b"], p)] for p in params]
    got: list[object] = [None] * 4

    def run(number: int) -> None:
        async def main() -> list[list[int]]:
            return await asyncio.gather(*(ids_of(gen.stream(t, params[number])) for t in "ab"))

        got[number] = asyncio.run(main())

    before = set(threading.enumerate())
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert set(threading.enumerate()) - before <= set(threads)  # none per request
    for thread in threads:
        thread.join(30)
    assert got == expected


def test_one_stream_may_be_made_in_a_thread_and_read_on_two_loops(gen: Generator) -> None:
    expected = gen.complete("abc", GREEDY)[0].outputs[0].token_ids

    async def first_half() -> tuple[AsyncEventStream, list[int]]:
        stream = await asyncio.to_thread(gen.stream, "abc", GREEDY)
        return stream, [(await anext(stream)).token_id for _ in range(5)]

    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    stream, ids = first.run_until_complete(first_half())
    assert ids + second.run_until_complete(ids_of(stream)) == expected
    first.run_until_complete(first.shutdown_default_executor())
    first.close()
    second.close()


def test_an_event_loop_that_is_closed_early_harms_nobody(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    for waits_at_the_end in (True, False):
        loop = asyncio.new_event_loop()
        started = asyncio.Event()

        async def read(started: asyncio.Event, waits: bool = waits_at_the_end) -> None:
            async for _ in gen.stream("abc", LONG):
                started.set()
                if not waits:
                    await asyncio.sleep(60)

        tasks = [loop.create_task(read(started)) for _ in range(3)]
        loop.run_until_complete(started.wait())
        loop.close()  # with the tasks pending: nobody will ever resume them
        assert not any(task.done() for task in tasks)
        wait_until_free(gen)  # though tasks and loop are still referred to
        for task in tasks:
            task._log_destroy_pending = False
        del tasks, loop
        gc.collect()
        assert len(gen.complete("a", GREEDY)[0].outputs[0].token_ids) == 10


def test_a_full_queue_is_told_at_the_call(
    gen: Generator, wait_until_free: Callable[..., None]
) -> None:
    async def main() -> None:
        streams = []
        with pytest.raises(QueueFullError):
            for _ in range(SEATS + MAX_WAITING + 1):
                streams.append(gen.stream([1], LONG))
        assert len(streams) == SEATS + MAX_WAITING

    asyncio.run(main())
    gc.collect()
    wait_until_free(gen)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(gen: Generator) -> None:
    params = replace(GREEDY, max_tokens=300)
    expected = gen.complete("abc", params)[0].outputs[0].token_ids

    async def main() -> None:
        slow = gen.stream("abc", params)
        ids = [(await anext(slow)).token_id]
        deadline = time.monotonic() + 20
        while not slow.done():  # the engine goes on to its end
            assert time.monotonic() < deadline
            assert len(await ids_of(gen.stream("quick", GREEDY))) == 10
        assert ids + await ids_of(slow) == expected

    asyncio.run(main())


def test_two_tasks_cannot_read_one_stream(gen: Generator) -> None:
    async def main() -> None:
        with gen._loop._wake:  # no event can come yet
            stream = gen.stream("abc", GREEDY)
            first = asyncio.create_task(ids_of(stream))
            await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="one at a time"):
                await anext(stream)
        assert len(await first) == 10

    asyncio.run(main())


def test_a_closed_generator_and_a_dead_engine_end_streams(tiny_models: Callable[..., Path]) -> None:
    async def read(gen: Generator, how: Callable[[], None], kind: type, text: str) -> None:
        streams = [gen.stream("abc", replace(GREEDY, max_tokens=400)) for _ in range(3)]
        await anext(streams[0])
        tasks = [asyncio.create_task(ids_of(stream)) for stream in streams]
        await asyncio.sleep(0)
        await asyncio.to_thread(how)
        for task in tasks:
            with pytest.raises(kind, match=text):
                await asyncio.wait_for(task, 10)

    gen = Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2)
    asyncio.run(read(gen, gen.close, GeneratorClosedError, "the generator was closed"))

    gen = Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2)

    def break_it() -> None:
        def breaks(*args: object) -> None:
            raise RuntimeError("boom")

        gen._parts.engine.fail_all = lambda error: None  # the worst case: it tells nobody
        gen._parts.engine.runner.run = breaks

    asyncio.run(read(gen, break_it, FastDecodeError, "the engine failed: RuntimeError: boom"))
    gen.close()
