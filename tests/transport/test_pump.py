"""The engine's side of the pump against workers that serve on threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from fastdecode_rdma.config import ENTRY_DTYPE, StepCode
from fastdecode_rdma.errors import LocalProtocolError, StepError, WorkerLostError
from fastdecode_rdma.transport.base import PortTimeout


@pytest.mark.parametrize("kind", ["local", "stream"])
@pytest.mark.parametrize("num_rows", [1, 2, 23, 24])
def test_rows_come_back_in_place(make_rig, kind, num_rows):
    rig = make_rig()
    getattr(rig, f"add_{kind}")()
    for step in range(3):
        rig.run_step(step, [num_rows])


@pytest.mark.parametrize("num_ports", [1, 3, 16])
def test_many_ports_get_contiguous_ranges(make_rig, new_geometry, num_ports):
    rig = make_rig(new_geometry(max_rows=160))
    for _ in range(num_ports):
        rig.add_stream()
    rows = [(3 * port) % 11 for port in range(num_ports)]
    rows[0] = 5
    for step in range(3):
        rig.run_step(step, rows)
    for port, session in enumerate(rig.sessions):
        assert {count for _, _, count in session.attended} == {rows[port]} - {0}


def test_local_and_stream_together(make_rig):
    rig = make_rig()
    rig.add_stream()
    rig.add_local()
    rig.add_stream()
    for step in range(3):
        rig.run_step(step, [3, 4, 2])


def test_largest_rows_pass_sockets_that_hold_less(make_rig, new_geometry):
    # 2 MB out, 1 MB back: more than a socket pair takes
    rig = make_rig(new_geometry(max_rows=4096))
    rig.add_stream()
    rig.add_stream()
    for step in range(2):
        rig.run_step(step, [4000, 96])


def test_two_tables_overlap(make_rig):
    rig = make_rig()
    rig.add_stream()
    rig.add_local()
    rig.begin(1, [2, 3], table=0)
    rig.begin(2, [4, 1], table=1)
    for layer in range(rig.geometry.num_layers):
        first = rig.fill(5, layer, table=0, seed=1)
        rig.pump.submit(0, layer)
        second = rig.fill(5, layer, table=1, seed=2)
        rig.pump.submit(1, layer)
        rig.pump.collect(0, layer)
        np.testing.assert_array_equal(rig.received(5, layer, table=0), first)
        rig.pump.collect(1, layer)
        np.testing.assert_array_equal(rig.received(5, layer, table=1), second)


def test_engine_and_worker_that_both_send_do_not_wait_for_each_other(make_rig, new_geometry):
    """The worker cannot get its first reply out before it takes the second request in."""
    rig = make_rig(new_geometry(max_rows=4096))
    rig.add_stream()
    rig.begin(1, [4096], table=0)
    rig.begin(2, [4096], table=1)
    first = rig.fill(4096, 0, table=0)
    second = rig.fill(4096, 0, table=1)
    rig.pump.submit(0, 0)
    rig.pump.submit(1, 0)
    rig.pump.collect(0, 0)
    np.testing.assert_array_equal(rig.received(4096, 0, table=0), first)
    rig.pump.collect(1, 0)
    np.testing.assert_array_equal(rig.received(4096, 0, table=1), second)


def test_status_bytes_land_at_their_rows(make_rig):
    rig = make_rig()
    rig.add_stream()
    rig.add_stream()
    rig.begin(1, [3, 4])
    rig.fill(7, 0)
    rig.send[0].reshape(-1)[: 7 * 128].reshape(7, 128)[5, 9] = np.inf
    rig.pump.exchange(0, 0)
    assert rig.status[0][:7].tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_begin_step_says_what_the_worker_is_told(make_rig):
    rig = make_rig()
    session = rig.add_stream()
    entries = np.array([(5, 10, 2, 0), (6, 0, 4, 1)], ENTRY_DTYPE)
    rig.pump.begin(0, 9, [(0, entries)])
    rig.pump.wait_ready(0, 0)
    assert session.begun == [(0, 9, [(5, 10, 2, 0), (6, 0, 4, 1)])]
    rig.fill(2, 0)
    rig.pump.exchange(0, 0)  # the upload entry has no attention rows
    assert session.attended == [(0, 0, 2)]


@pytest.mark.parametrize("kind", ["local", "stream"])
def test_refused_step_is_reported_once_and_can_be_repeated(make_rig, kind):
    rig = make_rig()
    rig.add_stream()
    full = getattr(rig, f"add_{kind}")(full=True)
    rig.begin(1, [1, 1])
    rig.fill(2, 0)
    with pytest.raises(StepError, match="7 bytes needed, 3 free") as caught:
        rig.pump.exchange(0, 0)
    assert (caught.value.worker_index, caught.value.code) == (1, StepCode.CACHE_FULL)
    with pytest.raises(LocalProtocolError, match="aborted"):
        rig.pump.exchange(0, 1)
    full.full = False
    for step in (2, 3):
        rig.run_step(step, [1, 1])


def test_all_workers_refuse_one_error_and_the_next_step_is_clean(make_rig):
    rig = make_rig()
    sessions = [rig.add_stream(full=True) for _ in range(3)]
    rig.begin(1, [1, 1, 1])
    rig.fill(3, 0)
    with pytest.raises(StepError):
        rig.pump.exchange(0, 0)
    for session in sessions:
        session.full = False
    rig.run_step(2, [1, 1, 1])


@pytest.mark.parametrize("kind", ["local", "stream"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_step_aborted_at_every_layer_and_repeated(make_rig, kind, layer):
    rig = make_rig()
    rig.add_stream()
    session = getattr(rig, f"add_{kind}")(fail_at={layer: StepCode.ROWS})
    rig.begin(1, [2, 3])
    for done in range(layer):
        rig.fill(5, done)
        rig.pump.exchange(0, done)
    rig.fill(5, layer)
    with pytest.raises(StepError) as caught:
        rig.pump.exchange(0, layer)
    assert (caught.value.worker_index, caught.value.code) == (1, StepCode.ROWS)
    session.fail_at.clear()
    rig.run_step(2, [2, 3])


def test_late_replies_of_a_step_given_up_are_skipped(make_rig):
    rig = make_rig()
    slow = rig.add_stream(delay_s=0.05)
    rig.add_stream()
    for step in range(1, 12):  # more than the aborted steps that are remembered
        rig.begin(step, [2, 2])
        rig.fill(4, 0, seed=step)
        rig.pump.submit(0, 0)
    slow.delay_s = 0.0
    rig.run_step(20, [2, 2])
    rig.run_step(21, [2, 2])


def test_late_error_of_a_step_given_up_is_skipped(make_rig):
    rig = make_rig()
    slow = rig.add_stream(delay_s=0.05, fail_at={0: StepCode.INTERNAL})
    rig.begin(1, [2])
    rig.fill(2, 0)
    rig.pump.submit(0, 0)
    rig.begin(2, [2])
    time.sleep(0.2)
    slow.fail_at.clear()
    slow.delay_s = 0.0
    rig.fill(2, 0)
    rig.pump.exchange(0, 0)


def test_timeout_names_the_late_worker_and_holds_its_bound(make_rig):
    rig = make_rig(timeout_s=0.2)
    rig.add_stream()
    rig.add_stream(delay_s=0.8)
    rig.begin(1, [1, 1])
    rig.fill(2, 0)
    start = time.monotonic()
    with pytest.raises(PortTimeout, match=r"did not answer within 0\.2 s") as caught:
        rig.pump.exchange(0, 0)
    assert caught.value.worker_index == 1
    assert 0.15 < time.monotonic() - start < 0.7
    time.sleep(0.8)
    rig.sessions[1].delay_s = 0.0
    rig.run_step(2, [1, 1])  # a late worker can go on


def test_the_bound_grows_with_the_bytes_that_are_due(make_rig, new_geometry):
    rig = make_rig(new_geometry(max_rows=8000, num_layers=2), timeout_s=0.2)
    rig.add_stream(delay_s=0.45)
    width = rig.geometry.row_width(0) + rig.geometry.out_width(0)
    assert 0.5 < 8000 * width * 4 * 100e-9 < 1.0  # seconds more, at 100 ns a byte
    rig.begin(1, [8000])
    expected = rig.fill(8000, 0)
    rig.pump.exchange(0, 0)
    np.testing.assert_array_equal(rig.received(8000, 0), expected)
    rig.begin(2, [1])
    rig.fill(1, 0)
    with pytest.raises(PortTimeout):
        rig.pump.exchange(0, 0)


def test_lost_worker_is_named_and_the_others_go_on(make_rig):
    rig = make_rig()
    for _ in range(3):
        rig.add_stream()
    rig.run_step(1, [1, 2, 3])
    rig.peers[1].shutdown(2)
    rig.threads[1].join(5)
    with pytest.raises(WorkerLostError) as caught:
        rig.run_step(2, [1, 2, 3])
    assert caught.value.worker_index == 1
    assert rig.pump.is_lost(1) and not rig.pump.is_lost(0)
    for step in (3, 4):
        rig.begin(step, [])
        entries = np.zeros(2, ENTRY_DTYPE)
        entries["q_len"] = 1
        rig.pump.begin(0, step + 10, [(0, entries), (2, entries)])
        expected = rig.fill(4, 0)
        rig.pump.exchange(0, 0)
        np.testing.assert_array_equal(rig.received(4, 0), expected)
    with pytest.raises(WorkerLostError):
        rig.begin(30, [1, 1, 1])


def test_mark_lost_wakes_a_waiting_exchange(make_rig):
    rig = make_rig(timeout_s=20.0)
    rig.add_raw()  # a peer that never answers
    rig.begin(1, [1])
    rig.fill(1, 0)
    timer = threading.Timer(0.1, rig.pump.mark_lost, (0, "no heartbeat for 2 s"))
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="no heartbeat for 2 s"):
        rig.pump.exchange(0, 0)
    assert time.monotonic() - start < 2.0
    timer.join()


def test_close_wakes_a_waiting_exchange_and_is_idempotent(make_rig):
    rig = make_rig(timeout_s=20.0)
    rig.add_raw()
    rig.begin(1, [1])
    timer = threading.Timer(0.1, rig.pump.close)
    timer.start()
    with pytest.raises(WorkerLostError, match="closed"):
        rig.pump.exchange(0, 0)
    timer.join()
    rig.pump.close()
    rig.pump.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        rig.pump.exchange(0, 0)


def test_misuse_is_named_and_sends_nothing(make_rig):
    rig = make_rig()
    session = rig.add_stream()
    pump = rig.pump
    with pytest.raises(LocalProtocolError, match="not submitted"):
        rig.begin(1, [1])
        pump.collect(0, 0)
    with pytest.raises(LocalProtocolError, match="no such layer"):
        pump.exchange(0, 99)
    with pytest.raises(LocalProtocolError, match="uploads only"):
        pump.exchange(5, 0)
    with pytest.raises(LocalProtocolError, match="tables 0 to 7"):
        pump.exchange(8, 0)
    with pytest.raises(LocalProtocolError, match="new number"):
        rig.begin(1, [1])
    with pytest.raises(LocalProtocolError, match="25 rows"):
        rig.begin(2, [25])
    with pytest.raises(LocalProtocolError, match="named twice"):
        pump.begin(0, 3, [(0, np.zeros(1, ENTRY_DTYPE)), (0, np.zeros(1, ENTRY_DTYPE))])
    with pytest.raises(LocalProtocolError, match="no number 4"):
        pump.begin(0, 3, [(4, np.zeros(1, ENTRY_DTYPE))])
    assert session.attended == []
    rig.run_step(9, [1])


def test_counters_say_where_time_went(make_rig):
    rig = make_rig()
    rig.add_stream(delay_s=0.01)
    rig.add_local(delay_s=0.01)
    rig.run_step(1, [2, 2])
    for port in range(2):
        stats = rig.pump.stats(port)
        assert stats["kernel_ns"] > 4 * 9_000_000
        assert 0 < stats["pump_ns"] < 10_000_000
    assert rig.pump.stats(0)["bytes_sent"] > 0 and rig.pump.stats(1)["bytes_sent"] == 0
    # BEGIN_STEP and its answer, four layers and their replies
    assert rig.pump.stats(0)["messages"] == 10
