"""The simulator by hand, and its invariants; `fastdecode simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_rdma import cli
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel import simulate_command
from fastdecode_rdma.perfmodel.model import (
    DenseTable,
    Network,
    ServingModel,
    TimeTable,
    WorkerRate,
)
from fastdecode_rdma.perfmodel.shapes import ModelShape
from fastdecode_rdma.perfmodel.simulate import SimulatedRoom, Simulation
from fastdecode_rdma.perfmodel.simulate_command import load_over_time, summary
from fastdecode_rdma.perfmodel.traces import Lengths, Request, arrivals, make_trace, read_trace
from fastdecode_rdma.scheduler import POLICIES, make_scheduler

HARDWARE = ["--model", "llama-2-7b", "--hardware", "1x a10 + 8x epyc-7452 @ 100gbe"]


def seconds_model(*, capacity: float = 1e9, num_workers: int = 1) -> ServingModel:
    """One layer; T(B) = B seconds, from 1 on; attention 1 s a cached token; no network."""
    shape = ModelShape("s", 1, 8, 8, 1, 1, 8, 8)
    dense = DenseTable(TimeTable(((1, 1.0), (2, 2.0))), TimeTable(((0, 0.0),)))
    workers = (WorkerRate(1.0, capacity),) * num_workers
    return ServingModel(
        shape, dense, workers, Network(1e30, 1e30, 0.0), "fp16", num_minibatches=1
    )  # fmt: skip


def simulate(requests: list[Request], model: ServingModel | None = None, **limits: int):
    return Simulation(
        model or seconds_model(), requests, lambda options: make_scheduler("fcfs", options),
        **({"max_num_seqs": 8} | limits),
    ).run()  # fmt: skip


def test_one_request_by_hand() -> None:
    """Prompt of 3 tokens: 3 s to the first token; then 1 s dense and 4, then 5 s attention."""
    out = simulate([Request(10.0, 3, 3)])
    assert out.first_token_s.tolist() == [13.0]
    assert out.finish_s.tolist() == [13.0 + 5 + 6]
    assert out.makespan_s == 14 and out.tokens_per_s == 3 / 14
    assert out.latency_per_token_s.tolist() == [pytest.approx(14 / 3)]
    assert [(load.start_s, load.cached_tokens) for load in out.loads] == [
        (10.0, 0), (13.0, 4), (18.0, 5),
    ]  # fmt: skip


def test_a_second_one_joins_the_running_batch() -> None:
    # step 1: prefill of 2 at 0. At 2 s it decodes over 3 tokens (1 + 3 s) while the other's prompt
    # of 4 (4 s) is prefilled: 10 s. Then both decode: T(2) = 2 s, 4 + 5 tokens: 21 s.
    out = simulate([Request(0.0, 2, 3), Request(1.0, 4, 2)])
    assert out.first_token_s.tolist() == [2.0, 10.0]
    assert out.finish_s.tolist() == [21.0, 21.0]


def test_sequences_spread_over_workers_and_the_busiest_counts() -> None:
    requests = [Request(0.0, 64, 2) for _ in range(3)]
    out = simulate(requests, seconds_model(num_workers=3))
    assert out.loads[1].step_s == 3 + 65  # rather than 3 * 65
    out = simulate(requests, seconds_model(num_workers=2))
    assert out.loads[1].step_s == 3 + 130


def test_memory_preempts_and_all_finish() -> None:
    token_bytes = 2 * 8 * 2
    out = simulate(
        [Request(0.0, 60, 100) for _ in range(4)], seconds_model(capacity=6 * 64 * token_bytes)
    )
    assert out.num_preemptions > 0
    assert not np.isnan(out.finish_s).any()


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sequence of 201 tokens fits on no worker"):
        simulate([Request(0.0, 100, 100)], seconds_model(capacity=64 * 32))


def test_room_books_whole_blocks() -> None:
    room = SimulatedRoom(seconds_model(capacity=3 * 64 * 32), 4)
    assert room.reserve_gang([0], 64) and room.reserve(0, 64)
    assert room.reserve_gang([1, 2], 1) and not room.reserve(0, 65)
    room.release(2)
    room.release(2)
    assert room.reserve(0, 128) and not room.reserve_gang([3], 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=14),
    gap=st.integers(0, 300),
    seats=st.integers(1, 6),
    load=st.one_of(st.none(), st.integers(200, 400)),
)
def test_every_request_gets_its_tokens_under_any_policy(
    policy: str, lengths: list[tuple[int, int]], gap: int, seats: int, load: int | None
) -> None:
    requests = [Request(float(i * gap), p, o) for i, (p, o) in enumerate(lengths)]
    simulation = Simulation(
        seconds_model(capacity=8 * 64 * 32, num_workers=2), requests,
        lambda options: make_scheduler(policy, options), max_num_seqs=seats, max_load_tokens=load,
    )  # fmt: skip
    out = simulation.run()
    assert not np.isnan(out.finish_s).any() and not np.isnan(out.first_token_s).any()
    assert (out.time_to_first_token_s > 0).all() and (out.finish_s >= out.first_token_s).all()
    assert (
        sum(out.requests[i].output_len for i in range(len(lengths)))
        == (simulation._tokens - [p for p, _ in lengths]).sum()
    )
    ends = [one.start_s + one.step_s for one in out.loads]
    assert all(a <= b.start_s for a, b in zip(ends, out.loads[1:], strict=False))
    if load is not None:
        assert all(one.cached_tokens <= load or one.num_decoded == 1 for one in out.loads)


def test_arrivals_have_the_rate_and_the_spread_asked_for() -> None:
    rng = np.random.default_rng(3)
    for cv in (0.0, 0.5, 1.0, 3.0):
        gaps = np.diff(arrivals(100_000, rng, rate_per_s=4.0, cv=cv))
        assert gaps.mean() == pytest.approx(0.25, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)
    assert arrivals(3, rng, rate_per_s=None).tolist() == [0, 0, 0]


def test_lengths_have_the_mean_asked_for() -> None:
    drawn = Lengths(300, 1.0, most=100_000).draw(200_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(300, rel=0.02) and drawn.min() >= 1
    assert set(Lengths(5).draw(10, np.random.default_rng(0)).tolist()) == {5}
    assert Lengths(300, 2.0, most=400).draw(1000, np.random.default_rng(0)).max() == 400


def test_traces_in_both_formats(tmp_path: Path) -> None:
    wanted = [Request(0.5, 3, 4), Request(2.0, 1, 2)]
    (tmp_path / "t.csv").write_text("arrival_s,prompt_len,output_len\n2,1,2\n0.5,3,4\n")
    (tmp_path / "t.jsonl").write_text(
        '{"input_tokens": 3, "output_tokens": 4, "timestamp": 0.5}\n\n'
        '{"prompt_tokens": 1, "completion_tokens": 2, "arrival": 2}\n'
    )
    assert read_trace(tmp_path / "t.csv") == read_trace(tmp_path / "t.jsonl") == wanted
    drawn = read_trace(tmp_path / "t.csv", rate_per_s=1.0, cv=0.0)
    assert [request.arrival_s for request in drawn] == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold 1 to"),
        ("{}", "line 1 has no prompt_len"),
        ('{"prompt_len": 1, "output_len": 0}', "output_len must be 1 to"),
        ('{"prompt_len": 1.5, "output_len": 1}', "must be a whole number"),
        ('{"prompt_len": "x", "output_len": 1}', "prompt_len must be 1 to"),
        ('{"prompt_len": 1, "output_len": 1, "arrival_s": -1}', "arrival_s must be 0 to"),
        ("[]", "line 1: no JSON object"),
        ("{", "line 1: "),
    ],
)
def test_traces_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    place = tmp_path / "t.jsonl"
    place.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(place)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.csv")


def test_figures_of_a_run() -> None:
    out = simulate([Request(0.0, 2, 3), Request(1.0, 4, 2)])
    found = summary(out)
    assert found["tokens_per_s"] == pytest.approx(5 / 21)
    assert found["latency_per_token_s"]["mean"] == pytest.approx((7 + 10) / 2)
    assert found["time_to_first_token_s"]["mean"] == pytest.approx((2 + 9) / 2)
    assert found["max_cached_tokens"] == 9
    assert found["mean_cached_tokens"] == pytest.approx((0 * 2 + 3 * 8 + 9 * 11) / 21)
    assert [point["num_decoded"] for point in load_over_time(out)] == [0, 1, 2]


def test_the_command(tmp_path: Path, capsys) -> None:
    place = tmp_path / "o.json"
    code = cli.main(
        ["simulate", *HARDWARE, "--num", "30", "--lengths", "sharegpt", "--rate", "5", "--cv", "2",
         "--json", str(place), "--max-num-seqs", "8", "--minibatches", "1"]
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "latency per token" in out and "first token" in out
    found = json.loads(place.read_text())
    assert found["num_requests"] == 30 and found["load"]
    assert set(found["latency_per_token_s"]) == {"mean", "p50", "p95", "p99"}


def test_a_plot(tmp_path: Path, monkeypatch, capsys) -> None:
    matplotlib, place = MagicMock(), tmp_path / "load.png"
    pyplot = matplotlib.pyplot
    pyplot.subplots.return_value = figure, (above, below) = MagicMock(), (MagicMock(), MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    command = ["simulate", *HARDWARE, "--num", "3", "--length", "40", "--plot", str(place)]
    with monkeypatch.context() as patch:
        patch.setattr(simulate_command, "check_plot", lambda path: None)
        assert cli.main(command) == 0
    times, cached = above.plot.call_args.args
    assert times[0] == 0 and sorted(times) == times and max(cached) == 3 * 39
    assert [call.kwargs["label"] for call in below.plot.call_args_list] == [
        "decoded", "running", "waiting",
    ]  # fmt: skip
    figure.savefig.assert_called_once_with(place)
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(command) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num", "0"], "--num must be 1"),
        (["--prompt", "2000"], "--prompt must be at least 1 and less than --length"),
        (["--rate", "-1"], "--rate must be above 0"),
        (["--rate", "1", "--cv", "-1"], "--cv must be 0"),
        (["--scheduler", "fcsf"], "fcfs"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--trace", "none.jsonl"], "cannot read none.jsonl"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], words: str, capsys) -> None:
    assert cli.main(["simulate", *HARDWARE, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


def test_a_drawn_trace_is_the_same_again() -> None:
    lengths = Lengths(100, 1.0), Lengths(50, 1.0)
    first, second = (make_trace(20, *lengths, rate_per_s=2.0, seed=7) for _ in range(2))
    assert first == second != make_trace(20, *lengths, rate_per_s=2.0, seed=8)
