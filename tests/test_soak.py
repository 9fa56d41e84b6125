"""Fifty threads submit, read, wait, cancel, drop and stream at random; nothing is left behind."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastdecode_rdma import (
    Generator,
    QueueFullError,
    RequestCancelledError,
    RequestHandle,
    SamplingParams,
)

SECONDS, LONGEST = 10.0, 60.0
ENOUGH = 200
"""Requests that end by length, and by being cancelled: on a busy machine they take longer."""
NUM_THREADS = 50
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


class Client:
    """One thread's share: what it does with each request it submits."""

    def __init__(self, gen: Generator, seed: int, enough: threading.Event) -> None:
        self.gen, self.enough = gen, enough
        self.random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.handles: list[RequestHandle] = []

    def run(self) -> None:
        ways = [self.reads, self.waits, self.cancels, self.leaves, self.drops, self.streams]
        while not self.enough.is_set():
            way = self.random.choice(ways)
            try:
                way()
                self.counts[way.__name__] += 1
            except QueueFullError:
                self.counts["refused"] += 1
                time.sleep(self.random.random() * 0.02)

    def request(self) -> tuple[list[int], SamplingParams]:
        length = self.random.choice([1, 3, 70, 200])
        n = self.random.choice([1, 1, 1, 2])
        tokens = self.random.choice([1, 10, 60])
        prompt = [self.random.randrange(256) for _ in range(length)]
        return prompt, replace(PARAMS, n=n, max_tokens=tokens, seed=self.random.randrange(99))

    def submit(self) -> tuple[RequestHandle, SamplingParams]:
        prompt, params = self.request()
        handle = self.gen.submit(prompt, params)
        self.handles.append(handle)
        return handle, params

    def reads(self) -> None:
        handle, params = self.submit()
        assert sum(1 for _ in handle) == params.n * params.max_tokens

    def waits(self) -> None:
        handle, params = self.submit()
        output = handle.result(60)
        assert [len(s.token_ids) for s in output.outputs] == [params.max_tokens] * params.n

    def cancels(self) -> None:
        handle, params = self.submit()
        if self.random.random() < 0.5:
            time.sleep(self.random.random() * 0.05)
        if handle.cancel():
            try:
                handle.result(60)
                raise AssertionError("a cancelled request has no result")
            except RequestCancelledError:
                pass
        else:
            assert len(handle.result(0).outputs) == params.n

    def leaves(self) -> None:
        handle, _ = self.submit()
        with handle:
            for number, _ in enumerate(handle):
                if number == self.random.randrange(5):
                    break
        assert handle.done()

    def drops(self) -> None:
        prompt, params = self.request()
        handle = self.gen.submit(prompt, params)
        if self.random.random() < 0.5:
            next(iter(handle))

    def streams(self) -> None:
        async def main() -> None:
            prompt, params = self.request()
            stream = self.gen.stream(prompt, params)

            async def read() -> int:
                return len([event async for event in stream])

            task = asyncio.create_task(read())
            if self.random.random() < 0.5:
                await asyncio.sleep(self.random.random() * 0.05)
                task.cancel()
            try:
                assert await task == params.n * params.max_tokens
            except asyncio.CancelledError:
                assert stream.done()

        asyncio.run(main())


def test_fifty_threads_submit_and_cancel_at_random(
    tiny_models: Callable[..., Path], wait_until_free: Callable[..., None]
) -> None:
    before = set(threading.enumerate())
    errors: list[BaseException] = []
    with Generator.from_pretrained(tiny_models("llama"), max_num_seqs=8, max_waiting=30) as gen:
        enough, start = threading.Event(), time.monotonic()
        clients = [Client(gen, seed, enough) for seed in range(NUM_THREADS)]

        def run(client: Client) -> None:
            try:
                client.run()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        most = 0
        while not enough.is_set():
            stats, took = gen.stats(), time.monotonic() - start
            assert stats.num_requests_running <= 8
            most = max(most, stats.num_requests_waiting)
            ended = stats.request_success_total
            if took > LONGEST or (took > SECONDS and min(ended["length"], ended["abort"]) > ENOUGH):
                enough.set()
            time.sleep(0.1)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        wait_until_free(gen)
        counts = sum((client.counts for client in clients), collections.Counter())
        assert all(
            counts[way] > 10 for way in Client.__dict__ if way.endswith("s") and way[0] != "_"
        )
        handles = [handle for client in clients for handle in client.handles]
        assert all(handle.done() for handle in handles)
        assert {type(handle._error()) for handle in handles} == {type(None), RequestCancelledError}
        ended = gen.stats().request_success_total
        assert ended["error"] == 0 and ended["length"] > 100 and ended["abort"] > 100, ended
        assert 8 < most <= 30 + 8 + NUM_THREADS, most  # a burst may find seats free
        expected = gen.complete("abc", replace(PARAMS, temperature=0.0))
        assert len(expected[0].outputs[0].token_ids) == 30
    assert set(threading.enumerate()) == before
