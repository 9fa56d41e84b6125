"""The worker's side: whatever bytes arrive, only this connection ends, with a typed reason."""

from __future__ import annotations

import random
import socket
import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.config import StepCode
from fastdecode_rdma.errors import (
    FastDecodeError,
    RemoteProtocolError,
    StepError,
    TransportError,
    WorkerLostError,
)
from fastdecode_rdma.transport.serve import DataPlane
from fastdecode_rdma.wire.frame import (
    NO_TABLE,
    Frame,
    FrameKind,
    pack_fork,
    pack_handles,
    pack_import,
    pack_range,
)
from fastdecode_rdma.wire.messages import SlotPlan


def serve_bytes(rig, data, epoch, *, latency_slots=8, bulk_slots=4):
    """Feeds bytes to a fresh data plane until EOF; returns (how it ended, what it answered)."""
    ours, theirs = socket.socketpair()
    slots = SlotPlan(latency_slots, bulk_slots, rig.sizes.latency_bytes, rig.sizes.max_bulk_bytes)
    plane = DataPlane(theirs.fileno(), epoch, slots, rig.sessions[0])
    end = []

    def serve() -> None:
        try:
            plane.run()
        except FastDecodeError as error:
            end.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    answered = b""
    ours.settimeout(5)
    try:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        while part := ours.recv(1 << 16):
            answered += part
    except OSError:
        pass  # it hung up on us while bytes were still under way
    thread.join(10)
    assert not thread.is_alive()
    ours.close()
    return (end[0] if end else None), answered


def attend(rig, epoch, sequence=0, **fields):
    width = rig.sizes.row_bytes[0]
    values = {"step": 1, "layer": 0, "rows": 2, "nbytes": 2 * width} | fields
    return Frame(FrameKind.ATTEND, fields.pop("table", 0), epoch, sequence, **values)


BAD = {
    "another magic": lambda rig, epoch: b"X" + attend(rig, epoch).encode()[1:],
    "stale epoch": lambda rig, epoch: attend(rig, epoch + 1).encode(),
    "sequence": lambda rig, epoch: attend(rig, epoch, sequence=1).encode(),
    "reply kind": lambda rig, epoch: Frame(FrameKind.ATTEND_REPLY, 0, epoch, 0).encode(),
    "unknown kind": lambda rig, epoch: Frame(99, 0, epoch, 0).encode(),
    "kind 0": lambda rig, epoch: Frame(0, 0, epoch, 0).encode(),
    "layer": lambda rig, epoch: attend(rig, epoch, layer=4).encode(),
    "no rows": lambda rig, epoch: attend(rig, epoch, rows=0, nbytes=0).encode(),
    "too many rows": lambda rig, epoch: attend(rig, epoch, rows=25, nbytes=25 * 512).encode(),
    "rows times width": lambda rig, epoch: attend(rig, epoch, rows=3).encode(),
    "huge": lambda rig, epoch: attend(rig, epoch, nbytes=2**63).encode(),
    "table": lambda rig, epoch: Frame(FrameKind.BEGIN_STEP, 8, epoch, 0).encode(),
    "long step table": lambda rig, epoch: Frame(
        FrameKind.BEGIN_STEP, 0, epoch, 0, nbytes=2**40
    ).encode(),
    "K/V rows": lambda rig, epoch: Frame(
        FrameKind.KV_ROWS, 2, epoch, 0, rows=2**31, nbytes=2**31 * 256
    ).encode(),
    "credits": lambda rig, epoch: Frame(FrameKind.FREE, 0, epoch, 0, consumed_bulk=1).encode(),
    "fork": lambda rig, epoch: Frame(FrameKind.FORK, 0, epoch, 0, nbytes=3).encode() + b"abc",
}


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_lies_ends_the_connection(make_rig, epoch, name):
    rig = make_rig()
    rig.add_stream()
    end, answered = serve_bytes(rig, BAD[name](rig, epoch) + bytes(4096), epoch)
    assert isinstance(end, RemoteProtocolError), end
    assert answered == b""
    assert rig.sessions[0].attended == rig.sessions[0].stored == []


def test_stale_epoch_is_named_with_both(make_rig, epoch):
    rig = make_rig()
    rig.add_stream()
    end, _ = serve_bytes(rig, attend(rig, 0xABC).encode(), epoch)
    assert "0000000000000abc" in str(end) and f"{epoch:016x}" in str(end)


def test_credits_of_frames_without_a_reply_are_told_every_half_of_the_slots(make_rig, epoch):
    rig = make_rig()
    rig.add_stream()
    frames = b"".join(
        Frame(FrameKind.FREE, NO_TABLE, epoch, n, nbytes=8).encode() + pack_handles([n])
        for n in range(40)
    )
    end, answered = serve_bytes(rig, frames, epoch, latency_slots=8)
    assert end is None
    credits = [Frame.decode(answered[at : at + 64]) for at in range(0, len(answered), 64)]
    assert [c.consumed_latency for c in credits] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes(make_rig, epoch, seed):
    """Plain noise, and true frames with some bytes turned."""
    rng = random.Random(seed)
    rig = make_rig()
    rig.add_stream()
    good = b""
    for sequence in range(6):
        kind = rng.choice(list(FrameKind)[:7])
        payload = rng.choice(
            [pack_handles([1, 2]), pack_fork(1, 2, 3), pack_range(1, 0, 2), bytes(48)]
        )
        frame = Frame(kind, rng.randrange(8), epoch, sequence, nbytes=len(payload))
        good += frame.encode() + payload
    data = bytearray(good)
    for _ in range(rng.randrange(6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if seed % 4 == 0:
        data = bytearray(rng.randbytes(5000))
    end, _ = serve_bytes(rig, bytes(data), epoch)
    assert end is None or isinstance(end, RemoteProtocolError | TransportError)


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100, 64 + 47, 64 + 48])
def test_engine_that_dies_at_any_byte(make_rig, epoch, cut):
    rig = make_rig()
    rig.add_stream()
    frame = Frame(FrameKind.BEGIN_STEP, 0, epoch, 0, step=1, nbytes=48).encode() + bytes(48)
    end, answered = serve_bytes(rig, frame[:cut], epoch)
    assert (end is None) == (cut in (0, len(frame)))
    assert bool(answered) == (cut == len(frame))


@pytest.mark.parametrize("step", [0, 1])
def test_rows_for_a_table_that_is_not_armed(make_rig, epoch, step):
    rig = make_rig()
    rig.add_stream()
    payload = bytes(2 * rig.sizes.row_bytes[0])
    kv = bytes(2 * rig.sizes.kv_bytes[0])
    store = Frame(FrameKind.KV_ROWS, 2, epoch, 1, step=step, rows=1, nbytes=len(kv))
    data = attend(rig, epoch, step=step).encode() + payload + store.encode() + kv
    end, answered = serve_bytes(rig, data, epoch)
    assert end is None
    first = Frame.decode(answered[:64])
    second = Frame.decode(answered[64 + first.nbytes :][:64])
    assert [first.kind, second.kind] == [FrameKind.STEP_ERROR] * 2
    assert [first.status, second.status] == [StepCode.TABLE] * 2
    assert (first.table, first.step, second.table) == (0, step, 2)


def test_cold_frames_reach_the_session_in_order(make_rig):
    rig = make_rig()
    session = rig.add_stream()
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([1, 2]))
    rig.pump.post(0, FrameKind.FORK, payload=pack_fork(1, 2, 3))
    data = rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1000))
    assert data == bytes(range(256)) * 1000
    rig.pump.request(0, FrameKind.IMPORT, payload=pack_import(7, 5, b"abcdefgh"))
    assert session.calls == [
        ("free", [1, 2]),
        ("fork", 1, 2, 3),
        ("export", 7, 0, 1000),
        ("import", 7, 5, 8, b"abcd"),
    ]


def test_refused_requests_are_step_errors_and_the_connection_lives(make_rig):
    rig = make_rig()
    rig.add_stream()
    with pytest.raises(StepError, match="unknown sequence 404"):
        rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(404, 0, 1))
    with pytest.raises(StepError, match="fit into a reply"):
        rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(1, 0, 1 << 17))
    rig.pump.post(0, FrameKind.FORK, payload=pack_fork(404, 1, 1))
    with pytest.raises(StepError, match="unknown sequence 404"):  # by the next call that waits
        rig.run_step(1, [2])
    rig.run_step(2, [2])


def test_a_fault_in_the_session_is_an_error_frame_not_the_end(make_rig):
    rig = make_rig()
    session = rig.add_stream()
    session.free = None  # a TypeError inside
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))
    with pytest.raises(StepError, match="fault of the worker") as caught:
        rig.run_step(1, [1])
    assert caught.value.code == StepCode.INTERNAL
    rig.run_step(2, [1])


def test_progress_moves_with_every_frame(make_rig):
    rig = make_rig()
    rig.add_stream()
    before = rig.planes[0].num_messages
    rig.run_step(1, [1])
    assert rig.planes[0].num_messages >= before + 8
    deadline = time.monotonic() + 5
    while rig.planes[0].num_messages % 2:  # odd until the last reply is booked
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_progress_is_odd_in_the_middle_of_a_frame(make_rig):
    rig = make_rig()
    session = rig.add_stream()
    begun, go_on = threading.Event(), threading.Event()

    def free(handles: object) -> None:
        begun.set()
        assert go_on.wait(5)

    session.free = free
    rig.run_step(1, [1])
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))
    assert begun.wait(5)
    assert rig.planes[0].num_messages % 2 == 1
    go_on.set()
    rig.run_step(2, [1])


def test_stale_epoch_of_a_worker_is_a_typed_error_at_once(make_rig, epoch):
    rig = make_rig(timeout_s=20.0)
    theirs = rig.add_raw()
    rig.begin(1, [1])
    theirs.sendall(Frame(FrameKind.STEP_READY, 0, epoch + 1, 0, step=1).encode())
    with pytest.raises(WorkerLostError, match="epoch") as caught:
        rig.pump.wait_ready(0, 0)
    assert isinstance(caught.value.__cause__, RemoteProtocolError)


LIES = {
    "layer": {"layer": 1},
    "rows": {"rows": 3},
    "nbytes": {"nbytes": 2 * 256 + 3},
    "credits": {"consumed_latency": 3},
    "sequence": {"sequence": 1},
    "kind": {"kind": FrameKind.ATTEND},
    "unasked table": {"table": 9},
}


@pytest.mark.parametrize("name", LIES)
def test_a_worker_that_lies_is_lost(make_rig, epoch, name):
    rig = make_rig()
    theirs = rig.add_raw()
    rig.begin(1, [2])
    rig.fill(2, 0)
    rig.pump.submit(0, 0)
    fields = {"kind": FrameKind.ATTEND_REPLY, "table": 0, "sequence": 0, "step": 1, "layer": 0}
    fields |= {"rows": 2, "nbytes": 2 * 256 + 2} | LIES[name]
    theirs.sendall(Frame(epoch=epoch, **fields).encode() + bytes(514))
    with pytest.raises(WorkerLostError) as caught:
        rig.pump.collect(0, 0)
    assert isinstance(caught.value.__cause__, RemoteProtocolError)
    assert not rig.recv[0].any()


@pytest.mark.parametrize("seed", range(25))
def test_a_worker_that_dies_at_a_random_byte(make_rig, epoch, seed):
    """The whole answer to two layers, cut anywhere: a typed error at that layer, never a hang."""
    rng = random.Random(seed)
    rig = make_rig(timeout_s=20.0)
    theirs = rig.add_raw()
    rig.begin(1, [2])
    answer = Frame(FrameKind.STEP_READY, 0, epoch, 0, step=1).encode()
    ends = [len(answer)]
    for layer in range(2):
        nbytes = 2 * rig.sizes.out_bytes[layer] + 2
        reply = Frame(
            FrameKind.ATTEND_REPLY, 0, epoch, layer + 1, step=1, layer=layer, rows=2, nbytes=nbytes
        )
        answer += reply.encode() + bytes([layer + 1]) * nbytes
        ends.append(len(answer))
    cut = rng.randrange(len(answer))

    def play() -> None:
        for end, start in zip(ends, [0, *ends], strict=False):
            theirs.recv(64)  # a request, or part of one: enough to take turns
            theirs.sendall(answer[start : min(end, cut)])
            if cut <= end:
                theirs.close()
                return

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(WorkerLostError):
        for layer in range(3):
            rig.fill(2, layer)
            rig.pump.exchange(0, layer)
    thread.join()


def test_upload_rows_arrive_whole_whatever_the_number(make_rig):
    rig = make_rig()
    session = rig.add_stream(bulk_slots=1)
    rig.begin_upload(1, 20_000)
    width = 32
    for count in (1, 100, 9000):
        k = np.random.default_rng(count).standard_normal((count, width)).astype(np.float32)
        v = k + 1
        rig.pump.store(0, 2, 0, 0, 7, k.ctypes.data, v.ctypes.data, count)
        k_sent, v_sent = k.copy(), v.copy()
        k[:] = v[:] = np.nan  # the caller's memory is its own again
        rig.pump.wait_ready(0, 2)
        rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1))  # all is stored by now
        assert {(t, layer, entry) for t, layer, entry, *_ in session.stored} == {(2, 0, 0)}
        parts = sorted(session.stored, key=lambda part: part[3])
        np.testing.assert_array_equal(np.concatenate([part[4] for part in parts]), k_sent)
        np.testing.assert_array_equal(np.concatenate([part[5] for part in parts]), v_sent)
        assert parts[0][3] == 7
        session.stored.clear()
