"""The lines of an input that are to be worked on, as records."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode_rdma.batch.files import LineSource, RawLine
from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.records import LineFormat, PromptLines, Record
from fastdecode_rdma.batch.tables import TableSource
from fastdecode_rdma.errors import ConfigError

FormatFor = Callable[[RawLine], LineFormat]
"""Chooses the kind of lines by the first one that can be read."""


class Intake:
    """Reads records one by one: those of lines that are done already are left out, an id that came
    before is an error of its line.

    limit: lines of the input that count; None for all. first: the line that tells the kind of all,
    where the input was read before; else it is the first that comes.
    """

    def __init__(
        self,
        source: LineSource | TableSource | PromptLines,
        format_for: FormatFor,
        done: DoneLines,
        *,
        limit: int | None = None,
        first: RawLine | None = None,
    ) -> None:
        self._first = first
        self._source = source
        self._format_for = format_for
        self._format: LineFormat | None = None
        self._done = done
        self._seen = SeenIds()
        self._left = limit

    @property
    def format(self) -> LineFormat:
        """The kind of the lines; there must have been one."""
        assert self._format is not None
        return self._format

    @property
    def ended(self) -> bool:
        """Whether no record will come any more."""
        return self._source.ended or self._left == 0

    def next_record(self) -> Record | None:
        """Returns the next record; None at the end, or when a pipe has none just now.

        Raises:
            OSError: reading failed.
        """
        while not self.ended:
            line = self._source.next_line()
            if line is None:
                return None
            if self._left is not None:
                self._left -= 1
            record = self._record(line)
            if line.number not in self._done:
                return record
        return None

    def _record(self, line: RawLine) -> Record:
        if self._format is None:
            self._format = self._format_for(self._first or line)
        record = self._format.parse(line)
        if record.has_own_id:
            assert record.id is not None
            first = self._seen.first(record.id, record.number)
            if first != record.number and record.error is None:
                record.error = repeated_id(record, first)
        return record

    def close(self) -> None:
        """Drops the temporary file of ids."""
        self._seen.close()


def repeated_id(record: Record, first: int) -> ConfigError:
    """Returns the error of a record whose id was on line `first` already."""
    return ConfigError(f"id {record.id!r} was on line {first} already")
