"""How a worker is reached: the plane that an address demands or leaves open, and what it owes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.errors import (
    ConfigError,
    RemoteProtocolError,
    TransportError,
    WorkerLostError,
)
from fastdecode_rdma.transport import rdma_transport, same_host, shm
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import PlaneUnavailable, plan_slots
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.connected import prove_data_socket
from fastdecode_rdma.transport.rdma_ports import Port
from fastdecode_rdma.transport.tcp import dial
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection

TOKEN = b"t" * 32


def over(plane: str, url: str) -> str:
    """The same worker by another way; auto: by whichever is best."""
    place = url.removeprefix("tcp://")
    return place if plane == "auto" else f"{plane}://{place}"


def drained(served) -> bool:
    deadline = time.monotonic() + 2
    while served.budget.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return served.budget.used_bytes == 0


@pytest.mark.parametrize("plane", ["shm", "auto"])
def test_shared_memory_gives_the_same_bits_as_embedded(connect, serve, plane):
    embedded = connect()
    served = serve(token=TOKEN)
    remote = connect([over(plane, served.url), serve(token=TOKEN).url], token=TOKEN)
    handles = [1, 2, 3, 4, 5, 6, 7]
    for position in range(10):
        expected = embedded.run([(0, handles)], position)
        got = remote.run([(0, handles[0::2]), (1, handles[1::2])], position)
        assert got.keys() == expected.keys()
        for key, row in got.items():
            np.testing.assert_array_equal(row, expected[key], err_msg=str(key))
    first, second = remote.backend.infos()
    assert (first.transport, second.transport) == ("shm", "tcp")  # a mixed pool
    assert (first.fallback_reason, second.fallback_reason) == ("", "")
    assert first.name == over(plane, served.url)
    remote.backend.close()
    remote.backend.close()
    assert drained(served)


def test_k_v_and_cold_frames_pass_shared_memory(connect, serve):
    driver, embedded = connect([over("shm", serve().url)]), connect()
    for each in (driver, embedded):
        each.run([(0, [1, 2])], 0)
        data = each.backend.export_range(0, 1, 0, 1)
        each.backend.fork(0, 1, 9, 1)
        each.backend.import_range(0, 5, 0, data)
        each.backend.free(0, [2])
    expected = embedded.run([(0, [1, 5, 9])], 1)
    for key, row in driver.run([(0, [1, 5, 9])], 1).items():
        np.testing.assert_array_equal(row, expected[key])


def test_another_machine_is_an_error_or_a_reason(connect, serve, new_geometry, monkeypatch):
    served = serve()
    monkeypatch.setattr(shm, "boot_id", lambda: b"0" * 36)
    with pytest.raises(PlaneUnavailable, match=f"^{over('shm', served.url)}: .*another machine"):
        open_sessions([over("shm", served.url)], new_geometry())
    driver = connect([over("auto", served.url)])
    info = driver.backend.info(0)
    assert (
        info.transport != "shm" and "shm: the worker is on another machine" in info.fallback_reason
    )
    driver.run([(0, [1])], 0)
    assert isinstance(PlaneUnavailable("x"), TransportError)


BROKEN = {
    "no socket": ("connect", "another network namespace"),
    "another user": ("uid", "only as the same user"),
    "no memory": ("memory", "no shared memory"),
    "refused segment": ("segment", "bytes where"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plane_that_cannot_be_set_up(connect, serve, new_geometry, monkeypatch, caplog, name):
    """shm:// says why and goes nowhere else; without a scheme one warning tells, and it goes on."""
    how, words = BROKEN[name]
    served = serve()
    if how == "connect":
        host = served.server.hosts["shm"]
        offer = host.offer()
        monkeypatch.setattr(host, "offer", lambda: offer + b"not there")
    elif how == "uid":
        monkeypatch.setattr(shm, "peer_of", lambda sock: (1, os.geteuid() + 1))
    elif how == "memory":

        def refuse(nbytes: int) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shm, "make_segment", refuse)
    else:
        real = shm.make_segment
        monkeypatch.setattr(shm, "ShmPlane", lambda *args, **options: None)
        monkeypatch.setattr(shm, "make_segment", lambda nbytes: real(nbytes + 4096))
    with pytest.raises(PlaneUnavailable, match=words) as caught:
        open_sessions([over("shm", served.url)], new_geometry())
    assert "\n" not in str(caught.value) and over("shm", served.url) in str(caught.value)
    assert drained(served)
    with caplog.at_level(logging.WARNING):
        driver = connect([over("auto", served.url)])
    driver.run([(0, [1])], 0)
    info = driver.backend.info(0)
    assert info.transport != "shm" and words in info.fallback_reason
    warnings = [record.message for record in caplog.records if "goes on over" in record.message]
    assert warnings and words in warnings[0]
    assert "`fastdecode doctor` says what is here and what is missing" in warnings[0]


@pytest.mark.parametrize("has_rdma", [True, False])
def test_rdma_that_cannot_be_used_is_one_warning_where_there_is_any(
    connect, serve, monkeypatch, caplog, has_rdma
):
    monkeypatch.setattr(shm.ShmTransport, "why_not", lambda *_: "another machine")
    port = Port("mlx5_0", 1, "Ethernet", "DOWN", 100)
    ports = [port] if has_rdma else []
    monkeypatch.setattr(rdma_transport, "read_ports", lambda *_, **__: ports)
    served = serve()
    with caplog.at_level(logging.INFO):
        info = connect([over("auto", served.url)]).backend.info(0)
    assert info.transport == "tcp" and "rdma: this machine has no usable" in info.fallback_reason
    said = [record for record in caplog.records if "goes on over tcp" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING if has_rdma else logging.INFO]
    assert "`fastdecode doctor`" in said[0].message
    assert not has_rdma or "DOWN" in said[0].message


def test_one_worker_is_one_worker_whatever_the_way(serve, new_geometry):
    url = serve().url
    for plane in ("shm", "auto"):
        with pytest.raises(ConfigError, match="given twice"):
            open_sessions([url, over(plane, url)], new_geometry())


def test_a_worker_without_unix_sockets_is_reached_by_tcp(connect, serve, new_geometry, monkeypatch):
    def refuse(self: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("fastdecode_rdma.transport.shm_host.ShmHost.__init__", refuse)
    served = serve()
    with pytest.raises(PlaneUnavailable, match="does not offer it"):
        open_sessions([over("shm", served.url)], new_geometry())
    info = connect([over("auto", served.url)]).backend.info(0)
    assert info.transport != "shm" and "shm: the worker does not offer it" in info.fallback_reason


@pytest.mark.parametrize(("option", "expected"), [("?spin_us=20", 20_000), ("?spin_us=0", 0)])
def test_the_address_says_how_long_to_spin(connect, serve, monkeypatch, option, expected):
    planes = []
    real = shm.ShmPlane

    def keep(*args, **options):
        planes.append(real(*args, **options))
        return planes[-1]

    monkeypatch.setattr(shm, "ShmPlane", keep)
    monkeypatch.setattr("fastdecode_rdma.transport.shm_host.ShmPlane", keep)
    driver = connect([over("shm", serve().url) + option])
    driver.run([(0, [1])], 0)
    assert [plane.spin_ns for plane in planes] == [expected] * 2


def test_sides_on_the_same_cores_sleep(connect, serve, monkeypatch):
    spins = []
    real = same_host.spin_ns

    def decide(ours: bytes, theirs: bytes) -> int:
        assert ours == theirs == same_host.cpu_mask()  # one process plays both
        spins.append(real(ours, theirs))
        return spins[-1]

    monkeypatch.setattr("fastdecode_rdma.transport.shm_host.spin_ns", decide)
    connect([over("shm", serve().url)]).run([(0, [1])], 0)
    assert spins == [0]


# -- loss


def test_killed_and_stopped_workers_are_lost_in_time(connect, spawn):
    """kill -9 in the middle of a step at once, SIGSTOP by its silence; the third goes on."""
    workers = [spawn() for _ in range(3)]
    driver, other = connect([over("shm", worker.url) for worker in workers]), connect()
    assert {info.transport for info in driver.backend.infos()} == {"shm"}
    handles = [1, 2, 3]
    for position in range(3):
        other.run([(0, handles)], position)
        driver.run([(0, [1]), (1, [2]), (2, [3])], position)
    timer = threading.Timer(0.05, workers[1].kill)
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        while time.monotonic() - start < 10:
            driver.run([(0, [1]), (1, [2]), (2, [3])], 3)
    assert caught.value.worker_index == 1 and time.monotonic() - start < 2.0
    timer.join()
    workers[0].kill(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="no sign of life") as caught:
        driver.run([(0, [1]), (2, [3])], 3)
    assert caught.value.worker_index == 0 and 1.5 < time.monotonic() - start < 5.0
    expected = other.run([(0, handles)], 3)
    for key, row in driver.run([(2, [3])], 3).items():
        np.testing.assert_array_equal(row, expected[key])
    workers[0].kill(signal.SIGCONT)  # it wakes in a segment that is nobody's any more
    for key, row in driver.run([(2, [3])], 3).items():
        np.testing.assert_array_equal(row, expected[key])
    start = time.monotonic()
    driver.backend.close()
    assert time.monotonic() - start < 1.0


ENGINE = """
import sys, time
from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.config import AttentionGeometry, KVGroup
geometry = AttentionGeometry((KVGroup((0,), 1, 1, 8),), 1.0, "fp32", 4, 64)
workers = open_sessions([sys.argv[1]], geometry)
print(workers[0].info.transport, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_freezes_leaves_no_memory_behind(serve, tmp_path, number):
    served = serve()
    command = [sys.executable, "-c", ENGINE, over("shm", served.url)]
    engine = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert engine.stdout.readline() == b"shm\n"
        assert served.budget.used_bytes > 0
        engine.send_signal(number)
        deadline = time.monotonic() + (1.0 if number == signal.SIGKILL else 4.0)
        while served.budget.used_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


def test_a_worker_that_comes_back_is_reached_by_shared_memory_again(connect, serve):
    served = serve()
    driver = connect([over("auto", served.url)])
    for _ in range(5):
        driver.run([(0, [1])], 0)
        driver.backend.give_up(0, "for a test")
        (link,) = open_sessions([over("auto", served.url)], driver.geometry)
        assert driver.backend.add_worker(link) == 0
    assert driver.backend.info(0).transport == "shm"
    driver.run([(0, [1])], 0)


# -- who comes by which way


def opened(served, plane: str, geometry) -> tuple[socket.socket, Connection, m.SessionOpened]:
    """A session that was asked for by hand, without its data socket."""
    address = Address(*served.server.address)
    sock = dial(address, 5.0)
    conn = Connection(m.Role.ENGINE, now_s=time.monotonic(), token=TOKEN)
    link = BlockingConnection(sock, conn, peer=str(address), timeout_s=5.0)
    link.send(conn.hello(os.urandom(32)))
    link.receive(m.Hello)
    link.send(conn.proof())
    link.receive(m.Auth)
    link.send(m.OpenSession(geometry, plan_slots(geometry), transport=plane))
    return sock, conn, link.receive(m.SessionOpened)


def unix_socket(served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5.0)
    sock.connect(b"\0" + served.server.hosts["shm"].offer()[36:])
    return sock


def data_link(sock: socket.socket) -> BlockingConnection:
    conn = Connection(m.Role.ENGINE, now_s=time.monotonic())
    return BlockingConnection(sock, conn, peer="worker", timeout_s=5.0)


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_a_data_socket_that_comes_the_wrong_way_is_refused(serve, new_geometry, plane):
    served = serve(token=TOKEN)
    control, conn, session = opened(served, plane, new_geometry())
    wrong = unix_socket(served) if plane == "tcp" else dial(Address(*served.server.address), 5.0)
    with control, wrong, pytest.raises(RemoteProtocolError, match="came the wrong way"):
        prove_data_socket(data_link(wrong), session, conn.session_key)
    assert drained(served)


@pytest.mark.parametrize("key", ["none", "other"])
def test_a_segment_needs_the_proof_of_the_session(serve, new_geometry, key):
    served = serve(token=TOKEN)
    before = len(os.listdir("/proc/self/fd"))
    control, _, session = opened(served, "shm", new_geometry())
    segment = shm.make_segment(4096)
    with control, unix_socket(served) as sock:
        forged = {"none": b"", "other": b"k" * 32}[key]
        with pytest.raises(RemoteProtocolError, match="does not belong to the engine"):
            prove_data_socket(data_link(sock), session, forged, details=b"x", fds=(segment,))
    os.close(segment)
    assert drained(served)
    deadline = time.monotonic() + 2
    while len(os.listdir("/proc/self/fd")) > before:  # of our worker, too
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_unix_socket_takes_no_control_connection(serve):
    served = serve(token=TOKEN)
    with unix_socket(served) as sock:
        conn = Connection(m.Role.ENGINE, now_s=time.monotonic(), token=TOKEN)
        link = BlockingConnection(sock, conn, peer="worker", timeout_s=5.0)
        link.send(conn.hello(os.urandom(32)))
        with pytest.raises(RemoteProtocolError, match="data planes only"):
            link.receive(m.Hello)


def test_half_open_unix_connections_hold_up_nobody(serve, new_geometry, connect):
    served = serve(max_handshakes=8)
    idle = [unix_socket(served) for _ in range(20)]
    try:
        for sock in idle[:12]:  # the oldest had to go
            assert sock.recv(1) == b""
        connect([over("shm", served.url)]).run([(0, [1])], 0)
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("field", ["details", "mac"])
def test_what_is_changed_in_the_answer_is_noticed(serve, new_geometry, monkeypatch, field):
    """The worker's end of the plane is under its proof, as the engine's is."""
    served = serve(token=TOKEN)
    real = BlockingConnection.receive

    def receive(self, kind):
        event = real(self, kind)
        if kind is m.DataAccepted:
            setattr(event, field, bytes(len(getattr(event, field)) - 1) + b"\1")
        return event

    monkeypatch.setattr(BlockingConnection, "receive", receive)
    with pytest.raises(RemoteProtocolError, match="ended at another worker"):
        open_sessions([over("shm", served.url)], new_geometry(), token=TOKEN)
    assert drained(served)


TCP_ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if "verbs" in name or name.startswith("fastdecode_rdma.transport.rdma_b"):
            raise AssertionError(f"{name} was asked for")

sys.meta_path.insert(0, Refuse())
from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.config import AttentionGeometry, KVGroup

geometry = AttentionGeometry((KVGroup((0,), 4, 2, 16),), 0.25, "fp32", 4, 64)
backend = AttentionBackend(open_sessions(sys.argv[1:], geometry), geometry, timeout_s=20.0)
print(backend.info(0).transport)
backend.close()
"""


def test_tcp_asks_for_no_verbs(spawn):
    """Neither a binding nor the compiled queue pairs are looked for."""
    command = [sys.executable, "-c", TCP_ALONE, spawn().url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "tcp", done.stderr
