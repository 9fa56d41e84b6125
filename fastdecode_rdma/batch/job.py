"""A job that can be resumed: what it is, in a file beside its output, and which lines are done.

`OUT.job` says which input, model and parameters began the output `OUT`. The records in `OUT` are
the only account of what is done: a line is done when its record is there, whole. So nothing has to
be kept in step, and an end at any moment, kill -9 included, loses at most the line being written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from errno import ENOSPC
from pathlib import Path
from typing import Any, BinaryIO

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.json_lines import load_line
from fastdecode_rdma.errors import ConfigError

VERSION = 1
_SAMPLE_BYTES = 1 << 12
"""Of a tensor's beginning, middle and end: training may change one of them alone, but all of it."""

_MAX_HEADER_BYTES = 100_000_000
"""As the library that loads them has it."""

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class InputFacts:
    """What one pass over an input file shows. first: its first line that can be read, which tells
    the kind of all; if none can, the first that is not blank."""

    digest: str
    num_lines: int
    last_number: int
    first: RawLine | None


def scan_input(lines: Iterable[RawLine]) -> InputFacts:
    """Reads an input once. Line ends and blank lines do not count, but for the numbers."""
    hasher = hashlib.blake2b(digest_size=16)
    first, is_read, num_lines, number = None, False, 0, 0
    for line in lines:
        number, num_lines = line.number, num_lines + 1
        if not is_read:
            is_read = _can_be_read(line)
            first = line if is_read or first is None else first
        data = b"" if line.data is None else line.data
        hasher.update(b"%d %d\n" % (number, len(data)))
        hasher.update(data)
    return InputFacts(hasher.hexdigest(), num_lines, number, first)


def _can_be_read(line: RawLine) -> bool:
    try:
        load_line(line)
    except ConfigError:
        return False
    return True


def model_digest(directory: Path) -> str:
    """Returns what tells a model from another, wherever its directory is: its small files, and the
    sizes and headers of its weights, and pieces of every tensor.

    Raises:
        OSError: a file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    small = {path for pattern in _SMALL_FILES for path in directory.glob(pattern)}
    for path in sorted(path for path in small if path.is_file()):
        hasher.update(f"{path.name} {path.stat().st_size}\n".encode())
        hasher.update(path.read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        nbytes = path.stat().st_size
        hasher.update(f"{path.name} {nbytes}\n".encode())
        with path.open("rb") as file:
            for place in _pieces(file, nbytes):
                file.seek(place)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def _pieces(file: BinaryIO, nbytes: int) -> list[int]:
    """Where a safetensors file is looked at. One whose header makes no sense is refused when it is
    loaded: of that the ends will do."""
    places = [0, max(0, nbytes - _SAMPLE_BYTES)]
    try:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8)) if start <= _MAX_HEADER_BYTES else {}
        for name, tensor in header.items():
            if name != "__metadata__":
                low, high = tensor["data_offsets"]
                last = max(low, high - _SAMPLE_BYTES)
                places += [start + low, start + (low + last) // 2, start + last]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return [place for place in places if isinstance(place, int) and 0 <= place < nbytes]


@dataclass
class Job:
    """One run over an input.

    facts: what makes it this job and no other. seed: of lines that give none. created: Unix time
    of its first start. path: of its state beside the output, None where it cannot be resumed.
    """

    facts: Mapping[str, Any]
    seed: int
    created: int
    path: Path | None = None

    @property
    def digest(self) -> str:
        """A name made of the facts and the seed."""
        text = json.dumps([self.facts, self.seed], sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def save(self) -> None:
        """Writes the state, all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        if self.path is None:
            return
        values = {"version": VERSION, "created": self.created, "seed": self.seed, **self.facts}
        text = json.dumps(values, indent=1, sort_keys=True) + "\n"
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def state_path(output: str) -> Path:
    """Returns where the state of a job with that output is."""
    return Path(f"{output}.job")


def start_job(facts: Mapping[str, Any], seed: int | None, path: Path | None) -> Job:
    """Returns a new job; without a seed one is drawn."""
    drawn = int.from_bytes(os.urandom(6), "little") if seed is None else seed
    return Job(facts, drawn, int(time.time()), path)


def load_job(facts: Mapping[str, Any], seed: int | None, path: Path, output: str) -> Job:
    """Returns the job that began `output`.

    Raises:
        ConfigError: there is none, or it was another one; says what differs.
    """
    try:
        values = json.loads(path.read_text())
        created, before, version = values["created"], values["seed"], values["version"]
    except FileNotFoundError:
        raise ConfigError(
            f"cannot resume {output}: {path} is not there, which says what job began it; "
            "--overwrite starts anew"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot resume {output}: {path} cannot be read: {error}") from error
    if version != VERSION:
        raise ConfigError(f"cannot resume {output}: {path} is of another version of fastdecode")
    differences = [
        f"{name} is {_brief(facts.get(name))} and was {_brief(values.get(name))}"
        for name in sorted({*facts, *values} - {"version", "created", "seed"})
        if json.loads(json.dumps(facts.get(name))) != values.get(name)
    ]
    if seed is not None and seed != before:
        differences.append(f"seed is {seed} and was {before}")
    if differences:
        raise ConfigError(
            f"cannot resume {output}: another job began it: {'; '.join(differences)}; "
            "--overwrite starts anew"
        )
    return Job(facts, before, created, path)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass
class DoneLines:
    """The lines whose records are in the output: one bit for each line of the input."""

    bits: bytearray = field(default_factory=bytearray)
    count: int = 0
    failed: int = 0

    def add(self, number: int) -> bool:
        """Takes a line; False if it was there already."""
        if number in self:
            return False
        place = number >> 3
        if place >= len(self.bits):
            self.bits.extend(bytes(place + 1 - len(self.bits)))
        self.bits[place] |= 1 << (number & 7)
        self.count += 1
        return True

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self.bits) and bool(self.bits[place] >> (number & 7) & 1)


class SeenIds:
    """Which ids came on which line first. They are kept in a temporary file: memory does not grow
    with the input."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None)  # "": on disk, gone when closed
        self._table.execute("PRAGMA cache_size = -16384")  # KiB
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._table.execute("BEGIN")

    def first(self, id_: str | int, number: int) -> int:
        """Returns the line that had an id first; `number` if it is new.

        Raises:
            OSError: there is no room for the temporary file.
        """
        text = json.dumps(id_).encode()  # tells 1 from "1"
        key = text if len(text) <= 24 else hashlib.blake2b(text, digest_size=16).digest()
        try:
            done = self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, number))
            if done.rowcount:
                return number
            return self._table.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()[0]
        except sqlite3.OperationalError as error:
            raise OSError(
                ENOSPC, f"no room to remember ids in a temporary file: {error}"
            ) from error

    def close(self) -> None:
        """Removes the file."""
        self._table.close()
