"""A session driven step by step: repeats, aborts, freed sequences, native calls, cost."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fastdecode_rdma.config import (
    ENTRY_DTYPE,
    ENTRY_UPLOAD,
    AttentionGeometry,
    KVGroup,
    StepCode,
)
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget, StepRefusedError

UNIT = 2.0**-24
GEOMETRY = AttentionGeometry(
    groups=(KVGroup((0, 2, 3), 6, 2, 16, None), KVGroup((1, 4), 4, 1, 8, 100)),
    scale=0.25,
    kv_dtype="fp32",
    max_rows=1024,
    max_model_len=5000,
)
ATTEND = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
STORE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def entries(*lines: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(list(lines), dtype=ENTRY_DTYPE)


@pytest.fixture
def session() -> Iterator[AttentionSession]:
    budget = MemoryBudget(256 << 20)
    with AttentionSession(GEOMETRY, budget, 2) as session:
        yield session
    assert budget.used_bytes == 0


@functools.cache
def rows_of(handle: int, position: int, layer: int) -> np.ndarray:
    """The [q | k | v] row that a sequence brings at a position; the same at every call."""
    rng = np.random.default_rng([handle, position, layer])
    return rng.standard_normal(GEOMETRY.row_width(layer)).astype(np.float32)


def run_layer(
    session: AttentionSession, layer: int, lines: np.ndarray, table: int = 0
) -> np.ndarray:
    """Attends with the rows that the entries bring; returns the outputs [rows, out_width]."""
    rows = np.stack(
        [
            rows_of(int(line["handle"]), int(line["kv_len_before"]) + i, layer)
            for line in lines
            for i in range(line["q_len"])
        ]
    )
    out = np.empty((len(rows), GEOMETRY.out_width(layer)), np.float32)
    status = np.full(len(rows), 7, np.uint8)
    session.attend(table, layer, rows, out, status)
    assert not status.any()
    return out


def run_step(session: AttentionSession, step: int, lines: np.ndarray) -> list[np.ndarray]:
    session.begin_step(0, step, lines)
    return [run_layer(session, layer, lines) for layer in range(GEOMETRY.num_layers)]


def oracle(handle: int, position: int, layer: int) -> np.ndarray:
    """Float64 output of one row, from the rows that the sequence has brought so far."""
    group = GEOMETRY.group_of(layer)
    first = 0 if group.window is None else max(0, position - group.window + 1)
    rows = np.stack([rows_of(handle, p, layer) for p in range(first, position + 1)])
    heads, kv_heads, dim = group.num_q_heads, group.num_kv_heads, group.head_dim
    q, k, v = np.split(rows.astype(np.float64), np.cumsum([heads * dim, kv_heads * dim]), axis=1)
    q, k, v = (x.reshape(len(rows), -1, dim) for x in (q, k, v))
    out = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = k[:, kv_head] @ q[-1, head] * GEOMETRY.scale
        weights = np.exp(scores - scores.max())
        out.append((weights / weights.sum()) @ v[:, kv_head])
    return np.concatenate(out)


def assert_close(out: np.ndarray, expected: np.ndarray, length: int) -> None:
    """Unit normal q, k, v: |v| <= 5, sums |q k| * scale <= 16; derived as in test_attention.py."""
    bound = 5 * UNIT * (2 * 16 * (math.sqrt(16) + 4) + math.sqrt(length) + 8)
    assert np.abs(out - expected).max() <= bound


def test_decode_through_steps_matches_the_oracle(session: AttentionSession) -> None:
    """Prompts in chunks, then single tokens, sequences joining and leaving."""
    run_step(session, 1, entries((1, 0, 100, 0), (2, 0, 3, 0)))
    run_step(session, 2, entries((1, 100, 60, 0), (3, 0, 130, 0)))
    outs = run_step(session, 3, entries((3, 130, 1, 0), (1, 160, 2, 0), (2, 3, 1, 0)))
    session.free([2])
    later = run_step(session, 4, entries((1, 162, 1, 0), (4, 0, 1, 0)))
    for layer in range(GEOMETRY.num_layers):
        for row, (handle, position) in enumerate([(3, 130), (1, 160), (1, 161), (2, 3)]):
            assert_close(outs[layer][row], oracle(handle, position, layer), position + 1)
        assert_close(later[layer][0], oracle(1, 162, layer), 163)
        assert np.array_equal(later[layer][1], v_of(4, 0, layer))


def v_of(handle: int, position: int, layer: int) -> np.ndarray:
    """What a row that sees only itself must return: its own V, once per query head."""
    group = GEOMETRY.group_of(layer)
    v = rows_of(handle, position, layer)[-group.num_kv_heads * group.head_dim :]
    share = group.num_q_heads // group.num_kv_heads
    return np.repeat(v.reshape(group.num_kv_heads, group.head_dim), share, axis=0).ravel()


@pytest.mark.parametrize("died_at", range(GEOMETRY.num_layers + 1))
def test_a_step_that_died_at_any_layer_repeats_with_equal_bits(died_at: int) -> None:
    prompt = entries((1, 0, 150, 0), (2, 0, 64, 0), (3, 0, 20, 0))
    step = entries((1, 150, 1, 0), (2, 64, 3, 0), (3, 20, 1, 0))
    after = entries((1, 151, 1, 0), (2, 65, 1, 0), (3, 21, 1, 0))  # of 2's three tokens one stays
    results = []
    for abort in (False, True):
        with AttentionSession(GEOMETRY, MemoryBudget(64 << 20), 2) as session:
            run_step(session, 1, prompt)
            if abort:
                session.begin_step(0, 2, step)
                for layer in range(died_at):
                    run_layer(session, layer, step)
            results.append(run_step(session, 3, step) + run_step(session, 4, after))
            used = session.stats()["blocks_used"]
            assert used == [3 + 2 + 1, 3 + 2 + 1]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_an_attend_that_runs_twice_gives_the_same(session: AttentionSession) -> None:
    lines = entries((1, 0, 70, 0), (2, 0, 5, 0))
    session.begin_step(0, 1, lines)
    for layer in range(GEOMETRY.num_layers):
        assert np.array_equal(run_layer(session, layer, lines), run_layer(session, layer, lines))


def test_every_layer_and_repeat_of_a_step_merges_its_segments(session: AttentionSession) -> None:
    """The counters by which the last segment of a row finds out that it is the last start anew."""
    length = 2500
    session.begin_step(2, 1, entries((1, 0, length, ENTRY_UPLOAD)))
    rng = np.random.default_rng(8)
    for layer in range(GEOMETRY.num_layers):
        group = GEOMETRY.group_of(layer)
        width = group.num_kv_heads * group.head_dim
        k, v = (rng.standard_normal((length, width)).astype(np.float32) for _ in range(2))
        session.store(2, layer, 0, 0, k, v)
    step = entries((1, length, 2, 0))
    outs = run_step(session, 2, step)
    for layer in range(GEOMETRY.num_layers):
        for _ in range(2):
            assert np.array_equal(run_layer(session, layer, step), outs[layer])
    with AttentionSession(GEOMETRY, MemoryBudget(64 << 20), 1) as other:
        other.import_range(1, 0, session.export_range(1, 0, length))
        for layer in (3, 0):  # another order: a counter left over would show
            other.begin_step(0, 1, step)
            assert np.array_equal(run_layer(other, layer, step), outs[layer])


def test_replay_of_many_tokens_at_once_has_the_bits_of_decoding(session: AttentionSession) -> None:
    run_step(session, 1, entries((1, 0, 90, 0), (2, 0, 30, 0)))
    decoded = [run_step(session, 2 + i, entries((1, 90 + i, 1, 0))) for i in range(40)]
    with AttentionSession(GEOMETRY, MemoryBudget(64 << 20), 1) as other:
        run_step(other, 1, entries((1, 0, 90, 0)))
        replayed = run_step(other, 2, entries((1, 90, 40, 0)))
    for layer in range(GEOMETRY.num_layers):
        together = np.concatenate([step[layer] for step in decoded])
        assert np.array_equal(together, replayed[layer])


def test_upload_then_decode_and_mixed_tables(session: AttentionSession) -> None:
    """An upload entry brings no rows; a window layer may skip what its ring will not hold."""
    length = 700
    lines = entries((5, 0, length, ENTRY_UPLOAD), (6, 0, 2, 0))
    session.begin_step(2, 1, lines)
    for layer in range(GEOMETRY.num_layers):
        group = GEOMETRY.group_of(layer)
        rows = np.stack([rows_of(5, p, layer) for p in range(length)])
        width = group.num_kv_heads * group.head_dim
        k, v = rows[:, -2 * width : -width].copy(), rows[:, -width:].copy()
        first = 0 if group.window is None else length - group.window + 1
        for start in range(first, length, 250):
            stop = min(length, start + 250)
            session.store(2, layer, 0, start, k[start:stop].copy(), v[start:stop].copy())
        run_layer(session, layer, lines[1:], table=2)
    step = entries((5, length, 1, 0), (6, 2, 1, 0))
    outs = run_step(session, 2, step)
    for layer in range(GEOMETRY.num_layers):
        assert_close(outs[layer][0], oracle(5, length, layer), length + 1)
        assert_close(outs[layer][1], oracle(6, 2, layer), 3)
    with pytest.raises(StepRefusedError, match="ring"):  # the upload left nothing to shorten into
        session.begin_step(0, 3, entries((5, length - 5, 1, 0)))


def test_missing_writes_are_refused_not_attended(session: AttentionSession) -> None:
    session.begin_step(2, 1, entries((1, 0, 10, ENTRY_UPLOAD)))
    k = np.zeros((10, 32), np.float32)
    session.store(2, 0, 0, 0, k, k)
    lines = entries((1, 10, 1, 0))
    session.begin_step(0, 2, lines)
    run_layer(session, 0, lines)
    for layer in (1, 2):
        with pytest.raises(StepRefusedError) as caught:
            run_layer(session, layer, lines)
        assert caught.value.code is StepCode.RANGE


def test_refused_calls(session: AttentionSession) -> None:
    lines = entries((1, 0, 10, ENTRY_UPLOAD), (2, 0, 3, 0))
    session.begin_step(2, 1, lines)
    rows, out, status = (np.zeros((3, 400), np.float32) for _ in range(3))
    k = np.zeros((4, 32), np.float32)
    one = rows[:1]
    cases = [
        (lambda: session.attend(0, 0, rows, out, status), StepCode.TABLE),
        (lambda: session.attend(-1, 0, rows, out, status), StepCode.TABLE),
        (lambda: session.attend(8, 0, rows, out, status), StepCode.TABLE),
        (lambda: session.attend(2, -1, rows, out, status), StepCode.LAYER),
        (lambda: session.attend(2, 5, rows, out, status), StepCode.LAYER),
        (lambda: session.attend(2, 0, one, out, status), StepCode.ROWS),
        (lambda: session.store(0, 0, 0, 0, k, k), StepCode.TABLE),
        (lambda: session.store(2, 5, 0, 0, k, k), StepCode.LAYER),
        (lambda: session.store(2, 0, 2, 0, k, k), StepCode.RANGE),
        (lambda: session.store(2, 0, -1, 0, k, k), StepCode.RANGE),
        (lambda: session.store(2, 0, 0, 7, k, k), StepCode.RANGE),
        (lambda: session.store(2, 0, 0, -1, k, k), StepCode.RANGE),
        (lambda: session.store(2, 0, 0, 2, k, k), StepCode.RANGE),  # leaves a gap
        (lambda: session.store(2, 0, 1, 0, k[:1], k[:1]), StepCode.TABLE),  # no upload entry
    ]
    for call, code in cases:
        with pytest.raises(StepRefusedError, match=code.name) as caught:
            call()
        assert caught.value.code is code


def test_tables_of_freed_shared_and_shortened_sequences_are_dead(
    session: AttentionSession,
) -> None:
    run_step(session, 1, entries((1, 0, 90, 0), (2, 0, 90, 0)))
    step = entries((1, 90, 1, 0), (2, 90, 1, 0))

    def refused(code: StepCode) -> None:
        with pytest.raises(StepRefusedError, match=code.name):
            run_layer(session, 0, step)

    session.begin_step(0, 2, step)
    session.fork(1, 3, 90)
    refused(StepCode.TABLE)  # it would write into the block that 3 now shares
    session.begin_step(0, 3, step)
    session.begin_step(1, 3, entries((1, 40, 1, 0)))
    refused(StepCode.RANGE)
    session.begin_step(2, 3, entries((1, 0, 90, ENTRY_UPLOAD)))
    session.free([2])
    session.begin_step(1, 4, entries((7, 0, 150, 0)))  # takes the freed structure and blocks
    refused(StepCode.RANGE)
    with pytest.raises(StepRefusedError, match="SEQUENCE"):
        session.begin_step(0, 5, entries((7, 150, 1, 0)))
        session.free([7])
        run_layer(session, 0, entries((7, 150, 1, 0)))


def test_forks_decode_their_own_tokens(session: AttentionSession) -> None:
    run_step(session, 1, entries((1, 0, 130, 0)))
    for new in (2, 3):
        session.fork(1, new, 130)
    assert session.stats()["blocks_used"] == [3, 3]
    lines = entries((1, 130, 1, 0), (2, 130, 1, 0), (3, 130, 1, 0))
    outs = run_step(session, 2, lines)
    again = run_step(session, 3, lines)
    with AttentionSession(GEOMETRY, MemoryBudget(64 << 20), 1) as other:
        run_step(other, 1, entries((1, 0, 130, 0)))
        alone = run_step(other, 2, entries((1, 130, 1, 0)))
    for layer in range(GEOMETRY.num_layers):
        assert np.array_equal(outs[layer], again[layer])
        assert np.array_equal(outs[layer][0], alone[layer][0])
        assert not np.array_equal(outs[layer][1], outs[layer][2])


def test_native_entry_drives_the_session_and_outlives_close() -> None:
    budget = MemoryBudget(64 << 20)
    session = AttentionSession(GEOMETRY, budget, 1)
    native = session.native()
    attend, store = ATTEND(native.attend_addr), STORE(native.store_addr)
    session.begin_step(2, 1, entries((1, 0, 1, ENTRY_UPLOAD)))
    k = np.ones((1, 32), np.float32)
    data = k.ctypes.data
    assert store(native.ctx_addr, 2, 0, 0, 0, 1, data, data) == StepCode.OK
    session.begin_step(0, 1, entries((1, 1, 1, 0)))
    row = np.ones((1, GEOMETRY.row_width(0)), np.float32)
    out = np.zeros((1, GEOMETRY.out_width(0)), np.float32)
    status = np.zeros(1, np.uint8)
    addresses = (row.ctypes.data, out.ctypes.data, status.ctypes.data)
    assert attend(native.ctx_addr, 0, 0, 1, *addresses) == StepCode.OK
    assert np.array_equal(out, np.ones_like(out))
    assert session.stats()["attends"] == 1
    session.close()
    session.close()
    assert budget.used_bytes == 0
    del session
    gc.collect()
    assert attend(native.ctx_addr, 0, 0, 1, *addresses) == StepCode.TABLE
    assert store(native.ctx_addr, 2, 0, 0, 0, 1, data, data) == StepCode.TABLE


def test_a_closed_session_refuses_everything() -> None:
    session = AttentionSession(GEOMETRY, MemoryBudget(64 << 20), 1)
    run_step(session, 1, entries((1, 0, 5, 0)))
    session.close()
    assert session.stats()["kv_bytes_used"] == 0
    for call in (
        lambda: session.begin_step(0, 2, entries((1, 0, 1, 0))),
        lambda: run_layer(session, 0, entries((1, 0, 5, 0))),
        lambda: session.fork(1, 2, 1),
        lambda: session.export_range(1, 0, 1),
    ):
        with pytest.raises(StepRefusedError):
            call()
    session.free([1])


def test_close_waits_for_a_running_attend() -> None:
    """A thread attends while this one closes: calls before it work, later ones are refused."""
    budget = MemoryBudget(256 << 20)
    for _ in range(5):
        session = AttentionSession(GEOMETRY, budget, 1)
        lines = entries(*((h, 0, 20, 0) for h in range(50)))
        run_step(session, 1, lines)
        native = session.native()
        attend = ATTEND(native.attend_addr)
        rows = np.ones((1000, GEOMETRY.row_width(0)), np.float32)
        out = np.empty((1000, GEOMETRY.out_width(0)), np.float32)
        status = np.empty(1000, np.uint8)
        codes: list[int] = []

        def work(  # all by argument: the loop makes new ones
            native=native, attend=attend, rows=rows, out=out, status=status, codes=codes
        ) -> None:
            addresses = (rows.ctypes.data, out.ctypes.data, status.ctypes.data)
            while not codes or codes[-1] == StepCode.OK:
                codes.append(attend(native.ctx_addr, 0, 0, 1000, *addresses))

        thread = threading.Thread(target=work)
        thread.start()
        while len(codes) < 3:
            time.sleep(0.001)
        session.close()
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert set(codes[:-1]) == {StepCode.OK} and codes[-1] == StepCode.TABLE
        assert budget.used_bytes == 0


def test_threads_are_validated() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        AttentionSession(GEOMETRY, MemoryBudget(1), 0)


def test_python_of_a_decode_step_is_cheap(session: AttentionSession) -> None:
    """1000 decode rows well under 2 ms (the best of several steps: other load is not counted)."""
    handles = range(1, 1001)
    session.begin_step(2, 0, entries(*((h, 0, 60, ENTRY_UPLOAD) for h in handles)))
    lines = entries(*((h, 60, 1, 0) for h in handles))
    times = []
    for step in range(30):
        lines["kv_len_before"] = 60 + step
        start = time.perf_counter()
        session.begin_step(0, step, lines)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
    assert session.stats()["blocks_used"] == [2000, 2000]  # token 64 opened a block for all


def test_import_needs_no_torch_and_names_missing_kernels() -> None:
    code = (
        "import sys\n"
        "import fastdecode_rdma.worker.session\n"
        "assert 'torch' not in sys.modules\n"
        "for name in [n for n in sys.modules if n.startswith('fastdecode_rdma')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['fastdecode_rdma.worker._attention'] = None\n"
        "try:\n"
        "    import fastdecode_rdma.worker.session\n"
        "except ImportError as exc:\n"
        "    assert 'pip install -e .' in str(exc) and exc.__cause__ is not None\n"
        "else:\n"
        "    raise AssertionError('imported without kernels')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
