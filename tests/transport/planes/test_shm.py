"""Shared memory: what a segment must be, what the peer may do to it, and who wakes whom."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fastdecode_rdma.transport._pump import ShmPlane, shm_segment_bytes

from fastdecode_rdma.errors import (
    FastDecodeError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    WorkerLostError,
)
from fastdecode_rdma.transport import same_host
from fastdecode_rdma.transport.shm import HELLO, ShmTransport, make_segment
from fastdecode_rdma.transport.shm_host import FdInbox, ShmHost
from fastdecode_rdma.wire.frame import Frame, FrameKind, pack_handles, pack_range

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def mapped() -> int:
    """Segments in this process's address space."""
    return Path("/proc/self/maps").read_text().count("/memfd:fastdecode")


# -- the segment


def test_nobody_can_change_the_length_of_a_segment():
    fd = make_segment(8192)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        assert not os.get_inheritable(fd)
        for length in (0, 4096, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
    finally:
        os.close(fd)


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file(nbytes: int) -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(fd, nbytes)
    return fd


FOREIGN = {
    "not sealed": (lambda nbytes: memfd(nbytes, 0), "not sealed"),
    "may grow": (lambda nbytes: memfd(nbytes, fcntl.F_SEAL_SHRINK), "not sealed"),
    "seals may follow": (lambda n: memfd(n, SEALS & ~fcntl.F_SEAL_SEAL), "not sealed"),
    "too short": (lambda nbytes: memfd(nbytes - 4096, SEALS), "bytes where"),
    "too long": (lambda nbytes: memfd(nbytes + 1, SEALS), "bytes where"),
    "empty": (lambda nbytes: memfd(0, SEALS), "has 0 bytes"),
    "a file": (plain_file, "memory segment|not sealed"),
    "a pipe": (lambda nbytes: os.pipe()[0], "no memory segment"),
    "a socket": (lambda nbytes: socket.socket().detach(), "no memory segment"),
    "closed": (lambda nbytes: 9999, "no memory segment"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_sealed_segment_of_the_length_agreed_on_is_refused(shared, name):
    make, words = FOREIGN[name]
    c = shared()
    fd = make(shm_segment_bytes(c.slots(), c.rig.sizes))
    before = mapped()
    with pytest.raises(TransportError, match=words):
        ShmPlane(fd, c.slots(), c.rig.sizes, is_engine=False)
    assert mapped() <= before


def test_memory_and_descriptors_go_with_the_connection(make_rig, shared):
    gc.collect()  # what earlier tests left
    files = len(os.listdir("/proc/self/fd"))
    before = mapped()
    c = shared()
    c.add()
    c.add_raw().memory.close()
    assert mapped() == before + 3  # of engine and worker, and of the engine whose worker we play
    c.rig.run_step(1, [1, 0])
    unused = c.ends()
    assert mapped() == before + 7
    for sock in unused.pair:
        sock.close()
    for side in range(2):
        unused.peer(side).memory.close()
    del unused, sock
    assert mapped() == before + 3  # a plane that no connection took frees itself
    c.rig.close()
    c.rig.planes.clear()
    assert mapped() == before
    c.rig.peers.clear()
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_a_plane_serves_one_connection(shared):
    c = shared()
    ends = c.ends()
    c.rig.add_stream(planes=ends.planes, pair=ends.pair)
    ours, theirs = socket.socketpair()
    with theirs, ours, pytest.raises(LocalProtocolError, match="one connection"):
        c.rig.pump.add_stream(
            "twice", ours.fileno(), epoch=1, latency_slots=8, bulk_slots=4, plane=ends.planes[0]
        )


# -- in place


def test_the_kernel_reads_and_writes_the_shared_pages(shared):
    c = shared()
    ends = c.ends()
    c.rig.add_raw(plane=ends.planes[0], pair=ends.pair)
    session, places = c.rig.sessions[0], []
    attend, store = session._attend, session._store
    session._attend = lambda *args: places.extend(args[4:7]) or attend(*args)
    session._store = lambda *args: places.extend(args[6:8]) or store(*args)
    _, end = c.serve(ends, session)
    c.rig.run_step(1, [5])
    c.rig.begin_upload(2, 10)
    rows = np.ones((3, 32), np.float32)
    c.rig.pump.store(0, 2, 0, 0, 0, rows.ctypes.data, rows.ctypes.data, 3)
    c.rig.pump.request(0, FrameKind.EXPORT, payload=pack_range(7, 0, 1))
    areas = [
        tuple(int(part, 16) for part in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:fastdecode" in line
    ]
    assert len(places) == 4 * 3 + 2
    for place in places:
        assert any(start <= place < end for start, end in areas)
    c.rig.pump.close()
    assert end() is None


# -- what the peer may write


def test_more_frames_than_places_is_a_lie(shared):
    for count in (9, 1 << 31, (1 << 32) - 1):
        c = shared()
        peer = c.add_raw()
        c.rig.begin(1, [1])
        peer.set_word(1, peer.PUBLISHED, count)
        peer.wake()
        with pytest.raises(WorkerLostError, match="more frames than") as caught:
            c.rig.pump.wait_ready(0, 0)
        assert isinstance(caught.value.__cause__, RemoteProtocolError)


def test_released_frames_that_were_never_sent_are_a_lie(shared):
    for count in (2, 1 << 31, (1 << 32) - 1):
        c = shared()
        peer = c.add_raw()
        c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([1]))
        peer.set_word(0, peer.RELEASED, count)
        with pytest.raises(WorkerLostError, match="never sent"):
            c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([2]))


@pytest.mark.parametrize("slot", [8, 255, 257, 258, 1 << 31, (1 << 32) - 1])
def test_a_slot_that_is_not_there_is_a_lie(shared, epoch, slot):
    c = shared()
    peer = c.add_raw()
    c.rig.begin(1, [2])
    c.rig.fill(2, 0)
    c.rig.pump.submit(0, 0)
    reply = Frame(FrameKind.ATTEND_REPLY, 0, epoch, 0, step=1, layer=0, rows=2, nbytes=2 * 256 + 2)
    peer.write(reply.encode(), slot=slot)
    peer.publish()
    with pytest.raises(WorkerLostError, match="fits no slot") as caught:
        c.rig.pump.collect(0, 0)
    assert isinstance(caught.value.__cause__, RemoteProtocolError)
    ends = c.ends()
    session, end = c.serve(ends)
    width = c.rig.sizes.row_bytes[0]
    ask = Frame(FrameKind.ATTEND, 0, epoch, 0, rows=2, nbytes=2 * width)
    ends.peer(0).write(ask.encode(), slot=slot)
    ends.peer(0).publish()
    assert isinstance(end(), RemoteProtocolError)
    assert session.attended == []
    ends.peer(0).close()


def test_a_connection_with_little_under_way_touches_the_same_slot_again(shared):
    c = shared()
    peer = c.add_raw()
    for number in range(20):
        c.rig.pump.post(0, FrameKind.FREE, payload=pack_handles([number]))
        at = peer.lanes[0].here()
        slot = int.from_bytes(peer.memory[at + 64 : at + 68], "little")
        peer.receive(release=number % 4 == 3)  # four under way, then all are given back
        assert slot == number % 4
        peer.send(
            Frame(FrameKind.CREDIT, 0xFFFF, 0x1122334455667788, number,
                  consumed_latency=number + 1).encode()
        )  # fmt: skip
        c.rig.begin(number + 1, [])


def test_a_frame_that_was_not_published_is_not_there(shared, epoch):
    c = shared(timeout_s=0.2)
    peer = c.add_raw()
    c.rig.begin(1, [1])
    peer.write(Frame(FrameKind.STEP_READY, 0, epoch, 0, step=1).encode())
    peer.wake()
    peer.wake()  # woken for nothing: sleeps on
    with pytest.raises(TransportError, match="did not answer within"):
        c.rig.pump.wait_ready(0, 0)
    peer.publish()
    c.rig.begin(2, [1])
    peer.send(Frame(FrameKind.STEP_READY, 0, epoch, 1, step=2).encode())
    c.rig.pump.wait_ready(0, 0)


def test_what_was_published_before_the_end_counts_and_nothing_after(shared, epoch):
    c = shared(timeout_s=20.0)
    peer = c.add_raw()
    c.rig.begin(1, [1])
    peer.send(Frame(FrameKind.STEP_READY, 0, epoch, 0, step=1).encode())
    peer.sock.shutdown(socket.SHUT_RDWR)
    c.rig.pump.wait_ready(0, 0)
    with pytest.raises(WorkerLostError):
        c.rig.fill(1, 0)
        c.rig.pump.exchange(0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_header_is_copied_before_it_is_checked(shared, epoch, seed):
    """A peer that turns bytes of its headers all the time gets nothing but a clean end."""
    c = shared()
    c.add()
    ends = c.ends()
    peer = ends.peer(0)
    session, end = c.serve(ends)
    stop, rng, lane = threading.Event(), random.Random(seed), peer.lanes[0]

    def scribble() -> None:
        while not stop.is_set():
            peer.memory[lane.entry_at + rng.randrange(128 * lane.entries)] = rng.randrange(256)

    thread = threading.Thread(target=scribble)
    thread.start()
    width = c.rig.sizes.row_bytes[0]
    for number in range(100):
        head = Frame(FrameKind.ATTEND, 0, epoch, number, rows=2, nbytes=2 * width)
        peer.send(head.encode(), bytes(2 * width))
    stop.set()
    thread.join()
    peer.sock.shutdown(socket.SHUT_RDWR)
    assert isinstance(end(), RemoteProtocolError | TransportError | None)
    assert session.attended == []  # no table was armed, whatever the bytes said
    c.rig.run_step(1, [2])  # the other session never noticed
    peer.close()


def test_random_counters_and_sleep_marks_end_in_a_typed_error_or_nothing(shared):
    for seed in range(10):
        c = shared(timeout_s=0.05)
        peer = c.add_raw()
        rng = random.Random(seed)
        try:
            for step in range(1, 30):
                c.rig.begin(step, [1])
                for _ in range(3):
                    lane, word = rng.randrange(2), rng.choice([0, 64, 128])
                    peer.set_word(lane, word, rng.choice([0, 1, 2, 3, step, rng.getrandbits(32)]))
                peer.wake()
                c.rig.pump.wait_ready(0, 0)
        except FastDecodeError:
            pass  # too late, or lost: both are
        start = time.monotonic()
        c.rig.pump.close()
        assert time.monotonic() - start < 1.0


def test_a_flood_of_wake_ups_does_no_harm(shared):
    c = shared()
    c.add()
    raw = c.rig.peers[0]
    stop = threading.Event()

    def flood() -> None:
        raw.setblocking(False)
        while not stop.is_set():
            try:
                raw.send(b"x" * 100)
            except BlockingIOError:
                time.sleep(0.0001)

    other = threading.Thread(target=flood)
    other.start()
    try:
        for step in range(1, 20):
            c.rig.run_step(step, [3])
    finally:
        stop.set()
        other.join()
        raw.setblocking(True)


# -- sleeping and spinning


@pytest.mark.parametrize("spin_us", [0, 20, 500])
def test_no_wake_up_is_lost(shared, spin_us):
    """Thousands of turns in which either side falls asleep at any moment."""
    c = shared(timeout_s=10.0)
    ends = c.ends()
    for plane in ends.planes:
        plane.spin_ns = spin_us * 1000
    c.rig.add_stream(planes=ends.planes, pair=ends.pair)
    rng = random.Random(spin_us)
    c.rig.begin(1, [1])
    c.rig.fill(1, 0)
    start = time.monotonic()
    for turn in range(3000):
        c.rig.pump.exchange(0, turn % 4)
        if turn % 16 == 0:
            time.sleep(rng.uniform(0, 1e-4))
        if time.monotonic() - start > 0.7:
            break
    assert turn > 10


def test_sides_that_share_a_core_do_not_spin():
    spin, mask = same_host.spin_ns, lambda *cores: bytes([sum(1 << core for core in cores)])
    assert spin(mask(0, 1), mask(2, 3)) == same_host.SPIN_NS
    assert spin(mask(0, 1), mask(1, 2)) == 0
    assert spin(mask(0), mask(0)) == 0
    assert spin(b"", mask(0)) == spin(mask(0), b"") == 0  # not known: as if shared
    assert spin(b"\0" * 40 + b"\1", b"\1") == same_host.SPIN_NS
    cores = int.from_bytes(same_host.cpu_mask(), "little")
    assert {core for core in range(4096) if cores >> core & 1} == os.sched_getaffinity(0)


# -- set-up


def test_the_host_names_this_machine_and_its_socket():
    host = ShmHost()
    try:
        offer = host.offer()
        assert offer[:36].decode() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(b"\0" + offer[36:])
            accepted, _ = host.listener.accept()
            with accepted:
                assert host.admit(accepted) == f"process {os.getpid()}"
        assert ShmTransport.why_not(None, offer) == ""
        assert ShmTransport.why_not(None, b"x" + offer[1:]) == "the worker is on another machine"
        assert ShmTransport.why_not(None, b"") == "the worker is on another machine"
        assert ShmTransport.why_not(None, None) == "the worker does not offer it"
    finally:
        host.close()
        host.close()


def test_another_users_process_is_not_let_in(monkeypatch):
    host = ShmHost()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(b"\0" + host.offer()[36:])
        accepted, _ = host.listener.accept()
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with accepted:
            assert host.admit(accepted) is None
    host.close()


def test_details_and_descriptors_that_are_none(shared):
    c = shared()
    host = ShmHost()
    fd = make_segment(4096)
    try:
        for details, given in ((b"", fd), (HELLO.pack(-1), None), (HELLO.pack(-1), fd)):
            with pytest.raises(TransportError, match="shared memory"):
                host.accept(details, given, c.slots(), c.rig.sizes)
    finally:
        os.close(fd)
        host.close()


def test_descriptors_that_nobody_asked_for_are_closed():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            socket.send_fds(ours, [b"abc"], [0, 1, 2])
        inbox = FdInbox()
        for _ in range(3):
            assert inbox.receive(theirs, 3) == b"abc"
        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert inbox.fd is not None and not os.get_inheritable(inbox.fd)
        inbox.close()
        inbox.close()
        assert len(os.listdir("/proc/self/fd")) == before
