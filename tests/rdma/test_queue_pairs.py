"""Queue pairs on real verbs, through either binding and mixed, under the pump."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from fastdecode_rdma.errors import (
    LocalProtocolError,
    TransportError,
    TransportTimeout,
    WorkerLostError,
)
from fastdecode_rdma.transport.rdma_bindings import find_binding
from fastdecode_rdma.transport.rdma_endpoint import DEPTH, Endpoint
from fastdecode_rdma.transport.rdma_limits import MEMORY_BYTES, NUM_SLOTS
from fastdecode_rdma.transport.rdma_ports import Gid
from fastdecode_rdma.transport.rdma_wish import Wish

NAMES = ("native", "pyverbs", "ibverbs")
BINDINGS = [*((name, name) for name in NAMES), ("native", "pyverbs"), ("ibverbs", "native")]
GENEROUS_S = 30.0  # the guest emulates its processor


@pytest.fixture
def make_rdma_rig(make_endpoints, make_rig):  # the rig ends first
    """A rig with one worker behind real queue pairs; returns (rig, endpoints, slots)."""

    def make(ours="native", theirs="native", *, geometry=None, spin_ns=0, wish=None, **options):
        rig = make_rig(geometry, timeout_s=GENEROUS_S)
        bindings = [find_binding({"FASTDECODE_VERBS": name}) for name in (ours, theirs)]
        endpoints = make_endpoints(*bindings, wish=wish)
        slots = [endpoint.slots() for endpoint in endpoints]
        rig.add_stream(planes=[each.plane(spin_ns=spin_ns) for each in slots], **options)
        return rig, endpoints, slots

    return make


@pytest.mark.parametrize(("ours", "theirs"), BINDINGS)
def test_rows_come_back_in_place(make_rdma_rig, ours, theirs):
    rig, _, slots = make_rdma_rig(ours, theirs)
    for step, rows in enumerate((1, 24, 7, 2)):
        rig.run_step(step, [rows])
    assert slots[0].stats()["chunks_sent"] == 4 * (1 + rig.geometry.num_layers)


@pytest.mark.parametrize(("ours", "theirs"), BINDINGS)
def test_more_messages_than_the_queues_are_long(make_rdma_rig, ours, theirs):
    rig, _, slots = make_rdma_rig(ours, theirs)
    for step in range(40):
        rig.run_step(step, [3])
    assert slots[0].stats()["writes"] > 2 * DEPTH


@pytest.mark.parametrize(("ours", "theirs"), BINDINGS)
def test_frames_longer_than_a_slot(make_rdma_rig, new_geometry, ours, theirs):
    rig, _, slots = make_rdma_rig(ours, theirs, geometry=new_geometry(max_rows=1024))
    rig.run_step(1, [1000])  # 512000 bytes out, 256000 back
    assert slots[0].stats()["chunks_sent"] > rig.geometry.num_layers + 1


@pytest.mark.parametrize("ours", NAMES)
def test_uploads_without_replies_are_credited(make_rdma_rig, ours):
    rig, _, slots = make_rdma_rig(ours)
    rig.begin_upload(1, 64)
    k = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    for _ in range(3 * NUM_SLOTS):
        rig.pump.store(0, 2, 0, 0, 0, k.ctypes.data, k.ctypes.data, 64)
    rig.pump.request(0, 6, payload=np.array([7, 0, 1], "<u8").tobytes())  # EXPORT: behind all
    assert len(rig.sessions[0].stored) == 3 * NUM_SLOTS
    np.testing.assert_array_equal(rig.sessions[0].stored[-1][4], k)
    assert slots[0].stats()["chunks_credited"] >= 3 * NUM_SLOTS - NUM_SLOTS


def test_spinning_first(make_rdma_rig):
    rig, _, _ = make_rdma_rig(spin_ns=200_000, delay_s=0.01)
    rig.run_step(1, [2])


def test_what_a_message_costs_is_counted(make_rdma_rig):
    rig, _, _ = make_rdma_rig()
    rig.run_step(1, [4])
    stats = rig.pump.stats(0)
    assert stats["io_ns"] > 0
    assert stats["bytes_sent"] > 4 * 128 * 4


def test_the_mtu_is_capped_on_wish(make_rdma_rig):
    rig, endpoints, _ = make_rdma_rig(wish=Wish(mtu=512))
    rig.run_step(1, [24])
    assert [endpoint.mtu_bytes for endpoint in endpoints] == [512, 512]


def test_closing_twice_and_with_work_under_way(make_endpoints, binding):
    first, second = make_endpoints(binding, binding)
    first.queue.write(0, 4096, 0, 1)
    first.close()
    first.close()
    second.close()


def test_closing_under_a_running_plane_is_refused(make_endpoints, make_rig, binding):
    endpoints = make_endpoints(binding, binding)
    rig = make_rig(None, timeout_s=GENEROUS_S)
    rig.add_stream(planes=[each.slots().plane() for each in endpoints])
    for endpoint in endpoints:
        with pytest.raises(LocalProtocolError, match="close the connection"):
            endpoint.close()
    rig.run_step(1, [4])  # and nothing was harmed


# ---- faults of the verbs, each with an error of its own ----


def lost(rig, step=2):
    """What a step raises, and after how many seconds."""
    start_s = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        rig.run_step(step, [2])
    return str(caught.value), time.monotonic() - start_s


@pytest.mark.parametrize("ours", NAMES)
def test_a_wrong_key(make_endpoints, make_rig, pair, ours):  # the rig ends first
    binding = find_binding({"FASTDECODE_VERBS": ours})
    first, second = make_endpoints(binding, binding, connect=False)
    offer = second.offer()
    wrong = replace(offer, rkey=offer.rkey ^ 0x5A5A00)
    first.connect(wrong, pair.remote, pair.remote_gid, Wish())
    second.connect(first.offer(), pair.local, pair.local_gid, Wish())
    rig = make_rig(None, timeout_s=GENEROUS_S)
    rig.add_stream(planes=[each.slots().plane() for each in (first, second)])
    text, took_s = lost(rig)
    assert "the peer's adapter refused the RDMA write: wrong key" in text
    assert took_s < 10


@pytest.mark.parametrize("ours", NAMES)
def test_a_queue_pair_that_is_gone_exhausts_the_retries(make_endpoints, make_rig, ours):
    binding = find_binding({"FASTDECODE_VERBS": ours})
    first, second = make_endpoints(binding, binding)
    number = first.queue.qp_num
    second.close()  # its process died; the socket, which would say so, is mute
    rig = make_rig(None, timeout_s=GENEROUS_S)
    rig.add_raw(plane=first.slots().plane())
    text, took_s = lost(rig)
    assert "retries exhausted" in text
    assert f"QP {number} to" in text
    assert took_s < 10


def test_a_ping_to_nobody_names_both_ends(make_endpoints, pair, binding):
    first, second = make_endpoints(binding, binding, connect=False)
    offer = second.offer()
    second.close()
    first.connect(offer, pair.remote, pair.remote_gid, Wish(timeout=12))
    start_s = time.monotonic()
    with pytest.raises(
        TransportError, match=r"retries exhausted.*QP \d+ to .* QP \d+, MTU 4096; tclass"
    ):
        first.ping(20.0)
    assert time.monotonic() - start_s < 10


def test_a_ping_has_its_bound(make_endpoints, pair, binding):
    first, second = make_endpoints(binding, binding, connect=False)
    offer = second.offer()
    second.close()
    first.connect(offer, pair.remote, pair.remote_gid, Wish(timeout=20, retry=6))  # 30 s
    with pytest.raises(TransportTimeout, match=r"QP \d+, MTU 4096: no answer to a ping in 0\.5 s"):
        first.ping(0.5)


def test_a_gid_without_an_address(make_endpoints, pair, binding):
    empty = Gid(40, pair.local_gid.address, pair.local_gid.kind)
    first = Endpoint(pair.local, empty, binding)
    with pytest.raises(TransportError, match="GID 40 of rxe0:1 must hold an address"):
        first.connect(first.offer(), pair.remote, pair.remote_gid, Wish())
    first.close()


def test_an_unknown_device(pair, binding):
    with pytest.raises(TransportError, match=r"mlx5_99:1: .*RDMA device"):
        Endpoint(replace(pair.local, device="mlx5_99"), pair.local_gid, binding)


MEMLOCK = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
libc = ctypes.CDLL(None, use_errno=True)
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
caps = (ctypes.c_uint32 * 6)()
assert libc.capget(header, caps) == 0
for i in (0, 1):
    caps[i] &= ~(1 << CAP_IPC_LOCK)
assert libc.capset(header, caps) == 0
from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport import rdma_limits, rdma_endpoint
from fastdecode_rdma.transport.rdma_bindings import find_binding
from fastdecode_rdma.transport.rdma_ports import read_ports
if sys.argv[1] == "unchecked":  # as when the kernel counts more than it tells
    rdma_endpoint.check_limits = lambda *_, **__: None
port = read_ports()[0]
try:
    rdma_endpoint.Endpoint(port, port.gids[-1], find_binding())
except TransportError as error:
    print(error.errno, error)
"""


@pytest.mark.parametrize("how", ["checked", "unchecked"])
def test_a_low_limit_of_locked_memory(how):
    done = subprocess.run(
        [sys.executable, "-c", MEMLOCK, how], capture_output=True, text=True, timeout=300
    )
    text = done.stdout + done.stderr
    assert text.startswith(f"{errno.ENOMEM} "), text
    needed_kib = MEMORY_BYTES // 1024
    for words in (f"{needed_kib} KiB", "64 KiB", "ulimit -l unlimited", "LimitMEMLOCK"):
        assert words in text


def test_no_descriptor_is_left(make_endpoints, binding):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for endpoint in make_endpoints(binding, binding):
            endpoint.close()
    assert len(os.listdir("/proc/self/fd")) <= before
