"""Anonymous memory by the page: 2 MiB pages, NUMA nodes, first touch. No policy in here.

By ctypes, not by the module mmap: its madvise() holds the GIL, and it knows no mbind().
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass

HUGE_BYTES = 2 << 20
SMALL_BYTES = mmap.PAGESIZE

_MAP_NORESERVE = 0x4000
_MAP_HUGETLB = 0x40000
_MAP_HUGE_2MB = 21 << 26
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
)  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_libc.read.restype = ctypes.c_ssize_t
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Mapping:
    """Memory of whole pages; `is_explicit` when they are reserved 2 MiB pages."""

    address: int
    nbytes: int
    is_explicit: bool


def round_up(nbytes: int, unit: int) -> int:
    """Returns the least multiple of `unit` that is not below `nbytes`."""
    return -(-nbytes // unit) * unit


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _mmap(nbytes: int, flags: int) -> int:
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _error(f"mmap of {nbytes} bytes")
    return int(address)


def map_pages(nbytes: int, *, explicit: bool) -> Mapping:
    """Returns new memory, on reserved 2 MiB pages (`explicit`) or on what the system gives.

    Memory of 2 MiB or more begins and ends where such a page does, so that transparent huge pages
    cover all of it. Nothing is touched yet: populate() explicit pages before anyone writes to them,
    as one that cannot be had is a SIGBUS.

    Raises:
        OSError: there are no such addresses, or not enough reserved pages.
    """
    if explicit:
        nbytes = round_up(nbytes, HUGE_BYTES)
        return Mapping(_mmap(nbytes, _MAP_HUGETLB | _MAP_HUGE_2MB), nbytes, is_explicit=True)
    if nbytes < HUGE_BYTES:
        nbytes = round_up(nbytes, SMALL_BYTES)
        return Mapping(_mmap(nbytes, _MAP_NORESERVE), nbytes, is_explicit=False)
    nbytes = round_up(nbytes, HUGE_BYTES)
    start = _mmap(nbytes + HUGE_BYTES, _MAP_NORESERVE)
    address = round_up(start, HUGE_BYTES)
    if address > start:
        unmap(start, address - start)
    unmap(address + nbytes, start + HUGE_BYTES - address)
    # A kernel without transparent huge pages says EINVAL: `doctor` and the worker's start say so.
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    return Mapping(address, nbytes, is_explicit=False)


def unmap(address: int, nbytes: int) -> None:
    """Gives whole pages back to the system; nothing to do for 0 bytes.

    Raises:
        OSError: these are no pages.
    """
    if nbytes and _libc.munmap(address, nbytes):
        raise _error(f"munmap of {nbytes} bytes")


def populate(address: int, nbytes: int) -> None:
    """Touches pages that hold nothing yet, without the GIL: afterwards they are there.

    Raises:
        OSError: the system has no such pages (where a write would be a SIGBUS).
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise _error(f"touching {nbytes} bytes")
    _fill_with_zeros(address, nbytes)


def _fill_with_zeros(address: int, nbytes: int) -> None:
    """As populate(), for kernels before 5.14: a read(2) fails where our write is a SIGBUS."""
    with open("/dev/zero", "rb", buffering=0) as zeros:
        while nbytes:
            count = _libc.read(zeros.fileno(), address, nbytes)
            if count <= 0:
                raise _error(f"touching {nbytes} bytes")
            address, nbytes = address + count, nbytes - count


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Asks for the memory of a NUMA node, for pages not touched yet; a full node is no error.

    Raises:
        OSError: refused: no such node, a seccomp filter (as in containers), or another processor.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {platform.machine()}")
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * bits + 1),  # one more than the bits: the kernel takes one off
        ctypes.c_long(0),
    )
    if _libc.syscall(ctypes.c_long(number), *arguments):
        raise _error(f"mbind to NUMA node {node}")


def cpu_mask(cpus: Iterable[int], nbytes: int) -> bytes:
    """Returns a mask as sched_setaffinity() takes it."""
    return sum(1 << cpu for cpu in set(cpus)).to_bytes(nbytes, "little")
