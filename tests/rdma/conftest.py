"""Tests on real verbs. They need an RDMA device: `tests/rdma_vm/run` brings one (Soft-RoCE in a
virtual machine). Nothing here imports torch: in the emulated guest that takes minutes."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fastdecode_rdma.transport.rdma_bindings import Binding, find_binding
from fastdecode_rdma.transport.rdma_endpoint import Endpoint
from fastdecode_rdma.transport.rdma_ports import read_ports
from fastdecode_rdma.transport.rdma_select import Pair, choose, usable_ports
from fastdecode_rdma.transport.rdma_wish import Wish

IN_GUEST = "RDMA_VM_NODE" in os.environ


def _fixtures_of(folder: str) -> ModuleType:
    """The fixtures of another folder of tests, loaded by path: these folders are no packages."""
    path = Path(__file__).resolve().parents[1] / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"rdma_{folder}_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_transport, _attention = _fixtures_of("transport"), _fixtures_of("attention")
make_rig, new_geometry = _transport.make_rig, _transport.new_geometry
serve, connect = _attention.serve, _attention.connect


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent
    device = any(port.fault() is None for port in read_ports())
    nodes = int(os.environ.get("RDMA_VM_NODES", 1))
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.rdma)
        if not device and not IN_GUEST:  # in a guest its absence is a failure
            reason = "no usable RDMA device here; run tests/rdma_vm/run"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif (nodes == 2) != ("two_guests" in item.path.name) and IN_GUEST:
            item.add_marker(pytest.mark.skip(reason=f"not for {nodes} guests"))
        elif "two_guests" in item.path.name and not IN_GUEST:
            item.add_marker(pytest.mark.skip(reason="run tests/rdma_vm/run --two"))


@pytest.fixture
def pair() -> Pair:
    """The best pair of ports of this machine with itself."""
    ports = usable_ports(read_ports(), Wish())
    return choose(ports, ports).pairs[0]


@pytest.fixture(params=["native", "pyverbs", "ibverbs"])
def binding(request: pytest.FixtureRequest) -> Binding:
    return find_binding({"FASTDECODE_VERBS": request.param})


@pytest.fixture
def make_endpoints(pair: Pair) -> Iterator[Callable[..., tuple[Endpoint, Endpoint]]]:
    """Two endpoints on this machine, connected to each other and tried out."""
    made: list[Endpoint] = []

    def make(
        ours: Binding, theirs: Binding, *, wish: Wish | None = None, connect: bool = True
    ) -> tuple[Endpoint, Endpoint]:
        wish = wish or Wish()
        first = Endpoint(pair.local, pair.local_gid, ours)
        made.append(first)
        second = Endpoint(pair.remote, pair.remote_gid, theirs)
        made.append(second)
        if connect:
            first.connect(second.offer(), pair.remote, pair.remote_gid, wish)
            second.connect(first.offer(), pair.local, pair.local_gid, wish)
            first.ping(20.0)
        return first, second

    yield make
    gc.collect()  # planes that the frames of an error still hold
    for endpoint in made:
        endpoint.close()
