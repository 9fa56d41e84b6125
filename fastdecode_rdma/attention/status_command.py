"""`fastdecode status --workers a,b`: asks workers for their figures, without a session."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastdecode_rdma.command_line import split_workers
from fastdecode_rdma.errors import FastDecodeError, WorkerError
from fastdecode_rdma.transport.address import parse_url
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.tcp import dial
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection
from fastdecode_rdma.wire.token_file import find_token

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastdecode status`."""
    parser.add_argument(
        "--workers", required=True, metavar="A,B", help="addresses, HOST[:PORT], comma-separated"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def read_status(address: str, token: bytes | None, *, timeout_s: float = TIMEOUT_S) -> m.Status:
    """Returns the figures of one worker.

    Raises:
        ConfigError: that is no worker's address.
        WorkerError: it cannot be reached, refuses us, or answers nonsense; the message says what.
    """
    place = parse_url(address)
    try:
        sock = dial(place, timeout_s)
        with sock:
            conn = Connection(m.Role.ENGINE, token=token, now_s=time.monotonic())
            link = BlockingConnection(sock, conn, peer=str(place), timeout_s=timeout_s)
            link.send(conn.hello(os.urandom(m.NONCE_BYTES)))
            link.receive(m.Hello)
            link.send(conn.proof())
            link.receive(m.Auth)
            link.send(m.StatusRequest())
            status = link.receive(m.Status)
            link.send(m.Bye())
            return status
    except FastDecodeError as exc:
        raise WorkerError(str(place), str(exc).removeprefix(f"{place}: ")) from exc


@dataclass(frozen=True)
class Report:
    """What one worker said, or why it said nothing."""

    address: str
    status: m.Status | None
    error: str | None


def read_reports(addresses: Sequence[str], token: bytes | None) -> list[Report]:
    """Returns one report per address, all asked at once."""

    def read(address: str) -> Report:
        try:
            return Report(address, read_status(address, token), None)
        except WorkerError as exc:
            return Report(address, None, exc.remote_message)

    with ThreadPoolExecutor(max_workers=min(32, len(addresses))) as pool:
        return list(pool.map(read, addresses))


_COLUMNS = ("worker", "version", "up", "memory", "sessions", "sequences", "messages", "kernel")


def _row(report: Report) -> tuple[str, ...]:
    status = report.status
    if status is None:
        return (report.address, f"unreachable: {report.error}")
    used, limit = (value / 2**30 for value in (status.memory_used_bytes, status.memory_limit_bytes))
    return (
        report.address,
        status.software,
        f"{status.uptime_s:.0f}s",
        f"{used:.2f}/{limit:.2f}GiB",
        str(status.num_sessions),
        str(status.num_sequences),
        str(status.num_messages),
        f"{status.num_threads}x {status.isa}",
    )


def format_table(reports: Sequence[Report]) -> str:
    """Returns the reports as aligned columns."""
    rows = [_COLUMNS, *map(_row, reports)]
    full = [row for row in rows if len(row) == len(_COLUMNS)]
    widths = [max(len(row[i]) for row in full) for i in range(len(_COLUMNS))]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )


def format_json(reports: Sequence[Report]) -> str:
    """Returns the reports as a JSON list."""
    return json.dumps(
        [
            {"address": report.address, "error": report.error}
            | ({} if report.status is None else dataclasses.asdict(report.status))
            for report in reports
        ],
        indent=2,
    )


def run(args: argparse.Namespace) -> int:
    """Prints what every worker says; returns 1 when one said nothing."""
    addresses = split_workers(args.workers)
    for address in addresses:
        parse_url(address)  # a typing error is no unreachable worker
    reports = read_reports(addresses, find_token(args.token_file))
    print(format_json(reports) if args.json else format_table(reports))
    return 1 if any(report.error is not None for report in reports) else 0
