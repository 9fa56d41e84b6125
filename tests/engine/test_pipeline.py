"""Steps of two mini-batches: the same bits, in flight together, repeated after anything."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.config import StepCode
from fastdecode_rdma.engine import setup
from fastdecode_rdma.engine.pipeline import PipelineRunner
from fastdecode_rdma.engine.prefill import CHUNK_TOKENS
from fastdecode_rdma.worker.kvcache import StepRefusedError

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, seed=3, ignore_eos=True, logprobs=1)
PROMPTS = ["a", "some words", "x" * 70, "one two three four five", "b c"]
PARAMS = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY]
LOGITS_TOLERANCE = 2e-4
"""As in test_steps.py."""


def results(outputs: list) -> list[tuple[list[int], list[float]]]:
    return [
        (s.token_ids, [step[t].logprob for step, t in zip(s.logprobs, s.token_ids, strict=True)])
        for output in outputs
        for s in output.outputs
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_one_or_two_mini_batches_embedded_or_remote_give_the_same_bits(
    name: str, tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    path, seen = tiny_models(name), []
    workers = [w.address for w in start_workers(2)]
    shm = [workers[0].replace("tcp://", "shm://"), workers[1]]
    for addresses, parts in ((None, 1), (None, 2), (workers, 1), (workers, 2), (shm, 2)):
        with Generator.from_pretrained(
            path, workers=addresses, num_mini_batches=parts, deterministic=True
        ) as gen:
            run = gen._parts.engine.runner.run
            widths: set[int] = set()

            def watched(batches: list, step: int, run: object = run, w: set = widths) -> object:
                w.add(len(batches))
                return run(batches, step)

            gen._parts.engine.runner.run = watched
            seen.append(results(gen.complete(PROMPTS, PARAMS)))
            assert max(widths) == parts
            assert gen.stats().num_mini_batches == parts
    assert all(other == seen[0] for other in seen)


def test_two_mini_batches_match_transformers(
    tiny_models: Callable[..., Path],
    make_bench: Callable[..., object],
    hf_logits: Callable[..., torch.Tensor],
) -> None:
    path = tiny_models("gemma3")
    bench = make_bench(path)
    runner = PipelineRunner(bench.model, bench.backend)
    texts = {h: torch.randint(0, 300, (20 + 7 * h,)).tolist() for h in (1, 2, 3)}
    bench.prefill({handle: ids[:-4] for handle, ids in texts.items()})
    for left in (4, 3, 2, 1):
        rows = [(h, len(ids) - left, ids[len(ids) - left :][:1]) for h, ids in texts.items()]
        bench.step += 1
        logits, finite = runner.run([bench.batch(rows[:2]), bench.batch(rows[2:])], bench.step)
        assert finite == []  # these batches name no sequences
        for row, (handle, cached, _) in enumerate(rows):
            expected = hf_logits(path, texts[handle])[cached]
            assert (logits[row] - expected).abs().max() < LOGITS_TOLERANCE


def test_a_step_that_dies_anywhere_in_either_mini_batch_is_repeated_for_both(
    tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    bench = make_bench(tiny_models("gemma3"))
    prompts = {1: list(range(30)), 2: list(range(50, 75)), 3: [9] * 21}
    rows = [(1, 30, [11]), (2, 25, [12]), (3, 21, [13])]
    bench.prefill(prompts)
    expected = bench.decode(rows)
    follow = bench.decode([(h, n + 1, [5]) for h, n, _ in rows])
    bench.backend.free(0, [1, 2, 3])
    bench.prefill(prompts)

    class Abort(Exception):
        pass

    dies_at: list[tuple[str, int, int]] = []

    def dying(name: str) -> Callable[[int, int], None]:
        call = getattr(bench.backend, name)

        def either(table: int, layer: int) -> None:
            if (name, table, layer) in dies_at:
                raise Abort
            call(table, layer)

        return either

    bench.backend.submit, bench.backend.collect = dying("submit"), dying("collect")
    runner = PipelineRunner(bench.model, bench.backend)

    def run(*parts: list) -> torch.Tensor:
        bench.step += 1
        return runner.run([bench.batch(part) for part in parts], bench.step)[0].clone()

    for name in ("submit", "collect"):
        for table in (0, 1):
            for layer in range(bench.model.config.num_layers):
                dies_at.append((name, table, layer))
                with pytest.raises(Abort):
                    run(rows[:1], rows[1:])
                dies_at.clear()
                again = run(rows) if layer % 2 else run(rows[:2], rows[2:])
                assert torch.equal(again, expected), (name, table, layer)
    assert torch.equal(run([(1, 31, [5])], [(2, 26, [5]), (3, 22, [5])]), follow)


@pytest.mark.parametrize("table", [0, 1])
@pytest.mark.parametrize("code", [StepCode.CACHE_FULL, StepCode.INTERNAL])
def test_a_refusal_in_either_mini_batch(
    table: int,
    code: StepCode,
    tiny_models: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without room, the youngest gives way and comes back; a fault fails those that it hit."""
    with Generator.from_pretrained(
        tiny_models("llama"), num_mini_batches=2, deterministic=True
    ) as gen:
        expected = results(gen.complete(PROMPTS, PARAMS))
        cache = gen._parts.backend._workers[0].session._cache
        begin_step, calls = cache.begin_step, iter(range(1000))

        def faulty(number: int, step: int, entries: np.ndarray) -> None:
            if number == table and next(calls) == 7:
                raise StepRefusedError(code, "refused")
            begin_step(number, step, entries)

        monkeypatch.setattr(cache, "begin_step", faulty)
        outputs = gen.complete(PROMPTS, PARAMS, on_error="event")
        assert next(calls) >= 8
        if code == StepCode.CACHE_FULL:
            assert results(outputs) == expected
            assert gen.stats().num_preemptions_total == 1
        else:
            assert all(output.error is not None for output in outputs)
        monkeypatch.undo()
        assert results(gen.complete(PROMPTS, PARAMS)) == expected


def test_a_worker_killed_between_the_layers_of_two_mini_batches_costs_nothing(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    path = tiny_models("llama")
    with Generator.from_pretrained(path, deterministic=True) as gen:
        expected = results(gen.complete(PROMPTS, PARAMS))
    workers = start_workers(2)
    with Generator.from_pretrained(
        path, workers=[w.address for w in workers], num_mini_batches=2, deterministic=True
    ) as gen:
        runner, backend = gen._parts.engine.runner, gen._parts.backend
        collect, calls = backend.collect, iter(range(10**6))

        def deadly(table: int, layer: int) -> None:
            if next(calls) == 50:
                workers[1].kill()
            collect(table, layer)

        backend.collect = deadly
        gen._parts.engine.runner = PipelineRunner(runner.model, backend)
        assert results(gen.complete(PROMPTS, PARAMS)) == expected
        assert gen.stats().recoveries == 1


def test_a_cancel_leaves_the_other_mini_batch_alone(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(
        tiny_models("llama"), num_mini_batches=2, deterministic=True
    ) as gen:
        expected = results(gen.complete(PROMPTS, PARAMS))
        handles = [gen.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
        for _ in zip(range(5), handles[1], strict=False):
            pass
        handles[1].cancel()
        kept = [0, 2, 3, 4]
        assert results([handles[i].result() for i in kept]) == [expected[i] for i in kept]
        assert not gen._parts.engine.has_work()


@pytest.mark.parametrize("value", [0, 3, "two", True, 1.5, None])
def test_wrong_numbers_of_mini_batches(value: object, tiny_models: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="num_mini_batches must be 'auto' or an integer from 1"):
        Generator.from_pretrained(tiny_models("llama"), num_mini_batches=value)


def test_an_embedded_worker_leaves_one_mini_batch(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        gen.complete(PROMPTS, PARAMS)
        stats = gen.stats()
    assert stats.num_mini_batches == 1
    assert "own processors" in stats.mini_batch_reason
    assert 0 < stats.dense_busy < 1 and 0 < stats.attention_busy < 1
    # one after the other: together they are the step, but for the way into the kernel
    assert stats.bubble == 1 - max(stats.dense_busy, stats.attention_busy)
    assert stats.dense_busy + stats.attention_busy <= 1.05


def test_python_calls_per_layer_are_those_of_one_mini_batch_times_two(
    tiny_models: Callable[..., Path],
) -> None:
    root = Path(setup.__file__).parents[1]

    def calls_per_step(path: Path) -> collections.Counter[str]:
        counts: list[collections.Counter[str]] = []
        with Generator.from_pretrained(path, num_mini_batches=2) as gen:
            step = gen._parts.engine.step

            def hook(frame: object, event: str, argument: object) -> None:
                file = Path(frame.f_code.co_filename)
                if event == "call" and root in file.parents:
                    name = frame.f_code.co_name
                    way = name if name in ("submit", "collect") else ""
                    counts[-1][way or file.relative_to(root).parts[0]] += 1

            def profiled() -> bool:
                counts.append(collections.Counter())
                sys.setprofile(hook)
                try:
                    return step()
                finally:
                    sys.setprofile(None)

            gen.complete(["a", "b"], GREEDY)
            gen._parts.engine.step = profiled
            gen.complete(["a", "b"], GREEDY)
        return counts[20]

    few = calls_per_step(tiny_models("llama-2layers", num_hidden_layers=2))
    many = calls_per_step(tiny_models("llama-8layers", num_hidden_layers=8))
    for way in ("submit", "collect"):
        assert few.pop(way) == 2 * 2 and many.pop(way) == 2 * 8
    for room in ("attention", "transport", "wire", "worker", "engine", "scheduler", "sampling.py"):
        assert few[room] == many[room], room


def test_sequences_decode_all_through_a_long_prefill(tiny_models: Callable[..., Path]) -> None:
    """Between two decode steps there is never more prefill than the budget and one cell."""
    path = tiny_models("llama-4k", max_position_embeddings=4096)
    budget, length = 256, 3500
    with Generator.from_pretrained(
        path, max_num_batched_tokens=budget, max_num_seqs=4, num_mini_batches=2
    ) as gen:
        steps: list[tuple[int, int]] = []
        gen._parts.engine.scheduler.observe = lambda tokens, _, num, cached, seconds: steps.append(
            (tokens, num)
        )
        params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        running = [gen.submit([5, 6, 7], params) for _ in range(2)]
        for handle in running:
            next(iter(handle))
        gen.submit([1] * length, SamplingParams(max_tokens=1)).result()
        for handle in running:
            handle.cancel()
    num_layers = 3
    beside = [tokens for tokens, num_decoded in steps if num_decoded == 2]
    assert max(beside) <= budget + CHUNK_TOKENS // num_layers + 1
    during = [tokens for tokens in beside if tokens]
    assert sum(during) == pytest.approx(length, abs=len(during))
    assert len(during) >= length // (budget + CHUNK_TOKENS // num_layers + 1)
