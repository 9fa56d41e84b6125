"""The LM head without its logits: top-k, log-softmax statistics and chosen logits, tile by tile.

    logit = softcap(scale * x @ weight.T)
    out:  the k largest logits and their tokens, log(sum(exp(logit))), the logit of a given token

A program takes some rows and one part of the vocabulary, keeps a running maximum, sum of exponents
and best k, and a second kernel merges the parts. Fp32 logits exist for one tile at a time.

A candidate is one int64: the logit's bits, mapped so that integers order as the floats do, above
2^31 - 1 minus the token. So ties go to the lower token, as argmax has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .configs import HEAD_SPLITS, MAX_CANDIDATES, head_config
from .launch import INTERPRETED, require, require_float

LOWEST = -(1 << 63)
"""Below every candidate."""

NO_TOKEN = -1
"""A target that is no token: its logit is minus infinity."""


@dataclass(frozen=True)
class HeadStatistics:
    """What the fused head returns of T rows; log-probabilities are logits minus `log_sum`."""

    logits: Tensor  # [T, k] fp32, largest first
    tokens: Tensor  # [T, k] int64
    log_sum: Tensor  # [T] fp32: log of the sum of all exponentials
    target: Tensor  # [T] fp32: logit of each row's target, -inf without


@triton.jit
def _candidates(logits, tokens):
    """Logits fp32 and their tokens as int64 that order by logit, then by lower token."""
    bits = logits.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _improved(best, keys, LOWEST: tl.constexpr):
    """Puts into best [M, COUNT], in no order, what is larger in keys [M, N]; all are distinct.

    Every turn moves one candidate of each row, so a tile that holds none costs one look.
    """
    newest = tl.max(keys, axis=1)[:, None]
    poorest = tl.min(best, axis=1)[:, None]
    while tl.max((newest > poorest).to(tl.int32)) > 0:
        best = tl.where((best == poorest) & (newest > poorest), newest, best)
        keys = tl.where(keys == newest, LOWEST, keys)
        newest = tl.max(keys, axis=1)[:, None]
        poorest = tl.min(best, axis=1)[:, None]
    return best


@triton.jit
def _logits_tile(
    x_at,
    weight_ptr,
    inside,
    tokens,
    vocab,
    num_in,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Logits [M, tokens], minus infinity beyond the vocabulary."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    token_at = weight_ptr + tokens.to(tl.int64)[None, :] * num_in
    for start in range(0, num_in, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x_mask = inside
        weight_mask = (tokens < vocab)[None, :]
        if not EVEN_K:
            x_mask = inside & (columns < num_in)[None, :]
            weight_mask = weight_mask & (columns < num_in)[:, None]
        x = tl.load(x_at + columns[None, :], mask=x_mask, other=0.0)
        weight = tl.load(token_at + columns[:, None], mask=weight_mask, other=0.0)
        if UPCAST:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    logits = acc * scale
    if HAS_SOFTCAP:  # tanh(u) = 2 sigmoid(2u) - 1
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return tl.where((tokens < vocab)[None, :], logits, float("-inf"))


@triton.jit
def _head_kernel(
    x_ptr,
    weight_ptr,
    target_ptr,
    keys_ptr,
    max_ptr,
    sum_ptr,
    target_logit_ptr,
    num_rows,
    vocab,
    num_in,
    x_row_stride,
    tiles_per_split,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    COUNT: tl.constexpr,
    LOWEST: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: [cdiv(T, BLOCK_M), splits]
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    inside = rows < num_rows
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    places = tl.arange(0, COUNT)[None, :]
    # no candidates yet: below all that are, and distinct
    best = tl.zeros([BLOCK_M, COUNT], dtype=tl.int64) + (LOWEST + places.to(tl.int64))
    if target_ptr is not None:
        target = tl.load(target_ptr + rows, mask=inside, other=-1)
        target_logit = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for tile in range(0, tiles_per_split):
        tokens = (split * tiles_per_split + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        logits = _logits_tile(
            x_at, weight_ptr, inside[:, None], tokens, vocab, num_in, scale, softcap,
            HAS_SOFTCAP, EVEN_K, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(logits, axis=1))
        # a tile beyond the vocabulary: exp(-inf - -inf) would be NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base[:, None]), axis=1)
        largest = new_largest
        if target_ptr is not None:
            hit = tokens[None, :] == target[:, None]
            found = tl.max(tl.where(hit, logits, float("-inf")), axis=1)
            target_logit = tl.maximum(target_logit, found)
        keys = _candidates(logits, tl.broadcast_to(tokens[None, :], [BLOCK_M, BLOCK_N]))
        if COUNT == 1:
            best = tl.maximum(best, tl.max(keys, axis=1)[:, None])
        else:
            best = _improved(best, keys, LOWEST)
    at = split * num_rows + rows
    tl.store(max_ptr + at, largest, mask=inside)
    tl.store(sum_ptr + at, total, mask=inside)
    if target_ptr is not None:
        tl.store(target_logit_ptr + at, target_logit, mask=inside)
    tl.store(keys_ptr + at.to(tl.int64)[:, None] * COUNT + places, best, mask=inside[:, None])


@triton.jit
def _head_merge_kernel(
    keys_ptr,
    max_ptr,
    sum_ptr,
    target_logit_ptr,
    logits_out_ptr,
    tokens_out_ptr,
    log_sum_out_ptr,
    target_out_ptr,
    num_rows,
    splits,
    count,
    COUNT: tl.constexpr,
    LOWEST: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):
    # grid: [T]
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS_BLOCK)
    inside = split < splits
    at = split * num_rows + row
    largest = tl.load(max_ptr + at, mask=inside, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=inside, other=0.0)
    peak = tl.max(largest, axis=0)
    log_sum = peak + tl.log(tl.sum(total * tl.exp(largest - peak), axis=0))
    tl.store(log_sum_out_ptr + row, log_sum)
    if target_logit_ptr is not None:
        target = tl.load(target_logit_ptr + at, mask=inside, other=float("-inf"))
        tl.store(target_out_ptr + row, tl.max(target, axis=0))
    places = tl.arange(0, SPLITS_BLOCK * COUNT)
    key_at = (places // COUNT * num_rows + row).to(tl.int64) * COUNT + places % COUNT
    keys = tl.load(keys_ptr + key_at, mask=places // COUNT < splits, other=LOWEST)
    for place in range(0, count):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, LOWEST, keys)
        ordered = (best >> 32).to(tl.int32)
        logit = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(logits_out_ptr + row * count + place, logit)
        tl.store(tokens_out_ptr + row * count + place, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def head_statistics(
    x: Tensor,  # [T, H], normed
    weight: Tensor,  # [V, H]
    *,
    count: int,
    targets: Tensor | None = None,  # [T] int64
    scale: float = 1.0,
    softcap: float | None = None,
    deterministic: bool = False,
) -> HeadStatistics:
    """Returns the `count` largest logits of each row and what log-probabilities need.

    `targets` are tokens whose logits are wanted too, NO_TOKEN for none. A row with a NaN has a NaN
    `log_sum`, and its candidates mean nothing.

    Raises:
        ConfigError: shapes or dtypes do not fit, or count is not 1 .. MAX_CANDIDATES.
    """
    require_float("x", x)
    num_rows, num_in = x.shape
    vocab = weight.shape[0]
    require(
        weight.shape == (vocab, num_in) and weight.dtype == x.dtype and weight.is_contiguous(),
        f"the head must be a contiguous [V, {num_in}] of {x.dtype}, got {weight.dtype} "
        f"{list(weight.shape)}",
    )
    limit = min(MAX_CANDIDATES, vocab)
    require(1 <= count <= limit, f"the head finds 1 to {limit} candidates, not {count}")
    if targets is not None:
        require(
            targets.shape == (num_rows,) and targets.dtype == torch.int64,
            f"targets must be int64 [{num_rows}], got {targets.dtype} {list(targets.shape)}",
        )
    kind = "single" if x.element_size() == 4 else "half"
    config = head_config(kind, num_rows, deterministic=deterministic)
    tiles = triton.cdiv(vocab, config.block_n)
    tiles_per_split = triton.cdiv(tiles, HEAD_SPLITS)
    splits = triton.cdiv(tiles, tiles_per_split)
    padded = triton.next_power_of_2(count)
    keys = x.new_empty(splits, num_rows, padded, dtype=torch.int64)
    largest, total, target = x.new_empty(3, splits, num_rows, dtype=torch.float32)
    launch.launch(
        _head_kernel, (triton.cdiv(num_rows, config.block_m), splits),
        x, weight, targets, keys, largest, total, None if targets is None else target,
        num_rows, vocab, num_in, x.stride(0), tiles_per_split, scale, softcap or 1.0,
        HAS_SOFTCAP=softcap is not None, COUNT=padded, LOWEST=LOWEST,
        EVEN_K=num_in % config.block_k == 0, UPCAST=INTERPRETED, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    result = HeadStatistics(
        x.new_empty(num_rows, count, dtype=torch.float32),
        x.new_empty(num_rows, count, dtype=torch.int64),
        x.new_empty(num_rows, dtype=torch.float32),
        x.new_full((num_rows,), float("-inf"), dtype=torch.float32),
    )
    launch.launch(
        _head_merge_kernel, (num_rows,),
        keys, largest, total, None if targets is None else target,
        result.logits, result.tokens, result.log_sum, result.target, num_rows, splits, count,
        COUNT=padded, LOWEST=LOWEST, SPLITS_BLOCK=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return result
