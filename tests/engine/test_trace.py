"""Traces: the file is what viewers read, and it tells what happened."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.engine import trace as trace_module

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NUM_LAYERS = 3  # of the tiny llama


@pytest.fixture
def gen(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> Iterator[Generator]:
    workers = [w.address for w in start_workers(2)]
    with Generator.from_pretrained(tiny_models("llama"), workers=workers, num_mini_batches=2) as g:
        yield g


def read(path: Path) -> tuple[dict[int, str], dict[str, list[dict[str, Any]]]]:
    """Track names, and the spans of each track by start; their format is checked."""
    whole = json.loads(path.read_text())
    names = {
        event["tid"]: event["args"]["name"]
        for event in whole["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in whole["traceEvents"]:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            tracks[names[event["tid"]]].append(event)
    for spans in tracks.values():
        spans.sort(key=lambda span: span["ts"])
    return names, tracks


def test_every_layer_of_every_mini_batch_and_worker_is_in_the_trace(
    gen: Generator, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    prompts = [[i] * 20 for i in range(4)]
    expected = [o.outputs[0].token_ids for o in gen.complete(prompts, GREEDY)]
    gate, loop = threading.Event(), gen._loop
    with gen.trace(path):
        with loop._wake:  # nothing starts until all are there
            loop._commands.append(gate.wait)
            loop._wake.notify()
        handles = [gen.submit(prompt, GREEDY) for prompt in prompts]
        gate.set()
        traced = [handle.result().outputs[0].token_ids for handle in handles]
    assert traced == expected
    names, tracks = read(path)
    workers = [f"worker {info.name}" for info in gen._parts.backend.infos()]
    assert list(names.values()) == [
        "engine", "dense", "transport", "mini-batch 0", "mini-batch 1", *workers
    ]  # fmt: skip
    assert {span["name"] for span in tracks["engine"]} == {"prefill", "decode", "sample"}
    decode_steps = len([s for s in tracks["dense"] if s["name"] == "head"])
    assert decode_steps == 11  # the first token is the prefill's
    for mini_batch in (0, 1):
        spans = tracks[f"mini-batch {mini_batch}"]
        waits = [s for s in spans if s["name"].startswith("attention")]
        assert len(waits) == decode_steps * NUM_LAYERS
        assert all(s["args"]["mini_batch"] == mini_batch for s in spans)
    for worker in workers:  # each has a sequence of each mini-batch
        assert len(tracks[worker]) == decode_steps * NUM_LAYERS * 2
    for name, spans in tracks.items():  # on a track one thing at a time, but for nesting phases
        if name != "engine":
            for one, other in pairwise(spans):
                assert one["ts"] + one["dur"] <= other["ts"] + 0.01, name
    layers = [s["args"]["layer"] for s in tracks["dense"] if "layer" in s["args"]]
    assert layers[:8] == [0, 0, 0, 1, 0, 1, 1, 2]  # A0 B0, then after 0 with before 1, in turn


def test_start_and_stop_and_two_at_once(gen: Generator, tmp_path: Path) -> None:
    trace = gen.trace(tmp_path / "one.json")
    trace.stop()  # not started: nothing to write
    assert not (tmp_path / "one.json").exists()
    trace.start()
    with pytest.raises(ConfigError, match="under way already"):
        gen.trace(tmp_path / "two.json").start()
    with pytest.raises(ConfigError, match="has been started already"):
        trace.start()
    trace.stop()
    trace.stop()
    assert read(tmp_path / "one.json")[1]["dense"] == []
    with pytest.raises(ConfigError, match=r"cannot write the trace .*No such file or directory"):
        gen.trace(tmp_path / "nowhere" / "x.json").start()
    assert gen._parts.engine.runner.recorder is None


def test_an_error_inside_the_block_still_leaves_a_file(gen: Generator, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), gen.trace(str(tmp_path / "x.json")):
        gen.complete(["a"], GREEDY)
        raise RuntimeError("mine")
    assert read(tmp_path / "x.json")[1]["dense"]


def test_what_is_too_long_is_cut_and_says_so(
    gen: Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trace_module, "MAX_SPANS", 100)
    with gen.trace(tmp_path / "x.json"):
        gen.complete(["a", "b"], GREEDY)
    whole = json.loads((tmp_path / "x.json").read_text())
    assert sum(event["ph"] == "X" for event in whole["traceEvents"]) == 100
    assert whole["spansLeftOut"] > 0
    assert "later ones were left out" in caplog.text
