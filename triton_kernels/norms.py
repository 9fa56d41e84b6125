"""Residual add and RMSNorm or LayerNorm in one pass over the rows.

    s = x + y                                     (kept in x, in x's dtype)
    RMS:    out = s / sqrt(mean(s^2) + eps) * (offset + weight)
    layer:  out = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

A row stays in registers: it is read once and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .configs import MAX_NORM_WIDTH, norm_warps
from .launch import require, require_float, require_vector


@dataclass(frozen=True)
class Norm:
    """A norm's weights: RMS, or with `is_layer` LayerNorm; `unit_offset`: weight stands for 1 + w.

    weight and bias are vectors of the row's width; None: ones, zeros.
    """

    weight: Tensor | None
    eps: float
    bias: Tensor | None = None
    is_layer: bool = False
    unit_offset: bool = False

    def check(self, width: int) -> None:
        """Raises ConfigError unless the vectors fit rows of that width."""
        require_vector("the norm's weight", self.weight, width)
        require_vector("the norm's bias", self.bias, width)
        require(self.eps >= 0, f"a norm's eps must not be negative, got {self.eps}")

    @property
    def kind(self) -> int:
        """The kernels' number of the kind: 1 RMS, 2 LayerNorm."""
        return 2 if self.is_layer else 1


@triton.jit
def _norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_row_stride,
    y_row_stride,
    out_row_stride,
    width,
    eps,
    OFFSET: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [T]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + row * y_row_stride + columns, mask=inside, other=0.0)
        # what is normed is what the residual stream holds: the rounded sum
        rounded = (x + y.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_row_stride + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps))
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + row * out_row_stride + columns
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


def norm(x: Tensor, norm: Norm, *, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns the norm of x [T, H]; with `add` [T, H], x += add in place and then its norm.

    Rows of x, `add` and `out` may be strided; `out` may be x itself if nothing is added.

    Raises:
        ConfigError: shapes or dtypes do not fit, or rows are longer than MAX_NORM_WIDTH.
    """
    require_float("x", x)
    num_rows, width = x.shape
    norm.check(width)
    require(width <= MAX_NORM_WIDTH, f"a norm takes up to {MAX_NORM_WIDTH} columns, got {width}")
    if out is None:
        out = x.new_empty(num_rows, width)
    for name, other in (("add", add), ("out", out)):
        if other is not None:
            require_float(name, other)
            require(other.shape == x.shape, f"{name} must have x's shape {tuple(x.shape)}")
    block = triton.next_power_of_2(width)
    launch.launch(
        _norm_kernel, (num_rows,),
        x, add, norm.weight, norm.bias, out,
        x.stride(0), 0 if add is None else add.stride(0), out.stride(0), width, norm.eps,
        OFFSET=float(norm.unit_offset), IS_LAYER=norm.is_layer, HAS_Y=add is not None,
        HAS_WEIGHT=norm.weight is not None, HAS_BIAS=norm.bias is not None, BLOCK=block,
        num_warps=norm_warps(block),
    )  # fmt: skip
    return out
