"""What two processes of one machine must know of each other to share memory."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_MASK_BYTES = 512

SPIN_NS = 50_000
"""How long to look for the peer's news before sleeping, where each side has cores of its own: ten
times what a wake-up costs."""


def boot_id() -> bytes:
    """Returns what tells this run of this machine's kernel from all others; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""  # nobody is then taken for a neighbour


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Returns process and user id at the other end of a Unix socket, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def cpu_mask() -> bytes:
    """Returns the cores that this process may run on, a bit each; empty if unknown."""
    try:
        cores = os.sched_getaffinity(os.getpid())
    except OSError:
        return b""
    mask = sum(1 << core for core in cores)
    raw = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    return raw if len(raw) <= _MAX_MASK_BYTES else b""


def spin_ns(ours: bytes, theirs: bytes) -> int:
    """Returns how long two sides with these cores look for news before they sleep: not at all where
    they share a core, as the one that looks could keep the other from making them."""
    shared = int.from_bytes(ours, "little") & int.from_bytes(theirs, "little")
    return SPIN_NS if ours and theirs and not shared else 0


def is_from_here(fd: int) -> bool:
    """Whether the peer of a connected socket is on this machine, as far as addresses tell."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return True
        try:
            return sock.getpeername()[0] == sock.getsockname()[0]
        except OSError:  # it has gone
            return False
