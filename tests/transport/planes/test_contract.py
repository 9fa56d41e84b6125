"""What every data plane owes the pump, whatever carries the frames."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.config import ENTRY_DTYPE, StepCode
from fastdecode_rdma.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StepError,
    WorkerLostError,
)
from fastdecode_rdma.transport.base import COLD_BYTES, PortTimeout
from fastdecode_rdma.wire.frame import (
    Frame,
    FrameKind,
    pack_fork,
    pack_handles,
    pack_import,
    pack_range,
)


@pytest.mark.parametrize("num_rows", [1, 2, 23, 24])
def test_rows_of_every_number_come_back_in_place(contract, num_rows):
    c = contract()
    c.add()
    for step in range(3):
        c.rig.run_step(step, [num_rows])


def test_the_largest_frames_pass(contract, new_geometry):
    c = contract(new_geometry(max_rows=4096))
    c.add()
    for step in range(c.num_rounds):
        c.rig.run_step(step, [4096 if step % 3 else 1])


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1])
def test_cold_payloads_of_every_length(connected, num_bytes):
    c = connected()
    session = c.add()
    got = []
    session.import_range = lambda handle, start, data: got.append(data)
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    for _ in range(3):
        c.rig.pump.request(0, FrameKind.IMPORT, payload=pack_import(7, 5, data))
    assert got == [data] * 3
    session.export_range = lambda handle, start, stop: data
    for _ in range(3):
        assert c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1)) == data


def test_the_longest_cold_payloads(connected):
    c = connected()
    session = c.add()
    data = np.random.default_rng(0).bytes(COLD_BYTES)
    got = []
    session.import_range = lambda handle, start, part: got.append(part)
    session.export_range = lambda handle, start, stop: data
    payload = pack_import(7, 5, data[:-16])
    assert len(payload) == COLD_BYTES
    for _ in range(2):
        c.rig.pump.request(0, FrameKind.IMPORT, payload=payload)
        assert c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1)) == data
    assert got == [data[:-16]] * 2
    with pytest.raises(LocalProtocolError, match="longer than a frame may be"):
        c.rig.pump.request(0, FrameKind.IMPORT, payload=payload + b"x")
    c.rig.run_step(1, [3])


def test_frames_of_all_kinds_arrive_in_order(connected):
    c = connected(latency_slots=3, bulk_slots=2)
    session, rng = c.add(), random.Random(1)
    seen, due = [], []
    session.free = lambda handles: seen.append(("free", list(handles)))
    session.fork = lambda src, dst, length: seen.append(("fork", src))
    session.import_range = lambda handle, start, data: seen.append(("import", len(data)))

    class Stored(list):
        def append(self, part) -> None:
            seen.append(("store", part[3]))

    session.stored = Stored()
    c.rig.begin_upload(1, 100_000)
    for number in range(400):
        kind = rng.choice(["free", "fork", "import", "store"])
        if kind == "free":
            c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([number]))
            due.append(("free", [number]))
        elif kind == "fork":
            c.rig.pump.post(0, FrameKind.FORK, payload=pack_fork(number, 1, 1))
            due.append(("fork", number))
        elif kind == "import":
            nbytes = rng.randrange(9000)
            c.rig.pump.request(0, FrameKind.IMPORT, payload=pack_import(1, 0, bytes(nbytes)))
            due.append(("import", nbytes))
        else:
            rows = np.zeros((1, 32), np.float32)
            address = rows.ctypes.data
            c.rig.pump.store(0, 2, 0, 0, number, address, address, 1)
            due.append(("store", number))
    c.rig.pump.request(0, FrameKind.IMPORT, payload=pack_import(1, 0, b""))
    assert seen == [*due, ("import", 0)]


def test_a_slow_worker_holds_uploads_back_and_gets_every_row(connected):
    c = connected(bulk_slots=3)
    session = c.add(delay_s=0.002)
    c.rig.begin_upload(1, 1000)
    rows = np.random.default_rng(3).standard_normal((60, 32)).astype(np.float32)
    for at in range(60):
        k = rows[at : at + 1].copy()
        c.rig.pump.store(0, 2, 0, 0, at, k.ctypes.data, k.ctypes.data, 1)
        k[:] = np.nan  # the caller's memory is its own again
        sent, returned = c.rig.pump.stats(0)["sent"][1], c.rig.pump.stats(0)["returned"][1]
        assert sent - returned <= 3
    c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1))
    np.testing.assert_array_equal(np.concatenate([part[4] for part in session.stored]), rows)


def test_a_worker_whose_replies_nobody_reads_waits_and_goes_on(connected):
    c = connected(latency_slots=2)
    session = c.add()
    for step in range(1, 60):  # each is answered; begin reads only when it must
        c.rig.begin(step, [1], table=step % 2)
    c.rig.run_step(100, [2])
    assert len(session.begun) == 60


def test_uploads_without_credit_do_not_hold_up_attention(connected):
    c = connected(bulk_slots=1, timeout_s=0.3)
    peer = c.add_raw()
    c.rig.begin_upload(1, 100)
    k = np.zeros((1, 32), np.float32)
    c.rig.pump.store(0, 2, 0, 0, 0, k.ctypes.data, k.ctypes.data, 1)
    with pytest.raises(PortTimeout):
        c.rig.pump.store(0, 2, 0, 0, 1, k.ctypes.data, k.ctypes.data, 1)
    c.rig.begin(2, [1])
    c.rig.fill(1, 0)
    c.rig.pump.submit(0, 0)
    kinds = [peer.receive()[0].kind for _ in range(4)]
    assert kinds == [
        FrameKind.BEGIN_STEP, FrameKind.KV_ROWS, FrameKind.BEGIN_STEP, FrameKind.ATTEND,
    ]  # fmt: skip


def test_two_tables_and_two_workers_overlap(contract):
    c = contract()
    c.add()
    c.add()
    c.rig.begin(1, [2, 3], table=0)
    c.rig.begin(2, [4, 1], table=1)
    for layer in range(c.rig.geometry.num_layers):
        first = c.rig.fill(5, layer, table=0, seed=1)
        c.rig.pump.submit(0, layer)
        second = c.rig.fill(5, layer, table=1, seed=2)
        c.rig.pump.submit(1, layer)
        c.rig.pump.collect(0, layer)
        np.testing.assert_array_equal(c.rig.received(5, layer, table=0), first)
        c.rig.pump.collect(1, layer)
        np.testing.assert_array_equal(c.rig.received(5, layer, table=1), second)


def test_planes_mix_in_one_step(contract):
    """One worker of this plane beside one over a socket pair and one in this process."""
    c = contract()
    c.add()
    c.rig.add_stream()
    c.rig.add_local()
    for step in range(3):
        c.rig.run_step(step, [3, 4, 2])


@pytest.mark.parametrize("layer", [0, 3])
def test_a_refused_layer_is_one_error_and_the_step_repeats(contract, layer):
    c = contract()
    session = c.add(fail_at={layer: StepCode.ROWS})
    c.rig.begin(1, [3])
    with pytest.raises(StepError) as caught:
        for each in range(4):
            c.rig.fill(3, each)
            c.rig.pump.exchange(0, each)
    assert caught.value.code == StepCode.ROWS
    session.fail_at.clear()
    c.rig.run_step(2, [3])


def test_a_late_worker_is_a_timeout_and_can_go_on(connected):
    c = connected(timeout_s=0.2)
    session = c.add(delay_s=0.6)
    c.rig.begin(1, [1])
    c.rig.fill(1, 0)
    start = time.monotonic()
    with pytest.raises(PortTimeout, match=r"did not answer within 0\.2 s"):
        c.rig.pump.exchange(0, 0)
    assert 0.15 < time.monotonic() - start < 0.55
    time.sleep(0.6)
    session.delay_s = 0.0
    c.rig.run_step(2, [1])


def test_a_late_reply_writes_nothing_into_the_rows_of_a_later_step(connected):
    c = connected(timeout_s=0.1)
    c.add(delay_s=0.3)
    c.rig.begin(1, [2])
    c.rig.fill(2, 0)
    with pytest.raises(PortTimeout):
        c.rig.pump.exchange(0, 0)
    c.rig.recv[0][:] = 7.0  # the rows are the engine's own again
    c.rig.pump.mark_lost(0, "too late")
    time.sleep(0.5)  # the kernel of the lost worker ends meanwhile
    assert (c.rig.recv[0] == 7.0).all()
    c.rig.threads[0].join(5)
    assert not c.rig.threads[0].is_alive()


@pytest.mark.parametrize("seed", range(12))
def test_a_worker_that_dies_at_any_moment_is_lost_at_once(connected, seed):
    """Its socket ends while steps, uploads and cold frames are under way."""
    c = connected(timeout_s=20.0, latency_slots=4)
    c.add(delay_s=0.0005)
    c.add()
    rng = random.Random(seed)
    peer = c.rig.peers[0]
    timer = threading.Timer(rng.uniform(0.0, 0.03), peer.shutdown, (2,))
    timer.start()
    rows = np.zeros((1, 32), np.float32)
    start = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        for step in range(1, 100_000):
            c.rig.run_step(3 * step, [2, 2])
            c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([step]))
            c.rig.begin_upload(3 * step + 1, 100)
            c.rig.pump.store(0, 2, 0, 0, 0, rows.ctypes.data, rows.ctypes.data, 1)
            c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1))
    assert time.monotonic() - start < 2.0
    assert caught.value.worker_index == 0
    timer.join()
    entries = np.zeros(2, ENTRY_DTYPE)
    entries["q_len"] = 1
    c.rig.pump.begin(0, 999_999_999, [(1, entries)])  # the other goes on
    expected = c.rig.fill(2, 0)
    c.rig.pump.exchange(0, 0)
    np.testing.assert_array_equal(c.rig.received(2, 0), expected)


@pytest.mark.parametrize("moment", ["at once", "asked", "answered"])
def test_a_peer_that_hangs_up_between_frames(connected, moment):
    c = connected(timeout_s=20.0)
    peer = c.add_raw()
    if moment == "at once":
        peer.close()
    with pytest.raises(WorkerLostError):
        c.rig.begin(1, [2])
        c.rig.fill(2, 0)
        c.rig.pump.submit(0, 0)
        ready = Frame(FrameKind.STEP_READY, 0, 0x1122334455667788, 0, step=1)
        if moment == "asked":
            peer.receive()
            peer.close()
        elif moment == "answered":
            peer.send(ready.encode())
            peer.close()
        c.rig.pump.collect(0, 0)
    if moment == "answered":  # what had come before the end counts
        assert c.rig.pump.stats(0)["bytes_received"] == 64 + c.chunk_head


def test_a_silent_worker_given_up_by_another_thread_wakes_the_engine(connected):
    c = connected(timeout_s=20.0)
    c.add_raw()
    c.rig.begin(1, [1])
    c.rig.fill(1, 0)
    timer = threading.Timer(0.1, c.rig.pump.mark_lost, (0, "no heartbeat for 2 s"))
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="no heartbeat for 2 s"):
        c.rig.pump.exchange(0, 0)
    assert time.monotonic() - start < 2.0
    timer.join()


def test_an_engine_that_ends_ends_the_worker(connected):
    c = connected()
    c.add()
    c.rig.run_step(1, [2])
    c.rig.pump.close()
    c.rig.pump.close()
    c.rig.threads[0].join(2)
    assert not c.rig.threads[0].is_alive()
    assert c.rig.ends[0] is None
    with pytest.raises(LocalProtocolError, match="closed"):
        c.rig.pump.exchange(0, 0)


def test_a_worker_that_comes_back_takes_its_port(connected):
    c = connected()
    for turn in range(5):
        ends = c.ends()
        number = c.rig.pump.add_stream(
            "again", ends.pair[0].detach(), epoch=turn, latency_slots=8, bulk_slots=4,
            plane=ends.planes[0],
        )  # fmt: skip
        assert number == 0
        c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([turn]))
        frame, payload = ends.peer(1).receive()
        assert (frame.epoch, payload) == (turn, pack_handles([turn]))
        c.rig.pump.mark_lost(0, "gone")
        ends.peer(1).close()
    assert c.rig.pump.stats(0)["bytes_sent"] == 5 * (72 + c.chunk_head)


def test_a_stale_epoch_is_a_typed_error_at_once(connected, epoch):
    c = connected(timeout_s=20.0)
    c.add(worker_epoch=epoch + 1)
    start = time.monotonic()
    with pytest.raises(WorkerLostError):
        c.rig.run_step(1, [1])
    assert time.monotonic() - start < 2.0
    c.rig.threads[0].join(2)
    assert isinstance(c.rig.ends[0], RemoteProtocolError) and "epoch" in str(c.rig.ends[0])


LIES = {
    "magic": None,
    "epoch": {"epoch": 1},
    "layer": {"layer": 1},
    "rows": {"rows": 3},
    "nbytes": {"nbytes": 2 * 256 + 3},
    "no bytes": {"nbytes": 0},
    "huge": {"nbytes": 2**63},
    "credits": {"consumed_latency": 3},
    "sequence": {"sequence": 1},
    "kind": {"kind": FrameKind.ATTEND},
    "bulk kind": {"kind": FrameKind.KV_ROWS},
    "unasked table": {"table": 9},
    "long error": {"kind": FrameKind.STEP_ERROR, "nbytes": 1025},
    "long reply": {"kind": FrameKind.EXPORT_REPLY, "nbytes": COLD_BYTES + 1, "entry": 1},
}


@pytest.mark.parametrize("name", LIES)
def test_a_worker_whose_header_lies_is_lost_and_nothing_is_written(connected, epoch, name):
    c = connected()
    peer = c.add_raw()
    c.rig.begin(1, [2])
    c.rig.fill(2, 0)
    c.rig.pump.submit(0, 0)
    fields = {
        "kind": FrameKind.ATTEND_REPLY, "table": 0, "epoch": epoch, "sequence": 0, "step": 1,
        "layer": 0, "rows": 2, "nbytes": 2 * 256 + 2,
    } | (LIES[name] or {})  # fmt: skip
    head = Frame(**fields).encode()
    if name == "long reply":  # only one that is waited for is taken in
        timer = threading.Timer(0.1, peer.send, (head, bytes(600)))
        timer.start()
        with pytest.raises(WorkerLostError, match="too long"):
            c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(1, 0, 1))
        timer.join()
        return
    peer.send(b"X" + head[1:] if name == "magic" else head, bytes(515))
    with pytest.raises(WorkerLostError) as caught:
        c.rig.pump.collect(0, 0)
    assert isinstance(caught.value.__cause__, RemoteProtocolError)
    assert not c.rig.recv[0].any() and not c.rig.status[0].any()


BAD = {
    "epoch": {"epoch": 1},
    "sequence": {"sequence": 1},
    "reply kind": {"kind": FrameKind.ATTEND_REPLY},
    "kind 0": {"kind": 0},
    "kind 99": {"kind": 99},
    "layer": {"layer": 4},
    "no rows": {"rows": 0, "nbytes": 0},
    "too many rows": {"rows": 25, "nbytes": 25 * 512},
    "rows times width": {"rows": 3},
    "huge": {"nbytes": 2**63},
    "long step table": {"kind": FrameKind.BEGIN_STEP, "nbytes": 2**40},
    "rows of K/V": {"kind": FrameKind.KV_ROWS, "rows": 2**31, "nbytes": 2**31 * 256},
    "credits": {"kind": FrameKind.FREE, "nbytes": 0, "consumed_bulk": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_an_engine_whose_header_lies_is_dropped_unserved(connected, epoch, name):
    c = connected()
    session = c.add()
    c.rig.run_step(1, [2])
    served = list(session.attended)
    other = c.ends()
    session, end = c.serve(other)
    fields = {
        "kind": FrameKind.ATTEND, "table": 0, "epoch": epoch, "sequence": 0, "step": 1,
        "layer": 0, "rows": 2, "nbytes": 2 * 512,
    } | BAD[name]  # fmt: skip
    other.peer(0).send(Frame(**fields).encode(), bytes(1024))
    assert isinstance(end(), RemoteProtocolError)
    assert session.attended == session.stored == []
    c.rig.run_step(2, [2])  # only that connection ended
    assert len(c.rig.sessions[0].attended) == len(served) + 4
    other.peer(0).close()
