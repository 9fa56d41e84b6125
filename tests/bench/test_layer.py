"""`fastdecode bench layer`, against real workers and peers; no speeds are asserted."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.bench.layer import Row
from fastdecode_rdma.bench.layer_models import SHAPES, LayerShape, shape_of
from fastdecode_rdma.bench.layer_session import Exchanges, as_wire
from fastdecode_rdma.errors import ConfigError

TINY = ("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--iters", "20")


def bench(*arguments: str) -> int:
    return cli.main(["bench", "layer", *arguments])


def test_with_and_without_the_kernel(start_workers, tmp_path: Path, capsys) -> None:
    workers = ",".join(worker.address for worker in start_workers(2, memory="64MiB"))
    place = tmp_path / "o.json"
    code = bench(
        "--workers", workers, *TINY, "--batch", "1,5", "--length", "70", "--s-time", "0.5",
        "--json", str(place),
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "with the kernel" in out and "without the kernel" in out and "a bubble of" in out
    result = json.loads(place.read_text())
    assert result["complete"] and result["bench"] == "layer"
    rows = result["rows"]
    assert [(row["with_kernel"], row["batch"]) for row in rows] == [
        (False, 1), (False, 5), (True, 1), (True, 5),
    ]  # fmt: skip
    assert [row["rows_per_worker"] for row in rows[:2]] == [[1, 0], [3, 2]]
    for row in rows:
        for part in ("scatter", "attend", "gather", "total", "skew", "incast"):
            figures = row[f"{part}_usec"]
            assert 0 <= figures["p50"] <= figures["p99"] <= figures["max"]
        assert row["bubble_usec"] == pytest.approx(row["total_usec"]["p50"] - 0.5)
        # q, k, v of 4 heads go, the output of 2 and a status byte come
        share = row["in_gbit_per_s"] / row["out_gbit_per_s"]
        assert share == pytest.approx((2 * 16 * 4 + 1) / (4 * 16 * 4))
    assert rows[3]["attend_usec"]["p50"] > rows[1]["attend_usec"]["p50"]


def test_a_peer_without_kv(peer, capfd) -> None:
    assert bench("--workers", peer.place, *TINY, "--batch", "2") == 0
    out = capfd.readouterr().out
    assert "not measured with the kernel" in out and "without the kernel" in out
    assert bench("--workers", peer.place, *TINY, "--kernel", "with") == 2
    assert "holds no KV-cache" in capfd.readouterr().err


def test_no_room_is_one_line(start_workers, capfd) -> None:
    (worker,) = start_workers(1, memory="16MiB")
    big = ("--heads", "8", "--head-dim", "128", "--batch", "64", "--kernel", "with")
    assert bench("--workers", worker.address, *big, "--length", "2000") == 2
    assert len(capfd.readouterr().err.strip().splitlines()) == 1


def options(**given: object) -> argparse.Namespace:
    values = dict.fromkeys(("model", "hidden", "heads", "kv_heads", "head_dim"))
    return argparse.Namespace(**(values | {"kv_dtype": "fp16", "wire_dtype": "fp32"} | given))


def test_shapes(tmp_path: Path) -> None:
    assert shape_of(options(model="Llama-3.1-8B")) == LayerShape("llama-3.1-8b", 32, 8, 128)
    assert shape_of(options(hidden=576, heads=9, kv_heads=3)).head_dim == 64
    assert shape_of(options(heads=4, head_dim=32)).num_kv_heads == 4
    config = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert shape_of(options(model=str(tmp_path))) == LayerShape(tmp_path.name, 28, 4, 128)
    for name, shape in SHAPES.items():
        geometry = LayerShape(name, *shape).geometry(
            kv_dtype="fp16", wire_dtype="bf16", max_rows=8, max_model_len=64, num_layers=2
        )
        assert geometry.num_layers == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "pass --model, or --heads"),
        ({"model": "llama-3.1-8b", "heads": 4}, "so --heads cannot"),
        ({"model": "gpt-9"}, "is no file and none of"),
        ({"heads": 3, "hidden": 100}, "does not divide over 3 heads"),
        ({"heads": 2, "hidden": 100, "head_dim": 64}, "make 128, not 100"),
        ({"heads": 0, "head_dim": 64}, "heads must be a positive integer"),
        ({"heads": 2, "head_dim": 64, "kv_dtype": "fp7"}, "fp7"),
    ],
)
def test_shapes_that_cannot_be(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        shape_of(options(**given))


def test_configs_that_leave_heads_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="does not say num_attention_heads and num_key_value"):
        shape_of(options(model=str(tmp_path / "config.json")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch must be at least 1"),
        (["--kernel", "maybe"], "--kernel 'maybe' is unknown"),
        (["--iters", "0"], "--iters must be 1"),
        (["--s-time", "-1"], "--s-time must be above 0"),
    ],
)
def test_options_that_cannot_be(capfd, arguments, words) -> None:
    assert bench("--workers", "127.0.0.1:1", *TINY, *arguments) == 2
    assert words in capfd.readouterr().err


def test_figures_of_a_row() -> None:
    def column(*values: int) -> np.ndarray:
        return np.array(values, np.uint64)

    found = Exchanges(
        scatter=column(10_000), total=column(100_000), arrived=np.array([[60_000, 90_000]]),
        kernel=np.array([[20_000, 50_000]], np.uint64), pump_ns=1500.0, bytes_out=1000,
        bytes_in=500,
    )  # fmt: skip
    row = Row.of([2, 1], found, with_kernel=True, s_part_us=80.0)
    assert {name: values[0] for name, values in row.parts.items()} == {
        "scatter": 10, "attend": 50, "gather": 40, "total": 100, "skew": 30, "incast": 30,
    }  # fmt: skip
    assert (row.bubble_us, row.pump_us, row.batch) == (20, 1.5, 3)
    assert (row.out_gbit_per_s, row.in_gbit_per_s) == (0.08, 0.04)


def test_rows_in_the_dtype_of_the_wire() -> None:
    values = np.array([[1.0, -2.5]], np.float32)
    assert as_wire(values, "bf16").tolist() == [[0x3F80, 0xC020]]
    assert as_wire(values, "fp16").dtype == np.float16


def test_benchmarks_over_a_network_load_no_torch() -> None:
    code = (
        "import sys; from fastdecode_rdma.bench import interconnect, layer, serve\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
