"""Peers of benchmarks, as processes, and a proxy that changes a byte on the way."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest


@dataclass
class PeerProcess:
    """A running `fastdecode bench serve`."""

    process: subprocess.Popen[bytes]
    place: str

    @property
    def port(self) -> int:
        return int(self.place.rpartition(":")[2])


@pytest.fixture(scope="session")
def start_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], PeerProcess]]:
    """Starts peers; they end with the tests."""
    folder = tmp_path_factory.mktemp("peers")
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        ready = folder / f"ready{len(started)}"
        command = [sys.executable, "-m", "fastdecode_rdma.cli", "bench", "serve"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not (ready.exists() and ready.read_text().endswith("\n")):
            assert process.poll() is None, "the peer ended before it was ready"
            assert time.monotonic() < deadline, "the peer was not ready within 30 s"
            time.sleep(0.02)
        started.append(PeerProcess(process, ready.read_text().split()[1].removeprefix("tcp://")))
        return started[-1]

    yield start
    for peer in started:
        peer.process.kill()
        peer.process.wait(10)


@pytest.fixture(scope="session")
def peer(start_peer: Callable[[], PeerProcess]) -> PeerProcess:
    """One peer that all tests may use; none may hurt it."""
    return start_peer()


class Proxy:
    """Passes connections on to a port; of the bytes that clients send on a connection, number
    `spoiled_at` is changed."""

    def __init__(self, port: int, spoiled_at: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._target = port
        self._spoiled_at = spoiled_at
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((client, server, self._spoiled_at), (server, client, -1)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, spoiled_at: int) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if 0 <= spoiled_at - passed < len(data):
                    changed = bytearray(data)
                    changed[spoiled_at - passed] ^= 1
                    data = bytes(changed)
                passed += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def spoiling_proxy(peer: PeerProcess) -> Iterator[Proxy]:
    """In front of the peer: a byte far inside a long message is changed."""
    proxy = Proxy(peer.port, 40_000)
    yield proxy
    proxy.close()
