"""Logits -> tokens and log-probabilities, each row by itself.

A row's result depends on its logits, parameters, seed, sample index and output ids alone, never on
its neighbours: the noise is counter-based, and every sum along the vocabulary runs in one
fixed order on one thread (cython/sampling.h; rows run in parallel).

One uniform number u per row picks the first candidate whose cumulative probability exceeds u.
Candidates are all tokens in id order, or, under top_k or top_p, the kept ones from the most
probable down (equal ones in id order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.errors import SamplingError
from fastdecode_rdma.logit_rules import LogitState
from fastdecode_rdma.logprobs import NO_MEMORY, SCORE, TOP, TopLogprobs, bind_kernel, score
from fastdecode_rdma.sequence import GREEDY_TEMPERATURE, SamplingParams

try:
    from fastdecode_rdma import _sampling
except ImportError as exc:
    raise ImportError(
        "compiled kernels not found: run `pip install -e .`, or leave the checkout directory"
    ) from exc

ROW = np.dtype(
    [
        ("logits", "u8"), ("uniform", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("token", "i8"),
        ("temperature", "f4"), ("min_p", "f4"),
    ]
)  # fmt: skip
"""One row as the kernel reads it: `sampling_row` in cython/sampling.h."""
MAX_TEMPERATURE = 1e30
"""Higher ones differ in nothing, and fp32 has no room for many of them."""
MAX_TOP_K = 1 << 62


@dataclass(slots=True)
class SampledTokens:
    """One token per row.

    `finite[row]` is False where the logits hold NaN or +inf, or nothing but -inf: that row has no
    token (its id is -1) and its request must fail; the other rows are sound. The same holds for
    rows in `errors`: their own parameters left no token. `logprobs` and `top_logprobs` are None
    when no row asked for them, and None per row that did not.
    `top_logprobs[row]` maps token ids to Logprob; whoever has the tokenizer sets `decode_token`.
    """

    token_ids: list[int]
    finite: list[bool]
    errors: dict[int, SamplingError]
    logprobs: list[float | None] | None
    top_logprobs: list[TopLogprobs | None] | None


class Scratch:
    """Memory for rows that are altered, kept from step to step: fresh pages cost more than the
    copies themselves."""

    def __init__(self) -> None:
        self._flat = np.empty(0, np.float32)

    def rows(self, num_rows: int, vocab_size: int) -> np.ndarray:
        """Returns fp32 [num_rows, vocab_size], valid until the next call."""
        if len(self._flat) < num_rows * vocab_size:
            self._flat = np.empty(num_rows * vocab_size, np.float32)
        return self._flat[: num_rows * vocab_size].reshape(num_rows, vocab_size)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns Philox4x32-10 of uint32 counters [R, 4] under uint32 keys [R, 2], as uint32 [R, 4].

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    counters = np.ascontiguousarray(counters, np.uint32)
    keys = np.ascontiguousarray(keys, np.uint32)
    words = np.empty(counters.shape, np.uint32)
    _sampling.philox(counters.ctypes.data, keys.ctypes.data, words.ctypes.data, len(counters))
    return words


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
    scratch: Scratch | None = None,
    num_threads: int | None = None,
) -> SampledTokens:
    """Returns one token per row; `positions` counts the output tokens before this one.

    `states` hold what else changes a row's logits (logit_rules.py); such rows are copied first,
    to `scratch` (memory of its own by default). `num_threads` is torch's number by default.

    Raises:
        MemoryError: there was none to sort some of a row's tokens.
    """
    num_rows, vocab_size = logits.shape
    rows = np.zeros(num_rows, ROW)
    first, step = logits.data_ptr(), 4 * logits.stride(0)
    rows["logits"] = range(first, first + num_rows * step, step)
    rows["temperature"] = [
        min(p.temperature, MAX_TEMPERATURE) if p.temperature >= GREEDY_TEMPERATURE else 0.0
        for p in params
    ]
    if rows["temperature"].any():
        rows["uniform"] = uniforms(seeds, sample_indices, positions)
        rows["top_p"] = [p.top_p for p in params]
        rows["top_k"] = [min(p.top_k, MAX_TOP_K) for p in params]
        rows["min_p"] = [p.min_p for p in params]
    altered, errors = (
        ({}, {}) if states is None else _alter(logits.numpy(), states, scratch or Scratch())
    )
    for row, copy in altered.items():
        rows["logits"][row] = copy.ctypes.data
    bind_kernel()
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    _sampling.sample(rows.ctypes.data, num_rows, vocab_size, num_threads)
    token_ids: list[int] = rows["token"].tolist()
    if NO_MEMORY in token_ids:
        raise MemoryError("no memory to sort the tokens of a row")
    for row in errors:
        token_ids[row] = -1
    finite = [token_id >= 0 or row in errors for row, token_id in enumerate(token_ids)]
    if all(row_params.logprobs is None for row_params in params):
        return SampledTokens(token_ids, finite, errors, None, None)
    top_logprobs = _top_logprobs(logits, [p.logprobs for p in params], token_ids, num_threads)
    logprobs = [None if top is None else top.logprob for top in top_logprobs]
    return SampledTokens(token_ids, finite, errors, logprobs, top_logprobs)


def _top_logprobs(
    logits: Tensor,  # [R, V], as the model gave them
    counts: Sequence[int | None],
    token_ids: Sequence[int],
    num_threads: int,
) -> list[TopLogprobs | None]:
    """Returns the chosen token's and the `counts[row]` best log-probabilities (-1: all)."""
    vocab_size, first, step = logits.shape[1], logits.data_ptr(), 4 * logits.stride(0)
    wanted = [row for row, count in enumerate(counts) if count is not None and token_ids[row] >= 0]
    tops = []
    for row in wanted:
        count = counts[row]
        tops.append(np.empty(vocab_size if count < 0 else min(count, vocab_size), TOP))
    rows = np.zeros(len(wanted), SCORE)
    rows["logits"] = [first + row * step for row in wanted]
    rows["top"] = [top.ctypes.data for top in tops]
    rows["token"] = [token_ids[row] for row in wanted]
    rows["num_top"] = [len(top) for top in tops]
    score(rows, vocab_size, num_threads)
    found: list[TopLogprobs | None] = [None] * len(counts)
    for row, top, logprob, rank in zip(
        wanted, tops, rows["logprob"].tolist(), rows["rank"].tolist(), strict=True
    ):
        found[row] = TopLogprobs(token_ids[row], logprob, rank, top)
    return found


def _alter(
    values: np.ndarray,  # [R, V]
    states: Sequence[LogitState | None],
    scratch: Scratch,
) -> tuple[dict[int, np.ndarray], dict[int, SamplingError]]:
    """Returns altered copies of the rows whose states say so, and why others failed.

    A row without a finite largest logit stays as it is: no mask may hide that.
    """
    altered: dict[int, np.ndarray] = {}
    errors: dict[int, SamplingError] = {}
    active = [row for row, state in enumerate(states) if state is not None and state.is_active]
    copies = scratch.rows(len(active), values.shape[1])
    for row, copy in zip(active, copies, strict=True):
        copy[:] = values[row]
        if not np.isfinite(copy.max()):
            continue
        try:
            states[row].apply_(copy)
        except SamplingError as error:
            errors[row] = error
        else:
            altered[row] = copy
    return altered, errors
