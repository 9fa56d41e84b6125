"""Records on their way to the output: at once, or in the order of the input."""

from __future__ import annotations

from collections import deque
from typing import Any

from fastdecode_rdma.batch.files import LineWriter, RawLine
from fastdecode_rdma.batch.job import DoneLines
from fastdecode_rdma.batch.json_lines import load_line
from fastdecode_rdma.errors import ConfigError

MAX_HELD_BYTES = 32 << 20
"""Records that wait for earlier lines; beyond it no further line is taken up."""

ID_PREFIX = "batch_req_"
"""How ids of OpenAI's lines begin; the number of the line ends them (see `openai_lines`)."""

_NUMBER_DIGITS = 12


class Output:
    """Writes the records of lines that were `expected`, in any order or in theirs."""

    def __init__(self, writer: LineWriter, *, ordered: bool) -> None:
        self._writer = writer
        self._ordered = ordered
        self._expected: deque[int] = deque()
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether so many records wait for earlier ones that no line should be taken up."""
        return self._held_bytes >= MAX_HELD_BYTES

    def expect(self, number: int) -> None:
        """Hears that a line was taken up."""
        if self._ordered:
            self._expected.append(number)

    def write(self, number: int, line: bytes) -> None:
        """Takes the record of a line.

        Raises:
            OSError: it could not be written.
        """
        if not self._ordered:
            self._writer.write(line)
            return
        self._held[number] = line
        self._held_bytes += len(line)
        while self._expected and self._expected[0] in self._held:
            ready = self._held.pop(self._expected.popleft())
            self._held_bytes -= len(ready)
            self._writer.write(ready)


def record_id(digest: str, number: int) -> str:
    """Returns the id of an OpenAI record: 12 hexadecimal digits of a digest, 12 of the line."""
    return f"{ID_PREFIX}{digest[:_NUMBER_DIGITS]}{number:0{_NUMBER_DIGITS}x}"


def done_lines(writer: LineWriter, last_number: int) -> DoneLines:
    """Returns the lines whose records an output holds.

    Raises:
        ConfigError: it holds something else.
    """
    done = DoneLines()
    for line in writer.written_lines():
        values = _record(writer, line)
        number = _number_of(values)
        if number is None or not 1 <= number <= last_number:
            raise ConfigError(f"cannot resume: line {line.number} of {writer.name} is no record")
        if not done.add(number):
            raise ConfigError(
                f"cannot resume: line {line.number} of {writer.name} is a second record of line "
                f"{number}"
            )
        done.failed += values.get("error") is not None
    return done


def _record(writer: LineWriter, line: RawLine) -> dict[str, Any]:
    try:
        return load_line(line)
    except ConfigError as error:
        raise ConfigError(f"cannot resume: line {line.number} of {writer.name}: {error}") from None


def _number_of(values: dict[str, Any]) -> int | None:
    number = values.get("line")
    if number is None and isinstance(values.get("id"), str):
        digits = values["id"].removeprefix(ID_PREFIX)[_NUMBER_DIGITS:]
        try:
            number = int(digits, 16)
        except ValueError:
            return None
    return number if isinstance(number, int) and not isinstance(number, bool) else None
