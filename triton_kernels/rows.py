"""Attention rows: from the q/k/v projection into the workers' slots, and their replies back.

Packing is one kernel over [q | k | v] rows, after a projection without its bias:

    x = qkv + bias
    q, k: x / sqrt(mean(x^2) + eps) * (offset + weight)   over a head, or over all heads of the row
    q, k: rotary: (a, b) -> (a cos - b sin, b cos + a sin), a and b half a rotary dimension apart
    q *= q_scale
    slot[row] = x in the wire's dtype

The slot of a row is an address: a worker's pinned memory, mapped. Address 0 is no row: a batch that
is padded up to a graph's size. Doorbells are in exchange.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdecode_rdma.reference import RopeTable

from . import launch
from .configs import GATHER_BLOCK, PACK_TILE
from .exchange import Doorbell, await_reply, ring
from .launch import INTERPRETED, TRITON_DTYPES, require, require_float, require_vector

SLOT_ALIGNMENT = 16
"""Bytes that every row's address in a slot must be a multiple of: kernels store that much at once.
"""


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of q and k: weights [D] per head, or with `whole_row` [Hq * D] and [Hkv * D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    unit_offset: bool = False
    whole_row: bool = False


@triton.jit
def _row_scale(
    row_ptr,
    bias_ptr,
    eps,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """1 / sqrt(mean square + eps) of the columns FIRST .. FIRST + WIDTH of a row."""
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        x = tl.load(row_ptr + FIRST + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + FIRST + columns, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / WIDTH + eps)


@triton.jit
def _normed(
    row_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scale,
    heads,
    dims,
    inside,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS,
):
    """The row's elements at (heads, dims) in fp32, biased and normed; `scale` [heads] of QK_NORM 2.

    `dims` may be a permutation of a head's: it says which weights and elements are meant.
    """
    at = heads * HEAD_DIM + dims
    x = tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM > 0:
        is_q = heads < NUM_Q
        is_k = (heads >= NUM_Q) & (heads < NUM_Q + NUM_KV)
        if QK_NORM == 1:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + EPS)[:, None]
            q_at, k_at = dims, dims
        else:
            q_at, k_at = at, at - NUM_Q * HEAD_DIM
        weight = tl.load(q_norm_ptr + q_at, mask=inside & is_q, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + k_at, mask=inside & is_k, other=0.0).to(tl.float32)
        x = tl.where(is_q | is_k, x * scale * (weight + OFFSET), x)
    return x


@triton.jit
def _pack_rows_kernel(
    qkv_ptr,
    bias_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slot_ptr,
    arrivals_ptr,
    number_ptr,
    request_ptr,
    row_stride,
    eps,
    q_scale,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIRE: tl.constexpr,
    RINGS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIMS_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # grid: [T, cdiv(Hq + 2 Hkv, HEADS_BLOCK)]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = qkv_ptr + row * row_stride
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    dims = tl.arange(0, DIMS_BLOCK)[None, :]
    inside = (heads < NUM_Q + 2 * NUM_KV) & (dims < HEAD_DIM)
    scale = 1.0
    if QK_NORM == 2:
        KV_WIDTH: tl.constexpr = NUM_KV * HEAD_DIM
        BLOCK: tl.constexpr = HEADS_BLOCK * DIMS_BLOCK
        q_row = _row_scale(row_ptr, bias_ptr, eps, 0, NUM_Q * HEAD_DIM, HAS_BIAS, BLOCK)
        k_row = _row_scale(row_ptr, bias_ptr, eps, NUM_Q * HEAD_DIM, KV_WIDTH, HAS_BIAS, BLOCK)
        scale = tl.where(heads < NUM_Q, q_row, k_row)
    x = _normed(
        row_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, scale, heads, dims, inside,
        NUM_Q, NUM_KV, HEAD_DIM, HAS_BIAS, QK_NORM, OFFSET, eps,
    )  # fmt: skip
    if HALF > 0:
        partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
        other = _normed(
            row_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, scale, heads, partners, inside,
            NUM_Q, NUM_KV, HEAD_DIM, HAS_BIAS, QK_NORM, OFFSET, eps,
        )  # fmt: skip
        rotated = (dims < 2 * HALF) & (heads < NUM_Q + NUM_KV)
        turn = tl.load(positions_ptr + row) * HALF + tl.where(dims < HALF, dims, dims - HALF)
        cos = tl.load(cos_ptr + turn, mask=dims < 2 * HALF, other=1.0)
        sin = tl.load(sin_ptr + turn, mask=dims < 2 * HALF, other=0.0)
        sin = tl.where(dims < HALF, -sin, sin)
        x = tl.where(rotated, x * cos + other * sin, x)
    x = tl.where(heads < NUM_Q, x * q_scale, x)
    slot = tl.load(slot_ptr + row)
    slot_at = tl.multiple_of(slot.to(tl.pointer_type(WIRE)), ALIGNMENT) + (heads * HEAD_DIM + dims)
    stored = inside & (heads < tl.where(slot == 0, 0, NUM_Q + 2 * NUM_KV))
    tl.store(slot_at, x.to(WIRE), mask=stored)
    if RINGS:
        ring(arrivals_ptr, number_ptr, request_ptr, ON_DEVICE)


def pack_rows(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) D], before its bias
    slots: Tensor,  # [T] int64: addresses, multiples of SLOT_ALIGNMENT; 0: no row
    positions: Tensor,  # [T] int64, all inside the rope table
    *,
    num_q_heads: int,
    num_kv_heads: int,
    wire_dtype: torch.dtype,
    bias: Tensor | None = None,
    norm: HeadNorm | None = None,
    rope: RopeTable | None = None,
    q_scale: float = 1.0,
    doorbell: Doorbell | None = None,
) -> None:
    """Stores the attention rows [q | k | v] at their addresses, then rings, if there is a doorbell.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    num_rows, head_dim = _check_rows(qkv, num_q_heads + 2 * num_kv_heads, slots, positions)
    require(wire_dtype in TRITON_DTYPES, f"rows travel as fp32, fp16 or bf16, not {wire_dtype}")
    require_vector("the q/k/v bias", bias, qkv.shape[1])
    if norm is not None:
        weights = (("q_norm", norm.q_weight, num_q_heads), ("k_norm", norm.k_weight, num_kv_heads))
        for name, weight, heads in weights:
            require_vector(name, weight, head_dim * (heads if norm.whole_row else 1))
    half = 0 if rope is None else rope.cos.shape[1]
    require(2 * half <= head_dim, f"rotary dimension {2 * half} exceeds head_dim {head_dim}")
    dims_block = triton.next_power_of_2(head_dim)
    all_heads = num_q_heads + 2 * num_kv_heads
    heads_block = min(triton.next_power_of_2(all_heads), max(PACK_TILE // dims_block, 1))
    launch.launch(
        _pack_rows_kernel, (num_rows, triton.cdiv(all_heads, heads_block)),
        qkv, bias, positions, rope and rope.cos, rope and rope.sin,
        norm and norm.q_weight, norm and norm.k_weight, slots,
        doorbell and doorbell.arrivals, doorbell and doorbell.number, doorbell and doorbell.request,
        qkv.stride(0), 0.0 if norm is None else norm.eps, q_scale,
        NUM_Q=num_q_heads, NUM_KV=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        HAS_BIAS=bias is not None, QK_NORM=0 if norm is None else 1 + norm.whole_row,
        OFFSET=float(norm is not None and norm.unit_offset), WIRE=TRITON_DTYPES[wire_dtype],
        RINGS=doorbell is not None, ON_DEVICE=not INTERPRETED, HEADS_BLOCK=heads_block,
        DIMS_BLOCK=dims_block, ALIGNMENT=SLOT_ALIGNMENT, num_warps=4,
    )  # fmt: skip


def _check_rows(qkv: Tensor, num_heads: int, slots: Tensor, positions: Tensor) -> tuple[int, int]:
    """Returns T and D."""
    require_float("qkv", qkv)
    num_rows, width = qkv.shape
    require(width % num_heads == 0, f"rows of {width} elements do not hold {num_heads} heads")
    for name, tensor in (("slots", slots), ("positions", positions)):
        require(
            tensor.shape == (num_rows,) and tensor.dtype == torch.int64 and tensor.is_contiguous(),
            f"{name} must be a contiguous int64 [{num_rows}], got {tensor.dtype} "
            f"{list(tensor.shape)}",
        )
    return num_rows, width // num_heads


@triton.jit
def _gather_rows_kernel(
    slot_ptr,
    out_ptr,
    number_ptr,
    reply_ptr,
    seen_ptr,
    width,
    out_row_stride,
    WIRE: tl.constexpr,
    WAITS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # grid: [T, cdiv(width, BLOCK)]
    if WAITS:
        await_reply(number_ptr, reply_ptr, seen_ptr, ON_DEVICE)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    slot = tl.load(slot_ptr + row)
    slot_at = tl.multiple_of(slot.to(tl.pointer_type(WIRE)), ALIGNMENT) + columns
    # around the L1 cache: the CPU has written these bytes since a kernel last read them
    present = columns < tl.where(slot == 0, 0, width)
    x = tl.load(slot_at, mask=present, other=0.0, cache_modifier=".cg")
    out_at = out_ptr + row * out_row_stride + columns
    tl.store(out_at, x.to(tl.float32).to(out_ptr.dtype.element_ty), mask=inside)


def gather_rows(
    slots: Tensor,  # [T] int64: addresses, multiples of SLOT_ALIGNMENT; 0: a row of zeros
    out: Tensor,  # [T, Hq * D]
    *,
    wire_dtype: torch.dtype,
    doorbell: Doorbell | None = None,
) -> Tensor:
    """Returns `out` with the replies' rows; with a doorbell, after the reply to its last number.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    require_float("out", out)
    num_rows, width = out.shape
    _check_rows(out, 1, slots, slots)
    require(wire_dtype in TRITON_DTYPES, f"rows travel as fp32, fp16 or bf16, not {wire_dtype}")
    block = min(triton.next_power_of_2(width), GATHER_BLOCK)
    launch.launch(
        _gather_rows_kernel, (num_rows, triton.cdiv(width, block)),
        slots, out, doorbell and doorbell.number, doorbell and doorbell.reply,
        doorbell and doorbell.seen, width, out.stride(0), WIRE=TRITON_DTYPES[wire_dtype],
        WAITS=doorbell is not None, ON_DEVICE=not INTERPRETED, BLOCK=block,
        ALIGNMENT=SLOT_ALIGNMENT, num_warps=4,
    )  # fmt: skip
    return out
