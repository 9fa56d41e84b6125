"""`fastdecode profile`, its file, and predictions from it; no speeds are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.bench import attention, model_times
from fastdecode_rdma.bench.model_times import fit_rates
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.model import DenseTable, Network, Overlap, TimeTable
from fastdecode_rdma.perfmodel.profile_command import _overlap
from fastdecode_rdma.perfmodel.profile_file import (
    Measured,
    MeasuredWorker,
    read_measured,
    write_measured,
)
from fastdecode_rdma.perfmodel.shapes import ModelShape

SHAPE = ModelShape("m", 4, 256, 512, 8, 2, 32, 1000)
SMALL = ("--batch", "1,4", "--lengths", "8,40", "--repeats", "2")


def measured() -> Measured:
    return Measured(
        SHAPE,
        DenseTable(TimeTable(((1.0, 1e-5), (8.0, 2e-5))), TimeTable(((1.0, 3e-5),)), 1e-12),
        (
            MeasuredWorker("h:1", 1e9, {"fp16": (1e-8, 2e-7, 3e-6), "int8": (5e-9, 2e-7, 3e-6)}),
            MeasuredWorker("h:2", 2e9, {"fp16": (2e-8, 2e-7, 3e-6)}),
        ),
        Network(1e9, 1e9, 2e-5, 5e8),
        4.0,
        Overlap.PIPELINED,
        1e-4,
    )


def test_rates_are_found_again() -> None:
    samples = [
        (float(b), float(b * n), 2e-8 * b * n + 3e-7 * b + 5e-6)
        for b in (4, 16)
        for n in (128, 1024)
    ]
    assert fit_rates(samples) == pytest.approx((2e-8, 3e-7, 5e-6), rel=1e-6)


def test_rates_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        samples = [
            (float(b), float(b * n), float(1e-8 * b * n * rng.uniform(0.5, 2)))
            for b in (4, 16)
            for n in (128, 1024)
        ]
        rates = fit_rates(samples)
        assert rates[0] > 0 and min(rates) >= 0


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = tmp_path / "p.json"
    write_measured(place, measured(), {"machine": {}})
    assert read_measured(place) == measured()
    assert json.loads(place.read_text())["schema_version"] == 1


def test_the_measured_workers_again_in_turn() -> None:
    model = measured().serving_model("fp16", num_workers=3)
    assert [worker.token_s for worker in model.workers] == [1e-8, 2e-8, 1e-8]
    assert measured().kv_dtypes == ("fp16",)
    with pytest.raises(ConfigError, match="no figures for KV dtype 'int8': it has fp16"):
        measured().serving_model("int8")
    with pytest.raises(ConfigError, match="--num-workers must be at least 1"):
        measured().serving_model("fp16", num_workers=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "no performance profile of version 1"),
        ({"kind": "x"}, "no performance profile"),
        ({"workers": []}, "no worker was measured"),
        ({"workers": 5}, "is damaged"),
        ({"dense": {}}, "is damaged: KeyError"),
        ({"overlap": "some"}, "is damaged"),
        ({"wire_bytes": 0}, "wire_bytes must be positive"),
        ({"fixed_step_s": "1"}, "fixed_step_s must be a finite number"),
        ({"model": {"name": "x"}}, "is damaged: TypeError"),
    ],
)
def test_profiles_that_cannot_be(tmp_path: Path, change: dict, words: str) -> None:
    place = tmp_path / "p.json"
    write_measured(place, measured(), {})
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        read_measured(place)


def test_nothing_overlaps_where_cores_are_too_few(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert _overlap(("shm", "shm"), (1, 1)) is Overlap.PIPELINED
    assert _overlap(("shm", "shm"), (1, 2)) is Overlap.SHARED
    assert _overlap(("tcp", "rdma"), (64, 64)) is Overlap.PIPELINED


def test_an_embedded_worker_is_profiled_planned_and_simulated(
    tiny_models, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(attention, "WORKING_SET", 1 << 16)
    place = str(tmp_path / "p.json")
    model = str(tiny_models("llama"))
    command = ["profile", "--model", model, "--kv-dtypes", "fp16,int8", *SMALL, "--output", place]
    assert cli.main(command) == 0
    assert "embedded int8: R" in capsys.readouterr().out
    found = read_measured(place)
    assert found.overlap is Overlap.SHARED and found.kv_dtypes == ("fp16", "int8")
    assert (found.shape.num_layers, found.shape.num_kv_heads) == (3, 2)
    assert [rows for rows, _ in found.dense.block.points] == [1, 4]
    assert all(seconds > 0 for _, seconds in found.dense.head.points)
    assert cli.main(["plan", "--profile", place, "--length", "64"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert cli.main(["simulate", "--profile", place, "--length", "64", "--num", "5"]) == 0


def test_workers_are_profiled(
    tiny_models, start_workers, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(model_times, "WARM_UP_S", 0.0)
    monkeypatch.setattr(model_times, "UPLOAD_BYTES", 1 << 18)
    place = str(tmp_path / "p.json")
    workers = ",".join(f"tcp://{w.address[6:]}" for w in start_workers(2, memory="64MiB"))
    command = ["profile", "--model", str(tiny_models("llama")), "--workers", workers, *SMALL]
    assert cli.main([*command, "--output", place]) == 0
    assert "us a round trip" in capsys.readouterr().out
    found = read_measured(place)
    assert len(found.workers) == 2 and found.overlap is Overlap.PIPELINED
    assert all(64e6 < worker.capacity_bytes < 68e6 for worker in found.workers)
    assert found.network.round_trip_s > 0
    assert cli.main(["plan", "--profile", place, "--num-workers", "5", "--length", "64"]) == 0
    assert "5; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "none"], "none"),
        (["--model", "x", "--repeats", "0"], "--repeats must be 1"),
        (["--model", "x", "--lengths", "8"], "--lengths takes two different lengths"),
        (["--model", "x", "--batch", "5000"], "--batch must be at most 4096"),
        (["--model", "x", "--kv-dtypes", "fp7"], "fp7"),
        (["--model", "x", "--output", "/none/p.json"], "there is no directory /none"),
        ([], "--model"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], words: str, capsys) -> None:
    assert cli.main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1
