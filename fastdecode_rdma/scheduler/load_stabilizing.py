"""Load-stabilizing schedule: sequences start at such times that the load stays level.

A sequence's load grows with every token, so a batch that starts together swings between nothing and
all of it. Here newcomers start when the load, forecast over the whole of their lives, stays below
the limit (FastDecode's load control, its newcomers counted once, and checked against their own
peak, to which all add who outlive them).

Load control alone looks at those that run, not at those that will follow: it fills the near future
up and keeps the swing that it finds, half of the limit on average. Lengths that differ mix the ages
by themselves. Where they are alike newcomers are paced as well: no more work starts in a step than
the limit lets a step do, so that ages spread evenly in the first generation and stay so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fastdecode_rdma.param_checks import check_bool, check_int
from fastdecode_rdma.scheduler.base import SchedulerOptions
from fastdecode_rdma.scheduler.entries import Entry, Rank
from fastdecode_rdma.scheduler.forecast import Forecast
from fastdecode_rdma.scheduler.lengths import LengthEstimator
from fastdecode_rdma.scheduler.queued import QueuedScheduler

GROUPS = 64
"""Groups in which a generation starts: its load swings by 1 / GROUPS."""
WINDOW = 256
"""So many jobs tell whether lengths are alike."""
JOBS_PER_STEP = 512
"""A forecast of a few jobs is made in every step, one of n jobs every n / JOBS_PER_STEP steps."""
ALIKE = 0.25
"""Lengths are, if they deviate from their mean by less than this share of it."""


@dataclass(frozen=True)
class LoadStabilizingSettings:
    """knows_lengths: every job generates max_tokens; False: it may end early, lengths are learned.
    stagger: paces newcomers; False leaves all to load control. interval_steps: steps between groups
    of newcomers; None: a 64th of their length."""

    knows_lengths: bool = False
    stagger: bool = True
    interval_steps: int | None = None

    def __post_init__(self) -> None:
        check_bool("knows_lengths", self.knows_lengths)
        check_bool("stagger", self.stagger)
        check_int("interval_steps", self.interval_steps, low=1, optional=True)


class LoadStabilizingScheduler(QueuedScheduler):
    """In order of priority and arrival, at times that load control finds.

    Without max_load_tokens the limit is what max_num_seqs jobs of the expected length hold when
    their ages are spread evenly.
    """

    Settings: ClassVar[type] = LoadStabilizingSettings

    def __init__(self, options: SchedulerOptions, settings: Any = None) -> None:
        super().__init__(options, settings)
        self._lengths = LengthEstimator()
        self._forecast: Forecast | None = None
        self._forecast_at = 0
        self._started: deque[int] = deque(maxlen=WINDOW)  # expected lengths
        self._credit = 0.0  # work that may start: tokens, summed over the steps of a job
        self._credited_at = 0
        self._is_paced = False

    def _rank(self, entry: Entry) -> Rank:
        return entry.job.priority, entry.job.arrival

    def _forget(self, entry: Entry) -> None:
        job = entry.job
        generated = job.num_tokens - job.prompt_len
        if generated > 0 and len(entry.jobs) == 1:
            self._lengths.add(generated, job.max_tokens)

    # -- lengths and limits

    def _steps_left(self, entries: list[Entry]) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens so far, and tokens that are expected to come, [n]; at least one."""
        jobs = [job for entry in entries for job in entry.jobs]
        tokens = np.array([job.num_tokens for job in jobs], np.int64)
        prompts = np.array([job.prompt_len for job in jobs], np.int64)
        bounds = np.array([job.max_tokens for job in jobs], np.int64)
        generated = tokens - prompts
        if self.settings.knows_lengths:
            left = bounds - generated
        else:
            left = np.ceil(self._lengths.estimate(generated, bounds)).astype(np.int64) - generated
        return tokens, np.maximum(left, 1)

    def _limit(self, mean_load: float, steps: int) -> float:
        """The load limit, given a typical job."""
        if self.options.max_load_tokens is not None:
            return self.options.max_load_tokens
        return self.options.max_num_seqs * (mean_load + self._interval(steps) / 2)

    def _interval(self, steps: int) -> int:
        return self.settings.interval_steps or max(1, steps // GROUPS)

    # -- who may start

    def _may_start(self, gang: Entry, step: Any) -> bool:
        del step
        count = len(gang.jobs)
        tokens, left = self._steps_left([gang])
        prompt, steps = int(tokens[0]), int(left[0])
        mean_load = prompt + steps / 2
        limit = self._limit(mean_load, steps)
        if self._credited_at != self._step_number:
            self._earn(mean_load, prompt + steps, steps, limit)
        forecast = self._current_forecast(steps)
        age = self._step_number - self._forecast_at
        if self._running and (
            forecast.peak_with(count, prompt, steps, age=age) > limit
            or (self._is_paced and self._credit < 0)
        ):
            return False
        self._credit -= count * mean_load * steps
        forecast.add(count, prompt, steps, age=age)
        self._started.append(steps)
        return True

    def _earn(self, mean_load: float, last_load: float, steps: int, limit: float) -> None:
        """Adds the work that may start since the last step in which somebody wanted to. It is kept
        for one interval at most: what comes late must not come at once."""
        batch = limit / mean_load
        interval = max(self._interval(steps), steps / batch)
        # when a group ends the load falls by that much, half of it is above the mean
        swing = interval * batch / steps * last_load
        rate = max(limit - swing / 2, limit / 2)
        passed = self._step_number - self._credited_at
        self._credited_at = self._step_number
        self._credit = min(self._credit + passed * rate, interval * rate)
        self._is_paced = self.settings.stagger and self._are_alike() and not self._do_all_fit(limit)

    def _are_alike(self) -> bool:
        lengths = list(self._started)
        if len(lengths) < WINDOW:
            waiting = self._waiting.entries[: WINDOW - len(lengths)]
            lengths.extend(self._steps_left(waiting)[1].tolist())
        return float(np.std(lengths)) < ALIKE * float(np.mean(lengths))

    def _current_forecast(self, steps: int) -> Forecast:
        """Returns one that reaches as many steps. It is made anew when it is old: newcomers have
        been added, those that ended early or run on have not been corrected."""
        age = self._step_number - self._forecast_at
        old = age > len(self._running) // JOBS_PER_STEP
        if self._forecast is None or old or self._forecast.horizon < steps + age:
            left = self._steps_left(self._running.entries)
            self._forecast = Forecast(*left, steps + len(self._running) // JOBS_PER_STEP)
            self._forecast_at = self._step_number
        return self._forecast

    def _do_all_fit(self, limit: float) -> bool:
        """Whether the limit would hold if all that wait started now: then none needs to wait."""
        if self._num_waiting > min(WINDOW, self.options.max_num_seqs - len(self._running)):
            return False
        tokens, left = self._steps_left(self._running.entries + self._waiting.entries)
        return float(Forecast(tokens, left, 1).load.max()) <= limit
