"""Credits: never more frames under way than slots, and the C counters follow a plain ledger."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from fastdecode_rdma.transport._pump import Pump
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup, StepCode
from fastdecode_rdma.errors import StepError
from fastdecode_rdma.transport.base import FrameSizes, PortTimeout
from fastdecode_rdma.wire.frame import Frame, FrameKind, pack_handles


def receive(sock, count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part
        data += part
    return data


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_uploads_stop_at_the_slots_and_go_on_with_credits(make_rig, epoch, slots):
    rig = make_rig(timeout_s=0.1)
    theirs = rig.add_raw(bulk_slots=slots)
    rig.begin_upload(1, 10_000)
    k = np.zeros((1, 32), np.float32)
    for offset in range(slots):
        rig.pump.store(0, 2, 0, 0, offset, k.ctypes.data, k.ctypes.data, 1)
    with pytest.raises(PortTimeout):
        rig.pump.store(0, 2, 0, 0, slots, k.ctypes.data, k.ctypes.data, 1)
    assert rig.pump.stats(0)["sent"] == (1, slots)
    theirs.sendall(Frame(FrameKind.CREDIT, 0xFFFF, epoch, 0, consumed_bulk=1).encode())
    rig.begin_upload(2, 10_000)
    rig.pump.store(0, 2, 0, 0, slots, k.ctypes.data, k.ctypes.data, 1)
    with pytest.raises(PortTimeout):
        rig.pump.store(0, 2, 0, 0, slots + 1, k.ctypes.data, k.ctypes.data, 1)
    assert rig.pump.stats(0)["returned"] == (0, 1)


def test_bulk_without_credit_does_not_hold_up_attention(make_rig, epoch):
    rig = make_rig(timeout_s=0.1)
    theirs = rig.add_raw(bulk_slots=1)
    rig.begin_upload(1, 100)
    k = np.zeros((1, 32), np.float32)
    rig.pump.store(0, 2, 0, 0, 0, k.ctypes.data, k.ctypes.data, 1)
    with pytest.raises(PortTimeout):
        rig.pump.store(0, 2, 0, 0, 1, k.ctypes.data, k.ctypes.data, 1)
    rig.begin(2, [1])
    rig.fill(1, 0)
    rig.pump.submit(0, 0)
    kinds = []
    for _ in range(4):
        frame = Frame.decode(receive(theirs, 64))
        receive(theirs, frame.nbytes)
        kinds.append(frame.kind)
    assert kinds == [
        FrameKind.BEGIN_STEP,
        FrameKind.KV_ROWS,
        FrameKind.BEGIN_STEP,
        FrameKind.ATTEND,
    ]


def test_a_refusal_ends_the_wait_for_a_credit(make_rig, epoch):
    rig = make_rig(timeout_s=20.0)
    theirs = rig.add_raw(bulk_slots=1)
    rig.begin_upload(1, 100)
    k = np.zeros((1, 32), np.float32)
    rig.pump.store(0, 2, 0, 0, 0, k.ctypes.data, k.ctypes.data, 1)
    refusal = Frame(FrameKind.STEP_ERROR, 2, epoch, 0, step=1, status=StepCode.CACHE_FULL, nbytes=4)
    theirs.sendall(refusal.encode() + b"full")
    with pytest.raises(StepError, match="full"):
        rig.pump.store(0, 2, 0, 0, 1, k.ctypes.data, k.ctypes.data, 1)


def test_a_sender_without_latency_credit_waits_and_reads(make_rig, epoch):
    rig = make_rig(timeout_s=5.0)
    theirs = rig.add_raw(latency_slots=2)
    for handle in range(2):
        rig.pump.post(0, FrameKind.FREE, payload=pack_handles([handle]))
    credit = Frame(FrameKind.CREDIT, 0xFFFF, epoch, 0, consumed_latency=2).encode()
    timer = threading.Timer(0.1, theirs.sendall, (credit,))
    timer.start()
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([2]))
    assert rig.pump.stats(0)["sent"] == (3, 0)
    timer.join()


def test_a_frame_without_credit_is_taken_back_on_timeout(make_rig, epoch):
    rig = make_rig(timeout_s=0.01)
    theirs = rig.add_raw(latency_slots=1)
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))
    for _ in range(40):  # more often than the ring is long
        with pytest.raises(PortTimeout):
            rig.pump.post(0, FrameKind.FREE, payload=pack_handles([2]))
    assert rig.pump.stats(0)["sent"] == (1, 0)
    theirs.sendall(Frame(FrameKind.CREDIT, 0xFFFF, epoch, 0, consumed_latency=1).encode())
    rig.pump.post(0, FrameKind.FREE, payload=pack_handles([3]))
    sent = [receive(theirs, 72) for _ in range(2)]
    assert [Frame.decode(data[:64]).sequence for data in sent] == [0, 1]
    assert [data[64:] for data in sent] == [pack_handles([1]), pack_handles([3])]


class CreditMachine(RuleBasedStateMachine):
    """Sends both classes in any order against a peer that consumes when it likes; a plain ledger
    says what the counters must be and what order the frames arrive in."""

    @initialize(latency=st.integers(2, 6), bulk=st.integers(1, 5))
    def open(self, latency, bulk):
        sizes = FrameSizes.of(AttentionGeometry((KVGroup((0,), 1, 1, 8),), 1.0, "fp32", 4, 64))
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(5)
        self.pump = Pump(sizes, timeout_s=0.02)
        self.slots = (latency, bulk)
        self.pump.add_stream("peer", ours.detach(), epoch=5, latency_slots=latency, bulk_slots=bulk)
        self.step = 1
        self.pump.begin(2, 1, [(0, np.array([(1, 0, 60, 1)], ENTRY_DTYPE))])
        self.sent = [1, 0]
        self.consumed = [0, 0]
        self.told = [0, 0]
        self.on_the_wire = [FrameKind.BEGIN_STEP]
        self.replies = 0

    def _has_credit(self, kind):
        return self.sent[kind] - self.told[kind] < self.slots[kind]

    @rule()
    def free(self):
        if self._has_credit(0):
            self.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))
            self.sent[0] += 1
            self.on_the_wire.append(FrameKind.FREE)
        else:
            with pytest.raises(PortTimeout):
                self.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))

    @rule()
    def store(self):
        rows = np.zeros(8, np.float32)
        address = rows.ctypes.data
        if self._has_credit(1):
            self.pump.store(0, 2, 0, 0, 0, address, address, 1)
            self.sent[1] += 1
            self.on_the_wire.append(FrameKind.KV_ROWS)
            return
        with pytest.raises(PortTimeout):
            self.pump.store(0, 2, 0, 0, 0, address, address, 1)
        if self._has_credit(0):  # the upload was given up: begin it again
            self.step += 1
            self.pump.begin(2, self.step, [(0, np.array([(1, 0, 60, 1)], ENTRY_DTYPE))])
            self.sent[0] += 1
            self.on_the_wire.append(FrameKind.BEGIN_STEP)
        else:
            self.credit()
            self.store_again()

    def store_again(self):
        self.consume_all()
        self.credit()
        self.step += 1
        self.pump.begin(2, self.step, [(0, np.array([(1, 0, 60, 1)], ENTRY_DTYPE))])
        # the credit lies in the socket; a wait that cannot be met reads it
        with pytest.raises(PortTimeout):
            self.pump.wait_ready(0, 2)
        self.step += 1
        self.pump.begin(2, self.step, [(0, np.array([(1, 0, 60, 1)], ENTRY_DTYPE))])
        self.sent[0] += 2
        self.on_the_wire += [FrameKind.BEGIN_STEP] * 2

    @rule()
    def consume_one(self):
        if self.on_the_wire:
            due = self.on_the_wire.pop(0)
            frame = Frame.decode(receive(self.peer, 64))
            assert frame.kind == due
            assert frame.sequence == sum(self.consumed)
            receive(self.peer, frame.nbytes)
            self.consumed[frame.kind == FrameKind.KV_ROWS] += 1

    def consume_all(self):
        while self.on_the_wire:
            self.consume_one()

    @rule()
    def credit(self):
        latency, bulk = self.consumed
        frame = Frame(
            FrameKind.CREDIT,
            0xFFFF,
            5,
            self.replies,
            consumed_latency=latency,
            consumed_bulk=bulk,
        )
        self.peer.sendall(frame.encode())
        self.replies += 1
        self.told = list(self.consumed)

    @invariant()
    def counters_follow_the_ledger(self):
        if not hasattr(self, "pump"):
            return
        stats = self.pump.stats(0)
        assert list(stats["sent"]) == self.sent
        for kind in range(2):
            assert stats["returned"][kind] <= self.told[kind]
            assert self.sent[kind] - self.consumed[kind] <= self.slots[kind]

    def teardown(self):
        if hasattr(self, "pump"):
            self.pump.close()
            self.peer.close()


CreditMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCredits = CreditMachine.TestCase
