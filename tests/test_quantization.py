"""int8 weights: what they are rounded to, what is computed with them, how users ask for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastdecode_rdma import Generator, SamplingParams, _dense
from fastdecode_rdma.cli import main
from fastdecode_rdma.config import quantization_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.ops import CpuOps, Linear

EPS = torch.finfo(torch.float32).eps
BLOCK = 256
"""Inputs that share a scale."""


@pytest.fixture(params=_dense.ISA_NAMES)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """int8 weights on one instruction set, two threads."""
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    try:
        return CpuOps(num_threads=2, quantization="int8")
    except ConfigError as error:
        pytest.skip(str(error))


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps [N, K] and the size of each [N, K]: the largest weight of a block is 127 steps."""
    steps, sizes = torch.empty(2, *weight.shape)
    for start in range(0, weight.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        part = weight[:, columns].float()
        size = part.abs().amax(1, keepdim=True) / 127
        steps[:, columns] = (part / size).round()
        sizes[:, columns] = size
    return steps, sizes


def rows_of(ops: CpuOps, packed: Linear) -> torch.Tensor:
    return ops.embedding(packed, torch.arange(packed.out_features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (17, 33), (40, 256), (33, 600)])
def test_weights_are_rounded_to_127_steps_of_their_block(
    ops: CpuOps, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_in)
    weight = (torch.randn(num_out, num_in) * torch.logspace(-3, 3, num_out)[:, None]).to(dtype)
    packed = ops.pack(weight)
    steps, sizes = quantized(weight)
    assert torch.equal(rows_of(ops, packed), steps * sizes)
    blocks = -(-num_in // BLOCK)
    assert packed.weight.nbytes == -(-num_out // 16) * 16 * (num_in + 4 * blocks)
    # a weight is at most half a step away, and all that is computed here rounds thrice
    error = (rows_of(ops, packed) - weight.float()).abs()
    assert (error <= sizes * (0.5 + 127 * 3 * EPS)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 40, 129])
@pytest.mark.parametrize(("num_out", "num_in"), [(16, 8), (17, 33), (150, 576), (250, 1100)])
def test_linear_is_within_the_rounding_bound(
    ops: CpuOps, rows: int, num_out: int, num_in: int
) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(num_out, num_in), torch.randn(num_out)
    x, residual = torch.randn(rows, num_in), torch.randn(rows, num_out)
    packed = ops.pack(weight, bias)
    steps, sizes = quantized(weight)
    exact = steps.double() * sizes.double()
    expected = x.double() @ exact.t() + bias.double()
    # K products that round once each, one more for the scale, one for the bias
    bound = (num_in + 3) * EPS * (x.abs().double() @ exact.abs().t())
    bound += EPS * (expected.abs() + residual.abs())
    assert ((ops.linear(x, packed) - expected).abs() <= bound).all()
    total = ops.linear_add_(x, packed, residual.clone())
    assert ((total - expected - residual.double()).abs() <= 2 * bound).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_block_is_summed_in_steps_and_scaled_once(ops: CpuOps, rows: int) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(50, 200), torch.randn(rows, 200)
    steps, sizes = quantized(weight)
    plain = CpuOps(num_threads=1, deterministic=True)
    expected = plain.linear(x, plain.pack(steps)) * sizes[:, 0]
    assert torch.equal(ops.linear(x, ops.pack(weight)), expected)


def test_non_finite_weights_stay_visible_and_zeros_and_tiny_ones_are_numbers(ops: CpuOps) -> None:
    weight = torch.randn(6, 300)
    weight[0, 7] = float("nan")
    weight[1, 299] = float("inf")
    weight[2] = 0.0
    weight[3] = torch.linspace(-1, 1, 300) * 2e-43  # a step is no more than the smallest number
    weight[4] = 1e-45
    weight[5] *= 1e37
    packed = ops.pack(weight)
    back = rows_of(ops, packed)
    assert back[0, :256].isnan().all() and back[0, 256:].isfinite().all()
    assert back[1, 256:].isnan().all() and back[1, :256].isfinite().all()
    assert (back[2] == 0).all() and back[3:].isfinite().all()
    assert (back[3] - weight[3]).abs().max() <= 127 * 1e-45 and (back[4] == 0).all()
    assert (back[5] - weight[5]).abs().max() <= weight[5].abs().max() / 127
    out = ops.linear(torch.ones(2, 300), packed)
    assert out[:, :2].isnan().all() and out[:, 2:].isfinite().all()


def test_no_library_is_measured_for_what_none_has() -> None:
    ops = CpuOps(num_threads=1, quantization="int8")
    ops.pack(torch.randn(20, 30))
    assert ops.gemm_choices[(20, 30, "int8")].backend == "packed"
    assert not ops.gemm_choices[(20, 30, "int8")].seconds


@pytest.mark.parametrize("value", ["int4", "INT8", "", True, 8, [], {}])
def test_other_quantizations_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="quantization must be None or one of 'int8', got"):
        quantization_name(value)


def test_a_quantized_model_answers_the_same_in_any_batch(tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[i, 2 * i, 7] for i in range(1, 10)]
    options = {"deterministic": True, "max_model_len": 64, "kv_cache_dtype": "fp32"}
    with Generator.from_pretrained(path, quantization="int8", **options) as gen:
        assert all(key.endswith(" int8") for key in gen.stats().gemm)
        together = [out.outputs[0].token_ids for out in gen.complete(prompts, params)]
        alone = [gen.complete([p], params)[0].outputs[0].token_ids for p in prompts[:3]]
    assert together[:3] == alone
    with Generator.from_pretrained(path, **options) as gen:
        assert not any(key.endswith(" int8") for key in gen.stats().gemm)
        exact = [out.outputs[0].token_ids for out in gen.complete(prompts, params)]
    # most first tokens have a margin that rounding to 127 steps does not reach
    assert sum(a[0] == b[0] for a, b in zip(exact, together, strict=True)) >= 7


def test_the_command_line_takes_it(
    tiny_models: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_models("llama"))
    options = ["generate", "--model", model, "--prompt", "a", "--max-tokens", "3"]
    assert main([*options, "--max-model-len", "64", "--quantization", "int8"]) == 0
    assert "3 tokens" in capsys.readouterr().err
    for bad in ([*options, "--quantization", "gptq"], ["demo", "--quantization", "gptq"]):
        assert main(bad) == 2
        error = capsys.readouterr().err
        assert "quantization must be None or one of 'int8', got 'gptq'" in error
        assert error.count("\n") == 1
