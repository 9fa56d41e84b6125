"""Into how many mini-batches a step is split, by measured times; and which sequence goes where."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdecode_rdma.engine.state import LiveSequence

ROW_TOKENS = 64
"""What one more row weighs beside cached tokens when sequences are spread."""
TOLERANCE = 0.125
"""By how much of the mean a mini-batch may outweigh another before sequences change places. They
change places at no cost, as their K/V stays where it is; but who stays put needs no sorting."""

FIRST_TRIAL = 8
"""Steps before the first comparison: buffers and caches are warm by then."""
NEXT_TRIAL = 32
LAST_TRIAL = 2048
"""Steps to the comparison after next, and at most: each one that changes nothing makes the next
come four times later, so that a long run loses next to nothing by comparing."""
TRIAL_STEPS = 4
"""Steps of either kind in a comparison, in turn, so that growing caches weigh on both alike. The
first one of the kind that was not in use does not count."""
CLEAR = 1.15
"""Slower by so much twice in a row, and a comparison is over."""
GAIN = 0.985
"""The other number must be faster than this to be taken: less would be noise."""
LEAST_GAIN = 0.04
"""Share of a step that overlap could hide at best, below which it is not tried."""
LOAD_CHANGE, LOAD_SLACK = 1.6, (4, 256)
"""When rows or cached tokens have changed by this factor and more than that many, what was measured
says little."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one decode step was and took: dense work, and the exchange with workers, in seconds."""

    num_mini_batches: int
    num_rows: int
    cached_tokens: int
    dense_s: float
    exchange_s: float

    @property
    def seconds(self) -> float:
        return self.dense_s + self.exchange_s


@dataclass(slots=True)
class _Trial:
    """Steps with the number in use and with another one, in turn."""

    other: int
    times: dict[int, list[float]] = field(default_factory=dict)
    num_steps: int = 0

    def next_number(self, current: int) -> int:
        return current if self.num_steps % 2 else self.other


class MiniBatchChooser:
    """Decides how many mini-batches the next step has.

    Splitting runs the dense layers once for each part, which takes longer than once for all, and
    lets workers attend meanwhile. Which of the two weighs more is measured: every now and then a
    few steps run with another number, and the faster one is kept. Pure: time comes in through
    `observe`.
    """

    def __init__(self, *, fixed: int | None, most: int, can_overlap: bool) -> None:
        """`fixed`: always that many; None: 1 to `most`, by measurement, where workers have
        processors of their own (`can_overlap`)."""
        self.current = fixed or 1
        self.reason = "as asked for" if fixed else "not compared yet"
        self._most = most
        self._is_fixed = fixed is not None
        if not self._is_fixed and not can_overlap:
            self._is_fixed = True
            self.reason = "the embedded worker runs on the dense side's own processors"
        self._trial: _Trial | None = None
        self._pause = NEXT_TRIAL
        self._until_trial = FIRST_TRIAL
        self._load = (0, 0)  # rows and cached tokens at the last trial
        self._hidable: float | None = None  # moving average of what overlap could hide

    def choose(self, num_sequences: int) -> int:
        """Returns the number of mini-batches of the next step, at most one per sequence."""
        number = self.current
        if self._trial is not None:
            number = self._trial.next_number(self.current)
        return max(1, min(number, num_sequences))

    def forget(self) -> None:
        """Takes note that the workers are others now: what was measured says nothing."""
        self._trial, self._hidable = None, None
        self._pause, self._until_trial = NEXT_TRIAL, FIRST_TRIAL

    def observe(self, times: StepTimes) -> None:
        """Takes note of a step that was run as chosen."""
        if self._is_fixed:
            return
        if times.num_mini_batches == 1 and times.seconds > 0:
            share = min(times.dense_s, times.exchange_s) / times.seconds
            old = share if self._hidable is None else self._hidable
            self._hidable = old + 0.25 * (share - old)
        if self._trial is not None:
            self._observe_trial(self._trial, times)
            return
        self._until_trial -= 1
        if self._load_changed(times):
            self._pause = NEXT_TRIAL
            self._until_trial = min(self._until_trial, NEXT_TRIAL)
            self._load = (times.num_rows, times.cached_tokens)
        if self._until_trial <= 0 and times.num_rows > 1:
            self._begin_trial()

    def _load_changed(self, times: StepTimes) -> bool:
        return any(
            max(now, before) > LOAD_CHANGE * min(now, before) + slack
            for now, before, slack in zip(
                (times.num_rows, times.cached_tokens), self._load, LOAD_SLACK, strict=True
            )
        )

    def _begin_trial(self) -> None:
        if self.current == 1 and self._hidable is not None and self._hidable < LEAST_GAIN:
            self.reason = f"overlap could hide {self._hidable:.0%} of a step at best"
            self._wait_longer()
            return
        others = [n for n in (self.current - 1, self.current + 1) if 1 <= n <= self._most]
        if not others:
            self._is_fixed = True
            return
        # the neighbours in turn: the pause tells which turn it is
        self._trial = _Trial(others[self._pause.bit_length() // 2 % len(others)])

    def _observe_trial(self, trial: _Trial, times: StepTimes) -> None:
        if times.num_mini_batches != trial.next_number(self.current):
            self._trial, self._until_trial = None, FIRST_TRIAL  # too few sequences for it just now
            return
        trial.num_steps += 1
        if trial.num_steps > 1:
            trial.times.setdefault(times.num_mini_batches, []).append(times.seconds)
        tried = trial.times.get(trial.other, [])
        mine = trial.times.get(self.current, [])
        is_clear = len(tried) >= 2 and min(tried) > CLEAR * max(mine)
        if is_clear or len(tried) >= TRIAL_STEPS:
            self._decide(trial, statistics.median(tried), statistics.median(mine))

    def _decide(self, trial: _Trial, tried_s: float, mine_s: float) -> None:
        self._trial = None
        if tried_s < GAIN * mine_s:
            self.current, trial.other = trial.other, self.current
            tried_s, mine_s = mine_s, tried_s
            self._pause, self._until_trial = NEXT_TRIAL, NEXT_TRIAL
        else:
            self._wait_longer()
        self.reason = (
            f"{mine_s * 1e3:.2f} ms a step, {tried_s * 1e3:.2f} ms measured with {trial.other}"
        )

    def _wait_longer(self) -> None:
        self._until_trial = self._pause
        self._pause = min(4 * self._pause, LAST_TRIAL)


def spread(sequences: Sequence[LiveSequence], count: int) -> list[list[LiveSequence]]:
    """Splits sequences into `count` mini-batches and notes in each sequence which is its own.

    Every worker's cached tokens are spread evenly, and so are rows: a stage ends with its slowest
    worker. Those that have a mini-batch stay there unless that leaves one too heavy. No mini-batch
    is empty, given at least as many sequences.
    """
    if count == 1:
        return [list(sequences)]
    newcomers = [seq for seq in sequences if not 0 <= seq.mini_batch < count]
    loads = _Loads(count)
    for seq in sequences:
        if 0 <= seq.mini_batch < count:
            loads.add(seq)
    _place(newcomers, loads)
    if not loads.are_even():
        loads = _Loads(count)
        _place(sequences, loads)
    parts: list[list[LiveSequence]] = [[] for _ in range(count)]
    for seq in sequences:
        parts[seq.mini_batch].append(seq)
    return parts


def _weight(seq: LiveSequence) -> int:
    return seq.kv_len + ROW_TOKENS


def _place(sequences: Sequence[LiveSequence], loads: _Loads) -> None:
    """Gives sequences, heaviest first, to the mini-batch that has least on their worker."""
    for seq in sorted(sequences, key=lambda seq: (-_weight(seq), seq.handle)):
        seq.mini_batch = loads.lightest(seq.worker)
        loads.add(seq)


class _Loads:
    """Weights by worker and mini-batch."""

    def __init__(self, count: int) -> None:
        self.totals = [0] * count
        self.heaviest = 0
        self._by_worker: dict[int, list[int]] = {}

    def add(self, seq: LiveSequence) -> None:
        weight = _weight(seq)
        here = self._by_worker.setdefault(seq.worker, [0] * len(self.totals))
        here[seq.mini_batch] += weight
        self.totals[seq.mini_batch] += weight
        self.heaviest = max(self.heaviest, weight)

    def lightest(self, worker: int) -> int:
        here = self._by_worker.get(worker, self.totals)
        return min(range(len(self.totals)), key=lambda m: (here[m], self.totals[m], m))

    def are_even(self) -> bool:
        """Whether no mini-batch outweighs another, on any worker or in all, by more than tolerated
        or than one sequence may make up."""
        return all(
            max(loads) - min(loads) <= max(TOLERANCE * sum(loads) / len(loads), self.heaviest)
            for loads in (self.totals, *self._by_worker.values())
        ) and all(self.totals)
