"""Logits -> tokens and log-probabilities, each row by itself.

A row's result depends on its logits, parameters, seed, sample index and output ids alone, never on
its neighbours: the noise is counter-based, and every sum along the vocabulary runs in one
fixed order on one thread.

One uniform number u per row picks the first candidate whose cumulative probability exceeds u.
Candidates are all tokens in id order, or, under top_k or top_p, the kept ones from the most
probable down (equal ones in id order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.errors import SamplingError
from fastdecode_rdma.logit_rules import LogitState
from fastdecode_rdma.sequence import Logprob, SamplingParams

# The nucleus nearly always ends among so many tokens; when it does not, the row is sorted.
_NUCLEUS_GUESS = 512

_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


@dataclass(slots=True)
class SampledTokens:
    """One token per row.

    `finite[row]` is False where the logits hold NaN or +inf, or nothing but -inf: that row has no
    token (its id is -1) and its request must fail; the other rows are sound. The same holds for
    rows in `errors`: their own parameters left no token. `logprobs` and `top_logprobs` are None
    when no row asked for them, and None per row that did not.
    `top_logprobs[row]` maps token ids to Logprob, the chosen token first, then by rank;
    `decoded_token` is left to whoever has the tokenizer.
    """

    token_ids: list[int]
    finite: list[bool]
    errors: dict[int, SamplingError]
    logprobs: list[float | None] | None
    top_logprobs: list[dict[int, Logprob] | None] | None


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns Philox4x32-10 of uint32 counters [R, 4] under uint32 keys [R, 2], as uint32 [R, 4].

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        product0 = _PHILOX_MULTIPLIERS[0] * c0
        product1 = _PHILOX_MULTIPLIERS[1] * c2
        c0 = (product1 >> _SHIFT32) ^ c1 ^ k0
        c2 = (product0 >> _SHIFT32) ^ c3 ^ k1
        c1 = product1 & _LOW32
        c3 = product0 & _LOW32
        k0 = (k0 + _PHILOX_WEYL[0]) & _LOW32
        k1 = (k1 + _PHILOX_WEYL[1]) & _LOW32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    """Returns a float64 in [0, 1) per row, 53 bits, from (seed, sample index, output position)."""
    counters = np.zeros((len(seeds), 4), dtype=np.uint32)
    counters[:, 0] = np.asarray(sample_indices, dtype=np.uint32)
    counters[:, 1] = np.asarray(positions, dtype=np.uint32)
    words = [(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) for seed in seeds]
    bits = philox4x32(counters, np.array(words, dtype=np.uint32).reshape(-1, 2)).astype(np.uint64)
    high, low = bits[:, 0] >> np.uint64(5), bits[:, 1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) / float(1 << 53)


def sample(
    logits: Tensor,  # [R, V] fp32, CPU, contiguous
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    sample_indices: Sequence[int],
    *,
    states: Sequence[LogitState | None] | None = None,
) -> SampledTokens:
    """Returns one token per row; `positions` counts the output tokens before this one.

    `states` hold what else changes a row's logits (logit_rules.py); such rows are copied first.
    """
    num_rows = len(params)
    values = logits.numpy()
    token_ids, finite = _argmax(values)
    altered, errors = ({}, {}) if states is None else _alter(values, states, finite, token_ids)
    drawn = [row for row in range(num_rows) if token_ids[row] >= 0 and not params[row].is_greedy]
    if drawn:
        noise = uniforms(
            [seeds[row] for row in drawn],
            [sample_indices[row] for row in drawn],
            [positions[row] for row in drawn],
        )
        for row, uniform in zip(drawn, noise.tolist(), strict=True):
            draw = _draw_narrow if _is_narrow(params[row]) else _draw_wide
            token_ids[row] = draw(altered.get(row, values[row]), params[row], uniform)
    if all(row_params.logprobs is None for row_params in params):
        return SampledTokens(token_ids, finite, errors, None, None)
    logprobs: list[float | None] = [None] * num_rows
    top_logprobs: list[dict[int, Logprob] | None] = [None] * num_rows
    for row in range(num_rows):
        count = params[row].logprobs
        if count is not None and token_ids[row] >= 0:
            top = _top_logprobs(logits[row], token_ids[row], count)
            top_logprobs[row] = top
            logprobs[row] = top[token_ids[row]].logprob
    return SampledTokens(token_ids, finite, errors, logprobs, top_logprobs)


def _alter(
    values: np.ndarray,  # [R, V]
    states: Sequence[LogitState | None],
    finite: Sequence[bool],
    token_ids: list[int],
) -> tuple[dict[int, np.ndarray], dict[int, SamplingError]]:
    """Returns altered copies of the rows whose states say so, and the rows that failed.

    Puts the id of each copy's largest logit (-1 for a failure) into `token_ids`.
    """
    altered: dict[int, np.ndarray] = {}
    errors: dict[int, SamplingError] = {}
    for row, state in enumerate(states):
        if state is None or not finite[row] or not state.is_active:
            continue
        altered[row] = values[row].copy()
        try:
            token_ids[row] = state.apply_(altered[row])
        except SamplingError as error:
            token_ids[row], errors[row] = -1, error
    return altered, errors


def _argmax(values: np.ndarray) -> tuple[list[int], list[bool]]:  # values: [R, V]
    """Returns the lowest id of the largest logit per row, and whether that logit is finite.

    One pass: numpy's argmax stops at the first NaN, so a NaN anywhere is the "largest".
    """
    best = values.argmax(axis=1)
    finite = np.isfinite(values[np.arange(len(best)), best])
    return np.where(finite, best, -1).tolist(), finite.tolist()


def _is_narrow(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _weights(row: np.ndarray, temperature: float) -> np.ndarray:  # row: [V] fp32
    """Returns exp((x - max) / temperature), fp32 [V].

    One row at a time on this thread: no other row can change a bit, and at 49152 tokens it costs
    50 us, less than waking a thread pool for a softmax.
    """
    weights = row - row.max()
    if temperature != 1.0:
        weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def _draw_wide(row: np.ndarray, params: SamplingParams, uniform: float) -> int:  # row: [V] fp32
    """Draws from all tokens, less those that min_p cuts: prefix sums in id order."""
    weights = _weights(row, params.temperature)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    return _pick(weights.cumsum(dtype=np.float64), uniform)


def _pick(cumulative: np.ndarray, uniform: float) -> int:
    """Returns the first index whose prefix sum exceeds `uniform` of the total.

    An index of weight 0 never wins, as its prefix sum equals its predecessor's.
    """
    total = cumulative[-1]
    index = int(np.searchsorted(cumulative, uniform * total, side="right"))
    # Rounding may lift the product to the total itself: then the last index with weight is meant.
    return min(index, int(np.searchsorted(cumulative, total, side="left")))


def _draw_narrow(row: np.ndarray, params: SamplingParams, uniform: float) -> int:  # row: [V] fp32
    """Draws from the top_k or the nucleus, mostly without sorting the row."""
    vocab_size = len(row)
    mass = None
    count = params.top_k + 1  # one more than top_k shows whether others equal the k-th value
    if params.top_k <= 0:
        mass = float(_weights(row, params.temperature).sum(dtype=np.float64))
        count = _NUCLEUS_GUESS
    count = min(count, vocab_size)
    # 70 us for 49152 logits; torch.topk takes 110 to 380.
    largest = np.partition(row, vocab_size - count)[vocab_size - count :]
    descending = np.sort(largest)[::-1]
    index = _draw_sorted(descending, vocab_size, params, uniform, mass)
    if index is None:
        descending = np.sort(row)[::-1]
        index = _draw_sorted(descending, vocab_size, params, uniform, mass)
        assert index is not None  # a whole row is always enough
    # Equal logits share their places in order of their ids.
    place = index - int(np.searchsorted(-descending, -descending[index], side="left"))
    return int(np.flatnonzero(row == descending[index])[place])


def _draw_sorted(
    descending: np.ndarray,  # [C] fp32, the row's C largest logits
    vocab_size: int,
    params: SamplingParams,
    uniform: float,
    mass: float | None,
) -> int | None:
    """Draws a place among a row's sorted logits, or returns None if it takes more of them.

    `mass` is the sum of exp((x - max) / temperature) over the row; without top_k it is needed.
    """
    is_whole = len(descending) == vocab_size
    values = descending.astype(np.float64)
    weights = np.exp((values - values[0]) / params.temperature)
    kept = len(weights)
    if params.min_p > 0.0:
        kept = int(np.searchsorted(-weights, -params.min_p, side="right"))
    if 0 < params.top_k < len(values):
        kth = values[params.top_k - 1]
        kept = min(kept, int(np.searchsorted(-values, -kth, side="right")))
    # Whatever lies below the last logit here is kept, too, if that one is.
    is_cut = is_whole or kept < len(weights)
    if not is_cut and (params.top_k > 0 or params.min_p > 0.0):
        return None
    cumulative = weights[:kept].cumsum()
    if params.top_p < 1.0:
        total = mass if mass is not None and params.min_p == 0.0 else cumulative[-1]
        # A token stays while those above it hold less than top_p of the mass.
        last = int(np.searchsorted(cumulative, params.top_p * total, side="left"))
        if last >= kept and not is_cut:
            return None
        cumulative = cumulative[: last + 1]
    return _pick(cumulative, uniform)


def _top_logprobs(row: Tensor, token_id: int, count: int) -> dict[int, Logprob]:  # row: [V]
    """Returns the chosen token's and the `count` best log-probabilities (-1: all)."""
    logits = row.numpy()
    log_total = float(logits.max()) + math.log(_weights(logits, 1.0).sum(dtype=np.float64))
    chosen = logits[token_id]
    rank = int(np.count_nonzero(logits > chosen)) + 1
    top = {token_id: Logprob(float(chosen) - log_total, rank)}
    if count == 0:
        return top
    count = len(logits) if count < 0 else min(count, len(logits))
    values, ids = (part.numpy() for part in torch.topk(row, count))
    order = np.lexsort((ids, -values))
    ranks = np.searchsorted(-values[order], -values[order], side="left") + 1
    for value, other_id, rank in zip(
        values[order].tolist(), ids[order].tolist(), ranks.tolist(), strict=True
    ):
        if other_id != token_id:
            top[other_id] = Logprob(value - log_total, rank)
    return top
