"""A worker in one guest, an engine in the other, one virtual Ethernet between them."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.wire.address import format_address
from fastdecode_rdma.worker.machinery import kernel_facts, real_machinery
from fastdecode_rdma.worker.memory import MemoryBudget
from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer

NODE = int(os.environ.get("RDMA_VM_NODE", 0))
PORT, SIGNAL_PORT = 18815, 18816
TOKEN = b"t" * 32
MEMORY_BYTES = 64 << 20
MEET_S = 300.0


def serve_until_told() -> None:
    facts = kernel_facts()
    config = WorkerConfig(
        os.environ["RDMA_VM_IP"],
        PORT,
        MEMORY_BYTES,
        1,
        facts.isa,
        facts.block_tokens,
        facts.seg_tokens,
        token=TOKEN,
    )
    server = WorkerServer(config, MemoryBudget(MEMORY_BYTES), real_machinery())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with socket.create_server((os.environ["RDMA_VM_IP"], SIGNAL_PORT)) as listener:
        listener.settimeout(MEET_S)
        peer, _ = listener.accept()
        peer.settimeout(MEET_S)
        assert peer.recv(4) == b"done"  # nothing comes from a peer that failed
        peer.close()
    assert server.close(10.0)
    thread.join(10.0)


def meet() -> socket.socket:
    deadline_s = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection((os.environ["RDMA_VM_PEER"], SIGNAL_PORT), 5.0)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def attend_over_the_wire(connect) -> None:
    url = format_address(os.environ["RDMA_VM_PEER"], PORT).replace("tcp://", "rdma://")
    with meet() as peer:
        driver, embedded = connect([url], token=TOKEN), connect()
        detail = driver.backend.info(0).transport_detail
        assert os.environ["RDMA_VM_IP"] in detail and os.environ["RDMA_VM_PEER"] in detail
        for position in range(5):
            expected = embedded.run([(0, [1, 2, 3])], position)
            for key, row in driver.run([(0, [1, 2, 3])], position).items():
                np.testing.assert_array_equal(row, expected[key])
        driver.backend.close()
        peer.sendall(b"done")


@pytest.mark.parametrize("role", ["worker" if NODE == 0 else "engine"])
def test_attention_between_two_machines(connect, role):
    if role == "worker":
        serve_until_told()
    else:
        attend_over_the_wire(connect)
