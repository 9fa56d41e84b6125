"""`fastdecode bench gemm`: what it measures, prints and refuses; no speeds are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import _dense, cli
from fastdecode_rdma.bench import attention, gemm
from fastdecode_rdma.bench.gemm import SHAPES, WEIGHT_TYPES, Case, PackedWeights, Row, shape_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "WORKING_SET", 1 << 20)
    monkeypatch.setattr(gemm, "SPIN_S", 0.0)
    monkeypatch.setattr(attention, "READ_BYTES", 4 << 20)


def case(**changes: object) -> Case:
    values = {
        "shape": "40x100", "num_out": 40, "num_in": 100, "rows": 3, "weights": "fp32",
        "threads": 1, "isa": _dense.ISA_NAMES[0],
    }  # fmt: skip
    return Case(**(values | changes))


def test_bytes_and_arithmetic_of_a_case() -> None:
    assert case().weight_bytes == 48 * 100 * 4
    assert case(weights="bf16").weight_bytes == 48 * 100 * 2
    assert case(weights="int8", num_in=300).weight_bytes == 48 * (300 + 2 * 4)
    row = Row(case(), 1e-3, 1e9, {})
    assert row.bytes_per_s == 48 * 100 * 4 * 1e3
    assert row.fmas_per_s == 3 * 40 * 100 * 1e3


def test_shapes_have_names_or_are_given() -> None:
    assert shape_of("3x7") == (3, 7)
    assert shape_of("8b-down") == SHAPES["8b-down"] == (4096, 14336)


@pytest.mark.parametrize("weights", WEIGHT_TYPES)
def test_every_copy_is_the_weight_and_takes_its_turn(weights: str) -> None:
    each = case(weights=weights)
    rng = np.random.default_rng(1)
    weight, x = rng.standard_normal((40, 100), np.float32), np.ones((3, 100), np.float32)
    packed = PackedWeights(each, weight)
    assert len(packed._copies) == -(-(1 << 20) // each.weight_bytes) > 1
    assert all((copy == packed._copies[0]).all() for copy in packed._copies)
    out = np.empty((3, 40), np.float32)
    assert packed.seconds(each, x, out) > 0
    # a weight is off by a bf16 truncation (2^-7 of it) or half an int8 step: below 0.03 of any here
    assert np.abs(out - weight.sum(1)).max() < 0.03 * 100


def test_the_command_prints_a_row_per_case_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    code = cli.main(
        "bench gemm --shape 40x100,32x64 --weights fp32,bf16,int8 --rows 1,3 --threads 1 "
        f"--repeats 1 --libraries --json {out}".split()
    )
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:13]] == ["fp32"] * 2 + ["bf16"] * 2 + [
        "int8"
    ] * 2 + ["fp32"] * 2 + ["bf16"] * 2 + ["int8"] * 2
    assert lines[-1].startswith("load average")
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"]["rows"] for row in rows] == [1, 3] * 6
    assert all(row["seconds"] > 0 and row["bytes_per_s"] > 0 for row in rows)
    assert all(
        ("torch_bf16" in row["libraries"]) == (row["case"]["weights"] == "bf16") for row in rows
    )
    assert all(row["libraries"]["torch"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--weights fp8", "'fp8' is unknown; expected fp32"),
        ("--isa avx9", "'avx9' is unknown"),
        ("--rows two", "--rows takes integers"),
        ("--threads 0", "--threads must be at least 1"),
        ("--shape 8b", "--shape takes NxK or one of smollm2-qkv"),
        ("--shape 0x8", "--shape takes NxK"),
        ("--shape 8x8x8", "--shape takes NxK"),
        ("--repeats 0", "--repeats must be at least 1"),
    ],
)
def test_bad_options_are_one_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "gemm", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
