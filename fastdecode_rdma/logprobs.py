"""Log-probabilities of rows of logits, the same for sampled tokens and for those of prompts.

A row's values depend on its logits alone: every sum along the vocabulary runs in one fixed order on
one thread (cython/sampling_score.h; rows run in parallel). Of equal logits the lowest ids come
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.isa import choose_isa
from fastdecode_rdma.sequence import Logprob

try:
    from fastdecode_rdma import _sampling, _team
except ImportError as exc:
    raise ImportError(
        "compiled kernels not found: run `pip install -e .`, or leave the checkout directory"
    ) from exc

TOP = np.dtype([("logprob", "f8"), ("token", "i4"), ("rank", "i4")])
"""One of a row's most probable tokens: `sampling_top` in cython/sampling.h."""
SCORE = np.dtype(
    [
        ("logits", "u8"), ("top", "u8"), ("token", "i8"), ("num_top", "i8"), ("logprob", "f8"),
        ("rank", "i8"),
    ]
)  # fmt: skip
"""One row as the kernel reads it: `sampling_score` in cython/sampling.h."""
NO_MEMORY = -2

MAX_VALUES = 1 << 24
"""Log-probabilities of one request: 256 MiB in arrays, some 3 GB as dicts."""
ALWAYS_ALLOWED = 20
"""Values per token, vLLM's default limit: given for any number of tokens."""


def check_amount(name: str, num_top: int | None, num_tokens: int, vocab_size: int) -> None:
    """Checks that what the log-probabilities of a request's tokens would hold is within reason.

    Raises:
        ConfigError: it is not.
    """
    if num_top is None:
        return
    count = vocab_size if num_top < 0 else min(num_top, vocab_size)
    if count > ALWAYS_ALLOWED and num_tokens * count > MAX_VALUES:
        raise ConfigError(
            f"{name}={num_top} of {num_tokens} tokens is {num_tokens * count} values, at most "
            f"{MAX_VALUES} are given: for that many tokens use up to "
            f"{max(ALWAYS_ALLOWED, MAX_VALUES // num_tokens)}"
        )


@cache
def bind_kernel() -> None:
    """Gives the kernel the thread team, and the instruction set that FASTDECODE_ISA allows.

    Raises:
        ConfigError: FASTDECODE_ISA is unknown, or this CPU cannot run it.
    """
    _sampling.bind_team(_team.address())
    isa = choose_isa(_sampling.cpu_has, built=_sampling.ISA_NAMES)
    _sampling.set_isa(_sampling.ISA_NAMES.index(isa))


def score(rows: np.ndarray, vocab_size: int, num_threads: int | None = None) -> None:
    """Fills in `logprob` and `rank` of rows (SCORE [R]), and the `num_top` TOP entries of each.

    A row without a finite largest logit, or with a NaN, gets NaN and no entries. `num_threads` is
    torch's number by default.

    Raises:
        MemoryError: there was none to sort some of a row's tokens.
    """
    bind_kernel()
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    _sampling.score(rows.ctypes.data, len(rows), vocab_size, num_threads)
    if (rows["rank"] == NO_MEMORY).any():
        raise MemoryError("no memory to sort the tokens of a row")


def build_entry(
    token_id: int,
    logprob: float,
    rank: int,
    top: np.ndarray,  # TOP [num_top]
    decode_token: Callable[[int], str] | None,
) -> dict[int, Logprob]:
    """Returns the dict of one token: itself first, then the most probable ones by rank."""
    decode = decode_token if decode_token is not None else lambda token_id: None
    entry = {token_id: Logprob(logprob, rank, decode(token_id))}
    for value, other, place in top.tolist():
        if other != token_id:
            entry[other] = Logprob(value, place, decode(other))
    return entry


class TopLogprobs(Mapping[int, Logprob]):
    """What came of one sampled token: token id -> Logprob, the chosen token first, then by rank.

    It is flat until somebody looks: Logprob objects and the texts of tokens are made then, on the
    thread of who looks, not on the engine's. Copies and pickles are plain dicts.
    """

    __slots__ = ("_entry", "_top", "decode_token", "logprob", "rank", "token_id")

    def __init__(self, token_id: int, logprob: float, rank: int, top: np.ndarray) -> None:
        """`top` is TOP [num_top]. `decode_token`, set later, gives `Logprob.decoded_token`."""
        self.token_id = token_id
        self.logprob = logprob
        self.rank = rank
        self.decode_token: Callable[[int], str] | None = None
        self._top = top
        self._entry: dict[int, Logprob] | None = None

    def _built(self) -> dict[int, Logprob]:
        if self._entry is None:
            self._entry = build_entry(
                self.token_id, self.logprob, self.rank, self._top, self.decode_token
            )
        return self._entry

    def __getitem__(self, token_id: int) -> Logprob:
        return self._built()[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._built())

    def __len__(self) -> int:
        return len(self._built())

    def __repr__(self) -> str:
        return repr(self._built())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._built(),)
