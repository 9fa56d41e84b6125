"""Norms in Triton's interpreter against float64; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import ReferenceOps
from fastdecode_rdma.triton_kernels.norms import Norm, norm

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Relative error of storing one number; the interpreter truncates to bf16."""

EPS = 1e-5
SHAPES = [(1, 1), (5, 37), (2, 640)]
TINY = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}
"""Half the spacing of the smallest numbers, which fp16 reaches."""


def oracle(x: torch.Tensor, how: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm in float64, and the bound of the kernel's error before it stores."""
    wide, ops = x.double(), ReferenceOps(torch.float64)
    ones = torch.ones(x.shape[1], dtype=torch.float64)
    weight = ones if how.weight is None else how.weight.double() + how.unit_offset
    if how.is_layer:
        bias = 0 * ones if how.bias is None else how.bias.double()
        out, variance = ops.layer_norm(wide, weight, bias, EPS), wide.var(-1, correction=0)
    else:
        out, variance = ops.rms_norm(wide, weight, EPS), wide.square().mean(-1)
    size = wide.abs().amax(-1) * (variance + EPS).rsqrt()  # of x / deviation, before cancellation
    # fp32 sums of H numbers, twice, and some ten operations more
    return out, (2 * x.shape[1] + 10) * 2.0**-24 * (size[:, None] * weight.abs() + out.abs())


@pytest.mark.parametrize("kind", ["rms", "offset", "bare", "layer", "layer without bias"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape, dtype, kind) -> None:
    torch.manual_seed(sum(shape))
    x, y = torch.randn(2, *shape).to(dtype)
    x *= 100
    weight, bias = torch.randn(2, shape[1])
    how = {
        "rms": Norm(weight, EPS),
        "offset": Norm(weight, EPS, unit_offset=True),
        "bare": Norm(None, EPS),
        "layer": Norm(weight, EPS, bias, is_layer=True),
        "layer without bias": Norm(weight.to(dtype), EPS, is_layer=True),
    }[kind]
    want, bound = oracle(x, how)
    error = (norm(x, how).double() - want).abs()
    rounded = ROUNDING[dtype] * (want.abs() + bound) + TINY[dtype]
    assert (error <= bound + rounded).all()

    total = x.double() + y.double()
    got = norm(x, how, add=y)
    assert ((x.double() - total).abs() <= ROUNDING[dtype] * total.abs()).all()
    want, bound = oracle(x, how)  # of the sum as it was stored
    rounded = ROUNDING[dtype] * (want.abs() + bound) + TINY[dtype]
    assert ((got.double() - want).abs() <= bound + rounded).all()


def test_many_rows() -> None:
    x, how = torch.randn(257, 9), Norm(torch.randn(9), EPS)
    want, bound = oracle(x, how)
    assert ((norm(x, how) - want).abs() <= bound + 2.0**-24 * want.abs()).all()


def test_strided_rows_and_norm_in_place() -> None:
    rows = torch.randn(4, 60)
    part, before = rows[:, 10:31], rows.clone()
    want, bound = oracle(part, Norm(None, EPS))
    assert norm(part, Norm(None, EPS), out=part) is part
    assert ((part - want).abs() <= bound + 2.0**-24 * want.abs()).all()
    assert torch.equal(rows[:, :10], before[:, :10]) and torch.equal(rows[:, 31:], before[:, 31:])


def test_no_rows_and_what_does_not_fit() -> None:
    assert norm(torch.empty(0, 8), Norm(None, EPS)).shape == (0, 8)
    x = torch.randn(2, 8)
    wide = torch.empty(1, (1 << 15) + 1)
    for bad, message in (
        (lambda: norm(x, Norm(torch.ones(7), EPS)), "weight must be a contiguous vector of 8"),
        (lambda: norm(x.double(), Norm(None, EPS)), "must be fp32, fp16 or bf16"),
        (lambda: norm(x.T, Norm(None, EPS)), "contiguous rows"),
        (lambda: norm(x, Norm(None, EPS), add=x[:1]), "add must have x's shape"),
        (lambda: norm(wide, Norm(None, EPS)), "up to 32768 columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            bad()
