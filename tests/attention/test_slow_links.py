"""A wire that is slow and goes on: what takes long because it is much is no fault."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import WorkerLostError

PIECE, PAUSE_S = 64 << 10, 0.004  # at most 16 MB/s; a worker is allowed 10 MB/s and slower fails
TOKENS = 768
TIMEOUT_S = 0.2


class SlowWire:
    """Forwards connections to a worker, no faster than a piece for each pause."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._there = (place.hostname, place.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.pause_s = 0.0
        self.num_bytes = 0
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:  # closed
                return
            there = socket.create_connection(self._there)
            for sock in (here, there):  # what fills the kernel's buffers would be sent at once
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            self._sockets += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(PIECE):
                self.num_bytes += len(data)
                time.sleep(self.pause_s * len(data) / PIECE)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # either side has closed
            source.close()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def wire(serve) -> Iterator[SlowWire]:
    made = SlowWire(serve().url)
    yield made
    made.close()


def upload(driver) -> None:
    """Uploads a long prompt in one frame."""
    group = driver.geometry.groups[0]
    rows = np.ones((TOKENS, group.num_kv_heads * group.head_dim), np.float32)
    entries = np.array([(1, 0, TOKENS, ENTRY_UPLOAD)], ENTRY_DTYPE)
    driver.backend.begin_step(2, 1, [(0, entries)])
    driver.backend.store_kv(0, 2, 0, 0, 0, rows.ctypes.data, rows.ctypes.data, TOKENS)
    driver.backend.wait_ready(0, 2)


def test_a_long_prompt_may_take_as_long_as_its_bytes(wire, connect):
    geometry = AttentionGeometry((KVGroup((0,), 8, 8, 128),), 0.1, "fp32", 16, 1024)
    driver = connect([wire.url], geometry=geometry, timeout_s=TIMEOUT_S)
    wire.pause_s = PAUSE_S
    before, start_s = wire.num_bytes, time.monotonic()
    upload(driver)
    output = driver.run([(0, [1])], TOKENS)[1, 0]  # behind all rows
    assert time.monotonic() - start_s > TIMEOUT_S
    assert wire.num_bytes - before >= TOKENS * 8 * 128 * 4 * 2
    assert np.isfinite(output).all()


def test_a_wire_that_stops_is_not_waited_for(wire, connect):
    geometry = AttentionGeometry((KVGroup((0,), 8, 8, 128),), 0.1, "fp32", 16, 1024)
    driver = connect([wire.url], geometry=geometry, timeout_s=TIMEOUT_S)
    wire.pause_s = 60.0
    start_s = time.monotonic()
    with pytest.raises(WorkerLostError):
        upload(driver)
    assert time.monotonic() - start_s < 20
