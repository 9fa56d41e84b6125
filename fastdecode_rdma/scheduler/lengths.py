"""How many tokens will a job generate? Learned from those that have finished."""

from __future__ import annotations

from collections import deque

import numpy as np

WINDOW = 1024
"""So many finished jobs are remembered."""


class LengthEstimator:
    """Estimates output lengths, given the tokens generated so far and the bound max_tokens.

    A job either runs to its bound, as the share of finished ones that did, or it ends as those that
    ended by themselves and had come as far. Before any has finished, and past all that have, the
    bound is the estimate.
    """

    def __init__(self) -> None:
        self._finished: deque[tuple[int, bool]] = deque(maxlen=WINDOW)  # length, hit its bound
        self._lengths = np.zeros(0)  # ascending, of those that ended early
        self._sums = np.zeros(1)  # of the lengths from each place on
        self._share_full = 1.0
        self._is_stale = False

    def add(self, num_generated: int, max_tokens: int) -> None:
        """Takes note of a job that has ended."""
        self._finished.append((num_generated, num_generated >= max_tokens))
        self._is_stale = True

    def estimate(self, num_generated: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Returns expected lengths [n], more than num_generated [n] and at most max_tokens [n]."""
        if self._is_stale:
            self._sort()
        total = len(self._lengths)
        if not total:
            return max_tokens.astype(np.float64)
        first = np.searchsorted(self._lengths, num_generated, side="right")
        longer = total - first
        early = np.where(longer > 0, self._sums[first] / np.maximum(longer, 1), max_tokens)
        # whoever runs to its bound is still there; of the others those are that get further
        full = self._share_full * np.ones(len(first))
        survivors = full + (1.0 - full) * longer / total
        full = np.divide(full, survivors, out=np.ones(len(first)), where=survivors > 0)
        length = full * max_tokens + (1.0 - full) * np.minimum(early, max_tokens)
        return np.clip(length, np.minimum(num_generated + 1, max_tokens), max_tokens)

    def _sort(self) -> None:
        self._is_stale = False
        early = [length for length, is_full in self._finished if not is_full]
        self._lengths = np.sort(np.array(early, np.float64))
        self._sums = np.append(np.cumsum(self._lengths[::-1])[::-1], 0.0)
        self._share_full = 1.0 - len(early) / len(self._finished)
