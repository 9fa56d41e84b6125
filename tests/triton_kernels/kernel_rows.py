"""Packing and gathering of attention rows in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import threading

import pytest
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.rope import KINDS, ORIGINAL_LEN, RopeSpec, rope_table
from fastdecode_rdma.reference import ReferenceOps
from fastdecode_rdma.triton_kernels.exchange import Doorbell
from fastdecode_rdma.triton_kernels.rows import HeadNorm, gather_rows, pack_rows

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Relative error of storing one number; the interpreter truncates to bf16."""

POISON = -(1 << 63)
PARAMS = {
    "factor": 4.0, ORIGINAL_LEN: 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
}  # fmt: skip


def rope_spec(kind: str, rot_dim: int) -> RopeSpec:
    factors = tuple(1.0 + 0.25 * i for i in range(rot_dim // 2))
    params = PARAMS | {"short_factor": factors, "long_factor": factors}
    given = tuple((name, params[name]) for name in KINDS[kind].required)
    return RopeSpec(rot_dim, kind=kind, params=given, attention_factor=1.25)


def pinned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros in the CPU's memory; on a GPU machine pinned, so that kernels reach them."""
    on_gpu = torch.empty(0).is_cuda
    return torch.zeros(*shape, dtype=dtype, device="cpu", pin_memory=on_gpu)


def wait_for_kernels() -> None:
    if torch.empty(0).is_cuda:
        torch.cuda.synchronize()


def doorbell() -> Doorbell:
    counters = {name: torch.zeros(1, dtype=torch.int64) for name in ("number", "seen")}
    counters |= {name: pinned(1, dtype=torch.int64) for name in ("request", "reply")}
    return Doorbell(arrivals=torch.zeros(1, dtype=torch.int32), **counters)


def slot_table(slots: torch.Tensor) -> torch.Tensor:
    """Addresses of rows whose bytes are a multiple of 16."""
    return torch.tensor([row.data_ptr() for row in slots], dtype=torch.int64)


def check_pack(
    num_rows, heads, kv_heads, dim, *, spec=None, norm=None, offset=False, bias=False, scale=1.0,
    dtype=torch.float32, wire=torch.float32,
):  # fmt: skip
    """Packs random rows, compares them with float64, returns nothing."""
    torch.manual_seed(num_rows + dim)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(num_rows, width).to(dtype)
    added = torch.randn(width) if bias else None
    positions = torch.randint(0, 64, (num_rows,))
    rope = None if spec is None else rope_table(spec, 64)
    weights = None
    if norm is not None:
        sizes = (dim, dim) if norm == "head" else (heads * dim, kv_heads * dim)
        weights = [torch.randn(size) for size in sizes]
    slots = torch.full((num_rows, width + 24), 7.0).to(wire)  # rows of a multiple of 16 bytes
    table = slot_table(slots)
    if num_rows > 1:
        table[1] = 0
    pack_rows(
        qkv, table, positions, num_q_heads=heads, num_kv_heads=kv_heads, wire_dtype=wire,
        bias=added, rope=rope, q_scale=scale,
        norm=weights and HeadNorm(*weights, 1e-6, unit_offset=offset, whole_row=norm == "row"),
    )  # fmt: skip

    ops, rows = ReferenceOps(torch.float64), qkv.double() + (0 if added is None else added.double())
    if norm == "row":
        ends = heads * dim, (heads + kv_heads) * dim
        for columns, weight in zip((slice(ends[0]), slice(*ends)), weights, strict=True):
            rows[:, columns] = ops.rms_norm(rows[:, columns], weight, 1e-6, unit_offset=offset)
    by_head = weights if norm == "head" else (None, None)
    want = ops.qkv_rows(
        rows, positions, rope, *by_head, 1e-6, unit_offset=offset, num_q_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, out=torch.empty_like(rows),
    )  # fmt: skip
    want[:, : heads * dim] *= scale
    # fp32 sums over at most a row, some 16 operations more; a rotated pair keeps its length;
    # 2^-25: half the spacing of fp16's smallest numbers
    bound = (width + 16) * 2.0**-24 * 2 * want.abs().amax(-1, keepdim=True)
    error = (slots[:, :width].double() - want).abs()
    kept = torch.arange(num_rows) != 1
    assert (error <= bound + ROUNDING[wire] * (want.abs() + bound) + 2.0**-25)[kept].all()
    assert (slots[:, width:] == 7).all()
    assert num_rows == 1 or (slots[1] == 7).all(), "a row without a slot was stored"


@pytest.mark.parametrize("kind", KINDS)
def test_every_rope_kind(kind) -> None:
    check_pack(3, 3, 1, 24, spec=rope_spec(kind, 24))
    check_pack(3, 3, 1, 24, spec=rope_spec(kind, 10), bias=True)


@pytest.mark.parametrize("norm", [None, "head", "row"])
@pytest.mark.parametrize("wire", ROUNDING, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_norms_and_dtypes(dtype, wire, norm) -> None:
    spec = rope_spec("default", 16)
    check_pack(
        2, 6, 2, 20, spec=spec, norm=norm, offset=norm is not None, bias=norm == "row", scale=0.25,
        dtype=dtype, wire=wire,
    )  # fmt: skip


def test_many_rows_and_heads() -> None:
    check_pack(33, 2, 1, 8, spec=rope_spec("default", 8))
    check_pack(1, 40, 8, 128, spec=rope_spec("default", 64), norm="row")  # three programs a row
    check_pack(1, 2, 1, 8)
    check_pack(4, 4, 4, 12, bias=True)


def ring(bell: Doorbell, num_rows: int) -> None:
    slots = torch.empty(num_rows, 3 * 8)
    pack_rows(
        torch.randn(num_rows, 24), slot_table(slots), torch.zeros(num_rows, dtype=torch.int64),
        num_q_heads=1, num_kv_heads=1, wire_dtype=torch.float32, doorbell=bell,
    )  # fmt: skip
    wait_for_kernels()


def test_the_last_program_rings() -> None:
    bell = doorbell()
    for number in (1, 2, 3):
        ring(bell, 5)
        assert bell.request.item() == bell.number.item() == number
        assert bell.arrivals.item() == 0


@pytest.mark.parametrize("wire", ROUNDING, ids=str)
def test_gather(wire) -> None:
    replies = torch.randn(9, 72).to(wire)
    table = slot_table(replies)
    table[3] = 0
    out = torch.full((9, 80), 7.0).to(wire)
    gather_rows(table, out[:, :72], wire_dtype=wire)
    replies[3] = 0
    assert torch.equal(out[:, :72], replies) and (out[:, 72:] == 7).all()


def test_gather_waits_for_the_reply_to_the_last_number() -> None:
    bell, replies, out = doorbell(), pinned(2, 8), torch.empty(2, 8)
    ring(bell, 2)
    ring(bell, 2)
    bell.reply.fill_(1)  # of the number before

    def answer() -> None:
        replies.fill_(5.0)
        bell.reply.fill_(2)

    timer = threading.Timer(0.1, answer)
    timer.start()
    gather_rows(slot_table(replies), out, wire_dtype=torch.float32, doorbell=bell)
    timer.join()
    assert (out == 5.0).all() and bell.seen.item() == 2


def test_a_poisoned_counter_lets_every_wait_fall_through() -> None:
    bell, replies, out = doorbell(), torch.ones(2, 8), torch.empty(2, 8)
    ring(bell, 2)
    bell.reply.fill_(POISON | 1)
    gather_rows(slot_table(replies), out, wire_dtype=torch.float32, doorbell=bell)
    assert bell.seen.item() == 1  # the next step waits for its own number


def test_what_does_not_fit() -> None:
    qkv, table = torch.randn(2, 24), torch.zeros(2, dtype=torch.int64)
    options = {"num_q_heads": 1, "num_kv_heads": 1, "wire_dtype": torch.float32}
    rope = rope_table(RopeSpec(16), 4)
    for change, message in (
        ({"num_q_heads": 3}, "do not hold 5 heads"),
        ({"wire_dtype": torch.float64}, "travel as"),
        ({"bias": torch.ones(23)}, "bias must be a contiguous vector of 24"),
        ({"rope": rope}, "rotary dimension 16 exceeds head_dim 8"),
        ({"norm": HeadNorm(torch.ones(8), torch.ones(7), 1e-6)}, "k_norm must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack_rows(qkv, table, table, **(options | change))
    with pytest.raises(ConfigError, match=r"slots must be a contiguous int64 \[2\]"):
        pack_rows(qkv, table.int(), table, **options)
    with pytest.raises(ConfigError, match=r"reply must be torch.int64 \[1\]"):
        Doorbell(torch.zeros(1, dtype=torch.int32), *[torch.zeros(1, dtype=torch.int64)] * 2,
                 torch.zeros(1, dtype=torch.int64), torch.zeros(1))  # fmt: skip
