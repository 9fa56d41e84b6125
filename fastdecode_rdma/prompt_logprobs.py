"""Log-probabilities of prompt tokens: flat arrays that read like vLLM's list of dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from fastdecode_rdma.logprobs import SCORE, TOP, build_entry, score
from fastdecode_rdma.sequence import Logprob


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """One entry per prompt token: None for the first, then token id -> Logprob.

    The prompt's own token comes first, then the `num_top` most probable by rank (equal ones in id
    order). A dict is built when it is looked at; the arrays are for those who need no dicts:
    `logprobs` (float64 [L], NaN first) and `ranks` (int64 [L], 0 first; 1 is the most probable) of
    the prompt's own tokens.
    """

    __slots__ = (
        "_decode",
        "_top",
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
        self._top = np.zeros((length, self.num_top), TOP)
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
        chosen = np.asarray(places, np.intp)
        own = (part[chosen].tolist() for part in (self.token_ids, self.logprobs, self.ranks))
        for place, *values in zip(places, *own, strict=True):
            yield build_entry(*values, self._top[place], self._decode) if place else None

    # -- what the engine does

    @property
    def is_greedy(self) -> np.ndarray:
        """Whether each token is the one that greedy decoding takes, bool [L], False where nothing
        has been filled in; with `num_top` of at least 1."""
        top = self._top[:, 0]
        return (top["token"] == self.token_ids) & (top["rank"] == 1)

    @property
    def is_finite(self) -> bool:
        """Whether all logits were numbers; whatever is left of them otherwise is worthless."""
        return not np.isnan(self.logprobs[1:]).any()

    def fill_(self, start: int, logits: np.ndarray) -> None:
        """Takes the logits [R, V] (fp32, contiguous) after tokens start .. start+R.

        Allocates some 50 bytes per row, and per thread up to 16 per logit of one row.

        Raises:
            MemoryError: there was none to sort some of a row's tokens.
        """
        rows = np.arange(len(logits))
        self.fill_places_(rows + start + 1, logits, rows)

    def fill_places_(
        self,
        places: np.ndarray,  # int64 [N], of tokens
        logits: np.ndarray,  # fp32 [R, V], contiguous
        chosen: np.ndarray,  # int64 [N], the row of logits that comes before each token
    ) -> None:
        """Takes the logits for some tokens; one row may serve several. Cost and errors: `fill_`."""
        rows = np.zeros(len(places), SCORE)
        rows["logits"] = _addresses(logits, chosen)
        rows["top"] = _addresses(self._top, places)
        rows["token"] = self.token_ids[places]
        rows["num_top"] = self.num_top
        score(rows, logits.shape[1])
        self.logprobs[places] = rows["logprob"]
        self.ranks[places] = rows["rank"]


def _addresses(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns where rows begin in memory."""
    return array.ctypes.data + rows.astype(np.uint64) * np.uint64(array.strides[0])
