"""What a worker does about its memory before it serves: NUMA nodes, pages, first touch."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastdecode_rdma import numa
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker import limits
from fastdecode_rdma.worker.attention import MAX_NODES
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.touch import touch_memory

ENOUGH = 0.95
"""Part of the memory on huge pages that is as good as all."""


def find_nodes(num_threads: int) -> tuple[tuple[numa.Node, ...], str]:
    """Returns the NUMA nodes that a worker of that many threads spreads over, and a line that names
    them; nothing when there is one.

    Raises:
        ConfigError: FASTDECODE_NUMA_NODES cannot be.
    """
    nodes = numa.find_nodes()
    if len(nodes) < 2:
        return (), ""
    if len(nodes) > min(num_threads, MAX_NODES):
        return (), f"nodes 1: {len(nodes)} NUMA nodes are too many for {num_threads} threads"
    names = "; ".join(numa.format_cpus(node.cpus) for node in nodes)
    return nodes, f"nodes {len(nodes)}: memory and threads of each NUMA node, CPUs {names}"


def reason_not_to_touch(nbytes: int, *, touch: bool | None, is_named: bool) -> str:
    """Returns why a worker does not touch its memory at the start; "" when it does.

    Memory that was named (--memory) is the worker's, so it takes it. A default is a limit: the rest
    of the machine keeps its memory until sequences need it. `touch` is the user's own word on it.

    Raises:
        ConfigError: it was asked to touch more than is free.
    """
    if touch is None and not is_named:
        return "taken when needed; pass --memory or --touch to take all now"
    if touch is False:
        return "taken when needed"
    if limits.free_huge_bytes() >= nbytes:  # set aside already: this takes nobody's memory
        return ""
    try:
        free = limits.free_memory()
    except ConfigError as exc:
        return "" if touch else f"taken when needed: {exc}"
    account = f"{free.reason} is {limits.format_memory(free.value)}"
    if touch and nbytes > free.value:
        raise ConfigError(
            f"cannot touch {limits.format_memory(nbytes)}: {account}; lower --memory or drop "
            "--touch"
        )
    if touch or nbytes <= free.value * limits.MEMORY_SHARE:
        return ""
    return f"taken when needed, as {account}"


def _shortage(budget: MemoryBudget) -> str:
    """Words for a system that had asked-for huge pages only for a part of the memory."""
    huge = limits.transparent_bytes()
    wanted = sum(pool.other_bytes for pool in budget.pools)
    if huge is None or huge >= wanted * ENOUGH or not limits.has_transparent_huge_pages():
        return ""
    return f"; the system had 2MiB pages for {huge / wanted:.0%} of it"


def prepare_memory(
    budget: MemoryBudget,
    num_threads: int,
    *,
    touch: bool | None,
    is_named: bool,
    is_stopped: Callable[[], bool],
) -> str:
    """Touches a worker's memory if it should; returns a line that says what pages it lies on.

    Raises:
        ConfigError: the system does not have the memory.
    """
    state = reason_not_to_touch(budget.limit_bytes, touch=touch, is_named=is_named)
    if not state:
        started_s = time.monotonic()
        touch_memory(budget, num_threads, is_stopped=is_stopped)
        took_s = time.monotonic() - started_s
        state = f"{limits.format_memory(budget.mapped_bytes)} touched in {took_s:.1f} s"
        state += _shortage(budget)
    return f"pages {budget.page_kind()}: {state}"
