"""The table of tile configurations, and quantised layouts: neither runs a kernel."""

from __future__ import annotations

import pytest
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.triton_kernels import configs
from fastdecode_rdma.triton_kernels.quantized import (
    AWQ_ORDER,
    QuantizedWeight,
    dequantize,
    quantize_int4,
    quantize_int8,
    repack_awq,
    repack_gptq,
)


def test_every_number_of_rows_has_a_configuration() -> None:
    for kind in configs.KINDS:
        for num_rows in (1, 16, 17, 64, 65, 257, 1 << 20):
            for gated in (False, True):
                config = configs.matmul_config(kind, num_rows, gated=gated)
                # tensor cores take tiles of 16; every size is a power of two
                for edge in (config.block_m, config.block_n, config.block_k):
                    assert edge >= 16 and edge & (edge - 1) == 0


@pytest.mark.parametrize("kind", configs.KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_deterministic_mode_has_one_configuration_for_all_numbers_of_rows(kind, gated) -> None:
    chosen = {
        configs.matmul_config(kind, num_rows, gated=gated, deterministic=True)
        for num_rows in range(1, 2000)
    }
    assert len(chosen) == 1


def test_a_tile_of_the_vocabulary_holds_the_most_candidates() -> None:
    for kind in ("half", "single"):
        for num_rows in (1, 16, 17, 4096):
            for deterministic in (False, True):
                config = configs.head_config(kind, num_rows, deterministic=deterministic)
                assert config.block_n >= configs.MAX_CANDIDATES


def words_of(fours: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Packs [..., 8 n] four-bit numbers into int32 [..., n]; number i goes to place order[i]."""
    shifts = torch.tensor([4 * place for place in order])
    words = (fours.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def checkpoint(num_in: int, num_out: int, group: int) -> tuple[torch.Tensor, ...]:
    """Codes [K, N], zero points and scales [K / G, N] as float64's weight [N, K] has them."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (num_in, num_out), generator=generator)
    zeros = torch.randint(1, 16, (num_in // group, num_out), generator=generator)
    scales = torch.rand(num_in // group, num_out, generator=generator).half()
    centred = codes - zeros.repeat_interleave(group, 0)
    weight = centred.double() * scales.double().repeat_interleave(group, 0)
    return codes, zeros, scales, weight.T


@pytest.mark.parametrize("group", [32, 128])
def test_an_awq_matrix(group) -> None:
    codes, zeros, scales, weight = checkpoint(256, 40, group)
    got = repack_awq(words_of(codes, AWQ_ORDER), words_of(zeros, AWQ_ORDER), scales)
    assert got.group == group
    assert torch.equal(dequantize(got, torch.float64), weight)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_a_gptq_matrix(group, zero_offset) -> None:
    codes, zeros, scales, weight = checkpoint(256, 40, group)
    plain = tuple(range(8))
    words = words_of(codes.T, plain).T  # along the inputs
    g_idx = torch.arange(256, dtype=torch.int32) // group
    packed_zeros = words_of(zeros - zero_offset, plain)
    got = repack_gptq(words, packed_zeros, scales, g_idx, zero_offset=zero_offset)
    assert torch.equal(dequantize(got, torch.float64), weight)
    with pytest.raises(ConfigError, match="desc_act"):
        repack_gptq(words, packed_zeros, scales, g_idx.flip(0))


def test_rounding_to_int8_and_int4() -> None:
    weight = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    weight[3] = 0
    int8, int4 = quantize_int8(weight), quantize_int4(weight, 64)
    # half a step, and fp32's rounding of the scale times up to 127 steps
    error = (dequantize(int8, torch.float64) - weight).abs()
    assert (error <= int8.scales[:, None] * (0.5 + 2.0**-14)).all()
    # the zero point is rounded as well: at the ends of the range another half step is cut
    error = (dequantize(int4, torch.float64) - weight).abs().view(7, 2, 64)
    assert (error <= int4.scales[..., None] * (1.0 + 2.0**-14)).all()
    assert (int4.out_features, int4.in_features, int4.kind) == (7, 128, "int4")
    assert (int8.out_features, int8.in_features, int8.kind) == (7, 128, "int8")


def test_what_does_not_fit() -> None:
    weight = torch.randn(4, 96)
    with pytest.raises(ConfigError, match=r"one of \(32, 64, 128\) inputs, got 48"):
        quantize_int4(weight, 48)
    with pytest.raises(ConfigError, match="96 inputs are no multiple of the group size 64"):
        quantize_int4(weight, 64)
    with pytest.raises(ConfigError, match="parts of a quantised weight do not fit"):
        QuantizedWeight(weight.to(torch.int8), torch.ones(5))
    words = torch.zeros(96, 2, dtype=torch.int32)
    with pytest.raises(ConfigError, match="do not fit a matrix of 96 inputs, 16 outputs"):
        repack_awq(words, words[:3], torch.ones(5, 16))
    with pytest.raises(ConfigError, match=r"zero points must be \[3, 2\]"):
        repack_awq(words, words[:2], torch.ones(3, 16))
    with pytest.raises(ConfigError, match="packed words must be int32"):
        repack_awq(words.long(), words[:3], torch.ones(3, 16))
