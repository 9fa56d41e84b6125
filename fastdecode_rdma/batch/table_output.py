"""Records as a Parquet or CSV file, made of a job's lines when all are there."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from fastdecode_rdma.batch.files import read_lines
from fastdecode_rdma.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 1024
Row = dict[str, Any]


class _Unfit(Exception):
    """A column holds what its type has no room for; it becomes text."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def check_tables() -> None:
    """Looks for pyarrow before any time is spent.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            "a table as output needs pyarrow: `pip install fastdecode_rdma[batch]`"
        ) from error
    assert pyarrow is not None


def write_table(lines: str, path: str) -> int:
    """Makes the table `path` of the records in `lines`, all of it or nothing; returns its rows.

    A column is of the type that holds all its values; what is of several kinds is text, in which
    what was no text is JSON. So is everything nested in CSV and TSV files. What a record has not is
    null.

    Raises:
        OSError: it cannot be written.
    """
    nested = path.lower().endswith(".parquet")
    folder, name = os.path.split(os.path.abspath(path))
    texts: set[str] = set()
    while True:
        handle, part = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        os.close(handle)
        try:
            count = _write(lines, part, path, texts, nested=nested)
            os.chmod(part, 0o666 & ~_umask())
            os.replace(part, path)
            return count
        except _Unfit as unfit:
            texts.add(unfit.name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(lines: str, part: str, path: str, texts: set[str], *, nested: bool) -> int:
    import pyarrow as pa

    schema = _schema(lines, texts, nested=nested)
    count = 0
    with _writer(part, path, schema) as writer:
        for rows in _batches(lines):
            arrays = [
                _column(rows, each.name, None if each.name in texts else each.type)
                for each in schema
            ]
            writer.write(pa.record_batch(arrays, schema=schema))
            count += len(rows)
    return count


def _writer(part: str, path: str, schema: pa.Schema) -> Any:
    if path.lower().endswith(".parquet"):
        import pyarrow.parquet as pq

        return _ParquetBatches(pq.ParquetWriter(part, schema))
    from pyarrow import csv

    delimiter = "\t" if path.lower().endswith(".tsv") else ","
    return csv.CSVWriter(part, schema, write_options=csv.WriteOptions(delimiter=delimiter))


class _ParquetBatches:
    """pyarrow's writer with the calls of its writer of CSV."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def __enter__(self) -> _ParquetBatches:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


def _schema(lines: str, texts: set[str], *, nested: bool) -> pa.Schema:
    """The columns in the order in which they come first; `texts` are given, and added to."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {}
    for rows in _batches(lines):
        for name in dict.fromkeys(key for row in rows for key in row):
            before = types.setdefault(name, pa.null())
            if name in texts:
                continue
            try:
                found = _column(rows, name, None, infer=True).type
                found = _common(before, found)
            except _Unfit:
                found = None
            if found is None or not (_is_plain(found) or (nested and _has_members(found))):
                texts.add(name)
                continue
            types[name] = found
    fields = [
        (name, pa.string() if name in texts or pa.types.is_null(kind) else kind)
        for name, kind in types.items()
    ]
    return pa.schema(fields)


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, None if there is none."""
    import pyarrow as pa

    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None


def _is_plain(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return not pa.types.is_nested(kind)


def _has_members(kind: pa.DataType) -> bool:
    """Whether no struct in a nested type is empty: Parquet has none."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(
            _has_members(kind.field(i).type) for i in range(kind.num_fields)
        )
    return not pa.types.is_list(kind) or _has_members(kind.value_type)


def _column(
    rows: Sequence[Row], name: str, kind: pa.DataType | None, *, infer: bool = False
) -> pa.Array:
    """The values of a column: of a type, of the one that is inferred, or (None) as text."""
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    if kind is None and not infer:
        return pa.array([None if v is None else _text(v) for v in values], pa.string())
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise _Unfit(name) from error


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # UTF-8 has no lone surrogates


def _batches(lines: str) -> Iterator[list[Row]]:
    fd = os.open(lines, os.O_RDONLY | os.O_CLOEXEC)
    try:
        records = (json.loads(line.data or b"{}") for line in read_lines(fd, 1 << 62))
        while rows := list(islice(records, ROWS_AT_ONCE)):
            yield rows
    finally:
        os.close(fd)
