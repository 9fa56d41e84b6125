"""NUMA nodes as a system's files tell them, cut to what the process may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_rdma import numa
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.numa import Node

MakeRoot = Callable[..., Path]


@pytest.fixture
def make_root(tmp_path: Path) -> MakeRoot:
    def make(nodes: dict[int, tuple[str, int]], mems: str | None = None) -> Path:
        """`nodes`: number -> (its CPUs, its memory in kB)."""
        for number, (cpus, kilobytes) in nodes.items():
            folder = tmp_path / f"sys/devices/system/node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cpus + "\n")
            (folder / "meminfo").write_text(
                f"Node {number} MemTotal:    {kilobytes} kB\nNode {number} MemFree: 7 kB\n"
            )
        if mems is not None:
            (tmp_path / "proc/self").mkdir(parents=True)
            (tmp_path / "proc/self/status").write_text(f"Name: x\nMems_allowed_list:\t{mems}\n")
        return tmp_path

    return make


def find(root: Path, affinity: range, **environ: str) -> tuple[Node, ...]:
    return numa.find_nodes(root, affinity, environ)


def test_nodes_have_their_cpus_and_their_share(make_root: MakeRoot) -> None:
    root = make_root({0: ("0-1,4-5", 300), 1: ("2-3,6-7", 100)}, mems="0-1")
    assert find(root, range(8)) == (Node(0, (0, 1, 4, 5), 0.75), Node(1, (2, 3, 6, 7), 0.25))


def test_only_cpus_in_the_mask_and_memory_in_the_cpuset_count(make_root: MakeRoot) -> None:
    root = make_root({n: (f"{4 * n}-{4 * n + 3}", 100) for n in range(12)}, mems="0,2,10-11")
    nodes = find(root, range(2, 44))
    assert [node.number for node in nodes] == [0, 2, 10]  # in order of numbers, not of names
    # CPUs whose own memory is not allowed belong to the first
    assert nodes[0].cpus == (2, 3, *range(4, 8), *range(12, 40))
    assert nodes[1].cpus == (8, 9, 10, 11)


def test_memory_without_cpus_and_cpus_without_memory(make_root: MakeRoot) -> None:
    root = make_root({0: ("0-1", 100), 1: ("2-3", 0), 2: ("", 900)})
    assert find(root, range(4)) == (Node(0, (0, 1, 2, 3), 1.0),)


def test_a_system_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert find(tmp_path, range(4)) == ()


def test_this_machine_is_covered() -> None:
    nodes = numa.find_nodes(environ={})
    assert {cpu for node in nodes for cpu in node.cpus} in (set(), os.sched_getaffinity(0))
    assert not nodes or abs(sum(node.share for node in nodes) - 1) < 1e-9


def test_a_variable_overrides_it(make_root: MakeRoot) -> None:
    root = make_root({0: ("0-3", 100), 1: ("4-7", 100)})
    assert find(root, range(8), FASTDECODE_NUMA_NODES="off") == ()
    chosen = find(root, range(8), FASTDECODE_NUMA_NODES="0-1;5,6")
    assert chosen == (Node(0, (0, 1), 0.5), Node(1, (5, 6), 0.5))


@pytest.mark.parametrize("text", ["0;0", "0;8", "0;", "0-1;1", "a", "on", "0,-1", "2-0"])
def test_what_it_cannot_be(make_root: MakeRoot, text: str) -> None:
    root = make_root({0: ("0-7", 100)})
    with pytest.raises(ConfigError, match="CPU"):
        find(root, range(8), FASTDECODE_NUMA_NODES=text)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_come_back(cpus: set[int]) -> None:
    assert numa.parse_cpus(numa.format_cpus(sorted(cpus))) == tuple(sorted(cpus))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_any_first_threads_spread_as_the_cpus_do(cpus: list[int], count: int) -> None:
    nodes = [Node(n, tuple(range(100 * n, 100 * n + k))) for n, k in enumerate(cpus)]
    order = numa.helper_nodes(nodes, count)
    assert len(order) == count and order[:1] in ([], [0])
    for part in range(count + 1):
        loads = [order[:part].count(n) / k for n, k in enumerate(cpus)]
        assert max(loads) - min(loads) <= 1 / min(cpus) + 1e-9
