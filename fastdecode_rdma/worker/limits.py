"""How much memory and how many threads a worker may take here: cgroups, affinity, what is free.

Nothing is taken from /proc/cpuinfo, whose layout differs by architecture and is absent in some
sandboxes. Every file may be missing; then that limit does not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.pages import HUGE_BYTES

MEMORY_SHARE = 0.8
"""Part of the available memory that a worker takes by default: the rest is for the page cache, the
socket buffers and whatever starts later on the machine."""

MIN_MEMORY_BYTES = 1 << 20

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

# cgroup v1 says "no limit" with the largest multiple of a page; anything this large is none.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Default:
    """A value found on this machine and the words that explain it."""

    value: int
    reason: str


def parse_memory(text: str) -> int:
    """Returns the bytes in a text like `4GiB`, `512M` or `1073741824`; units are powers of 1024.

    Raises:
        ConfigError: it is no such text, or under 1 MiB.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"cannot read {text!r} as memory; expected a number like 4GiB or 512MiB")
    nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if not MIN_MEMORY_BYTES <= nbytes < _NO_LIMIT:
        raise ConfigError(f"memory must be from 1MiB to below 2^60 bytes, got {text!r}")
    return nbytes


def format_memory(nbytes: int) -> str:
    """Returns bytes for people: `12.3GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    step = 0
    while nbytes >= 1024 ** (step + 1) and step < len(units) - 1:
        step += 1
    value = nbytes / 1024**step
    return f"{int(value)}{units[step]}" if value == int(value) else f"{value:.1f}{units[step]}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # no such limit here: absent, or not for our eyes
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _stat(path: Path, key: str) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _cgroup_folders(root: Path, controller: str) -> Iterable[tuple[bool, Path]]:
    """Yields (is version 2, folder) of this process's cgroups with a controller, innermost first.

    The path in /proc/self/cgroup is the host's; inside a container its folder may be mounted as the
    root of the hierarchy, so missing folders are skipped and the mount itself always comes last.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        mounts = (
            ("sys/fs/cgroup", "sys/fs/cgroup/unified")
            if is_v2
            else (
                f"sys/fs/cgroup/{controller}",
                f"sys/fs/cgroup/{controllers}",
            )
        )
        mount = next((root / name for name in mounts if (root / name).is_dir()), None)
        if mount is None:
            continue
        relative = Path(path.lstrip("/"))
        for inner in (relative, *relative.parents):
            if ".." not in inner.parts and (mount / inner).is_dir():
                yield is_v2, mount / inner


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Returns (limit, bytes left) of the tightest memory cgroup, or None when there is no limit.

    Bytes left count pages of files that the kernel drops first as free, as MemAvailable does.
    """
    tightest: tuple[int, int] | None = None
    for is_v2, folder in _cgroup_folders(root, "memory"):
        limit = _read_int(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _read_int(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
        key = "inactive_file" if is_v2 else "total_inactive_file"
        left = max(0, limit - max(0, used - _stat(folder / "memory.stat", key)))
        if tightest is None or left < tightest[1]:
            tightest = (limit, left)
    return tightest


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns MemAvailable in bytes, or None where the kernel does not tell."""
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def free_memory(root: Path = Path("/")) -> Default:
    """Returns the bytes that are free here, and by whose account.

    Raises:
        ConfigError: the system tells nothing about its memory.
    """
    cgroup = cgroup_memory(root)
    found = [
        (nbytes, name)
        for nbytes, name in (
            (available_memory(root), "MemAvailable"),
            (None if cgroup is None else cgroup[1], "the cgroup's free memory"),
        )
        if nbytes is not None
    ]
    if not found:
        raise ConfigError("cannot find out how much memory is free here; pass --memory")
    return Default(*min(found))


def default_memory(root: Path = Path("/")) -> Default:
    """Returns the bytes that a worker takes when it was not told.

    Raises:
        ConfigError: the system tells nothing about its memory, or there is next to none.
    """
    free = free_memory(root)
    nbytes, name = free.value, free.reason
    value = int(nbytes * MEMORY_SHARE)
    if value < MIN_MEMORY_BYTES:
        raise ConfigError(f"{name} is only {format_memory(nbytes)}; pass --memory")
    return Default(value, f"{MEMORY_SHARE:.0%} of {name}, {format_memory(nbytes)}")


def free_huge_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of reserved 2 MiB pages that are free and that the cgroup lets us take."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free = _read_int(folder / "free_hugepages") or 0
    promised = _read_int(folder / "resv_hugepages") or 0  # to mappings not touched yet
    free_bytes = max(0, free - promised) * HUGE_BYTES
    if not free_bytes:
        return 0
    for is_v2, group in _cgroup_folders(root, "hugetlb"):
        limit = _read_int(group / ("hugetlb.2MB.max" if is_v2 else "hugetlb.2MB.limit_in_bytes"))
        name = "hugetlb.2MB.current" if is_v2 else "hugetlb.2MB.usage_in_bytes"
        if limit is not None and limit < _NO_LIMIT:
            free_bytes = min(free_bytes, max(0, limit - (_read_int(group / name) or 0)))
    return free_bytes


def has_transparent_huge_pages(root: Path = Path("/")) -> bool:
    """Says whether the system gives 2 MiB pages to memory that asks for them."""
    mode = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    status = _read(root / "proc/self/status") or ""
    return ("[always]" in mode or "[madvise]" in mode) and "THP_enabled:\t0" not in status


def transparent_bytes(root: Path = Path("/")) -> int | None:
    """Returns how much of this process's memory lies on transparent huge pages; None: unknown."""
    for line in (_read(root / "proc/self/smaps_rollup") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "AnonHugePages":
            return int(rest.split()[0]) * 1024
    return None


def page_kind(nbytes: int, root: Path = Path("/")) -> str:
    """Returns the pages that `nbytes` of new KV memory lie on, in words."""
    if nbytes >= HUGE_BYTES and free_huge_bytes(root) >= nbytes:
        return "reserved 2MiB"
    return "transparent 2MiB" if has_transparent_huge_pages(root) else "small"


def _quota_cpus(folder: Path, *, is_v2: bool) -> float | None:
    if is_v2:
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            return int(quota) / int(period)
        return None
    quota_us = _read_int(folder / "cpu.cfs_quota_us")
    period_us = _read_int(folder / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """Returns the CPUs that the tightest cgroup quota allows, or None when there is none."""
    quotas = [_quota_cpus(folder, is_v2=is_v2) for is_v2, folder in _cgroup_folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def physical_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Returns how many cores the logical CPUs `cpus` belong to; siblings share a core's units."""
    topology = root / "sys/devices/system/cpu"
    cores = set()
    for cpu in cpus:
        folder = topology / f"cpu{cpu}/topology"
        siblings = _read(folder / "thread_siblings_list") or _read(folder / "core_cpus_list")
        cores.add(siblings or f"alone {cpu}")
    return len(cores)


def default_threads(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Default:
    """Returns the kernel threads that a worker starts when it was not told."""
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    cores = physical_cores(cpus, root)
    reason = f"physical cores of {len(cpus)} CPUs in the affinity mask"
    quota = cgroup_cpus(root)
    if quota is not None and quota < cores:
        # Rounded down: one thread too many is throttled in the middle of a region, which waits.
        return Default(max(1, int(quota)), f"the cgroup allows {quota:g} CPUs")
    return Default(max(1, cores), reason)
