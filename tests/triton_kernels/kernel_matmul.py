"""Projections in Triton's interpreter against float64; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import ReferenceOps, projection
from fastdecode_rdma.triton_kernels.launch import INTERPRETED
from fastdecode_rdma.triton_kernels.matmul import ACTIVATIONS, matmul
from fastdecode_rdma.triton_kernels.norms import Norm
from fastdecode_rdma.triton_kernels.quantized import dequantize, quantize_int4, quantize_int8

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Relative error of storing one number; the interpreter truncates to bf16."""

TINY = 2.0**-25
"""Half the spacing of fp16's smallest numbers."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed + sum(shape))
    return torch.randn(*shape).to(dtype)


def weight_of(kind: str, num_out: int, num_in: int, dtype: torch.dtype):
    """A weight for the kernel, and what it stands for in float64."""
    plain = random(num_out, num_in, seed=1, dtype=dtype) / 8
    if kind == "plain":
        return plain, plain.double()
    quantized = quantize_int8(plain) if kind == "int8" else quantize_int4(plain, 32)
    return quantized, dequantize(quantized, torch.float64)


def check(x, kind, num_out, *, norm=None, gated=False, activation=None, residual=False, bias=True):
    """Compares one projection with float64 within a bound that follows the sums."""
    dtype, (num_rows, num_in) = x.dtype, x.shape
    weight, wide = weight_of(kind, num_out * (1 + gated), num_in, dtype)
    added = random(len(wide), seed=2) if bias else None
    before = random(num_rows, num_out, seed=3, dtype=dtype) if residual else None
    got = matmul(
        x, weight, bias=added, norm=norm, gated=gated, activation=activation, residual=before
    )
    inner, input_error = x.double(), 0.0
    if norm is not None:
        ops, vector = ReferenceOps(torch.float64), norm.weight.double() + norm.unit_offset
        if norm.is_layer:
            inner = ops.layer_norm(inner, vector, norm.bias.double(), norm.eps)
        else:
            inner = ops.rms_norm(inner, vector, norm.eps)
        # the normed row is rounded to x's dtype; sums of K and some ten operations before that
        input_error = ROUNDING[dtype] + (2 * num_in + 10) * 2.0**-24
        inner_size = inner.abs() + inner.abs().amax(-1, keepdim=True) * (dtype == torch.float32)
    else:
        inner_size = inner.abs()
    sums = projection(inner, wide, bias=None if added is None else added.double())
    sum_error = (inner_size @ wide.abs().T) * (input_error + (num_in + 4) * 2.0**-24)
    sum_error += 2.0**-23 * sums.abs() + TINY * wide.abs().sum(1)
    options = {"gated": gated, "activation": activation}
    options["residual"] = None if before is None else before.double()
    want = projection(inner, wide, bias=None if added is None else added.double(), **options)
    if gated:  # slopes of the activations stay below 1.2, values below their argument's size
        gate, up = sums.chunk(2, -1)
        gate_error, up_error = sum_error.chunk(2, -1)
        error = 1.2 * gate_error * (up.abs() + up_error) + (gate.abs() + gate_error) * up_error
        error += 2.0**-20 * gate.abs() * up.abs()
    else:
        error = 1.2 * sum_error + 2.0**-20 * sums.abs() * (activation is not None)
    bound = error + ROUNDING[dtype] * (want.abs() + error) + TINY
    worst = ((got.double() - want).abs() / bound).max()
    assert worst <= 1, f"error is {float(worst):.2f} of its bound"


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_kind_of_weight_and_epilogue(dtype, kind) -> None:
    x = random(5, 96, dtype=dtype)
    check(x, kind, 37)
    check(x, kind, 37, residual=True, bias=False)
    check(x, kind, 37, gated=True, activation="silu")
    check(random(70, 160, dtype=dtype), kind, 41, residual=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_every_activation(activation, gated) -> None:
    check(random(3, 40) * 4, "plain", 17, gated=gated, activation=activation)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 129, 257])
def test_numbers_of_rows(num_rows) -> None:
    check(random(num_rows, 33, dtype=torch.float16), "plain", 35)


@pytest.mark.parametrize("kind", ["plain", "int4"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_norm_as_prologue(dtype, kind) -> None:
    x = random(5, 96, seed=5, dtype=dtype) * 20
    weight, bias = random(96, seed=6), random(96, seed=7)
    check(x, kind, 37, norm=Norm(weight, 1e-5, unit_offset=True))
    check(x, kind, 21, norm=Norm(weight, 1e-5, bias, is_layer=True), gated=True, activation="silu")
    if kind == "plain":
        check(x[:, :90].contiguous(), kind, 37, norm=Norm(weight[:90], 1e-5))


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
def test_deterministic_rows_do_not_depend_on_the_batch(kind) -> None:
    x = random(67, 96, dtype=torch.float16)
    weight, _ = weight_of(kind, 70, 96, torch.float16)
    whole = matmul(x, weight, deterministic=True)
    for num_rows in (1, 5, 33):
        assert torch.equal(matmul(x[:num_rows], weight, deterministic=True), whole[:num_rows])


def test_in_place_on_the_residual_and_strided_rows() -> None:
    x, weight = random(4, 50)[:, :33], random(20, 33)
    residual = random(4, 20)
    want = projection(x.double(), weight.double(), residual=residual.double())
    assert matmul(x, weight, residual=residual, out=residual) is residual
    assert ((residual - want).abs() <= 40 * 2.0**-24 * (x.abs() @ weight.abs().T + 10)).all()


def test_what_does_not_fit() -> None:
    x, weight = random(2, 32), random(6, 32)
    for options, message in (
        ({"x": x[:, :31]}, "x has 31 features, the weight has 32"),
        ({"weight": weight.half()}, "of x's dtype"),
        ({"gated": True}, "needs its activation"),
        ({"gated": True, "activation": "silu", "weight": weight[:5]}, "got 5 outputs"),
        ({"activation": "swish"}, "activation 'swish' is unknown"),
        ({"bias": random(5)}, "bias must be a contiguous vector of 6"),
        ({"residual": random(2, 5)}, "residual must have 6 columns"),
        ({"out": random(3, 6)}, "out must have 2 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            matmul(**({"x": x, "weight": weight} | options))


@triton.jit
def _dot_kernel(x_ptr, out_ptr):
    # grid: [1]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x))


def test_the_interpreter_still_gets_bf16_products_wrong() -> None:
    """If this fails, the kernels need no UPCAST any more. On a GPU they are right."""
    x, out = random(16, 16, dtype=torch.bfloat16), torch.zeros(16, 16)
    _dot_kernel[(1,)](x, out)
    assert torch.allclose(out, x.float() @ x.float(), rtol=0.1, atol=0.1) is not INTERPRETED
