"""Files that appear whole or not at all, and a lock between processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import ConfigError

_CHUNK_BYTES = 1 << 20


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes `value` as UTF-8 JSON, readable unless `indent` is None (for large files)."""
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `target` and renames it to `target` on success.

    On any failure the temporary directory is removed, with parents that were made for it, and
    `target` is as it was.

    Raises:
        ConfigError: `target` exists and is not an empty directory.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists already; name a directory that does not, or remove it")
    made = [parent for parent in target.absolute().parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch: Path | None = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield scratch
        for path in scratch.iterdir():
            _sync(path)
        scratch.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        os.rename(scratch, target)  # replaces an empty directory, fails on a filled one
        _sync(target.parent)
    except BaseException:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        for parent in made:  # innermost first
            with suppress(OSError):  # someone else has put something there
                parent.rmdir()
        raise


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path` between processes; the kernel frees it if one is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only portable way to read it is to set it; done in one place, at the end of a conversion.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
