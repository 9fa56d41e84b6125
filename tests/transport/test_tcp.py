"""Connecting: what goes wrong is named, and nothing waits longer than it was told to."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from fastdecode_rdma.errors import RemoteProtocolError, TransportError, TransportTimeout
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.tcp import dial, widen_buffers
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def blocking(sock, timeout_s):
    conn = Connection(m.Role.ENGINE, now_s=time.monotonic())
    return BlockingConnection(sock, conn, peer="tcp://peer:1", timeout_s=timeout_s)


def test_refused_connection_names_address_and_reason(listener):
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(TransportError, match=f"tcp://127.0.0.1:{port}: .*refused") as caught:
        dial(Address("127.0.0.1", port), 1.0)
    assert caught.value.errno


def test_unknown_host_is_one_line():
    with pytest.raises(TransportError, match=r"no-such-host\.invalid") as caught:
        dial(Address("no-such-host.invalid", 1), 1.0)
    assert "\n" not in str(caught.value)


def test_no_delay_and_user_timeout_are_set(listener):
    with dial(Address(*listener.getsockname()), 1.0) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_buffers_beyond_the_systems_limit_leave_its_tuning_alone(listener):
    with dial(Address(*listener.getsockname()), 1.0) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        widen_buffers(sock, 1 << 39)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
        widen_buffers(sock, 64 << 10)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 128 << 10  # linux doubles


def test_a_silent_peer_costs_the_timeout_and_no_more(listener):
    with dial(Address(*listener.getsockname()), 1.0) as sock:
        link = blocking(sock, 0.2)
        start = time.monotonic()
        link.send(link.conn.hello(bytes(32)))
        with pytest.raises(TransportTimeout, match=r"no answer within 0\.2 s"):
            link.receive(m.Hello)
        assert time.monotonic() - start < 1.0


def test_a_dripping_peer_does_not_stretch_the_timeout(listener):
    with dial(Address(*listener.getsockname()), 1.0) as sock:
        peer, _ = listener.accept()
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                peer.send(b"\0")

        thread = threading.Thread(target=drip)
        thread.start()
        link = blocking(sock, 0.3)
        link.send(link.conn.hello(bytes(32)))
        start = time.monotonic()
        with pytest.raises((TransportTimeout, RemoteProtocolError)):
            link.receive(m.Hello)
        assert time.monotonic() - start < 1.5
        stop.set()
        thread.join()
        peer.close()


def test_noise_and_hang_up_are_typed(listener):
    for data, error in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", RemoteProtocolError),
        (b"", TransportError),
    ):
        with dial(Address(*listener.getsockname()), 1.0) as sock:
            peer, _ = listener.accept()
            link = blocking(sock, 2.0)
            link.send(link.conn.hello(bytes(32)))
            peer.recv(1000)
            peer.sendall(data)
            peer.close()
            with pytest.raises(error):
                link.receive(m.Hello)
