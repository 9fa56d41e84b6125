"""Whom to spill, and when a copy pays: worked examples."""

from __future__ import annotations

import pytest

from fastdecode_rdma.scheduler.spill import (
    EXTEND_TOKENS,
    Held,
    SpillCosts,
    copy_ahead,
    enst_s,
    execute_s,
    headroom_bytes,
)


def test_the_worked_example_of_enst() -> None:
    """Quanta 1, 2, 4, 8 s, two seats; one job in Q1, two in Q2, one in Q4. Before the last is
    served the first may use 1 + 2 + 4 s and the two 2 + 4 s each: (7 + 12) / 2 = 9.5 s."""
    queues = {(0, 0): 1, (0, 1): 2, (0, 3): 1}
    turns = execute_s(queues, [1.0, 2.0, 4.0, 8.0], 2)
    assert turns == {(0, 0): 0.0, (0, 1): 0.5, (0, 3): 9.5}
    assert enst_s(3.0, turns[0, 3]) == 3.0  # promoted before its turn comes
    assert enst_s(30.0, turns[0, 3]) == 9.5


def test_more_important_jobs_come_before_whatever_their_queue() -> None:
    turns = execute_s({(0, 2): 4, (1, 0): 1, (1, 2): 1}, [1.0, 2.0, 4.0], 1)
    assert turns[0, 2] == 0.0  # those of a lower priority do not count
    assert turns[1, 2] == 3.0  # the one in its own first queue; four are at its level already
    assert turns[1, 0] == 0.0


def held(handle: int, nbytes: int = 100, lag: int = 1000, *, has_copy: bool = False) -> Held:
    return Held(handle, nbytes, lag, has_copy)


def test_as_many_are_copied_out_as_make_the_headroom() -> None:
    line = [held(3), held(2), held(1)]
    assert copy_ahead(line, 0, 250) == [3, 2, 1]
    assert copy_ahead(line, 60, 250) == [3, 2]
    assert copy_ahead(line, 250, 250) == []
    assert copy_ahead(line, 0, 10_000) == [3, 2, 1]


def test_a_copy_that_is_there_counts_and_is_extended_when_it_lags() -> None:
    fresh = held(3, lag=EXTEND_TOKENS - 1, has_copy=True)
    late = held(2, lag=EXTEND_TOKENS, has_copy=True)
    short = held(1, lag=5)
    assert copy_ahead([fresh, late, short], 0, 300) == [2, 1]
    assert copy_ahead([fresh, late, short], 0, 100) == []


def test_headroom() -> None:
    assert headroom_bytes(8000, 3, 100, 50) == 1000  # a share of the memory at least
    assert headroom_bytes(8000, 30, 100, 50) == 3050
    assert headroom_bytes(8000, 300, 100, 50) == 8000


class Fixed:
    """1 ms per prompt token, 10 ms per decode step."""

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / 1000

    def decode_s(self, num_seqs: int, cached_tokens: int) -> float:
        del num_seqs, cached_tokens
        return 0.01


def test_the_cheaper_way_is_chosen_by_measured_times() -> None:
    costs = SpillCosts(Fixed(), replays=False)
    costs.observe("out", 1000, 1.0)
    costs.observe("in", 4000, 1.0)
    assert costs.copy_s("out", 500) == 0.5 and costs.copy_s("in", 500) == 0.125
    assert costs.recompute_s(100, 600) == pytest.approx(0.6)
    assert not costs.spill_pays(100, 600, 500)  # 0.625 s against 0.6
    assert costs.spill_pays(100, 600, 470)
    # 0.5 s against 0.6; with 300 tokens to replay, five steps more, 0.55; 0.11 with 500, eight
    assert costs.restore_pays(100, 600, 300, 2000)
    assert not costs.restore_pays(100, 600, 300, 2300)


def test_replayed_tokens_cost_decode_steps() -> None:
    costs = SpillCosts(Fixed(), replays=True)
    assert costs.recompute_s(100, 100) == pytest.approx(0.1)
    assert costs.recompute_s(100, 101) == pytest.approx(0.11)
    assert costs.recompute_s(100, 100 + 640) == pytest.approx(0.2)


def test_rates_follow_what_is_seen() -> None:
    costs = SpillCosts(Fixed(), replays=False)
    before = costs.copy_s("out", 1_000_000)
    for _ in range(50):
        costs.observe("out", 1000, 1.0)
    assert costs.copy_s("out", 1000) == pytest.approx(1.0) and before < 0.01
