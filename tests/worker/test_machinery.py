"""What a worker's process decides when a data plane is opened."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from fastdecode_rdma.transport.same_host import is_from_here
from fastdecode_rdma.worker import machinery


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@pytest.mark.parametrize(
    ("is_here", "plane", "calls"),
    [
        (True, None, [0]),  # tcp on one machine: the same cores, most likely
        (True, SimpleNamespace(spin_ns=0), [0]),  # shm, masks that overlap
        (True, SimpleNamespace(spin_ns=20_000), []),  # shm, cores of its own
        (False, None, []),
    ],
)
def test_helpers_do_not_spin_where_the_engine_needs_the_cores(monkeypatch, is_here, plane, calls):
    found: list[int] = []
    monkeypatch.setattr(machinery, "DataPlane", lambda *args: args)
    monkeypatch.setattr(machinery, "is_from_here", lambda fd: is_here)
    monkeypatch.setattr(machinery, "_team", SimpleNamespace(set_spin_ns=found.append))
    machinery.open_data_plane(3, 1, None, object(), plane)
    assert found == calls


def test_who_is_on_this_machine(monkeypatch):
    ours, theirs = tcp_pair()
    assert is_from_here(ours.fileno()) and is_from_here(theirs.fileno())
    theirs.close()
    one, other = socket.socketpair()
    assert is_from_here(one.fileno())
    monkeypatch.setattr(socket.socket, "getpeername", lambda self: ("192.0.2.7", 1), raising=False)
    assert not is_from_here(ours.fileno())
    for sock in (ours, one, other):
        sock.close()
