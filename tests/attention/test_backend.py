"""AttentionBackend over one embedded worker: the contract that remote ones are compared with."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, StepCode
from fastdecode_rdma.errors import ConfigError, LocalProtocolError, StepError, WorkerLostError


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, row in got.items():
        np.testing.assert_array_equal(row, expected[key], err_msg=str(key))


def test_first_token_attends_to_itself(connect):
    """With one token the output is v, whatever q and k are: rows, widths and order are right."""
    driver = connect()
    handles = [3, 9, 4]
    outputs = driver.run([(0, handles)], 0)
    for (handle, layer), row in outputs.items():
        group = driver.geometry.group_of(layer)
        v = driver.rows([handle], 0, layer)[0, -group.num_kv_heads * group.head_dim :]
        v = v.reshape(group.num_kv_heads, 1, group.head_dim)
        share = group.num_q_heads // group.num_kv_heads
        expected = np.repeat(v, share, axis=1).reshape(-1)
        np.testing.assert_allclose(row, expected, rtol=4 * np.finfo(np.float32).eps, atol=0)


@pytest.mark.parametrize("layer", range(4))
def test_a_step_left_at_any_layer_and_repeated_gives_the_same(connect, layer):
    driver, other = connect(), connect()
    for position in range(8):
        expected = other.run([(0, [1, 2])], position)
        driver.run([(0, [1, 2])], position, stop_at=layer)
        assert_same(driver.run([(0, [1, 2])], position), expected)


def test_uploaded_rows_are_what_decoding_would_have_written(connect):
    decoded, uploaded = connect(), connect()
    for position in range(12):
        decoded.run([(0, [5])], position)
    backend, geometry = uploaded.backend, uploaded.geometry
    entries = np.array([(5, 0, 12, ENTRY_UPLOAD)], ENTRY_DTYPE)
    backend.begin_step(2, 1000, [(0, entries)])
    for layer in range(geometry.num_layers):
        group = geometry.group_of(layer)
        width = group.num_kv_heads * group.head_dim
        rows = np.concatenate([uploaded.rows([5], position, layer) for position in range(12)])
        k = np.ascontiguousarray(rows[:, -2 * width : -width])
        v = np.ascontiguousarray(rows[:, -width:])
        backend.store_kv(0, 2, layer, 0, 0, k.ctypes.data, v.ctypes.data, 7)
        backend.store_kv(0, 2, layer, 0, 7, k[7:].ctypes.data, v[7:].ctypes.data, 5)
    backend.wait_ready(0, 2)
    assert_same(uploaded.run([(0, [5])], 12), decoded.run([(0, [5])], 12))


def test_fork_export_import_continue_the_same(connect):
    driver = connect()
    for position in range(6):
        driver.run([(0, [1])], position)
    driver.backend.fork(0, 1, 2, 6)
    data = driver.backend.export_range(0, 1, 0, 6)
    driver.backend.import_range(0, 3, 0, data)
    expected = {layer: driver.run([(0, [1])], 6)[1, layer] for layer in range(4)}
    for handle in (2, 3):
        rows = driver.rows

        def as_sequence_1(handles, position, layer, rows=rows):
            return rows([1] * len(handles), position, layer)

        driver.rows = as_sequence_1
        got = driver.run([(0, [handle])], 6)
        driver.rows = rows
        for layer in range(4):
            np.testing.assert_array_equal(got[handle, layer], expected[layer])
    driver.backend.free(0, [1, 2, 3, 77])


def test_refusals_name_worker_and_code(connect):
    driver = connect()
    with pytest.raises(StepError) as caught:
        driver.run([(0, [1])], 5)  # nothing is cached of it
    assert (caught.value.worker_index, caught.value.code) == (0, StepCode.SEQUENCE)
    with pytest.raises(StepError):
        driver.backend.fork(0, 404, 1, 1)
    driver.run([(0, [1])], 0)


def test_cache_full_changes_nothing_and_says_so(connect):
    driver = connect(memory_bytes=1 << 20)
    driver.run([(0, [1])], 0)
    entries = np.array([(2, 0, 1024, ENTRY_UPLOAD)] * 1, ENTRY_DTYPE)
    many = np.repeat(entries, 40)
    many["handle"] = np.arange(40) + 10
    driver.backend.begin_step(2, 500, [(0, many)])
    with pytest.raises(StepError) as caught:
        driver.backend.wait_ready(0, 2)
    assert caught.value.code == StepCode.CACHE_FULL
    driver.run([(0, [1])], 1)


def test_buffers_are_aligned_stay_put_and_hold_the_widest_rows(connect):
    backend = connect().backend
    geometry = backend.geometry
    for table in range(2):
        assert backend.send_rows[table].shape == (16, geometry.max_row_width)
        assert backend.recv_rows[table].shape == (16, geometry.max_out_width)
        assert backend.row_status[table].shape == (16,)
        for buffer in (backend.send_rows, backend.recv_rows, backend.row_status):
            assert buffer[table].ctypes.data % 4096 == 0


def test_non_finite_rows_are_marked_and_others_are_not(connect):
    driver = connect()
    driver.backend.begin_step(0, 900, [(0, driver.entries([1, 2, 3], 0))])
    rows = driver.rows([1, 2, 3], 0, 0)
    rows[1, 0] = np.nan
    driver.backend.send_rows[0].reshape(-1)[: rows.size] = rows.reshape(-1)
    driver.backend.exchange(0, 0)
    assert driver.backend.row_status[0][:3].tolist() == [0, 1, 0]


def test_close_is_idempotent_and_ends_use(connect):
    driver = connect()
    driver.backend.close()
    driver.backend.close()
    with pytest.raises(LocalProtocolError):
        driver.run([(0, [1])], 0)
    with pytest.raises(WorkerLostError):
        driver.backend.free(0, [1])


def test_no_workers_is_a_config_error(new_geometry):
    with pytest.raises(ConfigError):
        AttentionBackend([], new_geometry())


def count_python_calls(driver, position):
    """Python-level calls per function name while one step runs, those of this test left out."""
    counts = {}

    def profile(frame, event, argument):
        if event == "call" and "fastdecode_rdma" in frame.f_code.co_filename:
            name = frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else ""
            name = name or frame.f_code.co_name
            counts[name] = counts.get(name, 0) + 1

    sys.setprofile(profile)
    try:
        driver.run([(0, [1, 2])], position)
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("remote", [False, True])
def test_python_calls_per_step_do_not_grow_with_layers(connect, serve, new_geometry, remote):
    urls = [serve().url] if remote else None
    counts = {}
    for num_layers in (2, 12):
        driver = connect(urls, geometry=new_geometry(num_layers))
        driver.run([(0, [1, 2])], 0)
        calls = count_python_calls(driver, 1)
        for name in [name for name in calls if "row_width" in name or "out_width" in name]:
            del calls[name]  # the test's own look at the geometry
        for name in [name for name in calls if name.endswith(("group_of", "_group_by_layer"))]:
            del calls[name]
        assert calls.pop("AttentionBackend.exchange", calls.pop("exchange", None)) == num_layers
        counts[num_layers] = calls
    assert counts[2] == counts[12]
    assert sum(counts[2].values()) < 40


def test_a_worker_runs_no_python_per_layer(connect, serve, new_geometry):
    counts = {}
    for num_layers in (2, 12):
        calls = {}

        def profile(frame, event, argument, calls=calls):
            name = frame.f_code.co_filename
            if event == "call" and name.endswith(("serve.py", "session.py", "kvcache.py")):
                calls[frame.f_code.co_name] = calls.get(frame.f_code.co_name, 0) + 1

        threading.setprofile(profile)
        try:
            driver = connect([serve().url], geometry=new_geometry(num_layers))
            for position in range(3):
                driver.run([(0, [1, 2])], position)
        finally:
            threading.setprofile(None)
        counts[num_layers] = dict(calls)  # before the session is closed, on a thread of its own
        counts[num_layers].pop("num_messages", None)  # the heartbeat's look at the progress counter
        driver.backend.close()
    assert counts[2] == counts[12]
    assert counts[2]["_begin_step"] == 3
