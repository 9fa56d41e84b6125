"""What a benchmark says of the machine it ran on, and the network's counters at one end of a
connection. What this system does not tell is left out."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma import __version__, numa

_SIOCGIFADDR = 0x8915
_TCP_INFO_BYTES = 256
_TCP_COUNTERS = {  # name -> (offset in struct tcp_info of linux/tcp.h, layout)
    "tcp_retransmits": (100, "I"),
    "tcp_delivered_ce": (196, "I"),
    "tcp_bytes_retransmitted": (208, "Q"),
    "tcp_dsack_dups": (216, "I"),
    "tcp_reordered": (220, "I"),
    "tcp_out_of_order": (224, "I"),
}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # no such file in this kernel or sandbox
        return ""


def cpu_model(root: Path = Path("/")) -> str:
    """Returns the processor's name, or its architecture where there is none."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.machine()


def machine_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Returns host, processor, cores, NUMA nodes, system and versions of this process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpu": cpu_model(root),
        "num_cpus": os.cpu_count() or 0,
        "cpus_allowed": numa.format_cpus(sorted(os.sched_getaffinity(0))),
        "numa_nodes": [node.number for node in numa.find_nodes(root)],
        "governor": _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "versions": {
            "fastdecode_rdma": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def _interface_of(address: str, root: Path) -> str:
    """The network interface that has an address; "" when none is known to."""
    number = ipaddress.ip_address(address.partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    if number.version == 6:
        lines = (line.split() for line in _text(root / "proc/net/if_inet6").splitlines())
        wanted = number.packed.hex()
        return next((fields[-1] for fields in lines if fields and fields[0] == wanted), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an IPv4 address
                continue
            if found == number.packed or (name == "lo" and number.is_loopback):
                return name
    return ""


def link_facts(fd: int, root: Path = Path("/")) -> dict[str, Any]:
    """Returns interface, MTU, NUMA node and speed under a connected socket, and its segment size;
    what they are for."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return {"interface": "memory"}
        name = _interface_of(sock.getsockname()[0], root)
        device = root / "sys/class/net" / name
        facts: dict[str, Any] = {
            "interface": name,
            "tcp_max_segment_bytes": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG),
        }
    if not name:
        return facts
    for key, file in (
        ("mtu_bytes", "mtu"), ("numa_node", "device/numa_node"), ("speed_mbit_per_s", "speed"),
    ):  # fmt: skip
        value = _text(device / file)
        if value.removeprefix("-").isdecimal():
            facts[key] = int(value)
    return facts


def tcp_counters(fd: int) -> dict[str, int]:
    """Returns what TCP_INFO counts of trouble on a socket; empty if it is no TCP socket."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return {}
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return {
        name: struct.unpack_from(f"={layout}", raw, offset)[0]
        for name, (offset, layout) in _TCP_COUNTERS.items()
        if offset + struct.calcsize(layout) <= len(raw)  # an older kernel tells less
    }


def rdma_counters(root: Path = Path("/")) -> dict[str, int]:
    """Returns the counters and hw_counters of all RDMA ports, as `device/port name`."""
    found: dict[str, int] = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*/*counters")):
        port = f"{folder.parts[-4]}/{folder.parts[-2]}"
        for file in sorted(folder.iterdir()):
            value = _text(file)
            if value.isdecimal():
                found[f"{port} {file.name}"] = int(value)
    return found


def counters(fd: int, root: Path = Path("/")) -> dict[str, int]:
    """Returns the counters of one end of a connection, by name."""
    return tcp_counters(fd) | rdma_counters(root)


def moved(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Returns by how much counters have grown, those that have."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    }
