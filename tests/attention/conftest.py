"""Backends over real sessions: embedded, served by threads of this process, or worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.attention.remote import open_sessions
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.worker.machinery import kernel_facts, real_machinery
from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer
from fastdecode_rdma.worker.session import MemoryBudget

MEMORY = 64 << 20


def make_geometry(num_layers: int = 4) -> AttentionGeometry:
    even = KVGroup(tuple(range(0, num_layers, 2)), 4, 2, 16)
    odd = KVGroup(tuple(range(1, num_layers, 2)), 2, 1, 8, window=5)
    return AttentionGeometry((even, odd), 0.25, "fp32", 16, 1024)


@dataclass
class Served:
    """A worker server on a thread of this process."""

    server: WorkerServer
    budget: MemoryBudget
    thread: threading.Thread

    @property
    def url(self) -> str:
        host, port = self.server.address
        return f"tcp://{host}:{port}"


@dataclass
class Process:
    """A `fastdecode worker` process."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            _wait_until_stopped(self.process.pid)


def _wait_until_stopped(pid: int) -> None:
    """A thread on another core may answer for a moment after the signal was sent."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if all(stat.rpartition(") ")[2].startswith("T") for stat in stats):
            return
        time.sleep(0.001)
    raise AssertionError("the worker goes on after SIGSTOP")


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def start(*, memory_bytes: int = MEMORY, token: bytes | None = None, **limits: int) -> Served:
        facts = kernel_facts()
        config = WorkerConfig(
            "127.0.0.1",
            0,
            memory_bytes,
            1,
            facts.isa,
            facts.block_tokens,
            facts.seg_tokens,
            token=token,
            **limits,
        )
        budget = MemoryBudget(memory_bytes)
        server = WorkerServer(config, budget, real_machinery())
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        running.append(Served(server, budget, thread))
        return running[-1]

    yield start
    for served in running:
        assert served.server.close(5.0)
        served.thread.join(5.0)
        assert not served.thread.is_alive()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    running: list[Process] = []

    def start() -> Process:
        ready = tmp_path / f"ready{len(running)}"
        command = [sys.executable, "-m", "fastdecode_rdma.worker", "--listen", "127.0.0.1:0"]
        command += ["--memory", "64MiB", "--threads", "1", "--ready-file", str(ready)]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        running.append(Process(process, ready.read_text().split()[1]))
        return running[-1]

    yield start
    for worker in running:
        worker.process.kill()
        worker.process.wait()


class Driver:
    """Decodes sequences of random rows: what worker w computes depends on handle and position
    alone, so outputs of different backends can be compared bit by bit."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.geometry = backend.geometry
        self.step = 0

    def entries(self, handles: list[int], position: int) -> np.ndarray:
        entries = np.zeros(len(handles), ENTRY_DTYPE)
        entries["handle"], entries["kv_len_before"], entries["q_len"] = handles, position, 1
        return entries

    def rows(self, handles: list[int], position: int, layer: int) -> np.ndarray:
        width = self.geometry.row_width(layer)
        return np.stack(
            [
                np.random.default_rng((handle, position, layer)).standard_normal(width)
                for handle in handles
            ]
        ).astype(np.float32)

    def run(
        self, placed: list[tuple[int, list[int]]], position: int, *, stop_at: int | None = None
    ) -> dict[tuple[int, int], np.ndarray]:
        """Runs one step; returns {(handle, layer): output}. `stop_at` leaves it before a layer."""
        self.step += 1
        self.backend.begin_step(
            0, self.step, [(worker, self.entries(handles, position)) for worker, handles in placed]
        )
        handles = [handle for _, some in placed for handle in some]
        outputs = {}
        for layer in range(self.geometry.num_layers):
            if layer == stop_at:
                return outputs
            rows = self.rows(handles, position, layer)
            self.backend.send_rows[0].reshape(-1)[: rows.size] = rows.reshape(-1)
            self.backend.exchange(0, layer)
            width = self.geometry.out_width(layer)
            got = self.backend.recv_rows[0].reshape(-1)[: len(handles) * width].copy()
            for handle, row in zip(handles, got.reshape(len(handles), width), strict=True):
                outputs[handle, layer] = row
        return outputs


@pytest.fixture
def connect() -> Iterator[Callable[..., Driver]]:
    backends: list[AttentionBackend] = []

    def start(
        urls: list[str] | None = None,
        *,
        geometry: AttentionGeometry | None = None,
        token: bytes | None = None,
        timeout_s: float = 20.0,
        memory_bytes: int = MEMORY,
    ) -> Driver:
        geometry = geometry or make_geometry()
        if urls is None:
            links = [LocalWorker(geometry, MemoryBudget(memory_bytes), num_threads=1)]
        else:
            links = open_sessions(urls, geometry, token=token)
        backends.append(AttentionBackend(links, geometry, timeout_s=timeout_s))
        return Driver(backends[-1])

    yield start
    for backend in backends:
        backend.close()


@pytest.fixture
def new_geometry() -> Callable[..., AttentionGeometry]:
    return make_geometry
