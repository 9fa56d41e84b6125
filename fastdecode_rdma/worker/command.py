"""`fastdecode worker`: serves attention until it is told to stop."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_rdma.command_line import messages_on_stderr
from fastdecode_rdma.errors import ConfigError

if TYPE_CHECKING:
    from fastdecode_rdma.worker.server import WorkerServer

# numpy, the server and the kernel are imported in run(), after prepare_environment().

READY = b"ready tcp://"
"""What the line of a worker that is ready starts with."""

CLOSE_TIMEOUT_S = 0.7
"""A stopped worker is gone within a second; a kernel that runs longer goes with the process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastdecode worker`."""
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="KV-cache limit, such as 4GiB (default: 80%% of what is free)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="kernel threads (default: the physical cores)"
    )
    parser.add_argument(
        "--touch",
        action=argparse.BooleanOptionalAction,
        help="take all memory at the start, page by page, and keep it; without, it is taken when "
        "sequences need it and given back after them (default: --touch if --memory is given)",
    )
    add_listening_arguments(parser)


def add_listening_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of everything that engines connect to: where, for whom, what it reports."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:18815",
        metavar="HOST:PORT",
        help="address to listen on; port 0 picks a free one (default: %(default)s)",
    )
    parser.add_argument("--ready-file", metavar="FILE", help="write the ready line to FILE as well")
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--token-file",
        metavar="FILE",
        help="engines must hold this token (default: FASTDECODE_TOKEN_FILE)",
    )
    access.add_argument(
        "--insecure",
        action="store_true",
        help="listen without a token, also where other machines can reach it",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="report engines that come and go on stderr"
    )


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Sets, in place, what numpy's BLAS reads when it is loaded; the user's own values stand."""
    # The worker multiplies no matrices; without this OpenBLAS starts a thread per core at import.
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def resolve(host: str) -> tuple[str, ...]:
    """Returns the numeric addresses of `host`, best first.

    Raises:
        ConfigError: the name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        numbers = [socket.getnameinfo(place, socket.NI_NUMERICHOST)[0] for *_, place in found]
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host!r}: {exc.strerror}") from exc
    return tuple(dict.fromkeys(numbers))


def is_loopback(address: str) -> bool:
    """Says whether only this machine can reach a numeric address."""
    number = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)  # ::ffff:127.0.0.1 is 127.0.0.1 to IPv6 sockets
    return (number if mapped is None else mapped).is_loopback


def find_access(args: argparse.Namespace, host: str, addresses: Sequence[str]) -> bytes | None:
    """Returns the token that engines must hold, None when they need none.

    Raises:
        ConfigError: others could reach the worker without a token.
    """
    from fastdecode_rdma.wire.token_file import find_token

    token = None if args.insecure else find_token(args.token_file)
    if token is None and not args.insecure and not all(map(is_loopback, addresses)):
        raise ConfigError(
            f"{host} can be reached from other machines: pass --token-file FILE (make one with "
            "`fastdecode token --output FILE`), or --insecure if every machine that reaches it is "
            "trusted"
        )
    return token


def make_server(args: argparse.Namespace) -> WorkerServer:
    """Returns the listening server that the options describe, after printing the defaults it chose.

    Raises:
        ConfigError: an option cannot be used.
    """
    from fastdecode_rdma.wire.address import parse_address
    from fastdecode_rdma.worker import limits
    from fastdecode_rdma.worker.machinery import kernel_facts, real_machinery
    from fastdecode_rdma.worker.memory import MemoryBudget
    from fastdecode_rdma.worker.preparation import find_nodes
    from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer

    host, port = parse_address(args.listen)
    host = host or "0.0.0.0"
    # Resolved once: a name that resolves otherwise a moment later must not open another address.
    addresses = resolve(host)
    token = find_access(args, host, addresses)
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads must be from 1 to 1024, got {args.threads}")
    if args.memory is None:
        memory = limits.default_memory()
        print(f"memory {limits.format_memory(memory.value)}: {memory.reason}")
    else:
        memory = limits.Default(limits.parse_memory(args.memory), "as asked")
    if args.threads is None:
        threads = limits.default_threads()
        print(f"threads {threads.value}: {threads.reason}")
    else:
        threads = limits.Default(args.threads, "as asked")
    facts = kernel_facts()
    config = WorkerConfig(
        host=addresses[0],
        port=port,
        memory_bytes=memory.value,
        num_threads=threads.value,
        isa=facts.isa,
        block_tokens=facts.block_tokens,
        seg_tokens=facts.seg_tokens,
        token=token,
    )
    nodes, said = find_nodes(threads.value)
    if said:
        print(said)
    budget = MemoryBudget(memory.value, nodes)
    return WorkerServer(config, budget, real_machinery())


def ready_line(server: WorkerServer) -> str:
    """Returns the line that tells whoever started the worker that and where it listens."""
    from fastdecode_rdma.wire.address import format_address
    from fastdecode_rdma.worker.limits import format_memory

    config = server.config
    return (
        f"ready {format_address(*server.address)} memory={format_memory(config.memory_bytes)} "
        f"threads={config.num_threads} isa={config.isa}"
    )


def _check_ready_file(path: Path) -> None:
    """Makes sure that nothing but an earlier worker's ready file is replaced.

    Raises:
        ConfigError: something else is at that path.
    """
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"--ready-file {path} is there and no regular file; name another path")
    with path.open("rb") as file:
        start = file.read(len(READY))
    if start and start != READY:
        raise ConfigError(f"--ready-file {path} holds something else; remove it or name another")


def _write_ready_file(path: Path, line: str) -> None:
    # Renamed into place: a reader that waits for the file never finds half a line in it.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(line + "\n")
        partial.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write ready file {str(path)!r}: {exc.strerror}") from exc


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM (returns 0) or SIGINT (returns 130)."""
    prepare_environment(os.environ)
    with messages_on_stderr(logging.INFO if args.verbose else logging.WARNING):
        ready_file = None if args.ready_file is None else Path(args.ready_file)
        return serve(
            lambda: make_server(args),
            ready_file,
            prepare=lambda server: _prepare_memory(args, server),
        )


def _prepare_memory(args: argparse.Namespace, server: WorkerServer) -> None:
    from fastdecode_rdma.worker.preparation import prepare_memory

    said = prepare_memory(
        server.budget,
        server.config.num_threads,
        touch=args.touch,
        is_named=args.memory is not None,
        is_stopped=lambda: server.stopping,
    )
    if not server.stopping:
        print(said)


def serve(
    make: Callable[[], WorkerServer],
    ready_file: Path | None,
    *,
    prepare: Callable[[WorkerServer], None] | None = None,
) -> int:
    """Makes a server and serves until SIGTERM (returns 0) or SIGINT (returns 130); says when it is
    ready, after `prepare`.

    Raises:
        ConfigError: it cannot be made, or something else is where the ready file goes.
    """
    if ready_file is not None:
        _check_ready_file(ready_file)
    server = make()
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # an earlier worker's would send engines to its port
    exit_codes: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        exit_codes.append(0 if number == signal.SIGTERM else 128 + number)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        if prepare is not None:
            prepare(server)
        if not server.stopping:
            line = ready_line(server)
            if ready_file is not None:
                _write_ready_file(ready_file, line)
            print(line, flush=True)
        server.serve_forever()
    finally:
        closed = server.close(CLOSE_TIMEOUT_S)
    code = exit_codes[0] if exit_codes else 0
    if not closed:
        # A thread is still in a kernel. Freeing memory under it would crash; the process's end does
        # not, and takes the memory along.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
