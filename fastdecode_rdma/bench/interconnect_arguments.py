"""Options of `fastdecode bench interconnect`, spelt as perftest spells them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastdecode_rdma.bench.interconnect_figures import REPORTS

ALL_MAX_BYTES = 8 << 20

RDMA_FLAGS = {
    "--ib-dev": ("dev", "device"),
    "--ib-port": ("port", "its port"),
    "--gid-index": ("gid", "index of our GID"),
    "--mtu": ("mtu", "path MTU, 256 to 4096"),
    "--sl": ("sl", "service level"),
    "--tclass": ("tclass", "traffic class"),
    "--qp-timeout": ("timeout", "4.096 us * 2^N until a resend"),
    "--retry-count": ("retry", "resends before a peer is given up"),
    "--inline-size": ("inline", "bytes handed over with a request, up to 1024"),
    "--cq-mod": ("cq_mod", "writes per report that they are done, up to 16"),
}
"""perftest's name -> (the option of an rdma:// address, help)."""

Rows = tuple[tuple[str, dict[str, Any], str], ...]
_ON = {"action": "store_true"}


def _number(metavar: str = "N", **more: Any) -> dict[str, Any]:
    return {"type": int, "metavar": metavar, **more}


_WHAT: Rows = (
    ("--plane", {"metavar": "NAME,..."}, "tcp, shm, rdma (default: what is there)"),
    (
        "--kind",
        {"metavar": "NAME,..."},
        "tcp: send, read; shm: write, read; rdma: write_imm (our frames), bare write, send, read",
    ),
    (
        "--test",
        {"metavar": "NAME,...", "default": "latency,bandwidth"},
        "latency, bandwidth (default: both)",
    ),
)
_MESSAGES: Rows = (
    ("--size", {"metavar": "BYTES,..."}, "default: 2 for latency, 65536 for bandwidth"),
    ("--all", _ON, "sizes from --min to --max by --factor"),
    ("--min", _number("BYTES"), "with --all (2)"),
    ("--max", _number("BYTES"), f"with --all ({ALL_MAX_BYTES})"),
    ("--factor", _number(), "with --all (2)"),
    ("--iters", _number(), "messages of each size (latency 1000, bandwidth 5000, 1 GiB at most)"),
    ("--duration", {"type": float, "metavar": "SECONDS"}, "of each size, instead of --iters"),
    ("--warm-up", _number(), "messages before each size (100, 64 MiB at most)"),
    ("--tx-depth", _number(default=128), "messages under way, bandwidth (%(default)s)"),
    ("--qp", _number(default=1), "connections (rdma: queue pairs) per worker, bandwidth (1)"),
    ("--bidirectional", _ON, "bandwidth: both ways at once"),
    ("--check", _ON, "compare every byte (slower); of bare verbs, the last message's"),
    ("--events", _ON, "sleep until there is news, never spin (shm, rdma)"),
)
_OUTPUT: Rows = (
    ("--report", {"choices": REPORTS, "default": "Gb"}, "unit of bandwidth (Gb)"),
    ("--compare", _ON, "rdma: perftest beside it, where it is installed"),
    ("--force", _ON, "also at a worker that holds sequences of engines"),
    (
        "--timeout",
        {"type": float, "metavar": "SECONDS", "default": 2.0},
        "a peer from which nothing comes for so long is dead (%(default)s)",
    ),
    (
        "--token-file",
        {"metavar": "FILE"},
        "the workers' token (default: FASTDECODE_TOKEN_FILE)",
    ),
    ("--json", {"type": Path, "metavar": "FILE"}, "write figures, settings and machines here"),
    ("--csv", {"type": Path, "metavar": "FILE"}, "write the figures here"),
    ("--plot", {"type": Path, "metavar": "FILE"}, "draw them into this file (needs matplotlib)"),
)


def add_flag(
    parser: argparse._ActionsContainer, flag: str, options: dict[str, Any], text: str
) -> None:
    """Adds an option that may also be written with underscores, as some of perftest's are."""
    parser.add_argument(flag, help=text, **options)
    if "-" in flag[2:]:
        dest = flag[2:].replace("-", "_")
        hidden = options | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS, "dest": dest}
        parser.add_argument(f"--{dest}", **hidden)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds the addresses that every benchmark over a network takes."""
    parser.add_argument(
        "--workers",
        required=True,
        metavar="HOST[:PORT],...",
        help="workers, or peers started with `fastdecode bench serve`",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all options of `fastdecode bench interconnect`."""
    add_workers(parser)
    rdma: Rows = (
        *((flag, {"metavar": "VALUE"}, text) for flag, (_, text) in RDMA_FLAGS.items()),
        ("--post-list", _number(), "requests per posting of write, send, read, bandwidth (1)"),
    )
    for title, rows in (
        ("what to measure", _WHAT), ("messages", _MESSAGES), ("rdma only", rdma), ("", _OUTPUT),
    ):  # fmt: skip
        group = parser.add_argument_group(title) if title else parser
        for flag, options, text in rows:
            add_flag(group, flag, options, text)
