"""`stats()`: what is counted is right, and Prometheus' text format is kept to the letter."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdecode_rdma import FastDecodeError, Generator, GeneratorStats, SamplingParams
from fastdecode_rdma.engine import reconnect
from fastdecode_rdma.engine.state import EngineCounters
from fastdecode_rdma.stats import (
    FINISH_REASONS,
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    Histogram,
)

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=400)

# -- a strict reader of the text format

NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"
SAMPLE = re.compile(rf"({NAME})\{{(.*)\}} (\S+)")
LABEL = re.compile(rf'({NAME})="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    while text:
        found = LABEL.match(text)
        assert found, text
        assert found[1] not in labels
        assert not found[1].startswith("__")
        labels[found[1]] = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), found[2])
        text = text[found.end() :]
    return labels


def read_exposition(text: str) -> tuple[dict[str, str], Samples]:
    """Types by family and samples by name; anything that is not as it must be is an error."""
    assert text.endswith("\n") and not text.endswith("\n\n")
    types: dict[str, str] = {}
    samples: Samples = {}
    seen: set[tuple[str, str]] = set()
    family, helped = "", ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            _, _, helped, words = line.split(" ", 3)
            assert helped not in types and words and "\\" not in words
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family == helped and family not in types and kind in SUFFIXES
            assert kind != "counter" or family.endswith("_total")
            types[family] = kind
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1] in [family + suffix for suffix in SUFFIXES[types[family]]], line
            assert (found[1], found[2]) not in seen, "a series twice"
            seen.add((found[1], found[2]))
            samples.setdefault(found[1], []).append((read_labels(found[2]), float(found[3])))
    for family, kind in types.items():
        if kind == "histogram":
            check_histogram(family, samples)
        elif kind == "counter":
            assert all(value >= 0 for _, value in samples.get(family, []))
    return types, samples


def check_histogram(family: str, samples: Samples) -> None:
    buckets = [(float(labels["le"]), value) for labels, value in samples[f"{family}_bucket"]]
    bounds, counts = [b for b, _ in buckets], [c for _, c in buckets]
    assert bounds == sorted(set(bounds)) and bounds[-1] == math.inf
    assert counts == sorted(counts)  # cumulative
    ((_, count),) = samples[f"{family}_count"]
    ((_, total),) = samples[f"{family}_sum"]
    assert counts[-1] == count and total >= 0


def value(samples: Samples, name: str, **labels: str) -> float:
    (found,) = [v for mine, v in samples[name] if labels.items() <= mine.items()]
    return found


# -- histograms


def test_bounds_are_inclusive_and_the_rest_has_its_bucket() -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for seconds in (0.0, 0.1, 0.100001, 1.0, 10.0, 10.5, 1e9):
        histogram.observe(seconds)
    stats = histogram.snapshot()
    assert stats.counts == (2, 2, 1, 2)
    assert stats.count == 7 and stats.sum == pytest.approx(1e9 + 21.700001)
    assert stats.mean == stats.sum / 7
    histogram.observe(0.0)
    assert stats.count == 7, "a snapshot stays"
    assert Histogram((1.0,)).snapshot().mean == 0.0


def test_buckets_are_vllms() -> None:
    for bounds in (FIRST_TOKEN_BUCKETS, INTER_TOKEN_BUCKETS, REQUEST_BUCKETS):
        assert list(bounds) == sorted(set(bounds))
    assert (len(FIRST_TOKEN_BUCKETS), FIRST_TOKEN_BUCKETS[0], FIRST_TOKEN_BUCKETS[-1]) == (
        22, 0.001, 2560.0,
    )  # fmt: skip
    assert (len(INTER_TOKEN_BUCKETS), INTER_TOKEN_BUCKETS[0], INTER_TOKEN_BUCKETS[-1]) == (
        19, 0.01, 80.0,
    )  # fmt: skip
    assert (len(REQUEST_BUCKETS), REQUEST_BUCKETS[0], REQUEST_BUCKETS[-1]) == (21, 0.3, 7680.0)


def test_counting_a_token_costs_next_to_nothing() -> None:
    counters = EngineCounters()
    seq = SimpleNamespace(last_token_s=None, request=SimpleNamespace(submitted_s=0.0))
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for now in range(10_000):
            counters.count_token(seq, None, float(now))
        best = min(best, time.perf_counter() - start)
    assert best / 10_000 < 5e-6  # about 0.5 us; a step of one token takes milliseconds
    assert counters.tokens == 50_000
    assert sum(counters.time_to_first_token.counts) == 1
    assert sum(counters.inter_token_latency.counts) == 49_999


# -- a generator's


def test_a_known_load_is_counted_right(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama")
    with Generator.from_pretrained(path, max_num_seqs=4) as gen:
        new = gen.stats()
        assert new.request_success_total == dict.fromkeys(FINISH_REASONS, 0)
        assert new.e2e_request_latency_seconds.count == new.generation_tokens_total == 0
        start = time.perf_counter()
        gen.complete(["abc", "defg", "h"], GREEDY)  # 8 prompt tokens, 30 new ones
        (output,) = gen.complete("abc", replace(GREEDY, n=2))  # 3 and 20
        stopping = replace(GREEDY, stop_token_ids=(output.outputs[0].token_ids[0],))
        gen.complete("abc", stopping)  # 3 and 1
        elapsed = time.perf_counter() - start
        stats = gen.stats()
        assert stats.model_name == str(path)
        assert stats.prompt_tokens_total == 14
        assert stats.generation_tokens_total == 51
        assert stats.request_success_total == {"stop": 1, "length": 5, "abort": 0, "error": 0}
        assert stats.time_to_first_token_seconds.count == 6
        assert stats.inter_token_latency_seconds.count == 51 - 6
        assert stats.e2e_request_latency_seconds.count == 6
        first, later, whole = (
            stats.time_to_first_token_seconds.sum,
            stats.inter_token_latency_seconds.sum,
            stats.e2e_request_latency_seconds.sum,
        )
        assert first + later == pytest.approx(whole)  # each token's time is in one of them
        assert 0 < whole <= 4 * elapsed  # never more than four at once
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        assert stats.kv_cache_usage == 0.0 and stats.num_preemptions_total == 0
        assert stats.elapsed_s > 0 and stats.steps >= 18


def test_gauges_follow_what_runs_and_waits(
    tiny_models: Callable[..., Path], wait_until_free: Callable[..., None]
) -> None:
    with Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2) as gen:
        handles = [gen.submit([i + 1], LONG) for i in range(5)]
        next(iter(handles[1]))
        stats = gen.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 3)
        (worker,) = stats.workers
        booked = gen._parts.engine.placement.bytes_for(2)
        assert worker.kv_cache_bytes == 2 * booked and worker.is_alive
        assert worker.kv_cache_usage == worker.kv_cache_bytes / worker.kv_cache_capacity_bytes
        assert stats.kv_cache_usage == worker.kv_cache_usage > 0
        assert (worker.worker, worker.transport) == (0, "loopback")
        for handle in handles:
            handle.cancel()
        wait_until_free(gen)
        stats = gen.stats()
        assert stats.request_success_total["abort"] == 5
        assert stats.kv_cache_usage == stats.workers[0].kv_cache_usage == 0.0
        assert stats.e2e_request_latency_seconds.count == 0
    after = gen.stats()  # closed: what is known stays known
    assert after.generation_tokens_total == stats.generation_tokens_total > 0
    assert after.workers == (replace(stats.workers[0], is_alive=False),)


def test_failed_requests_are_counted(tiny_models: Callable[..., Path]) -> None:
    gen = Generator.from_pretrained(tiny_models("llama"), max_num_seqs=2)
    handles = [gen.submit("abc", LONG) for _ in range(3)]
    next(iter(handles[0]))
    gen.close()
    for handle in handles:
        with pytest.raises(FastDecodeError):
            handle.result(10)
    assert gen.stats().request_success_total["error"] == 3


def test_workers_are_listed_one_by_one(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    workers = start_workers(2, memory="64MiB")
    addresses = [worker.address for worker in workers]
    with Generator.from_pretrained(tiny_models("llama"), workers=addresses) as gen:
        handles = [gen.submit([i + 1], LONG) for i in range(3)]
        for handle in handles:
            next(iter(handle))
        stats = gen.stats()
        assert [worker.address for worker in stats.workers] == addresses
        assert all(worker.is_alive and worker.transport == "tcp" for worker in stats.workers)
        usages = [worker.kv_cache_usage for worker in stats.workers]
        assert usages[0] == 2 * usages[1] > 0
        assert stats.kv_cache_usage == pytest.approx(sum(usages) / 2)
        assert all(worker.messages > 0 and worker.bytes_sent > 0 for worker in stats.workers)
        workers[0].kill()
        assert all(len(handle.result(30).outputs[0].token_ids) == 400 for handle in handles)
        stats = gen.stats()
        assert [worker.is_alive for worker in stats.workers] == [False, True]
        assert stats.recoveries == 1
        _, samples = read_exposition(stats.to_prometheus())
        for index, up in enumerate((0, 1)):
            labels = {"worker": str(index), "address": addresses[index]}
            assert value(samples, "fastdecode_worker_up", **labels) == up


def test_a_worker_that_comes_and_goes_stays_one(
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "FIRST_DELAY_S", 0.01)
    (worker,) = start_workers(1, memory="64MiB")
    with Generator.from_pretrained(
        tiny_models("llama"), workers=[worker.address], deterministic=True
    ) as gen:
        expected = gen.complete("abc", LONG)[0].outputs
        handle = gen.submit("abc", LONG)
        next(iter(handle))
        before = gen.stats().workers[0]
        for _ in range(3):
            gen._parts.backend.give_up(0, "for a test")
            deadline = time.monotonic() + 10
            while not gen.stats().workers[0].is_alive:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert handle.result(30).outputs == expected
        stats = gen.stats()
        (after,) = stats.workers
        assert stats.recoveries == 3 and (after.worker, after.address) == (0, worker.address)
        assert after.messages > before.messages and after.kernel_s > before.kernel_s
        assert after.kv_cache_bytes == 0 < after.kv_cache_capacity_bytes
        assert after.kv_cache_capacity_bytes == before.kv_cache_capacity_bytes
        _, samples = read_exposition(stats.to_prometheus())
        assert [count for _, count in samples["fastdecode_worker_up"]] == [1]


# -- the text format


def test_prometheus_text_says_the_same(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        gen.complete(["abc", "defg"], GREEDY)
        stats = gen.stats()
    nasty = 'a "name"\\with\nall of it, {x="y"} é'
    stats = replace(stats, model_name=nasty)
    types, samples = read_exposition(stats.to_prometheus())
    assert set().union(*([labels["model_name"] for labels, _ in s] for s in samples.values())) == {
        nasty
    }
    for name in (
        "num_requests_running", "num_requests_waiting", "prompt_tokens_total",
        "generation_tokens_total", "num_preemptions_total",
    ):  # fmt: skip
        assert value(samples, f"fastdecode_{name}") == getattr(stats, name)
    assert value(samples, "fastdecode_kv_cache_usage_perc") == stats.kv_cache_usage
    for reason, count in stats.request_success_total.items():
        assert value(samples, "fastdecode_request_success_total", finished_reason=reason) == count
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    ):  # fmt: skip
        histogram = getattr(stats, name)
        assert types[f"fastdecode_{name}"] == "histogram"
        assert value(samples, f"fastdecode_{name}_sum") == histogram.sum
        assert value(samples, f"fastdecode_{name}_count") == histogram.count > 0
        for number, bound in enumerate(histogram.bounds):
            count = value(samples, f"fastdecode_{name}_bucket", le=repr(bound))
            assert count == sum(histogram.counts[: number + 1])
    assert types["fastdecode_request_success_total"] == "counter"
    assert types["fastdecode_kv_cache_usage_perc"] == "gauge"


def test_every_number_is_exported(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        stats = gen.stats()

    def numbered(record: object, first: float) -> tuple[object, list[float]]:
        names = [
            field.name
            for field in dataclasses.fields(record)
            if field.name != "worker" and type(getattr(record, field.name)) in (int, float)
        ]
        numbers = [first + number for number in range(len(names))]
        return replace(record, **dict(zip(names, numbers, strict=True))), numbers

    worker, of_worker = numbered(stats.workers[0], 1000.5)
    stats, of_all = numbered(replace(stats, workers=(worker,)), 2000.5)
    _, samples = read_exposition(stats.to_prometheus())
    exported = [number for rows in samples.values() for _, number in rows]
    assert len(of_worker) == 11 and len(of_all) == 26
    assert [exported.count(number) for number in of_worker + of_all] == [1] * 37


def test_counters_never_go_back(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        handles = [gen.submit([i + 1], LONG) for i in range(3)]
        last: dict[str, float] = {}
        while not all(handle.done() for handle in handles):
            types, samples = read_exposition(gen.stats().to_prometheus())
            now = {name: samples[name][0][1] for name, kind in types.items() if kind == "counter"}
            assert [name for name in last if now[name] < last[name]] == []
            last = now
        assert len(last) > 10


def test_stats_are_frozen_documented_and_plain(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(tiny_models("llama")) as gen:
        stats = gen.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 3
    json.dumps(dataclasses.asdict(stats))
    for kind in (GeneratorStats, type(stats.workers[0])):
        for field in dataclasses.fields(kind):
            assert re.search(rf"^\s*(?:\w+, )*{field.name}(?:, \w+)*:|[;.] {field.name}:",
                             kind.__doc__, re.MULTILINE), field.name  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        'fastdecode_x{a="b"} 1\n',  # no type
        "# HELP a_total b\n# TYPE a_total counter\na_total{} 1\na_total{} 1\n",
        "# HELP a b\n# TYPE a counter\na{} 1\n",
        '# HELP a b\n# TYPE a gauge\na{x="\\t"} 1\n',
        '# HELP a b\n# TYPE a gauge\na{x="1" y="2"} 1\n',
        "# HELP a b\n# TYPE a gauge\na{} one\n",
        "# HELP a b\n# TYPE a gauge\na{} 1",
        '# HELP a b\n# TYPE a histogram\na_bucket{le="1.0"} 2\na_bucket{le="+Inf"} 1\n'
        "a_sum{} 1\na_count{} 1\n",
    ],
)
def test_the_reader_is_strict(broken: str) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        read_exposition(broken)
