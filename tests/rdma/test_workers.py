"""Attention workers reached over RDMA: real sessions, real rows, no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.errors import ConfigError, TransportError, WorkerLostError

HANDLES = [1, 2, 3]
GUEST_START_S = 240.0  # an emulated interpreter takes its time to import numpy


def over_rdma(served, options=""):
    return served.url.replace("tcp://", "rdma://") + options


@pytest.mark.parametrize("ours", ["native", "pyverbs", "ibverbs"])
def test_attention_is_the_embedded_workers_to_the_bit(serve, connect, monkeypatch, ours):
    monkeypatch.setenv("FASTDECODE_VERBS", ours)
    driver, embedded = connect([over_rdma(serve())]), connect()
    info = driver.backend.info(0)
    assert info.transport == "rdma"
    assert info.transport_detail.startswith("RDMA over rxe0:1 (RoCE v2, GID ")
    assert f"MTU 4096, {ours} queue pairs" in info.transport_detail
    for position in range(6):
        expected = embedded.run([(0, HANDLES)], position)
        for key, row in driver.run([(0, HANDLES)], position).items():
            np.testing.assert_array_equal(row, expected[key])
    counted = driver.backend.stats()[0]
    assert counted["bytes_sent"] > 6 * 3 * 4 * 32
    driver.backend.free(0, HANDLES)


def test_options_reach_the_queue_pair(serve, connect):
    options = f"?dev=rxe0&port=1&gid={os.environ.get('RDMA_VM_GID', 1)}&mtu=1024&tclass=8&sl=0"
    driver = connect([over_rdma(serve(), options)])
    detail = driver.backend.info(0).transport_detail
    assert "MTU 1024" in detail and "tclass 8, sl 0, timeout 14, retry 3" in detail
    driver.run([(0, HANDLES)], 0)


def test_a_mixed_pool(serve, connect):
    first, second = serve(), serve()
    driver, embedded = connect([over_rdma(first), second.url]), connect()
    assert [info.transport for info in driver.backend.infos()] == ["rdma", "tcp"]
    expected = embedded.run([(0, [1, 2])], 0)
    for key, row in driver.run([(0, [1]), (1, [2])], 0).items():
        np.testing.assert_array_equal(row, expected[key])


def test_a_named_device_is_strict(serve, connect):
    with pytest.raises(ConfigError, match=r"dev=mlx5_9: no device 'mlx5_9'; .* rxe0:1"):
        connect([over_rdma(serve(), "?dev=mlx5_9")])


def test_a_gid_without_an_address_is_refused_by_index(serve, connect):
    with pytest.raises(ConfigError, match="gid=77: no such usable port"):
        connect([over_rdma(serve(), "?gid=77")])


def test_a_worker_without_rdma_is_not_reached_otherwise(serve, connect, monkeypatch):
    monkeypatch.setattr("fastdecode_rdma.transport._HOSTS", {})
    served = serve()
    with pytest.raises(TransportError, match="the worker does not offer it"):
        connect([over_rdma(served)])


def test_sessions_leave_nothing_behind(serve, connect):
    served = serve()
    counts = []
    for _ in range(3):
        driver = connect([over_rdma(served)])
        driver.run([(0, HANDLES)], 0)
        driver.backend.close()
        deadline_s = time.monotonic() + 20
        while served.server.status().num_sessions and time.monotonic() < deadline_s:
            time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] <= counts[0] + 4  # the last connection's thread may still be leaving


# ---- a worker process that dies ----


@pytest.fixture(scope="module")
def start_worker(tmp_path_factory):
    running = []

    def start():
        ready = tmp_path_factory.mktemp("worker") / "ready"
        command = [sys.executable, "-m", "fastdecode_rdma.worker", "--listen", "127.0.0.1:0"]
        command += ["--memory", "64MiB", "--threads", "1", "--ready-file", str(ready)]
        process = subprocess.Popen(command, cwd=ready.parent, stdout=subprocess.DEVNULL)
        running.append(process)
        deadline_s = time.monotonic() + GUEST_START_S
        while not (ready.exists() and ready.read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        address = next(word for word in ready.read_text().split() if word.startswith("tcp://"))
        return process, address.replace("tcp://", "rdma://")

    yield start
    for process in running:
        process.kill()
        process.wait()


def lost_after(driver, process, number):
    """Sends a signal in the middle of steps; returns the error and the seconds until it came."""
    driver.run([(0, HANDLES)], 0)
    sent_s = []

    def strike() -> None:
        sent_s.append(time.monotonic())
        os.kill(process.pid, number)

    threading.Timer(0.3, strike).start()
    with pytest.raises(WorkerLostError) as caught:
        for _ in range(100_000):
            driver.run([(0, HANDLES)], 1)
    return str(caught.value), time.monotonic() - sent_s[0]


def test_a_worker_stopped_or_killed_in_the_middle_of_writes(start_worker, connect):
    process, url = start_worker()
    text, took_s = lost_after(connect([url]), process, signal.SIGSTOP)
    assert "no sign of life" in text
    assert took_s < 6  # 2 s of silence, in an emulated guest
    os.kill(process.pid, signal.SIGCONT)
    text, took_s = lost_after(connect([url]), process, signal.SIGKILL)
    assert "closed the connection" in text or "retries exhausted" in text
    assert took_s < 6


def verbs_objects() -> dict[str, int]:
    """Queue pairs, completion queues and registered memory of all processes."""
    done = subprocess.run(["rdma", "-j", "resource"], capture_output=True, text=True, check=True)
    devices = json.loads(done.stdout)
    return {kind: sum(each.get(kind, 0) for each in devices) for kind in ("qp", "cq", "mr", "pd")}


def test_a_worker_ended_by_sigterm_gives_its_registrations_back(start_worker, connect):
    process, url = start_worker()
    idle = verbs_objects()
    driver = connect([url])
    driver.run([(0, HANDLES)], 0)
    busy = verbs_objects()
    assert all(busy[kind] > idle[kind] for kind in ("qp", "cq", "pd"))
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=GUEST_START_S) == 0
    driver.backend.close()
    assert verbs_objects() == idle
