"""`fastdecode token > FILE`: makes a shared token for workers and engines."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from fastdecode_rdma.wire.token_file import new_token_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no options."""


def run(args: argparse.Namespace) -> int:
    """Prints a new token; a file that it is redirected to is made readable for its owner only."""
    sys.stdout.flush()
    fd = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)  # before the token is in it: the shell made it as the umask says
    print(new_token_text(), flush=True)
    return 0
