"""The RDMA plane over an imitation of a queue pair: the same slots, immediate values, credits and
completions, in this process. tests/rdma runs the real ones."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fastdecode_rdma.transport._rdma import (
    CHUNK_HEAD_BYTES,
    RECEIVED,
    SENT,
    SPARE_RECEIVES,
    SlotPlane,
    explain_status,
)

from fastdecode_rdma.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    WorkerLostError,
)

RETRIES_EXHAUSTED, NO_RECEIVE, REMOTE_ACCESS = 12, 13, 10
NO_SLOT = 255


class Queue:
    """One end of an imitated queue pair. Completions come at once, unless they are held back."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.memory = ctypes.create_string_buffer(2 * num_slots * slot_bytes)
        self.peer: Queue | None = None
        self.receives = num_slots + SPARE_RECEIVES
        self.done: deque[tuple[int, int, int, int, int]] = deque()
        self.lock = threading.RLock()
        self.armed = False
        self.closed = False
        self.fail_with = 0  # status of every further write
        self.tamper: Callable[[int, int], tuple[int, int]] = lambda nbytes, imm: (nbytes, imm)
        self.written: list[tuple[int, int, int]] = []

    @property
    def send(self) -> int:
        return ctypes.addressof(self.memory)

    @property
    def recv(self) -> int:
        return self.send + self.num_slots * self.slot_bytes

    def complete(self, *event: int) -> None:
        with self.lock:
            self.done.append(event)
            if self.armed:
                self.armed = False
                os.eventfd_write(self.fd, 1)

    def write(self, slot: int, nbytes: int, imm: int, count: int) -> None:
        peer = self.peer
        self.written.append((slot, nbytes, imm))
        status = self.fail_with or (RETRIES_EXHAUSTED if peer.closed else 0)
        if not status and not peer.receives:
            status = NO_RECEIVE
        if status:
            self.complete(SENT, status, 0, 0, 0)
            return
        offset = slot * self.slot_bytes
        ctypes.memmove(peer.recv + offset, self.send + offset, nbytes)
        peer.receives -= 1
        nbytes, imm = self.tamper(nbytes, imm)
        peer.complete(RECEIVED, 0, imm, nbytes, 0)
        if count:
            self.complete(SENT, 0, 0, 0, count)

    def receive(self, count: int) -> None:
        self.receives += count
        assert self.receives <= self.num_slots + SPARE_RECEIVES

    def poll(self, limit: int) -> list[tuple[int, int, int, int, int]]:
        with self.lock:
            return [self.done.popleft() for _ in range(min(limit, len(self.done)))]

    def arm(self) -> None:
        self.armed = True

    def disarm(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def explain(self, status: int) -> str:
        return explain_status(status, "here to there")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make_link() -> Iterator[Callable[..., tuple[Queue, Queue, SlotPlane, SlotPlane]]]:
    """Two connected queues and their planes, the engine's first."""
    made: list[Queue] = []

    def make(num_slots: int = 4, slot_bytes: int = 512) -> tuple:
        ours, theirs = Queue(num_slots, slot_bytes), Queue(num_slots, slot_bytes)
        ours.peer, theirs.peer = theirs, ours
        made.extend((ours, theirs))
        planes = [
            SlotPlane(
                queue,
                send=queue.send,
                recv=queue.recv,
                num_slots=num_slots,
                slot_bytes=slot_bytes,
                depth=2 * num_slots + 16,
                memory=queue.memory,
            )
            for queue in (ours, theirs)
        ]
        return ours, theirs, *planes

    yield make
    for queue in made:
        os.close(queue.fd)


@pytest.fixture
def make_rdma_rig(make_rig, make_link):
    """A rig with one worker behind the imitated link."""

    def make(geometry=None, *, num_slots=4, slot_bytes=512, spin_ns=0, **options):
        rig = make_rig(geometry)
        ours, theirs, *slots = make_link(num_slots, slot_bytes)
        planes = [plane.plane(spin_ns=spin_ns) for plane in slots]
        rig.add_stream(planes=planes, **options)
        return rig, ours, theirs, slots

    return make


@pytest.mark.parametrize("num_rows", [1, 2, 23, 24])
@pytest.mark.parametrize("slot_bytes", [96, 512, 1 << 16])
def test_rows_come_back_whatever_the_slots(make_rdma_rig, num_rows, slot_bytes):
    rig, _, _, _ = make_rdma_rig(slot_bytes=slot_bytes)
    for step in range(3):
        rig.run_step(step, [num_rows])


@pytest.mark.parametrize("num_slots", [2, 128])
def test_few_and_many_slots(make_rdma_rig, num_slots):
    rig, _, _, slots = make_rdma_rig(num_slots=num_slots)
    for step in range(20):
        rig.run_step(step, [5])
    stats = slots[0].stats()
    assert stats["chunks_sent"] > 2 * num_slots  # every slot was used again
    assert stats["chunks_sent"] - stats["chunks_credited"] <= num_slots


def test_frames_longer_than_all_slots_together(make_rdma_rig, new_geometry):
    rig, _, _, _ = make_rdma_rig(new_geometry(max_rows=1024), num_slots=4, slot_bytes=4096)
    for step in range(2):
        rig.run_step(step, [1000])


def test_both_sides_sending_do_not_wait_for_each_other(make_rdma_rig, new_geometry):
    rig, _, _, _ = make_rdma_rig(new_geometry(max_rows=256), slot_bytes=4096)
    rig.begin(1, [256], table=0)
    rig.begin(2, [256], table=1)
    expected = [rig.fill(256, 0, table=table) for table in range(2)]
    for table in range(2):
        rig.pump.submit(table, 0)
    for table in range(2):
        rig.pump.collect(table, 0)
        np.testing.assert_array_equal(rig.received(256, 0, table=table), expected[table])


def test_immediate_values_are_slot_and_sequence(make_rdma_rig):
    rig, ours, _, _ = make_rdma_rig(slot_bytes=1 << 16)
    for step in range(4):
        rig.run_step(step, [1])
    chunks = [(slot, imm) for slot, nbytes, imm in ours.written if nbytes]
    assert chunks == [(i % 4, (i % 4) << 24 | i) for i in range(len(chunks))]
    assert len(chunks) == 4 * 5


def test_a_sender_that_gets_no_answers_is_credited_alone(make_rdma_rig):
    """K/V rows have no replies: the worker returns slots in messages of their own."""
    rig, _, theirs, slots = make_rdma_rig(slot_bytes=256)
    rig.begin_upload(1, 64)
    k = np.ones((64, 32), np.float32)
    for layer in (0, 2):
        rig.pump.store(0, 2, layer, 0, 0, k.ctypes.data, k.ctypes.data, 64)
    rig.pump.wait_ready(0, 2)
    alone = [imm for _, nbytes, imm in theirs.written if not nbytes]
    assert alone
    assert {imm >> 24 for imm in alone} == {NO_SLOT}
    assert slots[0].stats()["chunks_credited"] > 16
    assert all(len(rows[4]) for rows in rig.sessions[0].stored)


def test_only_some_writes_are_signalled(make_rdma_rig):
    rig, ours, _, _ = make_rdma_rig(num_slots=16)
    counts = []
    original = ours.write
    ours.write = lambda slot, nbytes, imm, count: (
        counts.append(count),
        original(slot, nbytes, imm, count),
    )[1]
    for step in range(10):
        rig.run_step(step, [3])
    signalled = [count for count in counts if count]
    assert 0 < len(signalled) <= len(counts) // 8


def test_reports_that_nobody_asked_for_are_no_news(make_rdma_rig):
    """A binding may have every write reported: the send queue must not look full for that."""
    rig, ours, _, _ = make_rdma_rig()
    write = ours.write

    def report_all(slot: int, nbytes: int, imm: int, count: int) -> None:
        write(slot, nbytes, imm, count)
        if not count:
            ours.complete(SENT, 0, 0, 0, 0)

    ours.write = report_all
    for step in range(30):
        rig.run_step(step, [2])


@pytest.mark.parametrize("spin_ns", [0, 200_000])
def test_waiting_sleeps_or_spins_first(make_rdma_rig, spin_ns):
    rig, _, _, _ = make_rdma_rig(spin_ns=spin_ns, delay_s=0.002)
    for step in range(3):
        rig.run_step(step, [2])


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RETRIES_EXHAUSTED, "no answer over RDMA .retries exhausted.: .*; here to there"),
        (REMOTE_ACCESS, "refused the RDMA write: wrong key"),
        (NO_RECEIVE, "posted no receive"),
        (99, "failed with status 99; here to there"),
    ],
)
def test_a_failed_completion_loses_the_worker_with_its_reason(make_rdma_rig, status, words):
    rig, ours, _, _ = make_rdma_rig()
    rig.run_step(1, [2])
    ours.fail_with = status
    start_s = time.monotonic()
    with pytest.raises(WorkerLostError, match=words):
        rig.run_step(2, [2])
    assert time.monotonic() - start_s < 1
    assert rig.pump.is_lost(0)


def test_the_workers_side_ends_with_the_reason_too(make_rdma_rig):
    rig, _, theirs, _ = make_rdma_rig()
    rig.run_step(1, [2])
    theirs.fail_with = RETRIES_EXHAUSTED
    with pytest.raises(WorkerLostError):
        rig.run_step(2, [2])
    rig.threads[0].join(5)
    assert isinstance(rig.ends[0], TransportError)
    assert "retries exhausted" in str(rig.ends[0])


def test_an_exception_of_the_binding_is_a_typed_loss(make_rdma_rig):
    rig, ours, _, _ = make_rdma_rig()
    rig.run_step(1, [2])

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "the send queue is full")

    ours.write = refuse
    with pytest.raises(WorkerLostError, match="posting an RDMA write: Cannot allocate memory"):
        rig.run_step(2, [2])


LIES = {
    "slot_out_of_turn": (lambda nbytes, imm: (nbytes, imm ^ 1 << 24), "it wrote slot"),
    "number_out_of_turn": (lambda nbytes, imm: (nbytes, imm + 1), "where number"),
    "no_slot_of_this_size": (lambda nbytes, imm: (4097, imm), "4097 bytes into a slot of 4096"),
    "less_than_a_header": (lambda nbytes, imm: (CHUNK_HEAD_BYTES, imm), "wrote 16 bytes"),
    "a_frame_cut_short": (lambda nbytes, imm: (40, imm), "a frame of 40 bytes"),
    "a_frame_too_long": (lambda nbytes, imm: (nbytes + 8, imm), "more than its frame holds"),
    "credits_never_spent": (lambda nbytes, imm: (nbytes, NO_SLOT << 24 | 77), "never written"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_worker_that_lies_is_lost(make_rdma_rig, name):
    rig, _, theirs, _ = make_rdma_rig(slot_bytes=4096)
    rig.run_step(1, [1])
    lie, words = LIES[name]
    theirs.tamper = lie
    with pytest.raises(WorkerLostError, match=words) as caught:
        rig.run_step(2, [1])
    assert isinstance(caught.value.__cause__, RemoteProtocolError)


@pytest.mark.parametrize("name", LIES)
def test_an_engine_that_lies_ends_its_session_only(make_rdma_rig, name):
    rig, ours, _, _ = make_rdma_rig(slot_bytes=4096)
    rig.run_step(1, [1])
    lie, words = LIES[name]
    ours.tamper = lie
    with pytest.raises(WorkerLostError):
        rig.run_step(2, [1])
    rig.threads[0].join(5)
    assert isinstance(rig.ends[0], RemoteProtocolError)
    assert words in str(rig.ends[0])


def test_a_peer_that_closes_its_socket_is_lost_at_once(make_rdma_rig):
    rig, _, _, _ = make_rdma_rig(delay_s=0.5)
    rig.begin(1, [1])
    rig.fill(1, 0)
    threading.Timer(0.05, lambda: rig.peers[0].shutdown(2)).start()
    start_s = time.monotonic()
    with pytest.raises(WorkerLostError, match="closed the connection"):
        rig.pump.exchange(0, 0)
    assert time.monotonic() - start_s < 0.4


def test_a_worker_marked_lost_wakes_the_wait(make_rdma_rig):
    rig, _, _, _ = make_rdma_rig(delay_s=0.5)
    rig.begin(1, [1])
    rig.fill(1, 0)
    threading.Timer(0.05, lambda: rig.pump.mark_lost(0, "no sign of life")).start()
    with pytest.raises(WorkerLostError, match="no sign of life"):
        rig.pump.exchange(0, 0)


def test_bytes_beside_the_queue_pair_are_a_broken_protocol(make_rdma_rig):
    rig, _, _, _ = make_rdma_rig(delay_s=0.3)
    rig.begin(1, [1])
    rig.fill(1, 0)
    threading.Timer(0.05, lambda: rig.peers[0].send(b"hello")).start()
    with pytest.raises(WorkerLostError, match="beside its RDMA connection"):
        rig.pump.exchange(0, 0)


def test_closing_ends_both_queue_pairs_once(make_rdma_rig):
    rig, ours, theirs, _ = make_rdma_rig()
    rig.run_step(1, [2])
    closes = []
    close = ours.close
    ours.close = lambda: (closes.append(1), close())[1]
    rig.pump.close()
    rig.pump.close()
    assert closes == [1]
    rig.threads[0].join(5)
    assert rig.ends[0] is None  # a clean end, not a loss
    rig.planes[0] = None
    deadline_s = time.monotonic() + 5
    while not theirs.closed and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_a_queue_pair_serves_one_connection(make_link):
    _, _, slots, _ = make_link()
    slots.plane()
    with pytest.raises(LocalProtocolError, match="serves one connection"):
        slots.plane()


@pytest.mark.parametrize(("num_slots", "depth"), [(3, 64), (256, 1024), (1, 64), (16, 40)])
def test_sizes_that_cannot_work(num_slots, depth):
    queue = Queue(2, 64)
    with pytest.raises(LocalProtocolError):
        SlotPlane(
            queue,
            send=queue.send,
            recv=queue.recv,
            num_slots=num_slots,
            slot_bytes=64,
            depth=depth,
            memory=queue.memory,
        )
    os.close(queue.fd)
