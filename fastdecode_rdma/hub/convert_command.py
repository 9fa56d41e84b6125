"""`fastdecode convert FILE.gguf OUTDIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastdecode_rdma.command_line import unwinding_on_signals
from fastdecode_rdma.config import DTYPE_BYTES
from fastdecode_rdma.hub.convert import convert_gguf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("source", type=Path, metavar="FILE.gguf", help="of parts, any one")
    parser.add_argument("target", type=Path, metavar="OUTDIR", help="a directory to be made")
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPE_BYTES),
        default="bf16",
        help="type of the weights written (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Converts the file and says where the model is."""
    is_midway = False

    def show(done: int, total: int) -> None:
        nonlocal is_midway
        is_midway = done < total
        _show(done, total)

    try:
        with unwinding_on_signals():  # what is half written is removed
            convert_gguf(args.source, args.target, dtype=args.dtype, progress=show)
    except BaseException:
        if is_midway and sys.stderr.isatty():
            print(file=sys.stderr)  # what went wrong gets a line of its own
        raise
    print(f"wrote {args.target}")
    return 0


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} tensors", end=end, file=sys.stderr, flush=True)
