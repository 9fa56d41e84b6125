"""The engine under pressure: little memory, refusals, non-finite values, failures, lost workers."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import (
    CacheFullError,
    ConfigError,
    FastDecodeError,
    Generator,
    SamplingParams,
    WorkerLostError,
)
from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, UPLOAD_TABLE, StepCode
from fastdecode_rdma.engine import setup
from fastdecode_rdma.errors import StepError
from fastdecode_rdma.worker.kvcache import MemoryBudget, StepRefusedError
from fastdecode_rdma.worker.limits import default_memory

BLOCK = 2 * 3 * 64 * 2 * 16 * 4  # K and V, layers, tokens, heads, head_dim, fp32: the tiny llama's
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def small(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Generator, MemoryBudget]]]:
    """Makes generators whose embedded worker has so many blocks of KV-cache; tells the budget."""
    made: list[Generator] = []

    def make(
        blocks: int, *, name: str = "llama", block_bytes: int = BLOCK, **options: object
    ) -> tuple[Generator, MemoryBudget]:
        budgets: list[MemoryBudget] = []

        def budget(limit: int, nodes: object) -> MemoryBudget:
            budgets.append(MemoryBudget(limit))
            return budgets[-1]

        limit = replace(default_memory(), value=blocks * block_bytes)
        monkeypatch.setattr(setup, "default_memory", lambda: limit)
        monkeypatch.setattr(setup, "MemoryBudget", budget)
        options = {"kv_cache_dtype": "fp32", "deterministic": True, **options}
        made.append(Generator.from_pretrained(tiny_models(name), **options))
        return made[-1], budgets[0]

    yield make
    for gen in made:
        gen.close()


@contextlib.contextmanager
def held(gen: Generator) -> Iterator[None]:
    """Keeps the engine from starting until all that is submitted inside is there."""
    gate, loop = threading.Event(), gen._loop
    with loop._wake:
        loop._commands.append(gate.wait)
        loop._wake.notify()
    yield
    gate.set()


def texts_and_ids(outputs: list) -> list[list[tuple[str, list[int]]]]:
    return [[(s.text, s.token_ids) for s in output.outputs] for output in outputs]


# -- preemption


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_preempted_sequences_finish_with_the_same_text(
    name: str, is_deterministic: bool, small: Callable[..., tuple[Generator, MemoryBudget]]
) -> None:
    prompts = [f"{i} " * (5 + 3 * i) for i in range(8)]
    params = [
        SamplingParams(max_tokens=100 + 10 * i, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(8)
    ]
    roomy, _ = small(1000, name=name)
    expected = roomy.complete(prompts, params)
    assert roomy.stats().num_preemptions_total == 0
    blocks = {"llama": 10, "gemma3": 32}[name]  # gemma3: 7 layers in two groups
    tight, budget = small(
        blocks, name=name, max_model_len=256, deterministic=is_deterministic, max_num_seqs=8
    )
    got = tight.complete(prompts, params)
    assert tight.stats().num_preemptions_total > 0
    assert [o.outputs[0].finish_reason for o in got] == ["length"] * 8
    assert [len(o.outputs[0].token_ids) for o in got] == [100 + 10 * i for i in range(8)]
    if is_deterministic:
        assert texts_and_ids(got) == texts_and_ids(expected)
    assert not tight._parts.engine.has_work()
    tight.close()
    assert budget.used_bytes == 0


def test_samples_of_one_prompt_preempted_apart(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    params = SamplingParams(n=4, max_tokens=120, seed=1, ignore_eos=True)
    roomy, _ = small(1000)
    expected = texts_and_ids(roomy.complete(["some prompt"] * 2, params))
    tight, _ = small(7, max_model_len=192)
    assert texts_and_ids(tight.complete(["some prompt"] * 2, params)) == expected
    assert tight.stats().num_preemptions_total > 0


def test_a_sample_preempted_before_its_prefill_does_not_strand_its_siblings(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    prompts = [[1] * 62, [2] * 1000, [3] * 10]
    params = [GREEDY, replace(GREEDY, max_tokens=2), replace(GREEDY, n=3, max_tokens=5)]
    options = {"max_num_batched_tokens": 1, "timeout_s": 5.0, "name": "llama-2k"}
    # the first grows over a block border while the second is prefilled and the third waits for that
    tight, _ = small(20, max_model_len=1200, **options)
    with held(tight):
        handles = [tight.submit(*request) for request in zip(prompts, params, strict=True)]
    got = [handle.result() for handle in handles]
    assert tight.stats().num_preemptions_total > 0
    roomy, _ = small(1000, **options)
    assert texts_and_ids(got) == texts_and_ids(roomy.complete(prompts, params))


@pytest.fixture(autouse=True)
def long_model(tiny_models: Callable[..., Path]) -> None:
    tiny_models("llama-2k", max_position_embeddings=2048)


def test_what_could_never_fit_is_refused_before_it_starts(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    with pytest.raises(ConfigError, match="max_model_len=512 needs 393216 bytes"):
        small(6, max_model_len=512)
    gen, _ = small(6)
    assert gen.max_model_len == 6 * 64
    with pytest.raises(ConfigError, match="n=7 samples of a prompt of 1 tokens need"):
        gen.generate("a", replace(GREEDY, n=7))
    with pytest.raises(ConfigError, match="at most 383 leave room"):
        gen.generate([[1] * 384])
    assert len(gen.complete([[1] * 383], GREEDY)[0].outputs[0].token_ids) == 1
    with pytest.raises(ConfigError, match="lower it to 0 or give a worker more"):
        small(1, block_bytes=100)


# -- other engines on the same worker


def hold_all_but(budget: MemoryBudget, free_bytes: int) -> int:
    """Books memory as another engine would; returns how much."""
    held = budget.limit_bytes - budget.used_bytes - free_bytes
    budget.reserve(held)
    return held


def test_a_request_without_room_waits_then_fails_and_the_others_finish(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    gen, budget = small(40, timeout_s=0.6)
    hold_all_but(budget, 4 * BLOCK)
    start = time.monotonic()
    prompts = [[1] * 300, [2] * 10, [3] * 20, [4] * 5]  # 5 blocks: never; the rest fit
    outputs = gen.complete(prompts, replace(GREEDY, max_tokens=20), on_error="event")
    assert 0.6 <= time.monotonic() - start < 10
    assert isinstance(outputs[0].error, CacheFullError)
    assert "no worker had room for 301 tokens" in str(outputs[0].error)
    assert outputs[0].error.needed_bytes == 5 * BLOCK
    assert [o.error for o in outputs[1:]] == [None] * 3
    assert [len(o.outputs[0].token_ids) for o in outputs[1:]] == [20] * 3
    assert not gen._parts.engine.has_work()


def test_those_that_fit_are_not_kept_out_by_those_packed_with_them(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    gen, budget = small(40, timeout_s=1.0)
    prompts = [[i] * 70 for i in range(1, 6)]  # 2 blocks each: two at a time, one after the other
    expected = texts_and_ids(gen.complete(prompts, GREEDY))
    hold_all_but(budget, 5 * BLOCK)
    assert texts_and_ids(gen.complete(prompts, GREEDY)) == expected


def test_a_request_waits_for_memory_of_another_engine(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    gen, budget = small(40, timeout_s=20.0)
    expected = texts_and_ids(gen.complete([[1] * 300, [2] * 10], GREEDY))
    held = hold_all_but(budget, 0)
    timer = threading.Timer(0.5, budget.release, (held,))
    timer.start()
    start = time.monotonic()
    assert texts_and_ids(gen.complete([[1] * 300, [2] * 10], GREEDY)) == expected
    assert 0.4 < time.monotonic() - start < 10
    timer.join()


def test_those_that_decode_go_on_while_others_find_no_room(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    gen, budget = small(40, timeout_s=0.15)
    params = replace(GREEDY, max_tokens=110)
    expected = texts_and_ids(gen.complete([[5] * 10], params))
    run = gen._parts.engine.runner.run

    def slowly(*args: object) -> object:
        time.sleep(0.01)
        return run(*args)

    gen._parts.engine.runner.run = slowly
    stream = gen.generate([[5] * 10], params)
    ids = [next(stream).token_id]
    hold_all_but(budget, BLOCK)  # the one that it will need
    other = gen.generate(
        [[6] * 70], GREEDY, on_error="event"
    )  # two blocks: when that one has ended
    ids.extend(event.token_id for event in stream)
    assert ids == expected[0][0][1]
    # it waited for a second, several times timeout_s: others made progress meanwhile
    assert [event.finish_reason for event in other][-1] == "length"


def test_a_decode_step_that_is_refused_for_ever_fails_that_request(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    gen, budget = small(40, timeout_s=0.5)
    expected = texts_and_ids(gen.complete([[5] * 10], replace(GREEDY, max_tokens=100)))[0][0][1]
    stream = gen.generate([[5] * 10], replace(GREEDY, max_tokens=100), on_error="event")
    ids = [next(stream).token_id]
    hold_all_but(budget, 0)  # it has one block and needs a second one
    *events, last = stream
    ids.extend(event.token_id for event in events)
    assert ids == expected[: len(ids)] and 50 < len(ids) < 60
    assert isinstance(last.error, CacheFullError)
    assert "65 tokens" in str(last.error) or "66 tokens" in str(last.error)
    assert not gen._parts.engine.has_work()
    assert gen.stats().num_preemptions_total >= 1


def test_a_second_engine_on_a_real_worker(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    (worker,) = start_workers(1, memory="16MiB")
    path = tiny_models("llama-2k")
    with Generator.from_pretrained(
        path, workers=[worker.address], kv_cache_dtype="fp32", timeout_s=1.0, deterministic=True
    ) as gen:
        expected = texts_and_ids(gen.complete([[2] * 10], GREEDY))
        geometry = gen._parts.backend.geometry
        other = AttentionBackend(open_sessions([worker.address], geometry), geometry)
        handle = 0
        while True:  # one block at a time, until the worker refuses
            handle += 1
            entries = np.array([(handle, 0, 64, ENTRY_UPLOAD)], ENTRY_DTYPE)
            other.begin_step(UPLOAD_TABLE, handle, [(0, entries)])
            try:
                other.wait_ready(0, UPLOAD_TABLE)
            except FastDecodeError as error:
                assert "KV" in str(error) or "memory" in str(error), error
                break
        other.free(0, list(range(1, 10)))  # one whole slab of 5 blocks, wherever they lie
        outputs = gen.complete([[1] * 1200, [2] * 10], GREEDY, on_error="event")
        assert isinstance(outputs[0].error, CacheFullError)
        assert texts_and_ids(outputs[1:]) == expected
        other.close()  # its memory is free within a second
        time.sleep(1.0)
        assert gen.complete([[1] * 1200], GREEDY)[0].finished


def test_a_worker_without_room_is_passed_over_for_one_that_has_some(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    full, free = start_workers(2, memory="16MiB")
    path = tiny_models("llama-2k")
    with Generator.from_pretrained(
        path, workers=[full.address, free.address], kv_cache_dtype="fp32", timeout_s=3.0
    ) as gen:
        geometry = gen._parts.backend.geometry
        other = AttentionBackend(open_sessions([full.address], geometry), geometry)
        largest = gen._parts.engine.placement.largest_capacity()
        for step in range(1, 20):  # all but a little of the first worker
            tokens = min(2048, 64 * (largest // BLOCK))
            entries = np.array([(step, 0, tokens, ENTRY_UPLOAD)], ENTRY_DTYPE)
            other.begin_step(UPLOAD_TABLE, step, [(0, entries)])
            try:
                other.wait_ready(0, UPLOAD_TABLE)
            except StepError:
                break
        start = time.monotonic()
        outputs = gen.complete([[i] * 1500 for i in range(1, 7)], GREEDY)
        assert all(output.finished for output in outputs)
        assert time.monotonic() - start < 20
        other.close()


def test_random_load_in_little_memory_with_cancels_and_threads(
    small: Callable[..., tuple[Generator, MemoryBudget]],
) -> None:
    draw = random.Random(0)
    jobs = [
        (
            [draw.randrange(300) for _ in range(draw.choice([1, 5, 63, 64, 65, 200]))],
            SamplingParams(
                n=draw.choice([1, 1, 3]),
                max_tokens=draw.choice([1, 2, 30, 64, 100]),
                temperature=draw.choice([0.0, 0.8]),
                seed=seed,
                ignore_eos=True,
            ),
        )
        for seed in range(30)
    ]
    prompts, params = zip(*jobs, strict=True)
    roomy, _ = small(1000)
    expected = [[s.token_ids for s in o.outputs] for o in roomy.complete(prompts, params)]
    tight, budget = small(14, max_model_len=320, max_num_seqs=5, max_num_batched_tokens=64)
    wrong: list[object] = []

    def consume(thread: int) -> None:
        mine = random.Random(thread)
        for _ in range(5):
            chosen = mine.sample(range(len(jobs)), 6)
            leave_after = mine.choice([None, None, 1, 50, 200])
            got: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
            stream = tight.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
            for number, event in enumerate(stream):
                got[event.request_index, event.sample_index].append(event.token_id)
                if number == leave_after:
                    break
            stream.close()
            for place, index in enumerate(chosen):
                for sample, whole in enumerate(expected[index]):
                    ids = got[place, sample]
                    if ids != (whole if leave_after is None else whole[: len(ids)]):
                        wrong.append((thread, index, sample, leave_after))

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert tight.stats().num_preemptions_total > 0
    tight.close()  # after the cancels that are on their way
    assert not tight._parts.engine.has_work() and budget.used_bytes == 0


# -- failures of one request


def poison(gen: Generator, token_id: int) -> None:
    """Makes one token's embedding NaN, as an overflown weight would."""
    model = gen._parts.model
    embed = model.embed

    def poisoned(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = embed(token_ids, positions)
        x[token_ids == token_id] = torch.nan
        return x

    model.embed = poisoned


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_non_finite_values_fail_their_request_alone(
    name: str, tiny_models: Callable[..., Path]
) -> None:
    with Generator.from_pretrained(tiny_models(name), deterministic=True) as gen:
        expected = gen.complete([[1, 2], [3, 4], [5, 6]], GREEDY)
        generated = expected[1].outputs[0].token_ids
        bad = next(i for i in generated[3:] if not any(
            i in o.outputs[0].token_ids for o in (expected[0], expected[2])
        ))  # fmt: skip
        poison(gen, bad)
        outputs = gen.complete([[1, 2], [3, 4], [5, bad], [5, 6]], GREEDY, on_error="event")
        assert texts_and_ids([outputs[0], outputs[3]]) == texts_and_ids([expected[0], expected[2]])
        # in a prompt, and as a row of a decode step
        assert "request 2: non-finite" in str(outputs[2].error)
        assert outputs[2].outputs[0].token_ids == []
        assert "request 1: non-finite attention inputs or outputs" in str(outputs[1].error)
        assert outputs[1].outputs[0].token_ids == generated[: generated.index(bad) + 1]
        with pytest.raises(FastDecodeError, match="request 1: non-finite"):
            gen.complete([[1, 2], [3, 4]], GREEDY)
        assert not gen._parts.engine.has_work()


def test_non_finite_logits_of_one_row_fail_its_request_with_all_samples(
    tiny_models: Callable[..., Path],
) -> None:
    with Generator.from_pretrained(tiny_models("llama"), deterministic=True) as gen:
        expected = gen.complete(["a", "b"], GREEDY)
        logits = gen._parts.model.logits

        def overflown(x: torch.Tensor) -> torch.Tensor:
            out = logits(x)
            if len(out) == 4:  # a decode step of all: the second request's second sample
                out[2] = torch.inf
            return out

        gen._parts.model.logits = overflown
        params = [GREEDY, replace(GREEDY, n=2), GREEDY]
        outputs = gen.complete(["a", "x", "b"], params, on_error="event")
        assert texts_and_ids([outputs[0], outputs[2]]) == texts_and_ids(expected)
        assert "request 1: non-finite logits" in str(outputs[1].error) and not outputs[1].finished


def test_a_tokenizer_that_fails_fails_its_request_alone(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama"), deterministic=True) as gen:
        expected = gen.complete(["a", "b"], GREEDY)
        make = gen._tokenizer.detokenizer

        class Failing:
            stop_string = None

            def push(self, token_id: int, *, is_stop_token: bool) -> str:
                raise ValueError("cannot decode")

        def chosen(params: SamplingParams, *, prompt_ids: list[int]) -> object:
            if prompt_ids == [7]:
                return Failing()
            if prompt_ids == [8]:
                raise ValueError("cannot begin")
            return make(params, prompt_ids=prompt_ids)

        gen._tokenizer.detokenizer = chosen
        outputs = gen.complete(["a", [7], [8], "b"], GREEDY, on_error="event")
        assert texts_and_ids([outputs[0], outputs[3]]) == texts_and_ids(expected)
        assert str(outputs[1].error) == "request 1: ValueError: cannot decode"
        assert str(outputs[2].error) == "request 2: ValueError: cannot begin"


# -- lost workers


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_on(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fastdecode_rdma.cli", "worker", "--memory", "64MiB"]
    command += ["--listen", f"127.0.0.1:{port}", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while not process.stdout.readline().startswith(b"ready"):
        assert process.poll() is None
    return process


@pytest.mark.parametrize("on_error", ["raise", "event"])
def test_with_no_worker_left_every_request_fails_with_its_text(
    on_error: str, tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    workers = start_workers(2)
    with Generator.from_pretrained(
        tiny_models("llama"), workers=[w.address for w in workers], timeout_s=1.0
    ) as gen:
        texts = collections.defaultdict(str)
        errors = {}
        params = replace(GREEDY, max_tokens=400)
        stream = gen.generate(["a", "b", "c"], params, on_error=on_error)
        killed_at = None
        try:
            for number, event in enumerate(stream):
                texts[event.request_index] += event.text
                if event.error is not None:
                    errors[event.request_index] = event.error
                if number == 30:
                    for worker in workers:
                        worker.kill()
                    killed_at = time.monotonic()
        except WorkerLostError as error:
            assert on_error == "raise"
            assert error.texts == {index: [text] for index, text in texts.items()}
            errors = dict.fromkeys(error.texts, error)
        assert time.monotonic() - killed_at < 6
        assert sorted(errors) == [0, 1, 2] and sum(map(len, texts.values())) > 20
        assert all("no attention worker came back within 1 s" in str(e) for e in errors.values())
        start = time.monotonic()
        with pytest.raises(WorkerLostError):  # and so do later ones, after as long a wait
            gen.complete("a", GREEDY)
        assert 0.9 < time.monotonic() - start < 6


def test_a_worker_lost_during_a_prefill_counts_once_and_the_other_takes_over(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    workers = start_workers(2, memory="64MiB")
    prompts = [[i] * 2000 for i in range(1, 5)]
    with Generator.from_pretrained(
        tiny_models("llama-2k"),
        workers=[w.address for w in workers],
        deterministic=True,
        max_num_batched_tokens=1,  # a cell per step
    ) as gen:
        expected = texts_and_ids(gen.complete(prompts, GREEDY))
        stream = gen.generate(prompts, GREEDY)
        while (
            gen._parts.engine._prefills._running is None or not gen._parts.engine._prefills._gangs
        ):
            time.sleep(0.001)
        workers[1].kill()
        ids = collections.defaultdict(list)
        for event in stream:
            ids[event.request_index].append(event.token_id)
        assert [ids[i] for i in range(4)] == [output[0][1] for output in expected]
        assert gen.stats().recoveries == 1


def test_a_worker_that_comes_back_in_time_takes_the_requests_on(
    tiny_models: Callable[..., Path],
) -> None:
    port = free_port()
    process = start_on(port)
    params = replace(GREEDY, max_tokens=300)
    try:
        with Generator.from_pretrained(
            tiny_models("llama"), workers=[f"127.0.0.1:{port}"], deterministic=True
        ) as gen:
            expected = texts_and_ids(gen.complete(["a", "b"], params))
            ids: list[list[int]] = [[], []]
            for number, event in enumerate(gen.generate(["a", "b"], params)):
                ids[event.request_index].append(event.token_id)
                if number == 50:
                    process.kill()
                    process.wait(10)
                    process = start_on(port)
            assert ids == [output[0][1] for output in expected]
            assert gen.stats().recoveries == 1
    finally:
        process.kill()
        process.wait(10)


def test_one_of_several_workers_that_comes_back_serves_again(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    """One failed connection must not leave a worker out for ever."""
    port = free_port()
    process = start_on(port)
    (other,) = start_workers(1, memory="64MiB")
    try:
        with Generator.from_pretrained(
            tiny_models("llama"), workers=[other.address, f"127.0.0.1:{port}"]
        ) as gen:
            process.kill()
            process.wait(10)
            gen.complete(["a", "b", "c", "d"], replace(GREEDY, max_tokens=60))
            assert gen.stats().recoveries == 1
            process = start_on(port)
            deadline = time.monotonic() + 30
            while not gen.stats().workers[1].is_alive:
                assert time.monotonic() < deadline, "the worker was not taken in again"
                gen.complete(["a"], GREEDY)
                time.sleep(0.05)
            before = gen.stats().workers[1].messages
            gen.complete(["a", "b", "c", "d"], replace(GREEDY, max_tokens=60))
            assert gen.stats().workers[1].messages > before and len(gen.stats().workers) == 2
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_fault_of_the_embedded_worker_fails_the_requests_of_that_step_only(
    where: str, tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Generator.from_pretrained(tiny_models("llama"), deterministic=True) as gen:
        expected = texts_and_ids(gen.complete(["a", "b"], GREEDY))
        session = gen._parts.backend._workers[0].session
        begin_step, table = session._cache.begin_step, UPLOAD_TABLE if where == "prefill" else 0

        def faulty(number: int, step: int, entries: np.ndarray) -> None:
            if number == table:
                raise StepRefusedError(StepCode.INTERNAL, "the kernel tripped")
            begin_step(number, step, entries)

        monkeypatch.setattr(session._cache, "begin_step", faulty)
        stream = gen.generate(["a", "b"], GREEDY, on_error="event")
        errors = [event.error for event in stream if event.error is not None]
        assert len(errors) == 2 and all("tripped" in str(error) for error in errors)
        monkeypatch.undo()
        assert texts_and_ids(gen.complete(["a", "b"], GREEDY)) == expected


# -- Python per step


def calls_per_decode_step(path: Path, workers: list[str] | None) -> collections.Counter[str]:
    """Python function calls of one steady decode step, by package folder or module."""
    root = Path(setup.__file__).parents[1]
    counts: list[collections.Counter[str]] = []
    with Generator.from_pretrained(path, workers=workers) as gen:
        engine = gen._parts.engine
        step = engine.step

        def hook(frame: object, event: str, argument: object) -> None:
            if event == "call":
                file = Path(frame.f_code.co_filename)
                if root in file.parents:
                    name = frame.f_code.co_name
                    place = file.relative_to(root).parts[0]
                    counts[-1][f"{place} exchange" if name == "exchange" else place] += 1

        def profiled() -> bool:
            counts.append(collections.Counter())
            sys.setprofile(hook)
            try:
                return step()
            finally:
                sys.setprofile(None)

        gen.complete(["a", "b"], GREEDY)
        engine.step = profiled
        gen.complete(["a", "b"], GREEDY)
    return counts[20]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_python_calls_per_step_do_not_grow_with_layers_beyond_the_models_own(
    num_workers: int, tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    workers = [w.address for w in start_workers(num_workers)] if num_workers else None
    few = calls_per_decode_step(tiny_models("llama-2layers", num_hidden_layers=2), workers)
    many = calls_per_decode_step(tiny_models("llama-8layers", num_hidden_layers=8), workers)
    # the way into the pump is one call a layer, whatever the number of workers
    assert few.pop("attention exchange") == 2 and many.pop("attention exchange") == 8
    for room in ("attention", "transport", "wire", "worker", "engine", "scheduler", "sampling.py"):
        assert few[room] == many[room], room
    dense = [sum(n for place, n in c.items() if place in ("models", "ops.py")) for c in (few, many)]
    assert dense[1] - dense[0] <= 6 * 40, (few, many)
