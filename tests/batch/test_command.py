"""Options of files: order, limits, dry runs, progress, and a job's own faults."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdecode_rdma import Generator
from fastdecode_rdma.batch import command, output, progress
from fastdecode_rdma.batch.files import LineSource, LineWriter
from fastdecode_rdma.batch.job import DoneLines, SeenIds, model_digest, scan_input
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.progress import Counts, Progress, UnderWay, describe
from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import CacheFullError, WorkerLostError
from fastdecode_rdma.handles import RequestHandle


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    """A tiny model."""
    return tiny_models("llama")


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(model: Path, *options: Any) -> int:
    return main(["generate", "--model", str(model), *map(str, options)])


def test_ordered_results_are_in_the_inputs_order(model, tmp_path):
    lengths = [30, 1, 20, 2, 10, 1, 1, 25, 3, 1]
    lines = [{"prompt": "x", "sampling_params": {"max_tokens": n}} for n in lengths]
    source, out = write_lines(tmp_path / "in", [*lines[:5], "{", *lines[5:]]), tmp_path / "out"
    assert generate(model, "-i", source, "-o", out, "--max-num-seqs", 3) == 3
    assert [line["line"] for line in read_lines(out)] != [*range(1, 12)]
    assert generate(model, "-i", source, "-o", out, "--ordered", "--overwrite") == 3
    assert [line["line"] for line in read_lines(out)] == [*range(1, 12)]


def test_results_that_wait_for_an_earlier_one_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MAX_HELD_BYTES", 10)
    writer = LineWriter(str(tmp_path / "out"), overwrite=False)
    held = Output(writer, ordered=True)
    for number in (1, 2, 4):
        held.expect(number)
    held.write(4, b"four\n")
    assert not held.is_full
    held.write(2, b"two22\n")
    assert held.is_full and (tmp_path / "out").read_bytes() == b""
    held.write(1, b"one\n")
    assert not held.is_full and (tmp_path / "out").read_bytes() == b"one\ntwo22\nfour\n"
    writer.close()


def test_a_limit_counts_lines_of_the_input(model, tmp_path, capfd):
    source = write_lines(tmp_path / "in", [{"prompt": "a"}, "", "{", {"prompt": "b"}, "{"])
    options = ["-i", source, "-o", tmp_path / "out", "--max-tokens", 1]
    assert generate(model, *options, "--limit", 2, "--ordered") == 3
    assert [line["line"] for line in read_lines(tmp_path / "out")] == [1, 3]
    for wrong in ("0", "-1", "x"):
        assert generate(model, *options, "--limit", wrong) == 2
        assert "expected a number of at least 1" in capfd.readouterr().err


def test_a_dry_run_checks_all_lines_and_loads_no_weights(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Generator, "from_pretrained", pytest.fail)
    lines = [{"prompt": "hello"}, {"prompt": "x" * 511}, {"prompt": "x" * 512}, "{"]
    lines += [{"id": "a", "prompt": [1, 2]}, {"id": "a", "prompt": "y"}, {"prompt": [300]}]
    source = write_lines(tmp_path / "in", lines)
    assert generate(model, "-i", source, "-o", tmp_path / "out", "--dry-run") == 3
    *wrong, count, summary = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in wrong] == ["line 3", "line 4", "line 6", "line 7"]
    assert "can never fit: max_model_len is 512" in wrong[0]
    assert count == "7 lines, 4 of them wrong"
    assert summary.startswith("1030 tokens in prompts; the longest has 512, on line 3; 1 cannot")
    assert not (tmp_path / "out").exists()
    assert generate(model, "-i", source, "--dry-run", "--limit", 1) == 0
    assert capfd.readouterr().out.startswith("1 lines, 0 of them wrong\n")


def test_a_lost_worker_is_no_fault_of_a_line(model, tmp_path, capfd, monkeypatch):
    source = write_lines(tmp_path / "in", [{"prompt": f"p{i}"} for i in range(5)])
    options = ["-i", source, "-o", tmp_path / "out", "--max-tokens", 2]
    result = RequestHandle.result
    calls: list[int] = []

    def lose(error: Exception) -> Callable[..., Any]:
        def failing(handle: RequestHandle, timeout: float | None = None) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise error
            return result(handle, timeout)

        return failing

    monkeypatch.setattr(RequestHandle, "result", lose(WorkerLostError("w:1", "it is gone")))
    assert generate(model, *options) == 1
    first, second, third = capfd.readouterr().err.splitlines()
    assert first == "fastdecode: error: attention worker w:1: it is gone"
    assert second.startswith("stopped: 2 requests, ") and third.startswith("continue with: ")
    assert all("error" not in line for line in read_lines(tmp_path / "out"))
    monkeypatch.setattr(RequestHandle, "result", result)
    assert generate(model, *options, "--resume") == 0
    assert sorted(line["line"] for line in read_lines(tmp_path / "out")) == [1, 2, 3, 4, 5]
    calls.clear()
    monkeypatch.setattr(RequestHandle, "result", lose(CacheFullError("no room")))
    assert generate(model, *options, "--overwrite") == 3  # that one is the line's
    assert sum("error" in line for line in read_lines(tmp_path / "out")) == 1


def test_progress_is_a_line_a_minute_in_a_log(capfd, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    counts = Counts(total=100, resumed=20, started=100.0)
    shown = Progress(counts, output_is_terminal=False)
    looks: list[int] = []

    def look() -> UnderWay:
        looks.append(1)
        return UnderWay(tokens=50, running=8, waiting=2)

    for _ in range(10):
        shown.show(look)
    assert not looks and capfd.readouterr().err == ""
    counts.requests, counts.failed, counts.tokens = 30, 1, 550
    now[0] += 60
    for _ in range(10):
        shown.show(look)
    shown.end()
    assert len(looks) == 1
    assert capfd.readouterr().err == (
        "50/100 lines (1 failed), 600 tokens, 10.0 tokens/s, running 8, waiting 2, ETA 0:01:40\n"
    )


def test_progress_is_one_line_on_a_terminal_that_shows_no_results(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = Progress(Counts(), output_is_terminal=False)
    shown.show(UnderWay)
    shown.show(UnderWay)
    shown.end()
    error = capfd.readouterr().err
    assert error.count("0 lines") == 1 and "\n" not in error and error.endswith("\r\033[K")
    Progress(Counts(), output_is_terminal=True).show(UnderWay)
    assert capfd.readouterr().err == ""


def test_an_estimate_needs_a_total_and_a_start():
    assert "ETA" not in describe(Counts(requests=3), UnderWay())
    assert "ETA" not in describe(Counts(total=3), UnderWay())
    assert "ETA" in describe(Counts(total=3, requests=1), UnderWay())


def test_ids_are_remembered_on_disk_and_told_apart():
    seen = SeenIds()
    assert [seen.first(x, n) for n, x in enumerate([1, "1", "é", "x" * 5000, 1, "x" * 5000])] == [
        0, 1, 2, 3, 0, 3,
    ]  # fmt: skip
    started = time.process_time()
    for number in range(20_000):
        assert seen.first(f"id-{number}", number) == number
    assert time.process_time() - started < 5
    seen.close()


def test_done_lines_take_a_bit_each():
    done = DoneLines()
    assert done.add(1_000_000) and not done.add(1_000_000) and done.add(7)
    assert 7 in done and 8 not in done and 5_000_000 not in done
    assert (done.count, len(done.bits)) == (2, 125_001)


def test_an_inputs_digest_is_of_its_lines(tmp_path):
    def facts(data: bytes):
        (tmp_path / "in").write_bytes(data)
        return scan_input(LineSource(str(tmp_path / "in")).lines())

    one = facts(b"a\nb\n\n")
    assert (one.num_lines, one.last_number) == (2, 2)
    assert one == facts(b"a\r\nb") and one == facts(b"\xef\xbb\xbfa\nb\n")
    others = [facts(data).digest for data in (b"a\n\nb", b"b\na", b"ab", b"a\nb\nc", b"")]
    assert len({one.digest, *others}) == 6


def test_a_models_digest_follows_its_weights_and_not_its_place(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_digest(copy) == model_digest(model)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    start = len(data) - max(ends)
    for end in ends:  # of one tensor alone
        data[start + end - 1] ^= 1
        weights.write_bytes(data)
        assert model_digest(copy) != model_digest(model)
        data[start + end - 1] ^= 1
    far = b'{"a":{"data_offsets":[-99,1e9]}}'
    for text in (b"", b"[]", b'{"a":1}', far, b'{"a":{"data_offsets":[-99,7]}}', b"[" * 10_000):
        weights.write_bytes(len(text).to_bytes(8, "little") + text)
        assert model_digest(copy) != model_digest(model)
    for broken in (b"", b"\xff" * 8, b"{}"):
        weights.write_bytes(broken)
        assert model_digest(copy) != model_digest(model)


def test_with_ray_records_alone_are_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before ")
    with command._output_on_stderr():
        os.write(1, b"said by a process of Ray's")
    os.write(1, b"after")
    out, err = capfd.readouterr()
    assert out == "before after" and err == "said by a process of Ray's"
