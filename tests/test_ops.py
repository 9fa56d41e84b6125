"""The CPU ops against the float64 oracle, and the bit-identity under deterministic mode."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import fastdecode_rdma.ops
from fastdecode_rdma import _dense
from fastdecode_rdma import ops as ops_module
from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.ops import (
    IDLE_POLL_S,
    PROBE_RECHECKS,
    CpuOps,
    GemmChoice,
    _await_idle_pools,
    _winner,
    measure_gemm,
)
from fastdecode_rdma.reference import ReferenceOps, RopeTable, attention

EPS = torch.finfo(torch.float32).eps
ORACLE = ReferenceOps(torch.float64)


@pytest.fixture(params=_dense.ISA_NAMES)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """Packed kernels of one instruction set, two threads."""
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    try:
        return CpuOps(num_threads=2, deterministic=True)
    except ConfigError as error:
        pytest.skip(str(error))


def gemm_bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """|error| of a K-term fp32 sum, each term rounded once, the textbook bound: K eps sum |x w|."""
    return (weight.shape[1] + 2) * EPS * (x.abs().double() @ weight.abs().double().t())


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 32, 127, 128, 129, 300])
@pytest.mark.parametrize(("num_out", "num_in"), [(16, 8), (17, 33), (96, 576), (250, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_within_the_rounding_bound(
    ops: CpuOps, rows: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out)
    x, residual = torch.randn(rows, num_in), torch.randn(rows, num_out)
    packed = ops.pack(weight, bias)
    expected = x.double() @ weight.double().t() + bias.double()
    bound = gemm_bound(x, weight) + EPS * (expected.abs() + residual.abs())
    assert ((ops.linear(x, packed) - expected).abs() <= bound).all()
    total = ops.linear_add_(x, packed, residual.clone())
    assert ((total - expected - residual.double()).abs() <= 2 * bound).all()


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(ops: CpuOps) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 700).bfloat16()
    x = torch.randn(300, 700)
    packed = ops.pack(weight, torch.randn(200))
    whole = ops.linear(x, packed).clone()
    for threads in (1, 2, 3):
        other = CpuOps(num_threads=threads, deterministic=True)
        for rows in (1, 2, 3, 6, 8, 11, 64, 129):
            assert torch.equal(other.linear(x[:rows].contiguous(), packed), whole[:rows]), rows
            tail = x[-rows:].contiguous()
            assert torch.equal(other.linear(tail, packed), whole[-rows:]), rows


@pytest.mark.parametrize(("num_out", "num_in"), [(16, 8), (150, 33), (70, 512), (250, 1030)])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_few_rows_have_the_bits_that_they_have_among_many(
    ops: CpuOps, num_out: int, num_in: int, weights: str
) -> None:
    """Tiles of all shapes: any number of rows, one to four panels, blocks of k and their ends."""
    torch.manual_seed(num_in)
    weight, x = torch.randn(num_out, num_in), torch.randn(40, num_in)
    quantization = "int8" if weights == "int8" else None
    others = [
        CpuOps(num_threads=threads, deterministic=True, quantization=quantization)
        for threads in (1, 2)
    ]
    packed = others[0].pack(weight.bfloat16() if weights == "bf16" else weight)
    whole = ops.linear(x, packed).clone()
    for other, rows in itertools.product(others, range(1, 18)):
        for first in (0, 40 - rows):
            part = x[first : first + rows].contiguous()
            assert torch.equal(other.linear(part, packed), whole[first : first + rows]), rows


def test_bf16_weights_give_the_bits_of_the_same_weights_in_fp32(ops: CpuOps) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(65, 90).bfloat16(), torch.randn(9, 90)
    assert torch.equal(
        ops.linear(x, ops.pack(weight, None)).clone(), ops.linear(x, ops.pack(weight.float(), None))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_returns_the_rows_of_the_checkpoint_exactly(
    ops: CpuOps, dtype: torch.dtype
) -> None:
    weight = torch.randn(37, 24).to(dtype)
    ids = torch.tensor([0, 36, 15, 16, 15])
    assert torch.equal(ops.embedding(ops.pack(weight, None), ids), weight[ids].float())


@pytest.mark.parametrize("bad", [-1, 37])
def test_embedding_refuses_ids_outside_the_vocabulary(ops: CpuOps, bad: int) -> None:
    packed = ops.pack(torch.randn(37, 24), None)
    with pytest.raises(ConfigError, match=f"token id {bad} is outside the vocabulary of 37"):
        ops.embedding(packed, torch.tensor([1, bad]))


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 576), (5, 100), (64, 640)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_match_the_oracle(ops: CpuOps, rows: int, width: int, unit_offset: bool) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(rows, width) * 3, torch.randn(rows, width)
    weight, bias = torch.randn(width), torch.randn(width)
    # mean of squares: width terms of relative error eps; then a handful of roundings
    tol = (width + 8) * EPS
    args = {"unit_offset": unit_offset}
    expected = ORACLE.rms_norm(x.double(), weight.double(), 1e-5, **args)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5, **args).double(), expected, rtol=tol, atol=tol
    )
    x1, x2 = x.clone(), x.double()
    normed = ops.add_rms_norm(x1, y, weight, 1e-5, **args)
    expected = ORACLE.add_rms_norm(x2, y.double(), weight.double(), 1e-5, **args)
    torch.testing.assert_close(normed.double(), expected, rtol=tol, atol=2 * tol)
    assert torch.equal(x1, x + y)
    expected = ORACLE.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    actual = ops.layer_norm(x, weight, bias, 1e-5).double()
    torch.testing.assert_close(actual, expected, rtol=tol, atol=4 * tol)


def test_a_norm_of_some_columns_leaves_the_others_alone(ops: CpuOps) -> None:
    torch.manual_seed(4)
    rows, weight = torch.randn(5, 100), torch.randn(48)
    before = rows.clone()
    part = rows[:, 20:68]
    expected = ops.rms_norm(before[:, 20:68].contiguous(), weight, 1e-5)
    assert ops.rms_norm(part, weight, 1e-5, out=part) is part
    assert torch.equal(part, expected)
    assert torch.equal(rows[:, :20], before[:, :20]) and torch.equal(rows[:, 68:], before[:, 68:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("width", [8, 30, 1536])
def test_activations_match_the_oracle_over_their_whole_range(
    ops: CpuOps, activation: str, width: int
) -> None:
    gate = torch.linspace(-120, 120, 4 * width).view(4, width)[torch.randperm(4)]
    gate[0] = torch.linspace(-3, 3, width)
    up = torch.randn(4, width)
    both = torch.cat([gate, up], dim=1)
    expected = ORACLE.act_mul(both.double(), activation)
    # exp, one division, one product: a few ulp; exp of a large |x| magnifies its argument's error
    torch.testing.assert_close(
        ops.act_mul(both, activation).double(), expected, rtol=64 * EPS, atol=1e-6
    )
    alone = ops.act(gate.clone(), activation)
    torch.testing.assert_close(
        alone.double(), ORACLE.act(gate.double(), activation), rtol=64 * EPS, atol=1e-6
    )


@pytest.mark.parametrize("head_dim", [8, 24, 64, 256])
@pytest.mark.parametrize("rotary", [0, 8, None])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_qkv_rows_match_the_oracle(
    ops: CpuOps, head_dim: int, rotary: int | None, normed: bool, in_place: bool
) -> None:
    torch.manual_seed(4)
    heads, kv_heads, rows = 6, 2, 5
    rot_dim = head_dim if rotary is None else rotary
    angle = torch.randn(40, rot_dim // 2)
    rope = RopeTable(angle.cos(), angle.sin()) if rot_dim else None
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    positions = torch.tensor([0, 39, 7, 7, 21])
    norms = [torch.randn(head_dim) if normed else None for _ in range(2)]
    args = {
        "unit_offset": True,
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    double = [None if norm is None else norm.double() for norm in norms]
    expected = torch.empty_like(qkv, dtype=torch.float64)
    ORACLE.qkv_rows(qkv.double(), positions, rope, *double, 1e-6, out=expected, **args)
    source = qkv.clone()
    out = source if in_place else torch.empty_like(qkv)
    ops.qkv_rows(source, positions, rope, *norms, 1e-6, out=out, **args)
    tol = (head_dim + 16) * EPS
    torch.testing.assert_close(out.double(), expected, rtol=tol, atol=8 * tol)


def test_non_finite_values_stay_visible(ops: CpuOps) -> None:
    """A NaN or infinity must reach the row status or the logits, never turn into a number."""
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    for activation in ("silu", "gelu_tanh", "relu"):
        assert ops.act(x.clone(), activation)[1, 5].isnan()
    normed = ops.rms_norm(x, torch.ones(64), 1e-5)
    assert normed[1].isnan().all() and normed[0].isfinite().all() and normed[2].isfinite().all()
    out = ops.linear(x, ops.pack(torch.randn(32, 64), None))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_prefill_attention_keeps_non_finite_scores_visible(ops: CpuOps, value: float) -> None:
    """A NaN query, and a score that overflows."""
    q, k, v = torch.randn(4, 16), torch.randn(4, 16), torch.randn(4, 16)
    q[2, 3] = value
    k[:, 3] = 1e30 if value == 1e30 else 1.0
    group = KVGroup((0,), 1, 1, 16)
    out = ops.attend(q, k, v, group, layer=0, scale=1.0, softcap=None, out=torch.empty_like(q))
    assert not out[2].isfinite().any()
    assert value == 1e30 or out[[0, 1, 3]].isfinite().all()


def test_the_gemm_is_chosen_by_measurement() -> None:
    ops = CpuOps(num_threads=2)
    ops.pack(torch.randn(64, 64), None)
    choice = ops.gemm_choices[(64, 64, "fp32")]
    assert set(choice.seconds) == {"packed", "torch", "numpy"}
    assert all(len(times) == 4 and min(times) > 0 for times in choice.seconds.values())
    assert choice.backend == _winner(choice.seconds)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_every_library_backend_computes_the_same_function(backend: str) -> None:
    ops = CpuOps(num_threads=2)
    weight, bias, x = torch.randn(48, 40).bfloat16(), torch.randn(48), torch.randn(7, 40)
    ops.gemm_choices[(48, 40, "bf16")] = GemmChoice(backend)
    linear = ops.pack(weight, bias)
    assert linear.backend == backend
    expected = x.double() @ weight.double().t() + bias.double()
    bound = gemm_bound(x, weight) + EPS * expected.abs()
    assert ((ops.linear(x, linear) - expected).abs() <= bound).all()
    residual = torch.randn(7, 48)
    total = ops.linear_add_(x, linear, residual.clone())
    assert ((total - expected - residual).abs() <= 2 * bound + EPS * residual.abs()).all()
    assert torch.equal(ops.embedding(linear, torch.tensor([3, 0])), weight[[3, 0]].float())


def test_the_fastest_backend_wins_but_packed_keeps_a_close_race() -> None:
    assert _winner({"packed": [1.4, 1.4], "torch": [1.0, 1.0], "numpy": [2.0, 2.0]}) == "packed"
    assert _winner({"packed": [1.6, 1.6], "torch": [1.0, 1.0], "numpy": [2.0, 2.0]}) == "torch"


def test_a_disturbed_probe_is_repeated_before_a_library_is_chosen(monkeypatch):
    """A time slice taken by somebody else makes one number of rows many times slower."""
    probes = []
    packed = [[40.0, 1.0, 1.0, 1.0], [1.0, 40.0, 1.0, 1.0]]

    def probe(own, weight, dtype, backend):
        probes.append(backend)
        return packed.pop(0) if backend == "packed" else [2.0] * 4

    monkeypatch.setattr(ops_module, "_probe", probe)
    choice = measure_gemm.__wrapped__(64, 64, "bf16", num_threads=1, isa="scalar")
    assert choice.backend == "packed" and choice.seconds["packed"] == [1.0] * 4
    assert probes == ["packed", "torch", "numpy", "packed"]
    packed[:] = [[4.0] * 4] * 9
    probes.clear()
    choice = measure_gemm.__wrapped__(64, 64, "bf16", num_threads=1, isa="scalar")
    assert choice.backend in ("torch", "numpy") and probes.count("packed") == 1 + PROBE_RECHECKS


def test_a_measurement_waits_for_threads_that_still_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 0.020, 0.02, 0.039, 0.039, 0.0391])  # two busy looks, then a quiet one
    slept: list[float] = []
    monkeypatch.setattr(fastdecode_rdma.ops.time, "process_time", lambda: next(used))
    monkeypatch.setattr(fastdecode_rdma.ops.time, "sleep", slept.append)
    _await_idle_pools()
    assert slept == [IDLE_POLL_S] * 3


def test_the_wait_for_spinning_threads_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    used = itertools.count(0.0, 1.0)
    monkeypatch.setattr(fastdecode_rdma.ops.time, "process_time", lambda: next(used))
    monkeypatch.setattr(fastdecode_rdma.ops, "IDLE_WAIT_S", 0.1)
    started = time.monotonic()
    _await_idle_pools()
    assert 0.1 <= time.monotonic() - started < 5


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5000), (1, 262_145)])
def test_softcap_is_tanh_and_keeps_what_is_no_number(ops: CpuOps, shape: tuple[int, int]) -> None:
    """Small values too, relative to themselves: logits near 0 differ by their low bits only."""
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    x[:, 0] = 0.0
    whole = ops.softcap_(x.clone(), 30.0)
    exact = ORACLE.softcap_(x.double(), 30.0)
    # x / cap, tanh and the product round once each, tanh itself errs by 2 to 3 eps
    assert ((whole.double() - exact).abs() <= 5 * EPS * exact.abs()).all()
    row = ops.softcap_(x[-1:].clone(), 30.0)
    assert torch.equal(row[0], whole[-1])  # whatever is beside it
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -0.0]])
    capped = ops.softcap_(odd, 30.0)[0]
    assert capped[0].isnan() and capped[1:].tolist() == [30.0, -30.0, 30.0, 0.0]


def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDECODE_ISA", "sse9")
    with pytest.raises(ConfigError, match="'sse9' is unknown"):
        CpuOps()


@pytest.mark.parametrize(
    ("num_rows", "length", "heads", "kv_heads", "head_dim"),
    [
        (1, 1, 4, 2, 16),
        (13, 13, 9, 3, 64),
        (100, 300, 4, 1, 256),
        (64, 129, 8, 8, 24),
        (33, 200, 130, 1, 8),
        (97, 64 + 97, 7, 1, 40),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 50, 64])
@pytest.mark.parametrize(("softcap", "biased"), [(None, False), (3.0, False), (None, True)])
def test_prefill_attention_matches_the_oracle_and_a_row_does_not_depend_on_its_chunk(
    ops: CpuOps,
    num_rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    biased: bool,
) -> None:
    torch.manual_seed(5)
    slopes, sinks = torch.linspace(-0.01, 0.1, heads), torch.linspace(-40, 40, heads)
    per_head = {"slopes": tuple(slopes.tolist()), "sinks": tuple(sinks.tolist())} if biased else {}
    rows = {**per_head, "sinks": ((0.0,) * heads, per_head["sinks"])} if biased else {}
    group = KVGroup((3, 7), heads, kv_heads, head_dim, window, **rows)
    q = torch.randn(num_rows, heads * head_dim)
    k, v = torch.randn(2, length, kv_heads * head_dim)
    args = {"scale": 2 * head_dim**-0.5, "softcap": softcap}
    out = ops.attend(q, k, v, group, layer=7, out=torch.empty_like(q), **args)
    oracle = attention(
        q.view(num_rows, heads, head_dim),
        k.view(length, kv_heads, head_dim),
        v.view(length, kv_heads, head_dim),
        window=window,
        **args,
        **per_head,
    ).reshape(num_rows, -1)
    # a score is a sum of head_dim products and exp turns its error into a relative one; scores here
    # stay below 30 in size (biases below 100, those of keys that weigh something below 50), values
    # below 6
    assert (out - oracle).abs().max() < (head_dim + 64) * 30 * EPS
    for first, last in ((0, num_rows), (num_rows - 1, num_rows), (num_rows // 2, num_rows)):
        seen = length - num_rows + last
        part = q[first:last]
        kept = torch.empty_like(part)
        alone = ops.attend(part, k[:seen], v[:seen], group, layer=7, out=kept, **args)
        assert torch.equal(alone, out[first:last])


@pytest.mark.parametrize("num_threads", [0, -8])
def test_a_team_has_at_least_one_thread(num_threads: int) -> None:
    with pytest.raises(ConfigError, match="num_threads must be at least 1"):
        CpuOps(num_threads=num_threads)
