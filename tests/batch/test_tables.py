"""Requests in Parquet and CSV files."""

from __future__ import annotations

import datetime
import errno
import gzip
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fastdecode_rdma.batch import command
from fastdecode_rdma.batch.table_output import write_table
from fastdecode_rdma.batch.tables import TableSource, open_source
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


def test_a_table_is_answered_and_resumed(model, tmp_path):
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


def test_what_is_no_table_is_one_line(tmp_path):
    (tmp_path / "in.parquet").write_text("no parquet")
    (tmp_path / "in.csv").write_text('a,b\n1,2\n"3\n')
    for name in ("in.parquet", "in.csv", "nowhere.csv"):
        with pytest.raises(ConfigError, match="cannot read") as caught:
            rows_of(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.TSV"])
def test_a_table_is_made_at_the_end_and_goes_on(model, tmp_path, capfd, monkeypatch, name):
    """Typed columns, an error's row among the others; what a longer limit adds is in the next."""
    lines: list[Any] = [{"id": i, "prompt": f"p{i}", "tag": [i]} for i in range(6)]
    lines[2] = "{"
    source, out = tmp_path / "in", tmp_path / name
    source.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    options = ["generate", "--model", str(model), "-i", str(source), "--max-tokens", "2"]
    options += ["-o", str(out), "--ordered", "--seed", "1"]
    assert main([*options, "--limit", "4"]) == 3
    assert main(options) == 2 and "is there already" in capfd.readouterr().err
    for _ in range(2):  # the second finds all lines done, and makes the table again
        out.unlink()
        assert main([*options, "--resume"]) == 3
        assert f"{out} has 6 rows, made of {out}.jsonl" in capfd.readouterr().err
    records = [json.loads(line) for line in Path(f"{out}.jsonl").read_bytes().splitlines()]
    rows = read_table(out)
    assert list(rows[0])[:3] == ["id", "line", "text"]
    for row, record in zip(rows, records, strict=True):
        for key, value in row.items():
            expected = record.get(key)
            if name != "out.parquet" and isinstance(expected, (dict, list)):
                expected = json.dumps(expected, ensure_ascii=False)
            assert value == expected, key
    assert rows[2]["error"] and rows[1]["error"] is None and rows[1]["tag"] in ([1], "[1]")
    assert not list(tmp_path.glob(".out*"))
    Path(f"{out}.jsonl").unlink()
    assert main([*options, "--resume"]) == 2 and "is not there" in capfd.readouterr().err
    monkeypatch.setattr(command, "write_table", refuse)
    assert main([*options, "--overwrite"]) == 1
    said = capfd.readouterr().err
    assert "error: No space left on device" in said and "--resume" in said and not out.exists()


def refuse(lines: str, path: str) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    options = pyarrow.csv.ParseOptions(
        delimiter="\t" if path.suffix == ".TSV" else ",", newlines_in_values=True
    )
    nulls = pyarrow.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    return pyarrow.csv.read_csv(path, parse_options=options, convert_options=nulls).to_pylist()


def test_columns_have_the_type_that_holds_all_their_values(tmp_path):
    """What comes late and does not fit turns the column into text, also where it was written."""
    rows: list[dict[str, Any]] = [
        {"n": 1, "x": 1, "kind": {"a": 1}, "mixed": "s", "big": 1, "empty": {}, "late": [1]}
    ] * 1500
    rows += [{"n": 2, "x": 1.5, "kind": {"b": "é"}, "mixed": 3, "big": 2**70, "none": None}]
    rows += [{"late": "\ud800", "x": 2**53 + 1}]
    source = tmp_path / "lines"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_table(str(source), str(tmp_path / "t.parquet")) == 1502
    table = pq.read_table(tmp_path / "t.parquet")
    kinds = {field.name: field.type for field in table.schema}
    assert kinds["n"] == pa.int64() and pa.types.is_struct(kinds["kind"])
    assert all(kinds[n] == pa.string() for n in ("mixed", "big", "empty", "late", "none", "x"))
    found = table.to_pylist()
    assert found[0] == {
        "n": 1, "x": "1", "kind": {"a": 1, "b": None}, "mixed": "s", "big": "1", "empty": "{}",
        "late": "[1]", "none": None,
    }  # fmt: skip
    assert (found[1500]["x"], found[1500]["big"]) == ("1.5", str(2**70))
    assert (found[1500]["mixed"], found[1501]["late"]) == ("3", "?")
    (tmp_path / "nothing").write_text("")
    assert write_table(str(tmp_path / "nothing"), str(tmp_path / "n.csv")) == 0


def test_a_table_of_a_pipe_leaves_no_lines(model, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.write(write, b'{"prompt": "a"}\n')
    os.close(write)
    out = tmp_path / "out.csv"
    options = ["-i", f"/dev/fd/{read}", "-o", str(out), "--max-tokens", "1"]
    assert main(["generate", "--model", str(model), *options]) == 0
    os.close(read)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert len(read_table(out)) == 1


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(ConfigError, match="two columns named 'prompt': rename one"):
        open_source(str(path))


def test_a_compressed_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    with pytest.raises(ConfigError, match="is compressed: unpack it first"):
        open_source(str(path))
