"""Cuts a file of lines into ranges that others read: where each begins, and what is to be done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from fastdecode_rdma.batch.files import read_lines
from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.records import LineFormat


def plan_ranges(
    path: str,
    lines: LineFormat,
    done: DoneLines,
    seen: SeenIds,
    *,
    num_lines: int,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields ranges of up to `num_lines` lines that are not done: `path`, `offset` and `number` of
    the first one, and `lines`, [its number, the line that had its id first] for each.

    Raises:
        OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        current: dict[str, Any] | None = None
        for place, line in enumerate(read_lines(fd)):
            if limit is not None and place >= limit:
                break
            record = lines.parse(line)
            first = line.number
            if record.has_own_id and record.id is not None:
                first = seen.first(record.id, line.number)
            if line.number in done:
                continue
            if current is None:
                current = {"path": path, "offset": line.offset, "number": line.number, "lines": []}
            current["lines"].append([line.number, first])
            if len(current["lines"]) == num_lines:
                yield current
                current = None
        if current is not None:
            yield current
    finally:
        os.close(fd)
