"""`fastdecode bench attention`: what it measures, prints and refuses; no speeds are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.bench import attention
from fastdecode_rdma.bench.attention import Decode
from fastdecode_rdma.bench.attention_report import Case, Row
from fastdecode_rdma.worker.attention import select_isa
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WORKING_SET", 1 << 20)
    monkeypatch.setattr(attention, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(attention, "FMA_PIECES", 4)


def case(**changes: object) -> Case:
    values = {
        "dtype": "fp16", "batch": 3, "length": 200, "group": 4, "kv_heads": 2, "head_dim": 64,
        "threads": 1, "isa": select_isa(),
    }  # fmt: skip
    return Case(**(values | changes))


def test_bytes_and_arithmetic_of_a_case() -> None:
    assert case().layer_bytes == 2 * 3 * 200 * 2 * 64 * 2
    assert case().bytes_per_fma == 2 / 4
    assert case(dtype="int8", group=1).bytes_per_fma == 68 / 64


def test_the_roof_is_the_lower_of_memory_and_arithmetic() -> None:
    fast = Row(case(), 1e-3, 1e9, 1e12, 8e8, None)
    slow = Row(case(), 1e-3, 1e9, 1e9, 8e8, None)
    assert fast.roofline == 1e9
    assert slow.roofline == 1e9 * 0.5
    assert fast.bytes_per_s == case().layer_bytes * 1e3


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_layer_holds_all_tokens_at_random_places(dtype: str) -> None:
    decode = Decode(case(dtype=dtype), rng=np.random.default_rng(1))
    assert decode.num_layers > 1
    assert decode.seconds() > 0  # an attend over fewer tokens than cached would be refused
    assert np.isfinite(decode._out).all() and not decode._status.any()
    decode.close()


def test_the_command_prints_a_row_per_case_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    code = cli.main(
        "bench attention --dtype fp32,int8 --batch 2 --length 65 --group 1,3 --kv-heads 1 "
        f"--head-dim 32 --threads 1 --repeats 1 --torch --json {out}".split()
    )
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["fp32", "int8", "fp32", "int8"]
    assert "of 64 tokens" in lines[-1] and "load average" in lines[-1]
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"]["group"] for row in rows] == [1, 1, 3, 3]
    assert all(row["seconds"] > 0 and row["roofline"] > 0 for row in rows)
    assert all(row["both_bytes_per_s"] > 0 for row in rows)
    assert [row["torch_seconds"] is not None for row in rows] == [True, False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype fp8", "'fp8' is unknown; expected fp32"),
        ("--isa avx9", "'avx9' is unknown"),
        ("--batch two", "--batch takes integers"),
        ("--length 0", "--length must be at least 1"),
        ("--repeats 0", "--repeats must be at least 1"),
    ],
)
def test_bad_options_are_one_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "attention", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory"]) == 2
    assert "attention" in capsys.readouterr().err
