"""Engines and attention workers on a Ray of this machine, one of whose workers dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from fastdecode_rdma import Generator, SamplingParams
from fastdecode_rdma.batch.files import LineWriter
from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.ray import (
    FastDecodeProcessorConfig,
    build_processor,
    files_run,
    line_rows,
)

NUM_ROWS = 60
ENGINE = {"deterministic": True, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A small Ray."""
    ray.init(
        num_cpus=7,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    """A tiny model."""
    return tiny_models("llama")


def config(model: Path, **changes: Any) -> FastDecodeProcessorConfig:
    values = {
        "model_source": str(model),
        "engine_kwargs": ENGINE,
        "concurrency": 2,
        "num_workers": 4,
        "worker_memory": "64MiB",
        "worker_threads": 1,
        "sampling_params": {"temperature": 0.0, "max_tokens": 12},
        "batch_size": 5,
    }
    return FastDecodeProcessorConfig(**{**values, **changes})


def test_a_dead_worker_costs_no_answer(cluster, model):
    """Two engines, four workers; columns are carried, a bad row fails alone, and the worker that
    was killed comes back where it was."""
    rows = [{"number": i, "question": f"p{i % 7}", "tag": {"x": [i]}} for i in range(NUM_ROWS)]
    processor = build_processor(
        config(model),
        preprocess=lambda row: {
            "prompt": row["question"],
            "sampling_params": {"max_tokens": -1 if row["number"] == 13 else 40, "seed": 1},
        },
        postprocess=lambda row: {
            "number": row["number"], "tag": row["tag"], "answer": row["generated_text"],
            "ids": row["generated_tokens"], "tokens": row["num_generated_tokens"],
        },
    )  # fmt: skip
    with processor:
        results = processor(ray.data.from_items(rows, override_num_blocks=12))
        found: list[dict[str, Any]] = []
        for row in results.iter_rows():
            if not found:
                victim = processor.pool.actors[0]
                os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
            found.append(row)
        assert ray.get(victim.address.remote(), timeout=120) == processor.pool.addresses[0]
    assert sorted(row["number"] for row in found) == [*range(NUM_ROWS)]
    with Generator.from_pretrained(model, **ENGINE) as generator:
        params = SamplingParams(temperature=0.0, max_tokens=40, seed=1)
        expected = [generator.complete(f"p{i}", params)[0].outputs[0] for i in range(7)]
    for row in found:
        number = row["number"]
        assert row["tag"] == {"x": [number]}
        if number == 13:
            assert row["__inference_error__"].startswith("ConfigError: max_tokens must be")
            assert row["question"] == "p6" and row["generated_text"] is None
            continue
        assert row["__inference_error__"] == ""
        assert list(row["ids"]) == expected[number % 7].token_ids
        assert (row["answer"], row["tokens"]) == (expected[number % 7].text, len(row["ids"]))


def hear_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hears how many lines a checkpoint holds as Ray Data is given it."""
    heard: list[int] = []

    def prepare(folder: Path, done: Any) -> Any:
        checkpoint = line_rows.prepare_checkpoint(folder, done)
        heard.append(pq.read_table(folder).num_rows)
        return checkpoint

    monkeypatch.setattr(files_run, "prepare_checkpoint", prepare)
    return heard


def test_a_file_is_answered_as_without_ray_and_resumed(
    cluster, model, tmp_path, capfd, monkeypatch
):
    """A full disk stops the job: lines that could not be written are not done, whatever tasks and
    engines have seen of them."""
    lines: list[Any] = [{"id": f"i{n}", "prompt": f"p{n}", "label": n} for n in range(150)]
    lines[40], lines[90], lines[100] = "{", {"id": "i3", "prompt": "x"}, {"prompt": "no id"}
    source = tmp_path / "in"
    source.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    options = ["generate", "--model", str(model), "-i", str(source), "--max-tokens", "4"]
    options += ["--seed", "5", "--deterministic", "--max-num-seqs", "32"]
    options.append("--ordered")
    assert main([*options, "-o", str(tmp_path / "here")]) == 3
    out = tmp_path / "out"
    on_ray = [*options, "-o", str(out), "--ray", "--ray-workers", "2"]
    on_ray += ["--ray-worker-memory", "64MiB"]
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(LineWriter, "write", full_after(70))
        assert main(on_ray) == 1
    said = capfd.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
    assert "stopped: 70 requests" in said and "continue with: fastdecode generate" in said
    assert out.read_bytes().count(b"\n") == 70
    out.write_bytes(out.read_bytes()[:-3])
    held_by_checkpoint = hear_of_checkpoints(monkeypatch)
    assert main([*on_ray, "--resume"]) == 3
    assert held_by_checkpoint == [69] and not (tmp_path / "out.checkpoint").exists()
    assert out.read_bytes() == (tmp_path / "here").read_bytes()
    assert "81 requests (1 failed), " in capfd.readouterr().err.splitlines()[-1]
    assert main([*options, "-o", str(out), "--resume"]) == 3  # the same job, with Ray or without


def full_after(count: int) -> Callable[[LineWriter, bytes], None]:
    """LineWriter.write on a disk that has room for so many lines."""
    written, write = [], LineWriter.write

    def full(writer: LineWriter, line: bytes) -> None:
        if len(written) == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, line)
        written.append(line)

    return full


def test_a_file_is_scored_as_without_ray(cluster, model, tmp_path, capfd):
    lines: list[Any] = [{"id": n, "context": "ab", "continuation": f"c{n}"} for n in range(20)]
    lines += [{"text": "a longer text", "tag": 1}, "{", {"id": 3, "text": "again"}]
    source = tmp_path / "in"
    source.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    options = ["score", "--model", str(model), "-i", str(source), "--deterministic", "--ordered"]
    assert main([*options, "-o", str(tmp_path / "here")]) == 3
    assert main([*options, "-o", str(tmp_path / "out"), "--ray", "--ray-engines", "2"]) == 3
    assert (tmp_path / "out").read_bytes() == (tmp_path / "here").read_bytes()
    assert main([*options, "-o", "-", "--ray-engines", "2"]) == 2
    assert "are for --ray" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": 0}, "concurrency must be an integer of at least 1"),
        ({"num_workers": True}, "num_workers must be"),
        ({"sampling_params": {"max_token": 1}}, "did you mean 'max_tokens'"),
        ({"worker_memory": "much"}, "as memory"),
        ({"engine_kwargs": {"workers": ["h"]}}, "num_workers starts workers"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(model, changes, words):
    with pytest.raises(ConfigError, match=words):
        config(model, **changes)


def test_wrong_options_are_one_line(model, tmp_path, capfd):
    source = tmp_path / "in"
    source.write_text('{"prompt": "x"}\n')
    options = ["generate", "--model", str(model), "--max-tokens", "1"]
    for more, words in (
        (["-i", str(source), "--ray-engines", "2"], "are for --ray"),
        (["-i", str(source), "--ray", "--workers", "h"], "leave out --workers"),
        (["-i", "-", "--ray"], "--ray needs --input with a file"),
        (["-i", str(source), "--ray", "--ray-engines", "0"], "at least 1"),
    ):
        assert main([*options, *more]) == 2
        error = capfd.readouterr().err
        assert words in error and error.count("\n") == 1


def test_an_address_where_nothing_listens_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        files_run._check_answers(f"127.0.0.1:{port}")
        files_run._check_answers("auto")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConfigError, match=rf"cannot reach Ray at {address}: .*refused"):
            files_run._check_answers(address)


def test_a_failure_is_told_by_what_the_engine_raised():
    text = "ray::Engine()\n  File x\nfastdecode_rdma.errors.ConfigError: not so\n\nAdvice of Ray"
    outer = ray.exceptions.RayError("To change retries, configure Ray")
    assert files_run._reason(ray.exceptions.RayError(text)) == "ConfigError: not so"
    assert files_run._reason(outer) == "To change retries, configure Ray"
    outer.__cause__ = ValueError("wrapped")
    outer.__cause__.__cause__ = ConfigError("the model is not there")
    assert files_run._reason(outer) == "the model is not there"


def test_ports_of_workers_are_forgotten_at_the_end(cluster, model):
    pool = config(model, num_workers=1).start_workers()
    (actor,) = pool.actors
    pool.close()
    pool.close()
    deadline = time.monotonic() + 20
    with contextlib.suppress(ray.exceptions.RayError):
        while True:  # Ray ends an actor in its own time
            ray.get(actor.pid.remote(), timeout=5)
            assert time.monotonic() < deadline, "the worker lives on"
            time.sleep(0.05)
