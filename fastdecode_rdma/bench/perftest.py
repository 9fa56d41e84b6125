"""perftest (ib_write_lat and its kin) run beside our own figures, and its tables read.

Its JSON is not valid in the versions that distributions ship, so the tables are what is read.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_rdma.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from fastdecode_rdma.bench.interconnect_options import Case
    from fastdecode_rdma.transport.address import Address

_VERBS = {"write_imm": "write", "write": "write", "send": "send", "read": "read"}
_TESTS = {"latency": "lat", "bandwidth": "bw"}
SERVER_START_S = 10.0
PORT = 18515
"""Where a perftest server waits for its client."""

_LISTENING = "0A"
TIMEOUT_S = 300.0
FEWEST_ITERS = 5
"""perftest refuses less."""

_FLAGS = {
    "dev": "--ib-dev", "port": "--ib-port", "gid": "--gid-index", "mtu": "--mtu", "sl": "--sl",
    "tclass": "--tclass", "timeout": "--qp-timeout", "retry": "--retry_count",
}  # fmt: skip

_COLUMN = re.compile(r"#\w+|[^\[\]#]+\[[^\]]*\]|[^\[\]#\s][^\[\]#]*$")
_KEYS = {
    "#bytes": "message_bytes",
    "#iterations": "iterations",
    "t_min": "t_min_usec",
    "t_max": "t_max_usec",
    "t_typical": "t_typical_usec",
    "t_avg": "t_avg_usec",
    "t_stdev": "t_stdev_usec",
    "99% percentile": "percentile_99_usec",
    "99.9% percentile": "percentile_99_9_usec",
    "tps average": "transactions_per_s",
    "MsgRate": "msg_rate_mpps",
    "CPU_Util": "cpu_percent",
}
_RATES = {
    "Gb/sec": "gbit_per_s",
    "GB/sec": "gb_per_s",
    "MiB/sec": "mib_per_s",
    "MB/sec": "mib_per_s",
}
"""perftest's units of bandwidth; what it calls MB is 2^20 bytes."""


def _key(column: str) -> str:
    name, _, unit = (part.strip(" ]") for part in column.partition("["))
    if name in ("BW peak", "BW average") and unit in _RATES:
        return f"{name.lower().replace(' ', '_')}_{_RATES[unit]}"
    try:
        return _KEYS[name]
    except KeyError:
        raise TransportError(f"perftest printed a column that is not known: {column!r}") from None


def parse_table(text: str) -> list[dict[str, float]]:
    """Returns the rows of the table that a perftest program printed, by column with its unit.

    Raises:
        TransportError: there is no table in it, or one that does not add up.
    """
    keys: list[str] = []
    rows = []
    for line in text.splitlines():
        if line.strip().startswith("#bytes"):
            keys = [_key(column.strip()) for column in _COLUMN.findall(line)]
            continue
        fields = line.split()
        if not keys or not fields or not _is_number(fields[0]):
            continue
        if len(fields) != len(keys) or not all(map(_is_number, fields)):
            raise TransportError(f"perftest printed a row of {len(fields)} figures: {line.strip()}")
        rows.append(dict(zip(keys, map(float, fields), strict=True)))
    if not rows:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        raise TransportError(f"perftest printed no figures; its last words: {last or 'none'}")
    return rows


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_own_address(host: str) -> bool:
    """Says whether an address is one of this machine: only its own can be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(place)
    except OSError:
        return False
    return True


def tool_of(case: Case) -> str:
    """Returns perftest's program for what a case measures."""
    return f"ib_{_VERBS[case.kind]}_{_TESTS[case.test]}"


def check_installed(tools: Iterable[str]) -> None:
    """Makes sure that perftest can be run.

    Raises:
        ConfigError: it is not installed.
    """
    missing = [tool for tool in sorted(tools) if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"--compare needs {' and '.join(missing)}, which come with perftest "
            "(Debian: apt install perftest)"
        )


def command_of(case: Case, address: Address, nbytes: int, iters: int) -> list[str]:
    """Returns the client's command for one message size; without its last word, the server's.
    `iters`: messages, 0 for as many as perftest takes by itself."""
    command = [tool_of(case), "--size", str(nbytes), "-F"]
    if iters:
        command += ["--iters", str(max(iters, FEWEST_ITERS))]
    for option, flag in _FLAGS.items():
        if option in address.options:
            command += [flag, str(address.options[option])]
    if case.test == "bandwidth":
        command.append("--report_gbits")
        if case.mode in ("pingpong", "both_ways"):
            command.append("--bidirectional")
    return [*command, address.host]


def beside(case: Case, address: Address, sizes: Mapping[int, int]) -> list[dict[str, float]]:
    """Runs perftest with a worker's machine, one size after the other; returns its rows. `sizes`:
    bytes -> messages.

    Where the worker is on this machine both ends are run; elsewhere its end must be running.

    Raises:
        TransportError: it failed; says what must run on the other machine.
    """
    rows = []
    for nbytes, iters in sizes.items():
        command = command_of(case, address, nbytes, iters)
        server = None
        if is_own_address(address.host):
            server = subprocess.Popen(
                command[:-1], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
            )
            _await_listener(server)
        try:
            rows += parse_table(_client(command))
        finally:
            if server is not None:
                server.kill()
                server.wait()
    return rows


def _await_listener(server: subprocess.Popen[bytes]) -> None:
    """Waits until the server listens, or has ended; connecting to find out would be its client."""
    end_s = time.monotonic() + SERVER_START_S
    while time.monotonic() < end_s and server.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines() if Path(table).exists() else ():
                fields = line.split()
                if fields[1].endswith(f":{PORT:04X}") and fields[3] == _LISTENING:
                    return
        time.sleep(0.02)


def _client(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise TransportError(f"{' '.join(command)}: no end within {TIMEOUT_S:g} s") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise TransportError(
            f"{' '.join(command)} failed: {words[-1] if words else done.returncode}; on "
            f"{command[-1]} there must run: {' '.join(command[:-1])}"
        )
    return done.stdout
