"""What stands in the way of registered memory and queues: checked before, explained after."""

from __future__ import annotations

import errno
import resource
from collections.abc import Mapping
from pathlib import Path

from fastdecode_rdma.errors import TransportError

NUM_SLOTS = 16
SLOT_BYTES = 128 << 10
"""Of each direction. Longer frames go in chunks, copied while the adapter sends the one before."""

MEMORY_BYTES = 2 * NUM_SLOTS * SLOT_BYTES
"""Registered for one connection: 4 MiB, half of the usual RLIMIT_MEMLOCK."""

_CAP_IPC_LOCK = 14
_MEMLOCK_FIX = (
    "raise it with `ulimit -l unlimited`, in a service with LimitMEMLOCK=infinity, in a container "
    "with --ulimit memlock=-1"
)


def format_kib(nbytes: int) -> str:
    """Returns an amount of memory as `ulimit -l` counts it."""
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{-(-nbytes // 1024)} KiB"


def _status_fields(root: Path) -> Mapping[str, str]:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:  # a sandbox without /proc: the limit alone decides
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def memlock_text(nbytes: int, root: Path = Path("/")) -> str | None:
    """Says why `nbytes` more may not be locked, with both figures and the fix; None: they may."""
    fields = _status_fields(root)
    if int(fields.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmPin", "VmLck"))
    if soft == resource.RLIM_INFINITY or pinned + nbytes <= soft:
        return None
    held = f" beside {format_kib(pinned)} that are locked" if pinned else ""
    return (
        f"RDMA needs {format_kib(nbytes)} of locked memory{held}, RLIMIT_MEMLOCK allows "
        f"{format_kib(soft)} (hard limit {format_kib(hard)}): {_MEMLOCK_FIX}"
    )


def check_limits(
    device: str,
    limits: Mapping[str, int],
    *,
    nbytes: int,
    depth: int,
    receives: int,
    root: Path = Path("/"),
) -> None:
    """Checks that memory of `nbytes` can be registered and the queues can be as long as asked.

    Raises:
        TransportError: with what is needed and what is allowed.
    """
    text = memlock_text(nbytes, root)
    if text is not None:
        raise TransportError(text, errno.ENOMEM)
    for name, needed, what in (
        ("max_mr_size", nbytes, "bytes in one registration"),
        ("max_qp_wr", max(depth, receives), "requests in a queue"),
        ("max_cqe", depth + receives, "completions in a queue"),
    ):
        if limits[name] < needed:
            raise TransportError(f"{device} allows {limits[name]} {what}, {needed} are needed")


def explain_failure(device: str, error: OSError, nbytes: int) -> TransportError:
    """Returns the typed error for what a device refused."""
    text = f"{device}: {error.args[-1] if error.args else error}"
    if error.errno == errno.ENOMEM:
        # the limit counts what the kernel has pinned for us, which may be more than it tells
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        text += (
            f"; needed are {format_kib(nbytes)} besides the queues, RLIMIT_MEMLOCK is "
            f"{format_kib(soft)} (hard limit {format_kib(hard)}): {_MEMLOCK_FIX}, or lower what "
            "other processes have registered on this device"
        )
    elif error.errno in (errno.EACCES, errno.EPERM):
        text += "; this user may not open /dev/infiniband/uverbs*: join its group, or run as root"
    elif error.errno in (errno.ENODEV, errno.ENOENT, errno.ENOSYS):
        text += "; in a container, pass /dev/infiniband through"
    return TransportError(text, error.errno)
