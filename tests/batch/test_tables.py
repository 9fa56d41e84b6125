"""Requests in Parquet and CSV files."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastdecode_rdma.batch.tables import TableSource
from fastdecode_rdma.cli import main
from fastdecode_rdma.errors import ConfigError


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    """A tiny model."""
    return tiny_models("llama")


def rows_of(path: Path) -> list[dict[str, Any]]:
    source = TableSource(str(path))
    found = []
    while (line := source.next_line()) is not None:
        assert line.number == len(found) + 1
        found.append(json.loads(line.data))
    assert source.ended
    source.close()
    return found


def test_rows_of_parquet_are_lines_without_nulls(tmp_path):
    rows = [
        {"id": 7, "prompt": "é", "sampling_params": {"max_tokens": 2, "top_k": None}},
        {"id": 8, "prompt": None, "messages": [{"role": "user", "content": "x", "name": None}]},
        {"id": 9, "day": datetime.date(2024, 5, 1), "weight": math.nan, "raw": b"ab"},
    ] * 200
    pq.write_table(pa.Table.from_pylist(rows, _schema()), tmp_path / "in.parquet")
    found = rows_of(tmp_path / "in.parquet")
    assert len(found) == 600
    assert found[:3] == [
        {"id": 7, "prompt": "é", "sampling_params": {"max_tokens": 2}},
        {"id": 8, "messages": [{"role": "user", "content": "x"}]},
        {"id": 9, "day": "2024-05-01", "weight": None, "raw": "ab"},
    ]


def _schema() -> pa.Schema:
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    params = pa.struct([("max_tokens", pa.int64()), ("top_k", pa.int64())])
    return pa.schema(
        [
            ("id", pa.int64()), ("prompt", pa.string()), ("sampling_params", params),
            ("messages", pa.list_(message)), ("day", pa.date32()), ("weight", pa.float64()),
            ("raw", pa.binary()),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(("name", "comma"), [("in.csv", ","), ("in.TSV", "\t")])
def test_cells_of_csv_are_text_or_json(tmp_path, name, comma):
    lines = [["id", "prompt", "sampling_params", "label"]]
    lines += [["007", '"two\nlines, ""quoted"""', '"{""max_tokens"": 2}"', "1"]]
    lines += [["b", "", "", "2"], ["c", "3", "{", "3"]]
    (tmp_path / name).write_text("".join(comma.join(line) + "\n" for line in lines))
    assert rows_of(tmp_path / name) == [
        {
            "id": "007",
            "prompt": 'two\nlines, "quoted"',
            "sampling_params": {"max_tokens": 2},
            "label": 1,
        },
        {"id": "b", "prompt": "", "label": 2},
        {"id": "c", "prompt": "3", "sampling_params": "{", "label": 3},
    ]


def test_a_table_is_answered_and_resumed(model, tmp_path, capfd):
    rows = [{"id": f"r{i}", "prompt": f"p{i}", "label": i} for i in range(5)]
    rows[3]["prompt"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    options = ["generate", "--model", str(model), "-i", str(tmp_path / "in.parquet")]
    options += ["--max-tokens", "2", "--seed", "1", "-o", str(tmp_path / "out")]
    assert main(options) == 3
    before = sorted((tmp_path / "out").read_bytes().splitlines())
    found = {line["id"]: line for line in map(json.loads, before)}
    assert found["r2"]["label"] == 2 and found["r2"]["line"] == 3 and "error" in found["r3"]
    (tmp_path / "out").write_bytes((tmp_path / "out").read_bytes()[:-7])
    assert main([*options, "--resume"]) == 3
    assert sorted((tmp_path / "out").read_bytes().splitlines()) == before
    capfd.readouterr()
    assert main([*options[:-1], str(tmp_path / "out.csv")]) == 2
    assert "results are lines of JSON" in capfd.readouterr().err


def test_what_is_no_table_is_one_line(tmp_path):
    (tmp_path / "in.parquet").write_text("no parquet")
    (tmp_path / "in.csv").write_text('a,b\n1,2\n"3\n')
    for name in ("in.parquet", "in.csv", "nowhere.csv"):
        with pytest.raises(ConfigError, match="cannot read") as caught:
            rows_of(tmp_path / name)
        assert "\n" not in str(caught.value)
