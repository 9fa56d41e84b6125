"""Weights of 8 and 4 bits: their layouts here, how to make them, and how checkpoints' become them.

int8: data int8 [N, K], one scale per output; weight = data * scale.
int4: groups of `group` inputs of an output share a scale and a zero point; weight =
(code - zero) * scale, codes 0 .. 15. Byte j of a group's group / 2 bytes holds input j in its low
four bits and input j + group / 2 in the high ones: both halves come out of one load as two
contiguous runs of K, so that nothing is interleaved on the way to the tensor cores.

Nothing here needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode_rdma.errors import ConfigError

GROUPS = (32, 64, 128)
"""Group sizes of int4: half of one is a step of the tensor cores, which take 16 at least."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of an AWQ checkpoint's word hold output 0, 1, … of its eight."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K]: `data` int8 [N, K], or uint8 [N, K / 2] with `group` inputs a scale.

    `scales` is fp32 [N] or [N, K / group]; `zeros`, for int4 alone, int8 [N, K / group].
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group: int = 0

    @property
    def kind(self) -> str:
        """ "int8" or "int4"."""
        return "int4" if self.group else "int8"

    @property
    def out_features(self) -> int:
        """N."""
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.data.shape[1] * (2 if self.group else 1)

    def __post_init__(self) -> None:
        num_out = self.data.shape[0]
        if self.group == 0:
            fits = self.data.dtype == torch.int8 and self.scales.shape == (num_out,)
        else:
            _check_group(self.group, self.in_features)
            groups = (num_out, self.in_features // self.group)
            fits = self.data.dtype == torch.uint8 and self.scales.shape == groups
            fits &= self.zeros is not None and self.zeros.shape == groups
            fits &= self.zeros is not None and self.zeros.dtype == torch.int8
        if not fits or self.scales.dtype != torch.float32:
            raise ConfigError(
                f"parts of a quantised weight do not fit: data {self.data.dtype} "
                f"{list(self.data.shape)}, scales {self.scales.dtype} {list(self.scales.shape)}, "
                f"group {self.group}"
            )


def _check_group(group: int, num_in: int) -> None:
    if group not in GROUPS:
        raise ConfigError(f"int4 groups must be one of {GROUPS} inputs, got {group}")
    if num_in % group:
        raise ConfigError(f"{num_in} inputs are no multiple of the group size {group}")


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Rounds a weight [N, K] to int8, symmetric, with a scale for each output."""
    rows = weight.float()
    scales = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    data = (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(data, scales)


def quantize_int4(weight: Tensor, group: int = 128) -> QuantizedWeight:
    """Rounds a weight [N, K] to int4 with a scale and a zero point for `group` inputs of an output.

    Raises:
        ConfigError: the group size is not supported or does not divide K.
    """
    num_out, num_in = weight.shape
    _check_group(group, num_in)
    groups = weight.float().view(num_out, -1, group)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = (high - low).clamp_min(torch.finfo(torch.float32).tiny) / 15
    zeros = (-low / scales).round_().clamp_(0, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return _pack_int4(codes.view(num_out, num_in), scales, zeros, group)


def repack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """Takes an AWQ matrix: words int32 [K, N / 8] and [K / G, N / 8], scales [K / G, N].

    Raises:
        ConfigError: shapes do not fit, or the group size G is not supported.
    """
    num_in, num_out = qweight.shape[0], 8 * qweight.shape[1]
    group = _group_of(num_in, scales, num_out, qzeros)
    codes = _fours(qweight)[..., AWQ_ORDER].reshape(num_in, num_out)
    zeros = _fours(qzeros)[..., AWQ_ORDER].reshape(-1, num_out)
    return _pack_int4(codes.T, scales.T, zeros.T, group)


def repack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    zero_offset: int = 1,
) -> QuantizedWeight:
    """Takes a GPTQ matrix: words int32 [K / 8, N] and [K / G, N / 8], scales [K / G, N].

    `zero_offset` is what the format adds to a stored zero point: 1, or 0 with checkpoint_format
    "gptq_v2". `g_idx` [K] tells an input's group; inputs out of order (desc_act) are not supported.

    Raises:
        ConfigError: shapes do not fit, the group size G is not supported, or g_idx is out of order.
    """
    num_in, num_out = 8 * qweight.shape[0], qweight.shape[1]
    group = _group_of(num_in, scales, num_out, qzeros)
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(num_in) // group):
        raise ConfigError(
            "this GPTQ checkpoint orders its inputs by activation (desc_act), which is not "
            "supported; use one that was quantised with desc_act=False"
        )
    codes = _fours(qweight).transpose(1, 2).reshape(num_in, num_out)
    zeros = _fours(qzeros).reshape(-1, num_out) + zero_offset
    return _pack_int4(codes.T, scales.T, zeros.T, group)


def _group_of(num_in: int, scales: Tensor, num_out: int, qzeros: Tensor) -> int:
    num_groups = scales.shape[0]
    if num_groups == 0 or num_in % num_groups or scales.shape[1] != num_out:
        raise ConfigError(
            f"scales {list(scales.shape)} do not fit a matrix of {num_in} inputs, {num_out} outputs"
        )
    if qzeros.shape != (num_groups, num_out // 8):
        raise ConfigError(
            f"zero points must be [{num_groups}, {num_out // 8}], got {list(qzeros.shape)}"
        )
    _check_group(num_in // num_groups, num_in)
    return num_in // num_groups


def _fours(words: Tensor) -> Tensor:
    """The eight four-bit numbers of each int32, lowest bits first: [..., 8]."""
    if words.dtype != torch.int32:
        raise ConfigError(f"packed words must be int32, got {words.dtype}")
    return words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15


def _pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> QuantizedWeight:
    num_out, num_in = codes.shape
    halves = codes.to(torch.uint8).reshape(num_out, num_in // group, 2, group // 2)
    data = halves[:, :, 0] | halves[:, :, 1] << 4
    return QuantizedWeight(
        data.reshape(num_out, num_in // 2).contiguous(),
        scales.float().contiguous(),
        zeros.to(torch.int8).contiguous(),
        group,
    )


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the weight [N, K] that a quantised one stands for: slow, the oracle's."""
    scales = weight.scales.to(dtype)
    if weight.zeros is None:
        return weight.data.to(dtype) * scales[:, None]
    bytes_ = weight.data.view(weight.out_features, -1, weight.group // 2)
    codes = torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1).to(dtype)
    centred = codes - weight.zeros.to(dtype)[..., None]
    return (centred * scales[..., None]).view(weight.out_features, weight.in_features)
