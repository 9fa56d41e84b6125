"""How many mini-batches a step has, by a made-up machine's times; how sequences are spread."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_rdma.engine.mini_batches import (
    ROW_TOKENS,
    TOLERANCE,
    MiniBatchChooser,
    StepTimes,
    spread,
)


class Machine:
    """Steps of `rows` sequences: `dense(parts)` seconds of dense work for all parts together,
    attention of `attend` seconds, of which a share `hidden` runs beside it when there are two."""

    def __init__(self, *, split_cost: float, attend: float, hidden: float, noise: float = 0.0):
        self.split_cost, self.attend, self.hidden, self.noise = split_cost, attend, hidden, noise
        self.random = random.Random(1)
        self.spent = 0.0
        self.steps = {1: 0, 2: 0}

    def seconds(self, parts: int) -> tuple[float, float]:
        dense = 1.0 + self.split_cost * (parts - 1)
        if parts == 1:
            return dense, self.attend
        return dense, max(self.attend - self.hidden * dense, 0.0)

    def run(
        self, chooser: MiniBatchChooser, steps: int, rows: int = 32, cached: int = 9000
    ) -> None:
        for _ in range(steps):
            parts = chooser.choose(rows)
            factor = 1 + self.noise * self.random.random()
            dense, waiting = (part * factor for part in self.seconds(parts))
            chooser.observe(StepTimes(parts, rows, cached, dense, waiting))
            self.spent += dense + waiting
            self.steps[parts] += 1

    def best(self, steps: int) -> float:
        return steps * min(sum(self.seconds(1)), sum(self.seconds(2)))


def automatic(**options: object) -> MiniBatchChooser:
    return MiniBatchChooser(fixed=None, most=2, **{"can_overlap": True, **options})


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"split_cost": 0.05, "attend": 1.0, "hidden": 0.9}, 2),
        ({"split_cost": 0.05, "attend": 0.2, "hidden": 0.9}, 2),
        ({"split_cost": 0.8, "attend": 1.0, "hidden": 0.2}, 1),  # weights are read twice
        ({"split_cost": 0.3, "attend": 1.0, "hidden": 0.0}, 1),  # the same cores
        ({"split_cost": 0.06, "attend": 0.5, "hidden": 0.0}, 1),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_faster_number_is_found_and_looking_costs_less_than_two_percent(
    machine: dict[str, float], expected: int, noise: float
) -> None:
    chooser, simulated = automatic(), Machine(**machine, noise=noise)
    simulated.run(chooser, 1000)
    assert chooser.current == expected
    mean_noise = 1 + noise / 2
    assert simulated.spent < simulated.best(1000) * mean_noise * 1.02 / 0.995
    assert f"measured with {3 - expected}" in chooser.reason


def test_nothing_is_tried_where_overlap_could_hide_next_to_nothing() -> None:
    chooser, simulated = automatic(), Machine(split_cost=0.5, attend=0.02, hidden=1.0)
    simulated.run(chooser, 3000)
    assert simulated.steps[2] == 0
    assert chooser.reason == "overlap could hide 2% of a step at best"


def test_a_change_of_load_is_noticed_soon() -> None:
    chooser = automatic()
    Machine(split_cost=0.3, attend=0.1, hidden=0.0).run(chooser, 5000, cached=2000)
    assert chooser.current == 1
    Machine(split_cost=0.05, attend=1.0, hidden=1.0).run(chooser, 50, cached=20000)
    assert chooser.current == 2
    Machine(split_cost=0.8, attend=0.3, hidden=1.0).run(chooser, 60, rows=4, cached=1000)
    assert chooser.current == 1


def test_equal_times_change_nothing() -> None:
    chooser, simulated = automatic(), Machine(split_cost=0.0, attend=0.5, hidden=0.0, noise=0.01)
    simulated.run(chooser, 2000)
    assert chooser.current == 1


def test_other_workers_begin_the_comparison_anew() -> None:
    chooser = automatic()
    Machine(split_cost=0.8, attend=1.0, hidden=0.2).run(chooser, 5000)
    chooser.forget()
    Machine(split_cost=0.1, attend=1.0, hidden=1.0).run(chooser, 40)
    assert chooser.current == 2


def test_what_is_not_measured() -> None:
    embedded = automatic(can_overlap=False)
    fixed = MiniBatchChooser(fixed=2, most=2, can_overlap=False)
    for chooser, number, why in ((embedded, 1, "embedded"), (fixed, 2, "as asked for")):
        Machine(split_cost=0.0, attend=1.0, hidden=1.0).run(chooser, 100)
        assert chooser.current == number and why in chooser.reason
    assert fixed.choose(1) == 1  # a sequence is not split
    alone = automatic()
    Machine(split_cost=0.0, attend=1.0, hidden=1.0).run(alone, 100, rows=1)
    assert alone.current == 1 and alone.reason == "not compared yet"


# -- who goes where


def sequence(handle: int, kv_len: int, worker: int = 0, mini_batch: int = -1) -> SimpleNamespace:
    return SimpleNamespace(handle=handle, kv_len=kv_len, worker=worker, mini_batch=mini_batch)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.integers(-1, 2)), min_size=3),
    st.integers(1, 3),
)
def test_any_sequences_are_spread_evenly_and_none_is_lost(
    known: list[tuple[int, int, int]], count: int
) -> None:
    sequences = [sequence(handle, *facts) for handle, facts in enumerate(known)]
    parts = spread(sequences, count)
    assert len(parts) == count and all(parts)
    assert sorted(seq.handle for part in parts for seq in part) == list(range(len(known)))
    if count > 1:
        assert all(seq.mini_batch == m for m, part in enumerate(parts) for seq in part)
    for worker in range(4):
        loads = [
            sum(seq.kv_len + ROW_TOKENS for seq in part if seq.worker == worker) for part in parts
        ]
        heaviest = max([seq.kv_len + ROW_TOKENS for seq in sequences], default=0)
        assert max(loads) - min(loads) <= max(heaviest, TOLERANCE * sum(loads) / count)


def test_sequences_stay_where_they_are_until_others_leave_a_mini_batch_too_light() -> None:
    sequences = [sequence(handle, 100 + handle, worker=handle % 2) for handle in range(40)]
    spread(sequences, 2)
    placed = {seq.handle: seq.mini_batch for seq in sequences}
    for _ in range(50):
        for seq in sequences:
            seq.kv_len += 1
        spread(sequences, 2)
        assert {seq.handle: seq.mini_batch for seq in sequences} == placed
    left = [seq for seq in sequences if seq.mini_batch == 0 or seq.handle < 4]
    parts = spread(left, 2)
    assert abs(len(parts[0]) - len(parts[1])) <= 2
    one = spread(sequences, 1)
    assert one == [sequences]
