"""The load of the steps to come, if every job that runs lives as long as expected."""

from __future__ import annotations

import numpy as np

MAX_POINTS = 2048
"""A forecast that reaches further takes every second step, third step, ..."""


class Forecast:
    """Load at `points`, steps from now. A job of n tokens that has r steps left has n + t tokens in
    step t, for t < r. Loads peak where jobs end."""

    def __init__(self, num_tokens: np.ndarray, steps_left: np.ndarray, horizon: int) -> None:
        """num_tokens, steps_left: of the running jobs, [n]; horizon: steps to look ahead."""
        reach = max(horizon, int(steps_left.max(initial=1))) + 1
        self.stride = -(-reach // MAX_POINTS)
        self.points = np.arange(0, reach + self.stride, self.stride)
        last = (steps_left - 1) // self.stride  # the last point that a job takes part in
        jobs = np.bincount(last, minlength=len(self.points))
        tokens = np.bincount(last, weights=num_tokens, minlength=len(self.points))
        self.load = _suffix_sums(tokens) + self.points * _suffix_sums(jobs)

    @property
    def horizon(self) -> int:
        """Steps that it looks ahead."""
        return int(self.points[-1])

    def peak_with(self, count: int, num_tokens: int, steps_left: int, *, age: int = 0) -> float:
        """Returns the largest load while `count` newcomers live that decode from the next step on,
        themselves included, and all who outlive them. age: steps since the forecast was made."""
        span = self._span(steps_left, age)
        own = count * (num_tokens - age + self.points[span])
        return float((self.load[span] + own).max(initial=0.0))

    def add(self, count: int, num_tokens: int, steps_left: int, *, age: int = 0) -> None:
        """Counts newcomers as of the next step."""
        span = self._span(steps_left, age)
        self.load[span] += count * (num_tokens - age + self.points[span])

    def _span(self, steps_left: int, age: int) -> slice:
        """The points in which newcomers take part."""
        return slice(age // self.stride + 1, (age + steps_left - 1) // self.stride + 2)


def _suffix_sums(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values[::-1])[::-1]
