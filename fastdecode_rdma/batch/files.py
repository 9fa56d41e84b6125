"""Lines of a file or a pipe: read one by one, written so that none is ever half there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fastdecode_rdma.errors import ConfigError

MAX_LINE_BYTES = 32 << 20
"""A prompt of a million tokens takes about 5 MB; what is longer is no line but a wrong file."""

STANDARD = "-"
"""The name of standard input and output."""

_CHUNK_BYTES = 1 << 16
_MAX_QUEUED_LINES = 128
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its end; `data` is None where it was too long to be kept. Numbers begin at 1
    and count blank lines, as editors do. `offset` is its first byte's, from where the reading
    began."""

    number: int
    data: bytes | None
    offset: int = field(default=0, compare=False)


def read_lines(
    fd: int, max_line_bytes: int | None = None, *, first_number: int = 1
) -> Iterator[RawLine]:
    """Yields the lines that are not blank. LF and CRLF end one, a BOM at the start is left out."""
    max_line_bytes = MAX_LINE_BYTES if max_line_bytes is None else max_line_bytes
    kept, nbytes = [], 0  # pieces of the line that is not ended yet, and its length
    number, offset = first_number, 0
    while True:
        chunk = os.read(fd, _CHUNK_BYTES)
        pieces = chunk.split(b"\n")
        for place, piece in enumerate(pieces):
            nbytes += len(piece)
            if nbytes <= max_line_bytes:
                kept.append(piece)
            else:
                kept.clear()
            if place == len(pieces) - 1 and chunk:
                continue  # the line goes on
            line = b"".join(kept).removeprefix(_BOM if number == 1 else b"").strip(b" \t\r")
            if nbytes > max_line_bytes:
                yield RawLine(number, None, offset)
            elif line:
                yield RawLine(number, line, offset)
            offset += nbytes + 1
            kept, nbytes, number = [], 0, number + 1
        if not chunk:
            return


class FileSource(Protocol):
    """What an output is compared with."""

    name: str
    status: os.stat_result


class LineSource:
    """Where the lines come from: `-` or a path. A pipe is read by a thread of its own, so that
    results need not wait for whoever writes into it.

    name: how messages call it. path: of a file that can be read again, else None. ended: whether
    `next_line` has come to the end. on_news: called by the thread when a pipe has something new for
    `next_line`.
    """

    def __init__(self, path: str) -> None:
        """Opens the input.

        Raises:
            ConfigError: it cannot be read.
        """
        self.name = "standard input" if path == STANDARD else path
        try:
            self._fd = os.dup(0) if path == STANDARD else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.status = os.fstat(self._fd)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read {self.name}: {reason}") from error
        if stat.S_ISDIR(self.status.st_mode):
            os.close(self._fd)
            raise ConfigError(f"cannot read {self.name}: it is a directory")
        is_file = stat.S_ISREG(self.status.st_mode)
        self.path = path if is_file and path != STANDARD else None
        self.ended = False
        self.on_news: Callable[[], object] = _nobody
        self._lines: Iterator[RawLine] | None = None
        self._queue: queue.Queue[RawLine | OSError | None] = queue.Queue(_MAX_QUEUED_LINES)
        if is_file:
            self._lines = read_lines(self._fd)
        else:
            threading.Thread(target=self._fill, name="fastdecode input", daemon=True).start()

    def _fill(self) -> None:
        try:
            for line in read_lines(self._fd):
                self._put(line)
        except OSError as error:
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: RawLine | OSError | None) -> None:
        self._queue.put(item)
        self.on_news()  # after it: whoever sets on_news and looks then misses nothing

    def next_line(self) -> RawLine | None:
        """Returns the next line; None at the end (`ended`), or when a pipe has none just now.

        Raises:
            OSError: reading failed.
        """
        if self._lines is not None:
            line = next(self._lines, None)
            self.ended = line is None
            return line
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, OSError):
            raise item
        self.ended = item is None
        return item

    def lines(self) -> Iterator[RawLine]:
        """Yields all lines of a file that can be read again (`path`), from the first.

        Raises:
            OSError: reading failed.
        """
        assert self.path is not None
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield from read_lines(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes a file; a pipe's thread may be waiting in it, and both end with the process."""
        if self._lines is not None:
            os.close(self._fd)


def _nobody() -> None:
    """Nobody waits for news yet."""


def check_output(
    path: str, source: FileSource | None, *, overwrite: bool, resume: bool = False
) -> None:
    """Refuses an output that would destroy something, before any time is spent on it.

    Raises:
        ConfigError: it is the input, or holds something already, or its folder is not there.
    """
    try:
        status = os.fstat(1) if path == STANDARD else os.stat(path)
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise ConfigError(f"cannot write {path}: there is no folder {folder}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write {path}: no permission in {folder}") from None
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {path}: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"cannot write {path}: it is a directory")
    if path != STANDARD and not os.access(path, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission")
    if not stat.S_ISREG(status.st_mode):
        return
    if source is not None and os.path.samestat(status, source.status):
        raise ConfigError(f"input and output are the same file ({source.name}); name another")
    if path != STANDARD and status.st_size and not overwrite and not resume:
        raise ConfigError(
            f"{path} is there already and not empty; name another, --resume the job that began it, "
            "or --overwrite it"
        )


class LineWriter:
    """Writes whole lines, each at once: what was written is complete whatever happens next. A file
    is locked: two jobs do not write into one."""

    def __init__(self, path: str, *, overwrite: bool, resume: bool = False) -> None:
        """Opens the output; with `overwrite` it is emptied, with `resume` lines are added.

        Raises:
            ConfigError: it cannot be written, or holds something already.
        """
        self.name = "standard output" if path == STANDARD else path
        self.is_terminal = path == STANDARD and os.isatty(1)
        mode = os.O_RDWR if resume else os.O_WRONLY
        try:
            flags = mode | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.dup(1) if path == STANDARD else os.open(path, flags, 0o666)
            status = os.fstat(self._fd)
            self._is_file = stat.S_ISREG(status.st_mode)
            if self._is_file:
                _lock(self._fd, self.name)
        except OSError as error:
            raise ConfigError(f"cannot write {self.name}: {error.strerror}") from error
        if path == STANDARD or not self._is_file:
            return
        if overwrite:
            os.ftruncate(self._fd, 0)
        elif status.st_size and not resume:
            os.close(self._fd)
            raise ConfigError(f"{path} is there already and not empty; name another")

    def written_lines(self) -> Iterator[RawLine]:
        """Yields the lines of a file that is resumed. A last one that was never ended is cut off
        first: it was torn.
        """
        size = os.fstat(self._fd).st_size
        end = _end_of_last_line(self._fd, size)
        if end < size:
            os.ftruncate(self._fd, end)
        os.lseek(self._fd, 0, os.SEEK_SET)
        yield from read_lines(self._fd, sys.maxsize)

    def write(self, line: bytes) -> None:
        """Writes one line; on any failure, Ctrl-C included, no part of it stays in a file.

        Raises:
            OSError: it could not be written.
        """
        start = os.fstat(self._fd).st_size if self._is_file else 0
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except BaseException:
            if self._is_file:
                self._drop_part(start, len(line))
            raise

    def _drop_part(self, start: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # the first error is the one to report
            # Not where another process has added lines of its own meanwhile.
            if start < os.fstat(self._fd).st_size < start + nbytes:
                os.ftruncate(self._fd, start)

    def close(self) -> None:
        """Closes the output.

        Raises:
            OSError: the file system reports only now that something was not written.
        """
        os.close(self._fd)


def _lock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(f"another process is writing {name}; wait for it or end it") from None
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # file systems without locks
            raise


def _end_of_last_line(fd: int, nbytes: int) -> int:
    """Returns the place after the last line end within the first `nbytes` of a file."""
    while nbytes:
        start = max(0, nbytes - _CHUNK_BYTES)
        place = os.pread(fd, nbytes - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        nbytes = start
    return 0
