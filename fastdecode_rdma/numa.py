"""NUMA nodes that this process may use: their CPUs and their share of the memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode_rdma.errors import ConfigError

NODES_VARIABLE = "FASTDECODE_NUMA_NODES"
"""Overrides what is found: `off`, or the CPUs of each node, such as `0-15;16-31`."""


@dataclass(frozen=True)
class Node:
    """CPUs and the memory next to them. `number` is the system's; `share` of all nodes' memory."""

    number: int
    cpus: tuple[int, ...]
    share: float = 1.0


def parse_cpus(text: str) -> tuple[int, ...]:
    """Returns the numbers in a list like `0-3,8`, in order.

    Raises:
        ConfigError: it is no such list.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise ConfigError(f"cannot read {text!r} as CPU numbers; expected a list like 0-3,8")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(numbers))


def format_cpus(cpus: Sequence[int]) -> str:
    """Returns numbers in order as a list like `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # this kernel does not have it: no NUMA to speak of
        return ""


def _allowed_memory(root: Path) -> set[int] | None:
    for line in _read(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return set(parse_cpus(value))
    return None


def _memory_bytes(folder: Path) -> int:
    for line in _read(folder / "meminfo").splitlines():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def find_nodes(
    root: Path = Path("/"),
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Node, ...]:
    """Returns the nodes that have both memory and CPUs for this process; empty when unknown.

    Only the CPUs in the affinity mask and the memory in the cpuset count. A node that has no CPU
    here is left out, and CPUs without memory of their own belong to the first node.

    Raises:
        ConfigError: FASTDECODE_NUMA_NODES cannot be.
    """
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    memory = _allowed_memory(root)
    found: list[tuple[int, set[int], int]] = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        number = int(folder.name.removeprefix("node"))
        cpus = allowed.intersection(parse_cpus(_read(folder / "cpulist")))
        nbytes = _memory_bytes(folder)
        if cpus and nbytes and (memory is None or number in memory):
            found.append((number, cpus, nbytes))
    found.sort()
    chosen = environ.get(NODES_VARIABLE, "")
    if chosen == "off":
        return ()
    if chosen:
        return _chosen(chosen, allowed, [(number, cpus) for number, cpus, _ in found])
    if not found:
        return ()
    found[0][1].update(allowed.difference(*(cpus for _, cpus, _ in found)))
    total = sum(nbytes for _, _, nbytes in found)
    return tuple(Node(number, tuple(sorted(cpus)), n / total) for number, cpus, n in found)


def _chosen(
    text: str, allowed: set[int], found: Sequence[tuple[int, set[int]]]
) -> tuple[Node, ...]:
    """The nodes that FASTDECODE_NUMA_NODES names, each with the number of the real one it is in."""
    lists = [parse_cpus(part) for part in text.split(";")]
    named = [cpu for cpus in lists for cpu in cpus]
    if not all(lists) or len(set(named)) < len(named) or not allowed.issuperset(named):
        raise ConfigError(
            f"{NODES_VARIABLE}={text!r}: expected `off` or lists of different CPUs, one per node, "
            f"among {format_cpus(sorted(allowed))}, such as 0-3;4-7"
        )
    return tuple(
        Node(
            next((number for number, known in found if cpus[0] in known), 0),
            cpus,
            1 / len(lists),
        )
        for cpus in lists
    )


def helper_nodes(nodes: Sequence[Node], count: int) -> list[int]:
    """Returns the node (an index) of each of `count` threads so that any first few of them spread
    over the nodes as their CPUs do; the first thread is on the first node."""
    given = [0] * len(nodes)
    order = []
    for _ in range(count):
        least = min(range(len(nodes)), key=lambda i: (given[i] / len(nodes[i].cpus), i))
        given[least] += 1
        order.append(least)
    return order
