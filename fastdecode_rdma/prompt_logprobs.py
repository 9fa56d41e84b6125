"""Log-probabilities of prompt tokens: flat arrays that read like vLLM's list of dicts.

A row's values depend on its logits alone, never on the rows computed with it: every sum along the
vocabulary runs in one fixed order on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, overload

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import Logprob

BLOCK_ELEMENTS = 1 << 17
"""Logits that are worked on at once (one row at least): 1 MiB in float64 stays in the cache, and
small vocabularies do not pay numpy's overhead per token."""

MAX_VALUES = 1 << 24
"""Log-probabilities of one prompt: 256 MiB in arrays, some 3 GB as dicts."""


def check_amount(num_top: int | None, num_tokens: int, vocab_size: int) -> None:
    """Checks that what a prompt's log-probabilities would hold is within reason.

    Raises:
        ConfigError: it is not.
    """
    if num_top is None:
        return
    count = vocab_size if num_top < 0 else min(num_top, vocab_size)
    if num_tokens * count > MAX_VALUES:
        raise ConfigError(
            f"prompt_logprobs={num_top} of a prompt of {num_tokens} tokens is {num_tokens * count} "
            f"values, at most {MAX_VALUES} are given: for this prompt use up to "
            f"{MAX_VALUES // num_tokens}"
        )


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """One entry per prompt token: None for the first, then token id -> Logprob.

    The prompt's own token comes first, then the `num_top` most probable by rank (equal ones in id
    order). A dict is built when it is looked at; the arrays are for those who need no dicts:
    `logprobs` (float64 [L], NaN first) and `ranks` (int64 [L], 0 first; 1 is the most probable) of
    the prompt's own tokens.
    """

    __slots__ = (
        "_decode",
        "_top_ids",
        "_top_logprobs",
        "_top_ranks",
        "logprobs",
        "num_top",
        "ranks",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: np.ndarray,  # int64 [L]
        num_top: int,
        vocab_size: int,
        decode_token: Callable[[int], str] | None,
    ) -> None:
        """`num_top` -1 is the whole vocabulary. `decode_token` gives `Logprob.decoded_token`."""
        length = len(token_ids)
        self.token_ids = token_ids
        self.num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
        self.logprobs = np.full(length, np.nan)
        self.ranks = np.zeros(length, np.int64)
        self._top_ids = np.zeros((length, self.num_top), np.int32)
        self._top_ranks = np.zeros((length, self.num_top), np.int32)
        self._top_logprobs = np.zeros((length, self.num_top))
        self._decode = decode_token

    # -- what a user sees

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._entries(range(*index.indices(len(self)))))
        place = range(len(self))[index]  # negative ones count from the end; IndexError beyond
        return next(self._entries(range(place, place + 1)))

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return self._entries(range(len(self)))

    def __repr__(self) -> str:
        return f"PromptLogprobs({len(self)} tokens, top {self.num_top})"

    def _entries(self, places: range) -> Iterator[dict[int, Logprob] | None]:
        decode = cache(self._decode) if self._decode is not None else lambda token_id: None
        chosen = np.asarray(places, np.intp)
        columns = (
            values[chosen].tolist()
            for values in (
                self.token_ids, self.logprobs, self.ranks,
                self._top_ids, self._top_logprobs, self._top_ranks,
            )
        )  # fmt: skip
        for place, token_id, logprob, rank, *top in zip(places, *columns, strict=True):
            if not place:
                yield None
                continue
            entry = {token_id: Logprob(logprob, rank, decode(token_id))}
            if self.num_top:
                for other, value, place_in_row in zip(*top, strict=True):
                    if other != token_id:
                        entry[other] = Logprob(value, place_in_row, decode(other))
            yield entry

    # -- what the engine does

    @property
    def is_finite(self) -> bool:
        """Whether all logits were numbers; whatever is left of them otherwise is worthless."""
        return not np.isnan(self.logprobs[1:]).any()

    def fill_(self, start: int, logits: np.ndarray) -> None:
        """Takes the logits [R, V] (fp32, contiguous) after tokens start .. start+R; destroys them.

        Allocates at most 100 bytes per element of BLOCK_ELEMENTS or of one row, whichever is more.
        """
        step = max(1, BLOCK_ELEMENTS // logits.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(0, len(logits), step):
                self._fill_block(start + first + 1, logits[first : first + step])

    def _fill_block(self, start: int, logits: np.ndarray) -> None:
        """Fills the entries of tokens start .. start+R from the logits that predict them."""
        places = slice(start, start + len(logits))
        highest = logits.max(axis=1)  # NaN if any of the row is
        unsound = ~np.isfinite(highest)
        if unsound.any():
            logits[unsound] = 0.0
        own = logits[np.arange(len(logits)), self.token_ids[places]]
        self.ranks[places] = np.count_nonzero(logits > own[:, None], axis=1) + 1
        if self.num_top:
            self._fill_top(places, logits)
        logits -= np.where(unsound, np.float32(0), highest)[:, None]
        np.exp(logits, out=logits)
        # converted first: a sum that converts on the way runs through a buffer that rows share
        total = np.log(logits.astype(np.float64).sum(axis=1)) + highest
        self.logprobs[places] = np.where(unsound, np.nan, own - total)
        self._top_logprobs[places] -= total[:, None]

    def _fill_top(self, places: slice, logits: np.ndarray) -> None:
        """Fills in the highest logits of each row, with their ids and ranks."""
        count, vocab_size = self.num_top, logits.shape[1]
        # partition, then look for what reaches the last place: faster than argpartition
        bound = np.partition(logits, vocab_size - count, axis=1)[:, vocab_size - count]
        rows, ids = np.nonzero(logits >= bound[:, None])
        values = logits[rows, ids]
        order = np.lexsort((ids, -values, rows))
        rows, ids, values = rows[order], ids[order], values[order]
        # more than `count` reach it where several equal it: those with the lowest ids are kept
        kept = np.arange(len(rows)) - np.searchsorted(rows, rows) < count
        values = values[kept].reshape(-1, count)
        self._top_ids[places] = ids[kept].reshape(-1, count)
        self._top_logprobs[places] = values
        is_new = np.ones(values.shape, bool)
        is_new[:, 1:] = values[:, 1:] != values[:, :-1]
        ranks = np.where(is_new, np.arange(1, count + 1), 0)
        self._top_ranks[places] = np.maximum.accumulate(ranks, axis=1)
