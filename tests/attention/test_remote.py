"""Remote workers: the same bits as embedded, and every kind of loss within its bound."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.errors import (
    ConfigError,
    RemoteProtocolError,
    TransportError,
    WorkerLostError,
)


def spread(handles, num_workers):
    return [(worker, handles[worker::num_workers]) for worker in range(num_workers)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_bit_identical_to_embedded(connect, serve, num_workers):
    embedded = connect()
    remote = connect([serve().url for _ in range(num_workers)])
    handles = [1, 2, 3, 4, 5, 6, 7]
    for position in range(10):
        expected = embedded.run([(0, handles)], position)
        got = remote.run(spread(handles, num_workers), position)
        assert got.keys() == expected.keys()
        for key, row in got.items():
            np.testing.assert_array_equal(row, expected[key], err_msg=str(key))
    stats = remote.backend.stats()
    assert all(worker["kernel_ns"] > 0 and worker["pump_ns"] > 0 for worker in stats)


def test_info_says_what_the_worker_is(connect, serve):
    served = serve()
    info = connect([served.url]).backend.info(0)
    assert (info.name, info.transport, info.alive) == (served.url, "tcp", True)
    assert info.num_threads == 1 and info.block_tokens == 64
    assert 0 < info.capacity_bytes < 64 << 20  # row buffers are paid from it too


def test_memory_is_free_after_close(connect, serve):
    served = serve()
    driver = connect([served.url])
    driver.run([(0, [1, 2])], 0)
    assert served.budget.used_bytes > 0
    driver.backend.close()
    deadline = time.monotonic() + 2
    while served.budget.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.budget.used_bytes == 0


def test_wrong_token_address_and_port_are_one_line(serve, new_geometry):
    served = serve(token=b"t" * 32)
    with pytest.raises(RemoteProtocolError, match="token"):
        open_sessions([served.url], new_geometry(), token=b"x" * 32)
    with pytest.raises(RemoteProtocolError, match="token"):
        open_sessions([served.url], new_geometry())
    with pytest.raises(ConfigError, match="given twice"):
        open_sessions([served.url, served.url.removeprefix("tcp://")], new_geometry())
    for worker in open_sessions([served.url], new_geometry(), token=b"t" * 32):
        worker.close()
        worker.close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransportError, match=f"127.0.0.1:{port}"):
        open_sessions([served.url, f"127.0.0.1:{port}"], new_geometry(), token=b"t" * 32)
    assert served.budget.used_bytes == 0 or _drained(served)


def _drained(served):
    deadline = time.monotonic() + 2
    while served.budget.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return served.budget.used_bytes == 0


def test_a_session_survives_an_engine_that_computes_for_long_and_one_without_a_backend(
    connect, serve, new_geometry
):
    driver, served = connect([serve().url]), serve()
    driver.run([(0, [1])], 0)
    (worker,) = open_sessions([served.url], new_geometry())
    time.sleep(2.6)  # longer than the silence that counts as death
    assert served.server.status().num_sessions == 1
    worker.close()
    assert driver.backend.info(0).alive
    outputs = driver.run([(0, [1])], 1)
    assert len(outputs) == driver.geometry.num_layers
    assert all(np.isfinite(row).all() and row.any() for row in outputs.values())


def test_a_worker_that_comes_and_goes_keeps_its_number(connect, serve):
    served, other = serve(), serve()
    driver = connect([served.url, other.url])
    backend, open_files = driver.backend, Path("/proc/self/fd")
    bytes_sent = num_files = 0
    for number in range(40):
        driver.run([(0, [1]), (1, [2])], 0)
        counted = backend.stats()[0]
        assert counted["bytes_sent"] > bytes_sent
        bytes_sent = counted["bytes_sent"]
        told_late = backend._workers[0]._control._on_lost
        backend.give_up(0, "for a test")
        assert not backend.info(0).alive and backend.info(1).alive
        (link,) = open_sessions([served.url], driver.geometry)
        assert backend.add_worker(link) == 0
        told_late("news of the session before")
        assert backend.info(0).alive and backend.num_workers == 2
        after = backend.stats()[0]
        for name in ("messages", "bytes_sent", "bytes_received", "kernel_ns", "io_ns", "wait_ns"):
            assert after[name] == counted[name], name
        if number == 2:
            num_files = len(list(open_files.iterdir()))
    assert backend._pump.num_ports == 2
    # the worker is a thread of this process: its side of an old session may take a moment
    deadline = time.monotonic() + 5
    while len(list(open_files.iterdir())) > num_files + 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.run([(0, [1]), (1, [2])], 0)


def test_killed_worker_is_named_and_the_step_repeats_on_the_others(connect, spawn):
    workers = [spawn() for _ in range(3)]
    driver, other = connect([worker.url for worker in workers]), connect()
    handles = [1, 2, 3, 4, 5, 6]
    for position in range(3):
        other.run([(0, handles)], position)
        driver.run(spread(handles, 3), position)
    timer = threading.Timer(0.05, workers[1].kill)
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        while time.monotonic() - start < 10:
            driver.run(spread(handles, 3), 3)  # the same position again and again
    timer.join()
    assert caught.value.worker_index == 1
    assert [info.alive for info in driver.backend.infos()] == [True, False, True]
    with pytest.raises(WorkerLostError):
        driver.backend.free(1, [2])
    left = [(0, [1, 4]), (2, [3, 6])]
    expected = other.run([(0, handles)], 3)
    for key, row in driver.run(left, 3).items():
        np.testing.assert_array_equal(row, expected[key])
    start = time.monotonic()
    driver.backend.close()
    assert time.monotonic() - start < 1.0


def test_stopped_worker_is_lost_by_its_silence(connect, spawn):
    worker = spawn()
    driver = connect([worker.url])
    driver.run([(0, [1])], 0)
    worker.kill(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="no sign of life"):
        driver.run([(0, [1])], 1)
    assert 1.5 < time.monotonic() - start < 5.0
    start = time.monotonic()
    driver.backend.close()
    assert time.monotonic() - start < 1.0


def test_worker_lost_while_nobody_waits_is_known_at_the_next_call(connect, spawn):
    worker = spawn()
    driver = connect([worker.url])
    worker.kill()
    worker.process.wait()
    deadline = time.monotonic() + 3
    while driver.backend.info(0).alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not driver.backend.info(0).alive
    with pytest.raises(WorkerLostError):
        driver.run([(0, [1])], 0)


def test_a_late_worker_stays_lost(connect, serve, monkeypatch):
    driver = connect([serve().url], timeout_s=0.2)
    monkeypatch.setattr(
        "fastdecode_rdma.worker.session.AttentionSession.begin_step",
        lambda self, table, step, entries: time.sleep(0.8),
    )
    with pytest.raises(WorkerLostError, match=r"did not answer within 0\.2 s"):
        driver.run([(0, [1])], 0)
    with pytest.raises(WorkerLostError):
        driver.run([(0, [1])], 0)


def test_no_half_open_sessions_when_the_data_socket_is_refused(serve, new_geometry, monkeypatch):
    served = serve()

    def refuse(*args, **options):
        raise TransportError("no data socket today")

    monkeypatch.setattr("fastdecode_rdma.attention.remote.open_transport", refuse)
    with pytest.raises(TransportError, match="today"):
        open_sessions([served.url], new_geometry())
    assert _drained(served)
