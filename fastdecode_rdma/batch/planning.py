"""Cuts a file of lines into ranges that others read: where each begins, whose ids came before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastdecode_rdma.batch.files import RawLine, read_lines
from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.records import LineFormat
from fastdecode_rdma.errors import ConfigError


@dataclass(slots=True)
class LineRange:
    """Consecutive lines of a file that are not blank.

    offset: of the first one in the file, in bytes; number: its number. num_lines, nbytes: how many
    there are, and how long they are together. repeats: line -> the line before it that has its id.
    """

    offset: int
    number: int
    num_lines: int = 0
    nbytes: int = 0
    repeats: dict[int, int] = field(default_factory=dict)


def plan_ranges(
    path: str,
    lines: LineFormat,
    done: DoneLines,
    seen: SeenIds,
    *,
    num_lines: int,
    limit: int | None = None,
) -> Iterator[LineRange]:
    """Yields ranges of up to `num_lines` lines in which something is not done.

    Raises:
        OSError: the file cannot be read.
    """
    current: LineRange | None = None
    has_work = False
    for line in _lines(path, limit):
        if current is None:
            current, has_work = LineRange(line.offset, line.number), False
        record = lines.parse(line)
        if record.has_own_id and record.id is not None:
            first = seen.first(record.id, line.number)
            if first != line.number:
                current.repeats[line.number] = first
        current.num_lines += 1
        current.nbytes += len(line.data or b"")
        has_work = has_work or line.number not in done
        if current.num_lines == num_lines:
            if has_work:
                yield current
            current = None
    if current is not None and has_work:
        yield current


def open_numbers(path: str, done: DoneLines, limit: int | None) -> Iterator[int]:
    """Yields the numbers of the lines that are not done, in order.

    Raises:
        OSError: the file cannot be read.
    """
    for line in _lines(path, limit):
        if line.number not in done:
            yield line.number


def read_range(path: str, part: LineRange) -> list[RawLine]:
    """Returns the lines of a range.

    Raises:
        ConfigError: the file has fewer now. OSError: it cannot be read.
    """
    found: list[RawLine] = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(fd, part.offset, os.SEEK_SET)
        for line in read_lines(fd, first_number=part.number):
            found.append(line)
            if len(found) == part.num_lines:
                return found
    finally:
        os.close(fd)
    raise ConfigError(f"{path} has changed since the job began")


def _lines(path: str, limit: int | None) -> Iterator[RawLine]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for place, line in enumerate(read_lines(fd)):
            if limit is not None and place >= limit:
                return
            yield line
    finally:
        os.close(fd)
