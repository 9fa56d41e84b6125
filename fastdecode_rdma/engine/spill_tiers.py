"""Where spilled KV lies: files of this machine, or the memory of other workers."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.placement import Placement
from fastdecode_rdma.config import StepCode
from fastdecode_rdma.errors import ConfigError, FastDecodeError, StepError

logger = logging.getLogger(__name__)

PREFIX = "fastdecode-spill-"
MAX_PENDING_BYTES = 64 << 20
"""Copied out and not yet on disk: a slower disk than this is waited for, by copying less."""


CLOSE_WAIT_S = 5.0
"""How long a disk may take to remove all copies at the end."""


class SpillError(FastDecodeError):
    """A copy could not be kept, or is not what it was; the sequence is computed again."""


class SpillGone(SpillError):
    """A copy gave way to sequences that needed the room."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. stop of a copy, in stored form. offset: of its bytes in the whole copy."""

    start: int
    stop: int
    offset: int
    nbytes: int
    crc: int

    def check(self, data: bytes) -> bytes:
        """Returns the data if it is what was copied.

        Raises:
            SpillError: it is not.
        """
        if len(data) != self.nbytes or zlib.crc32(data) != self.crc:
            raise SpillError(f"a copy of tokens {self.start} to {self.stop} came back damaged")
        return data


class SpillTier(ABC):
    """Keeps copies by sequence. Used by the engine's thread; none of it waits for a disk."""

    keeps_old_rows: bool = True
    """Whether a copy that grows still is what it was before, window groups included."""
    read_ahead: int = 8
    """Chunks of a sequence that comes back which are asked for at once."""

    @abstractmethod
    def has_room(self, handle: int, worker: int, stop: int) -> bool:
        """Whether the copy of a sequence that `worker` holds may grow to `stop` tokens just now."""

    @abstractmethod
    def put(self, handle: int, chunk: Chunk, data: bytes) -> None:
        """Takes the next chunk of a sequence that there is room for.

        Raises:
            SpillError, WorkerLostError
        """

    @abstractmethod
    def get(self, handle: int, chunk: Chunk) -> Future[bytes]:
        """Returns a chunk, checked, when it is there; or SpillError, WorkerLostError."""

    @abstractmethod
    def drop(self, handle: int) -> None:
        """Forgets a sequence; unknown ones are fine."""

    def flush(self) -> None:  # noqa: B027  (files need none)
        """Frees what was dropped, before a step that needs the room.

        Raises:
            WorkerLostError
        """

    def lose_worker(self, worker: int) -> None:  # noqa: B027  (files outlive workers)
        """Forgets the copies that a lost worker had."""

    @abstractmethod
    def take_failed(self) -> dict[int, SpillError | None]:
        """Returns the sequences whose copies are gone since the last call, and what went wrong;
        None if they gave way to others."""

    @abstractmethod
    def close(self) -> None:
        """Removes everything. Idempotent, bounded."""


class FileTier(SpillTier):
    """A file per sequence, in a directory of its own that only this user can read. One thread reads
    and writes; a chunk counts once it is written whole."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            ConfigError: nothing can be written there.
        """
        try:
            _remove_stale(directory)
            self._home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))  # mode 0700
            self._lock = _lock(self._home)
        except OSError as error:
            raise ConfigError(f"spill_dir {directory}: {error.strerror or error}") from error
        self._pid = os.getpid()
        self._io = ThreadPoolExecutor(1, thread_name_prefix="fastdecode-spill")
        self._guard = threading.Lock()
        self._pending_bytes = 0
        self._failed: dict[int, SpillError | None] = {}
        self._closed = False

    def _path(self, handle: int) -> Path:
        return self._home / f"{handle}.kv"

    def has_room(self, handle: int, worker: int, stop: int) -> bool:
        del handle, worker, stop  # a full disk is a fault, found by writing
        return self._pending_bytes < MAX_PENDING_BYTES

    def put(self, handle: int, chunk: Chunk, data: bytes) -> None:
        with self._guard:
            self._pending_bytes += len(data)
        self._io.submit(self._write, handle, chunk.offset, data)

    def _write(self, handle: int, offset: int, data: bytes) -> None:
        if self._closed:
            return
        try:
            fd = os.open(self._path(handle), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                view, at = memoryview(data), offset
                while view:
                    done = os.pwrite(fd, view, at)
                    view, at = view[done:], at + done
            finally:
                os.close(fd)
        except OSError as error:
            with self._guard:
                self._failed[handle] = SpillError(f"{self._home}: {error.strerror or error}")
        finally:
            with self._guard:
                self._pending_bytes -= len(data)

    def get(self, handle: int, chunk: Chunk) -> Future[bytes]:
        return self._io.submit(self._read, handle, chunk)

    def _read(self, handle: int, chunk: Chunk) -> bytes:
        try:
            fd = os.open(self._path(handle), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return chunk.check(os.pread(fd, chunk.nbytes, chunk.offset))
            finally:
                os.close(fd)
        except OSError as error:
            raise SpillError(f"{self._home}: {error.strerror or error}") from error

    def drop(self, handle: int) -> None:
        if not self._closed:
            self._io.submit(self._path(handle).unlink, missing_ok=True)

    def take_failed(self) -> dict[int, SpillError | None]:
        with self._guard:
            failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:  # after a fork the files are the parent's
            return
        self._closed = True  # what is still to be written is left out
        removed = self._io.submit(shutil.rmtree, self._home, ignore_errors=True)
        self._io.shutdown(wait=False)
        if not wait([removed], CLOSE_WAIT_S).done:
            logger.warning("%s does not answer: the copies there may be left over", self._home)
        os.close(self._lock)


def _lock(home: Path) -> int:
    """Marks a directory as in use for as long as this process lives."""
    fd = os.open(home / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _remove_stale(directory: Path) -> None:
    """Removes what processes that were killed have left."""
    for home in directory.glob(PREFIX + "*"):
        try:
            if home.stat().st_uid != os.getuid():
                continue
            fd = os.open(home / "lock", os.O_WRONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is being made or removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(fd)


REFUSED_HOLD_S = 1.0
"""How long no copies are made after a worker had no room: other engines hold its memory."""

COPY_BIT = 1 << 62
"""Handles of copies: no sequence of an engine ever has such a high one."""


class WorkerTier(SpillTier):
    """Copies lie in the free memory of workers other than the sequence's own, and give way as soon
    as a sequence needs the room."""

    keeps_old_rows = False  # a window's ring moves on
    read_ahead = 1  # `get` waits for the worker

    def __init__(self, backend: AttentionBackend, placement: Placement) -> None:
        self._backend = backend
        self._placement = placement
        self._nbytes: dict[int, int] = {}  # by handle, the oldest copy first
        self._failed: dict[int, SpillError | None] = {}
        self._to_free: list[tuple[int, int]] = []  # (worker, handle of a copy)
        self._refused_until = 0.0
        placement.on_copies_short = self._give_way

    def has_room(self, handle: int, worker: int, stop: int) -> bool:
        if time.monotonic() < self._refused_until:
            return False
        if not self._placement.reserve_copy(handle, stop, not_on=worker):
            return False
        self._nbytes[handle] = self._placement.bytes_for(stop)
        return True

    def put(self, handle: int, chunk: Chunk, data: bytes) -> None:
        target = self._placement.copy_on(handle)
        assert target is not None
        try:
            self._backend.import_range(target, handle | COPY_BIT, chunk.start, data)
        except StepError as error:
            if error.code != StepCode.CACHE_FULL:
                raise SpillError(str(error)) from error
            self._refused_until = time.monotonic() + REFUSED_HOLD_S
            raise SpillGone("other engines use the memory") from error

    def get(self, handle: int, chunk: Chunk) -> Future[bytes]:
        found: Future[bytes] = Future()
        target = self._placement.copy_on(handle)
        try:
            if target is None:
                raise SpillGone("the copy gave way to others")
            data = self._backend.export_range(target, handle | COPY_BIT, chunk.start, chunk.stop)
            found.set_result(chunk.check(data))
        except StepError as error:
            found.set_exception(SpillError(str(error)))
        except SpillError as error:
            found.set_exception(error)
        return found

    def drop(self, handle: int) -> None:
        self._nbytes.pop(handle, None)
        worker = self._placement.release_copy(handle)
        if worker is not None:
            self._to_free.append((worker, handle | COPY_BIT))

    def flush(self) -> None:
        while self._to_free:
            worker, copy = self._to_free.pop()
            if self._backend.info(worker).alive:
                self._backend.free(worker, [copy])

    def _give_way(self, worker: int, nbytes: int) -> None:
        for handle in list(self._nbytes):
            if nbytes <= 0:
                return
            if self._placement.copy_on(handle) == worker:
                nbytes -= self._nbytes[handle]
                self._lose(handle)

    def lose_worker(self, worker: int) -> None:
        for handle in list(self._nbytes):
            if self._placement.copy_on(handle) == worker:
                self._lose(handle)

    def _lose(self, handle: int) -> None:
        """A copy that gave way, or went with its worker, is no fault."""
        self._failed[handle] = None
        self.drop(handle)

    def take_failed(self) -> dict[int, SpillError | None]:
        failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        self._nbytes.clear()  # copies end with the sessions
