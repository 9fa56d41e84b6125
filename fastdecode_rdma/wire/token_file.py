"""Where a shared token is kept: the one file of this room that touches the file system."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping

from fastdecode_rdma.errors import ConfigError

TOKEN_BYTES = 32
TOKEN_FILE_VARIABLE = "FASTDECODE_TOKEN_FILE"
OWNER_ONLY = 0o600

_MAX_FILE_BYTES = 1024  # a token takes 65, with its newline
_REMEDY = "make one with `fastdecode token --output FILE`"


def new_token_text() -> str:
    """Returns the text of a new token: 32 random bytes in hex."""
    return secrets.token_hex(TOKEN_BYTES)


def read_token(path: str | os.PathLike[str]) -> bytes:
    """Returns the token in a file.

    Raises:
        ConfigError: the file cannot be read, others may read it, or it holds no token. The message
            never contains what the file holds.
    """
    name = os.fspath(path)
    if _is_token(name):
        raise ConfigError("what was given is a token itself; a file that holds it is meant")
    shown = repr(name)
    try:
        # A FIFO without a writer would be waited for, and a terminal would become ours.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"cannot read token file {shown}: {exc.strerror}; {_REMEDY}") from exc
    except ValueError as exc:
        raise ConfigError(f"cannot read token file {shown}: a zero byte in its name") from exc
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"token file {shown} is no regular file; {_REMEDY}")
        if mode & 0o077:
            raise ConfigError(
                f"token file {shown} can be read by others (mode {stat.S_IMODE(mode):04o}): "
                f"run `chmod 600 {shlex.quote(name)}`"
            )
        raw = os.read(fd, _MAX_FILE_BYTES)
    except OSError as exc:
        raise ConfigError(f"cannot read token file {shown}: {exc.strerror}; {_REMEDY}") from exc
    finally:
        os.close(fd)
    try:
        token = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        # `from None`: the parser's message could quote the file
        raise ConfigError(
            f"token file {shown} holds no token ({2 * TOKEN_BYTES} hex digits): {_REMEDY}"
        ) from None
    return token


def write_token(path: str | os.PathLike[str]) -> None:
    """Makes a file with a new token that its owner alone may read.

    Raises:
        ConfigError: something of that name is there already, or the file cannot be made.
    """
    name = os.fspath(path)
    # O_EXCL: a token that workers and engines use must not be lost, and no link be followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, OWNER_ONLY)
    except FileExistsError as exc:
        raise ConfigError(
            f"{name!r} is there already: remove it first if its token is no longer in use, "
            "or name another file"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot make token file {name!r}: {exc.strerror}") from exc
    try:
        with open(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, OWNER_ONLY)  # the umask may have taken away even the owner's
            file.write(new_token_text() + "\n")
    except OSError as exc:
        with contextlib.suppress(OSError):  # half a token helps nobody
            os.unlink(name)
        raise ConfigError(f"cannot write token file {name!r}: {exc.strerror}") from exc


def find_token(
    token_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> bytes | None:
    """Returns the token in `token_file`, else in FASTDECODE_TOKEN_FILE's file, else None.

    Raises:
        ConfigError: see read_token; or `token_file` is an empty name, as an unset shell variable
            gives: going on without a token is not what was asked for.
    """
    if token_file is not None:
        if not os.fspath(token_file):
            raise ConfigError("the name of the token file is empty; leave it out, or name a file")
        return read_token(os.path.expanduser(token_file))
    path = environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        return read_token(os.path.expanduser(path))
    except ConfigError as exc:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE}: {exc}") from None


def _is_token(text: str) -> bool:
    """Whether a token was given in the place of its file's name: no message may repeat it."""
    return re.fullmatch(rf"\s*[0-9a-fA-F]{{{2 * TOKEN_BYTES}}}\s*", text) is not None
