"""The equations, by hand and in the limits where the paper gives them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.model import (
    DenseTable,
    Network,
    Overlap,
    Roofline,
    ServingModel,
    TimeTable,
    WorkerRate,
)
from fastdecode_rdma.perfmodel.shapes import SHAPES, ModelShape

SHAPE = ModelShape("m", 4, 256, 512, 8, 2, 32, 1000)


def model(**changes: object) -> ServingModel:
    """T(B) = 10 us + B us; R = 0.5 us a token; rows of 12*32*2 = 768 bytes at 1 GB/s, outputs of
    512."""
    dense = DenseTable(TimeTable(((0, 10e-6), (10, 20e-6))), TimeTable(((0, 0.0),)))
    given = {
        "shape": SHAPE,
        "dense": dense,
        "workers": (WorkerRate(0.5e-6, 1e6),) * 2,
        "network": Network(1e9, 1e9, 3e-6),
        "kv_dtype": "fp16",
    }
    return ServingModel(**(given | changes))


def test_a_table_is_piecewise_linear_and_goes_on_as_its_last_piece() -> None:
    table = TimeTable(((1, 1.0), (3, 2.0), (5, 6.0)))
    assert [table.at(rows) for rows in (0, 1, 2, 3, 4, 7)] == [1, 1, 1.5, 2, 4, 10]
    assert TimeTable(((1, 3.0), (2, 2.5))).at(100) == 3.0  # noise does not extrapolate below
    for points in ((), ((2, 1.0), (1, 1.0)), ((1, -1.0),), ((1, float("nan")),)):
        with pytest.raises(ConfigError):
            TimeTable(points)


def test_a_roofline_reads_weights_then_multiplies() -> None:
    roof = Roofline(SHAPE, 2.0, 1e9, 1e12, 5e-6)
    params = 256 * (32 * (2 * 8 + 2 * 2) + 3 * 512)
    assert SHAPE.block_params == params
    assert roof.block_s(1) == pytest.approx(5e-6 + params * 2 / 1e9)
    assert roof.block_s(10_000) == pytest.approx(5e-6 + 2 * params * 10_000 / 1e12)
    assert roof.causal_s(100) == pytest.approx(4 * 256 * 100 * 50 / 1e12)


def test_a_layer_by_hand() -> None:
    one = model(num_minibatches=1)
    # 10 rows of 40 tokens: T 20, R 400 * 0.5 / 2 = 100, out 7.68, back 5.12, round trip 3
    layer = one.even_layer(10, 400)
    assert layer.total_s == pytest.approx((20 + 100 + 7.68 + 5.12 + 3) * 1e-6)
    two = one.with_minibatches(2).even_layer(20, 800)
    assert two.total_s == pytest.approx(200e-6)  # both halves' attention, all else hidden
    assert two.dense_s == pytest.approx(40e-6)
    assert one.decode_s(10, 400) == pytest.approx(4 * layer.total_s)
    assert one.decode_s(0, 0) == 0


def test_two_minibatches_are_the_papers_stage_when_sides_differ() -> None:
    """2 max(T, R), and T + R + W where the two are equal: no mini-batch overtakes itself."""
    fast = replace(model(), network=Network(1e15, 1e15, 0.0))
    for tokens in (8, 4000):
        layer = fast.even_layer(20, tokens)
        t, r = 20e-6, tokens / 2 * 0.5e-6 / 2
        assert layer.total_s == pytest.approx(2 * max(t, r))
    slow = model(network=Network(1e9, 1e9, 50e-6))
    layer = slow.even_layer(20, 160)  # T = R = 20
    assert layer.total_s == pytest.approx((20 + 20 + 7.68 + 5.12 + 50) * 1e-6)


def test_lockstep_adds_the_way_to_each_stage_and_shared_cores_add_everything() -> None:
    way = (7.68 + 5.12 + 3) * 1e-6
    lockstep = model(overlap=Overlap.LOCKSTEP).even_layer(20, 800)
    assert lockstep.total_s == pytest.approx(2 * (100e-6 + way))
    shared = model(overlap=Overlap.SHARED).even_layer(20, 800)
    assert shared.total_s == pytest.approx(2 * (120e-6 + way))


def test_the_slowest_worker_ends_the_stage() -> None:
    uneven = model()
    rows, tokens = np.array([1.0, 3.0]), np.array([10.0, 90.0])
    assert uneven.attention_s(rows, tokens) == pytest.approx(45e-6)
    costly = model(workers=(WorkerRate(0.5e-6, 1e6, 1e-6, 7e-6),) * 2)
    assert costly.attention_s(rows, tokens) == pytest.approx((45 + 3 + 7) * 1e-6)
    assert costly.even_attention_s(1, 100) == pytest.approx((50 + 1 + 7) * 1e-6)
    assert costly.even_attention_s(3, 300) == pytest.approx((100 + 2 + 7) * 1e-6)  # two and one


def test_faster_workers_take_more() -> None:
    mixed = model(workers=(WorkerRate(1e-6, 1e6), WorkerRate(0.25e-6, 4e6)))
    assert mixed.shares.tolist() == [0.2, 0.8]
    assert mixed.workers_token_s == pytest.approx(0.2e-6)


def test_windows_bound_what_is_seen_and_kept() -> None:
    shape = replace(SHAPE, num_local_layers=3, window=16)
    assert shape.seen_tokens(10) == 10
    assert shape.seen_tokens(96) == pytest.approx(0.25 * 96 + 0.75 * 16)
    local = model(shape=shape, num_minibatches=1)
    assert local.attention_s(np.array([2.0, 0.0]), np.array([192.0, 0])) == pytest.approx(36e-6 * 1)


def test_memory_and_prefill() -> None:
    # 4 layers, K and V of 2 heads of 32 in fp16: 1024 bytes a token
    assert model().max_seqs(10) == int(2e6 // 10240)
    unequal = model(workers=(WorkerRate(0.5e-6, 1e5), WorkerRate(0.5e-6, 1e6)))
    assert unequal.max_seqs(10) == int(2e5 // 10240)
    # T(100) = 110 us against 100 tokens of 256 bytes at 1 GB/s = 25.6 us: hidden
    assert model().prefill_s(100) == pytest.approx(4 * 110e-6 + 3e-6)
    slow = model(network=Network(1e9, 1e9, 3e-6, upload_bytes_per_s=1e8))
    assert slow.prefill_s(100) == pytest.approx(4 * 256e-6 + 3e-6)
    assert model().prefill_s(0) == 0


def test_grouped_heads_move_the_balance_to_the_network() -> None:
    """R and P fall by g; traffic from 8h to (4 + 4/g)h bytes."""
    mha, gqa = SHAPES["llama-2-7b"], SHAPES["llama-3.1-8b"]
    assert mha.kv_token_bytes("fp16") == 4 * gqa.kv_token_bytes("fp16") == 4 * 4096
    traffic = [2 * (s.row_elements() + s.out_elements()) / 4096 for s in (mha, gqa)]
    assert traffic == [8, 5]


@settings(deadline=None, max_examples=100)
@given(
    rows=st.integers(1, 500),
    tokens=st.integers(1, 500),
    count=st.integers(1, 3),
    overlap=st.sampled_from(Overlap),
)
def test_more_work_never_takes_less_and_more_workers_never_more(
    rows: int, tokens: int, count: int, overlap: Overlap
) -> None:
    serving = model(num_minibatches=count, overlap=overlap)
    rows *= 2 * count
    step = serving.decode_s(rows, rows * tokens)
    assert serving.decode_s(rows, rows * (tokens + 1)) >= step
    assert serving.decode_s(rows + 2 * count, (rows + 2 * count) * tokens) >= step
    more = replace(serving, workers=serving.workers * 2)
    assert more.decode_s(rows, rows * tokens) <= step * (1 + 1e-12)
    layer = serving.even_layer(rows, rows * tokens)
    assert layer.total_s >= max(layer.cycle_s, layer.network_s, 0) * (1 - 1e-12)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        model(workers=())
    with pytest.raises(ConfigError, match="num_minibatches"):
        model(num_minibatches=0)
