"""`fastdecode bench serve`: the other end of a benchmark, without kernel and KV-cache.

It is a worker in all but that: the same handshake, token, data planes and heartbeats. It takes
benchmarks only, from any number of engines.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import NoReturn

from fastdecode_rdma.command_line import messages_on_stderr
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport import open_hosts
from fastdecode_rdma.transport.base import check_slots
from fastdecode_rdma.wire.address import parse_address
from fastdecode_rdma.worker import command
from fastdecode_rdma.worker.bench_session import BenchSession
from fastdecode_rdma.worker.machinery import buffer_bytes, open_data_plane
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer
from fastdecode_rdma.worker.session_record import Budget, Machinery

BUFFER_LIMIT = 16 << 30
"""Bytes of row buffers that all benchmarks together may ask for."""

NO_KERNEL = "none"
"""The instruction set of a peer that attends nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, which mean what they mean to `fastdecode worker`."""
    command.add_listening_arguments(parser)


def _no_session(geometry: AttentionGeometry, budget: Budget, num_threads: int) -> NoReturn:
    raise ConfigError(
        "this is `fastdecode bench serve`, which holds no KV-cache: start `fastdecode worker` there"
    )


def make_server(args: argparse.Namespace) -> WorkerServer:
    """Returns the listening server.

    Raises:
        ConfigError: an option cannot be used.
    """
    host, port = parse_address(args.listen)
    addresses = command.resolve(host or "0.0.0.0")
    config = WorkerConfig(
        host=addresses[0],
        port=port,
        memory_bytes=0,
        num_threads=0,
        isa=NO_KERNEL,
        block_tokens=0,
        seg_tokens=0,
        token=command.find_access(args, host, addresses),
    )
    machinery = Machinery(
        open_session=_no_session,
        open_data_plane=open_data_plane,
        check_slots=check_slots,
        buffer_bytes=buffer_bytes,
        open_hosts=open_hosts,
        open_bench=BenchSession,
    )
    return WorkerServer(config, MemoryBudget(BUFFER_LIMIT), machinery)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM (returns 0) or SIGINT (returns 130).

    Raises:
        ConfigError: an option cannot be used.
    """
    command.prepare_environment(os.environ)
    ready_file = None if args.ready_file is None else Path(args.ready_file)
    with messages_on_stderr(logging.INFO if args.verbose else logging.WARNING):
        return command.serve(lambda: make_server(args), ready_file)
