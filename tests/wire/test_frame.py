"""The frame header: golden bytes, and that C and Python mean the same ones."""

from __future__ import annotations

import socket
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fastdecode_rdma.transport._pump import FrameServer, Pump

from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import RemoteProtocolError
from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.wire import frame as f
from fastdecode_rdma.wire.frame import Frame, FrameKind

FRAME = Frame(
    kind=FrameKind.KV_ROWS,
    table=2,
    epoch=0x1122334455667788,
    sequence=3,
    step=0xDEADBEEF,
    layer=31,
    rows=64,
    nbytes=0x1_0000_0001,
    status=-5,
    consumed_latency=7,
    consumed_bulk=9,
    entry=11,
    offset=0x2_0000_0003,
)
GOLDEN = (
    "46445231"  # "FDR1"
    "0300"  # kind
    "0200"  # table
    "8877665544332211"  # epoch
    "03000000"  # sequence
    "efbeadde"  # step
    "1f000000"  # layer
    "40000000"  # rows
    "0100000001000000"  # nbytes
    "fbffffff"  # status
    "07000000"  # consumed, latency
    "09000000"  # consumed, bulk
    "0b000000"  # entry
    "0300000002000000"  # offset
)


def test_golden_bytes():
    assert FRAME.encode().hex() == GOLDEN
    assert Frame.decode(bytes.fromhex(GOLDEN)) == FRAME
    assert f.HEADER_BYTES == 64


@pytest.mark.parametrize("data", [b"", b"x" * 63, b"x" * 64, FRAME.encode() + b"x"])
def test_other_bytes_are_refused(data):
    with pytest.raises(RemoteProtocolError):
        Frame.decode(data)


@pytest.fixture
def sizes() -> FrameSizes:
    group = KVGroup((0,), 2, 1, 8)
    return FrameSizes.of(AttentionGeometry((group,), 1.0, "fp32", 8, 64))


def test_the_pump_writes_these_bytes(sizes):
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    pump = Pump(sizes, timeout_s=5.0)
    pump.add_stream("peer", ours.detach(), epoch=FRAME.epoch, latency_slots=4, bulk_slots=4)
    entries = np.array([(1, 2, 3, 0), (4, 5, 6, 1)], ENTRY_DTYPE)
    pump.begin(5, 77, [(0, entries)])
    k = np.arange(16, dtype=np.float32)
    pump.store(0, 5, 0, 1, 40, k.ctypes.data, k.ctypes.data, 2)
    begin = Frame.decode(theirs.recv(64))
    assert begin == Frame(FrameKind.BEGIN_STEP, 5, FRAME.epoch, 0, step=77, rows=3, nbytes=48)
    assert theirs.recv(48) == entries.tobytes() == struct.pack("<QQIIQQII", 1, 2, 3, 0, 4, 5, 6, 1)
    rows = Frame.decode(theirs.recv(64))
    assert rows == Frame(
        FrameKind.KV_ROWS, 5, FRAME.epoch, 1, step=77, rows=2, nbytes=128, entry=1, offset=40
    )
    assert theirs.recv(128) == k.tobytes() * 2
    pump.close()
    theirs.close()


def test_the_server_reads_and_writes_these_bytes(sizes):
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    server = FrameServer(
        theirs.fileno(), sizes, epoch=9, latency_slots=4, bulk_slots=4, attend=0, store=0, ctx=0
    )
    asked = Frame(FrameKind.EXPORT, f.NO_TABLE, 9, 0, step=5, nbytes=24, entry=3)
    ours.sendall(asked.encode() + f.pack_range(8, 1, 2))
    found = SimpleNamespace()

    def serve() -> None:
        found.frame, found.payload = server.run()
        server.reply(FrameKind.EXPORT_REPLY, status=-6, payload=b"text")

    thread = threading.Thread(target=serve)
    thread.start()
    reply = Frame.decode(ours.recv(64))
    thread.join()
    assert (found.frame, f.unpack_range(found.payload)) == (asked, (8, 1, 2))
    assert reply == Frame(
        FrameKind.EXPORT_REPLY,
        f.NO_TABLE,
        9,
        0,
        step=5,
        nbytes=4,
        status=-6,
        consumed_bulk=1,
        entry=3,
    )
    assert ours.recv(4) == b"text"
    ours.close()
    theirs.close()


def test_payloads_survive_and_other_lengths_are_refused():
    assert f.unpack_handles(f.pack_handles([1, 2**64 - 1])).tolist() == [1, 2**64 - 1]
    assert f.unpack_fork(f.pack_fork(1, 2, 3)) == (1, 2, 3)
    assert f.unpack_range(f.pack_range(4, 5, 6)) == (4, 5, 6)
    assert f.unpack_import(f.pack_import(7, 8, b"data")) == (7, 8, b"data")
    for unpack in (f.unpack_handles, f.unpack_fork, f.unpack_range, f.unpack_import):
        with pytest.raises(RemoteProtocolError):
            unpack(b"123456789")
