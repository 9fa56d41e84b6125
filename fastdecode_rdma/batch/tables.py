"""Requests in Parquet and CSV files: every row becomes a line, its columns the keys."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from fastdecode_rdma.batch.files import LineSource, RawLine
from fastdecode_rdma.errors import ConfigError

SUFFIXES = (".parquet", ".csv", ".tsv")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
ROWS_AT_ONCE = 256
_TEXT_COLUMNS = ("id", "custom_id", "prompt", "context", "continuation", "text", "url", "method")
_JSON_COLUMNS = (
    "sampling_params",
    "messages",
    "tools",
    "documents",
    "chat_template_kwargs",
    "body",
)
"""Columns of a CSV file whose cells hold JSON."""


def open_source(path: str) -> LineSource | TableSource:
    """Opens an input by its name: a table, else lines.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.lower().endswith(COMPRESSED):
        raise ConfigError(
            f"{path} is compressed: unpack it first, or pipe it (`zcat FILE | fastdecode … -i -`)"
        )
    return TableSource(path) if is_table(path) else LineSource(path)


def is_table(path: str) -> bool:
    """Whether a name is that of a Parquet or CSV file."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


class TableSource:
    """The rows of a table as lines of JSON; the first row has number 1. Nulls are absent."""

    def __init__(self, path: str) -> None:
        """Opens the file.

        Raises:
            ConfigError: it cannot be read, or pyarrow is not installed.
        """
        self.name = self.path = path
        try:
            self.status = os.stat(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        self.ended = False
        self.on_news: Callable[[], object] | None = None  # there never is any
        self._lines = self.lines()
        self._waiting: RawLine | None = next(self._lines, None)  # what is wrong is said at once

    def next_line(self) -> RawLine | None:
        """Returns the next row, None at the end.

        Raises:
            ConfigError: the file is damaged.
        """
        line = self._waiting
        self.ended = line is None
        self._waiting = None if line is None else next(self._lines, None)
        return line

    def lines(self) -> Iterator[RawLine]:
        """Yields all rows, from the first.

        Raises:
            ConfigError: the file is none that can be read.
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs pyarrow: `pip install fastdecode_rdma[batch]`"
            ) from error
        is_csv = not self.path.lower().endswith(".parquet")
        number = 0
        try:
            for batch in _csv_batches(self.path) if is_csv else _parquet_batches(self.path):
                self._check_names(batch.schema.names)
                for row in batch.to_pylist():
                    number += 1
                    yield RawLine(number, _line(row, is_csv=is_csv))
        except (pa.ArrowException, OSError) as error:
            words = " ".join(str(error).split())
            raise ConfigError(f"cannot read {self.name}: {words}") from error

    def _check_names(self, names: list[str]) -> None:
        if len(set(names)) == len(names):
            return
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{self.name} has two columns named {twice!r}: rename one of them")

    def close(self) -> None:
        """Lets go of the file."""
        self._lines.close()


def _parquet_batches(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE)


def _csv_batches(path: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv

    names = (*_TEXT_COLUMNS, *_JSON_COLUMNS)
    with csv.open_csv(
        path,
        parse_options=csv.ParseOptions(
            delimiter="\t" if path.lower().endswith(".tsv") else ",", newlines_in_values=True
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    ) as reader:
        yield from reader


def _line(row: dict[str, Any], *, is_csv: bool) -> bytes:
    """A row as JSON. A cell that should hold JSON and does not stays text: the line's error."""
    values = _plain(row)
    for name in _JSON_COLUMNS if is_csv else ():
        text = values.get(name)
        if not text:
            values.pop(name, None)
            continue
        try:
            values[name] = json.loads(text)
        except ValueError:
            continue
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """What JSON can hold: nulls of structs are left out, NaN is null, dates are text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return value
