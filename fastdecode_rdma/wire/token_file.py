"""Where a shared token is kept: the one file of this room that touches the file system."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from fastdecode_rdma.errors import ConfigError

TOKEN_BYTES = 32
TOKEN_FILE_VARIABLE = "FASTDECODE_TOKEN_FILE"


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
    try:
        with open(name, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(1024)
    except OSError as exc:
        raise ConfigError(
            f"cannot read token file {name!r}: {exc.strerror}; make one with "
            f"`fastdecode token > FILE`"
        ) from exc
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError(
            f"token file {name!r} can be read by others (mode {mode & 0o777:04o}): "
            f"run `chmod 600 {name}`"
        )
    try:
        token = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        # `from None`: the parser's message could quote the file
        raise ConfigError(
            f"token file {name!r} holds no token ({2 * TOKEN_BYTES} hex digits): make one with "
            f"`fastdecode token > FILE`"
        ) from None
    return token


def find_token(
    token_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> bytes | None:
    """Returns the token in `token_file`, else in FASTDECODE_TOKEN_FILE's file, else None.

    Raises:
        ConfigError: see read_token.
    """
    path = token_file if token_file is not None else environ.get(TOKEN_FILE_VARIABLE)
    return None if not path else read_token(Path(path))
