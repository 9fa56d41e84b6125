"""`fastdecode token --output FILE`: makes a shared token for workers and engines."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from fastdecode_rdma.wire.token_file import OWNER_ONLY, new_token_text, write_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastdecode token`."""
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="make FILE, readable for you only; it must not be there (default: print the token; "
        "`fastdecode token > FILE` makes FILE readable for you only, too)",
    )


def run(args: argparse.Namespace) -> int:
    """Makes a file with a new token, or prints one; a file that it is redirected to is made
    readable for its owner only."""
    if args.output is not None:
        write_token(args.output)
        return 0
    sys.stdout.flush()
    fd = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fchmod(fd, OWNER_ONLY)  # before the token is in it: the shell made it as the umask says
    print(new_token_text(), flush=True)
    return 0
