"""Projections with what surrounds them: a norm before, bias, activation, gate or residual after.

    y = norm(x) @ weight.T + bias           weight [N, K]: fp32, fp16, bf16, int8 or int4
    out = y,  act(y),  act(gate) * up with y = [gate | up],  or residual + y

Products are summed in fp32, K in one fixed order without splits, so a row's bits depend on the tile
configuration alone. Quantised weights enter the tensor cores as the integers they are, exact in
16-bit floats; their scales multiply fp32 sums: for int8 at the end, for int4 after each group.

The norm as a prologue reads a program's rows of x once more: meant for few rows, where that is
nothing beside the weight, and a launch saved counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastdecode_rdma.errors import ConfigError

from . import launch
from .configs import matmul_config
from .launch import INTERPRETED, require, require_float, require_vector
from .norms import Norm
from .quantized import QuantizedWeight

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
"""The kernels' numbers of activations; 0 is none."""

KINDS = {"int8": 1, "int4": 2}
"""The kernel's numbers of weights that are not plain floats; those are 0."""

GROUP_ROWS = 8
"""Row blocks that share a weight tile while it is in the L2 cache."""


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """act(x) in fp32."""
    if ACTIVATION == 1:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 2:  # 1 + tanh(u) = 2 sigmoid(2u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 4:
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays
    return x


@triton.jit
def _row_statistics(
    x_at, inside, num_in, eps, NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean (0 for RMS) and 1 / sqrt(variance + eps) of rows that start at x_at [M, 1]."""
    columns = tl.arange(0, BLOCK)[None, :]
    mean = tl.zeros([BLOCK_M, 1], dtype=tl.float32)
    if NORM == 2:
        total = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
        for start in range(0, num_in, BLOCK):
            mask = inside & (start + columns < num_in)
            total += tl.load(x_at + start + columns, mask=mask, other=0.0).to(tl.float32)
        mean = (tl.sum(total, axis=1) / num_in)[:, None]
    squares = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
    for start in range(0, num_in, BLOCK):
        mask = inside & (start + columns < num_in)
        x = tl.load(x_at + start + columns, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - mean, 0.0)
        squares += x * x
    return mean, 1.0 / tl.sqrt(tl.sum(squares, axis=1) / num_in + eps)[:, None]


@triton.jit
def _x_tile(
    x_at,
    columns,
    inside,
    num_in,
    norm_weight_ptr,
    norm_bias_ptr,
    mean,
    scale,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """x [M, K tile], normed and rounded to x's dtype as a norm's own kernel leaves it."""
    mask = inside
    if not EVEN_K or NORM > 0:
        mask = inside & (columns < num_in)[None, :]
    x = tl.load(x_at + columns[None, :], mask=mask, other=0.0)
    if NORM > 0:
        dtype = x.dtype
        normed = (x.to(tl.float32) - mean) * scale
        if norm_weight_ptr is not None:
            weight = tl.load(norm_weight_ptr + columns, mask=columns < num_in, other=0.0)
            normed *= weight.to(tl.float32)[None, :] + OFFSET
        if norm_bias_ptr is not None:
            bias = tl.load(norm_bias_ptr + columns, mask=columns < num_in, other=0.0)
            normed += bias.to(tl.float32)[None, :]
        x = tl.where(mask, normed, 0.0).to(dtype)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _whole_tile(x, acc, weight_ptr, outputs, columns, num_out, num_in, EVEN_K: tl.constexpr):
    """acc += x @ W.T for a tile of a weight of whole elements: floats or int8."""
    mask = (outputs < num_out)[None, :]
    if not EVEN_K:
        mask = mask & (columns < num_in)[:, None]
    at = weight_ptr + outputs.to(tl.int64)[None, :] * num_in + columns[:, None]
    weight = tl.load(at, mask=mask, other=0.0).to(x.dtype)
    return tl.dot(x, weight, acc, input_precision="ieee")


@triton.jit
def _int4_tile(
    low, high, acc, weight_ptr, scale_ptr, zero_ptr, outputs, group, num_out, num_in,
    GROUP: tl.constexpr,
):  # fmt: skip
    """acc += x @ W.T for one group of inputs, x in two halves."""
    HALF: tl.constexpr = GROUP // 2
    inside = outputs < num_out
    rows = outputs.to(tl.int64)
    at = weight_ptr + rows[None, :] * (num_in // 2) + group * HALF + tl.arange(0, HALF)[:, None]
    codes = tl.load(at, mask=inside[None, :], other=0)
    group_at = rows * (num_in // GROUP) + group
    scale = tl.load(scale_ptr + group_at, mask=inside, other=0.0)
    zero = tl.load(zero_ptr + group_at, mask=inside, other=0)[None, :]
    first = ((codes & 15).to(tl.int8) - zero).to(low.dtype)
    second = ((codes >> 4).to(tl.int8) - zero).to(low.dtype)
    total = tl.dot(low, first, input_precision="ieee")
    total = tl.dot(high, second, total, input_precision="ieee")
    return acc + total * scale[None, :]


@triton.jit
def _finish(acc, scale_ptr, bias_ptr, outputs, num_out, KIND: tl.constexpr):
    """The sums with int8's scales and the bias: [M, N]."""
    if KIND == 1:
        acc *= tl.load(scale_ptr + outputs, mask=outputs < num_out, other=0.0)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, mask=outputs < num_out, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    return acc


@triton.jit
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_row_stride,
    residual_row_stride,
    out_row_stride,
    eps,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # grid: [cdiv(T, BLOCK_M) * cdiv(num_out, BLOCK_N)], num_out: columns of the output
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    column_blocks = tl.cdiv(num_out, BLOCK_N)
    first_block = tl.program_id(0) // (GROUP_M * column_blocks) * GROUP_M
    group_rows = tl.minimum(row_blocks - first_block, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * column_blocks)
    rows = (first_block + place % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = place // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None]
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride
    mean, scale = 0.0, 1.0
    if NORM > 0:
        mean, scale = _row_statistics(x_at, inside, num_in, eps, NORM, BLOCK_M, 2 * BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # the up half of a gated weight has its rows after the gate half's
    up_rows = num_out.to(tl.int64)
    up_ptr = weight_ptr + up_rows * (num_in // 2 if KIND == 2 else num_in)
    for start in range(0, num_in, BLOCK_K):
        if KIND == 2:
            HALF: tl.constexpr = BLOCK_K // 2
            columns = start + tl.arange(0, HALF)
            low = _x_tile(x_at, columns, inside, num_in, norm_weight_ptr, norm_bias_ptr, mean,
                          scale, NORM, OFFSET, EVEN_K, UPCAST)  # fmt: skip
            high = _x_tile(x_at, columns + HALF, inside, num_in, norm_weight_ptr, norm_bias_ptr,
                           mean, scale, NORM, OFFSET, EVEN_K, UPCAST)  # fmt: skip
            group = start // BLOCK_K
            acc = _int4_tile(low, high, acc, weight_ptr, scale_ptr, zero_ptr, outputs, group,
                             num_out, num_in, BLOCK_K)  # fmt: skip
            if GATED:
                skip = up_rows * (num_in // BLOCK_K)
                up_acc = _int4_tile(low, high, up_acc, up_ptr, scale_ptr + skip, zero_ptr + skip,
                                    outputs, group, num_out, num_in, BLOCK_K)  # fmt: skip
        else:
            columns = start + tl.arange(0, BLOCK_K)
            x = _x_tile(x_at, columns, inside, num_in, norm_weight_ptr, norm_bias_ptr, mean, scale,
                        NORM, OFFSET, EVEN_K, UPCAST)  # fmt: skip
            acc = _whole_tile(x, acc, weight_ptr, outputs, columns, num_out, num_in, EVEN_K)
            if GATED:
                up_acc = _whole_tile(x, up_acc, up_ptr, outputs, columns, num_out, num_in, EVEN_K)
    out = activate(_finish(acc, scale_ptr, bias_ptr, outputs, num_out, KIND), ACTIVATION)
    if GATED:
        up_scale_ptr = scale_ptr
        up_bias_ptr = bias_ptr
        if KIND == 1:
            up_scale_ptr = scale_ptr + up_rows
        if bias_ptr is not None:
            up_bias_ptr = bias_ptr + up_rows
        out *= _finish(up_acc, up_scale_ptr, up_bias_ptr, outputs, num_out, KIND)
    mask = inside & (outputs < num_out)[None, :]
    if residual_ptr is not None:
        at = residual_ptr + rows.to(tl.int64)[:, None] * residual_row_stride + outputs[None, :]
        out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * out_row_stride + outputs[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x: Tensor,  # [T, K]
    weight: Tensor | QuantizedWeight,  # [N, K]
    *,
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,  # [T, N]
    out: Tensor | None = None,  # [T, N], or gated [T, N / 2]
    deterministic: bool = False,
) -> Tensor:
    """Returns the projection of x with all that is asked for around it, in x's dtype.

    `gated`: the weight's first half of outputs is activated and multiplies the second. `out` may be
    `residual` itself. `deterministic`: a row's bits do not depend on the number of rows.

    Raises:
        ConfigError: shapes, dtypes or options do not fit.
    """
    require_float("x", x)
    num_rows, num_in = x.shape
    kind, total = _check_weight(weight, x)
    require(not gated or activation is not None, "a gated projection needs its activation")
    require(not gated or total % 2 == 0, f"a gated weight has halves, got {total} outputs")
    if activation not in (None, *ACTIVATIONS):
        raise ConfigError(f"activation {activation!r} is unknown; expected {tuple(ACTIVATIONS)}")
    num_out = total // 2 if gated else total
    require_vector("the bias", bias, total)
    if norm is not None:
        norm.check(num_in)
    if out is None:
        out = x.new_empty(num_rows, num_out)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            require_float(name, tensor, columns=num_out)
            require(len(tensor) == num_rows, f"{name} must have {num_rows} rows, got {len(tensor)}")
    config = matmul_config(kind, num_rows, gated=gated, deterministic=deterministic)
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    block_k = quantized.group if quantized is not None and quantized.group else config.block_k
    blocks = triton.cdiv(num_rows, config.block_m) * triton.cdiv(num_out, config.block_n)
    launch.launch(
        _matmul_kernel, (blocks,),
        x, weight if quantized is None else quantized.data, quantized and quantized.scales,
        quantized and quantized.zeros, bias, residual, norm and norm.weight, norm and norm.bias,
        out, num_rows, num_out, num_in, x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        0.0 if norm is None else norm.eps, KIND=KINDS.get(kind, 0),
        NORM=0 if norm is None else norm.kind, OFFSET=float(norm is not None and norm.unit_offset),
        GATED=gated, ACTIVATION=ACTIVATIONS.get(activation or "", 0),
        EVEN_K=num_in % block_k == 0, UPCAST=INTERPRETED, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=block_k, GROUP_M=GROUP_ROWS,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _check_weight(weight: Tensor | QuantizedWeight, x: Tensor) -> tuple[str, int]:
    """Returns the weight's kind in the table of configurations, and N."""
    if isinstance(weight, QuantizedWeight):
        kind, shape = weight.kind, (weight.out_features, weight.in_features)
    else:
        kind, shape = "single" if x.element_size() == 4 else "half", tuple(weight.shape)
        require(
            weight.dtype == x.dtype and weight.dim() == 2 and weight.is_contiguous(),
            f"the weight must be a contiguous matrix of x's dtype {x.dtype}, got {weight.dtype} "
            f"{list(weight.shape)}",
        )
    require(shape[1] == x.shape[1], f"x has {x.shape[1]} features, the weight has {shape[1]}")
    return kind, shape[0]
