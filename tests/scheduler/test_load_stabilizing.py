"""The load over time: level with pacing, a sawtooth without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdecode_rdma.scheduler import Job, SchedulerOptions, make_scheduler
from fastdecode_rdma.scheduler.forecast import Forecast
from fastdecode_rdma.scheduler.lengths import LengthEstimator

LENGTH, BATCH = 128, 128
LIMIT = BATCH * LENGTH // 2


def mean_load(
    drive: Callable[..., Any],
    settings: dict[str, object],
    lengths: Callable[[], int],
    *,
    limit: int | None = LIMIT,
) -> float:
    """Load of an endless backlog over its limit, the second half of twelve generations."""
    options = SchedulerOptions(4 * BATCH if limit else BATCH, 1 << 30, limit, block_tokens=64)
    driver = drive(make_scheduler("load_stabilizing", options, settings))
    loads, handle, num_steps = [], 0, 12 * LENGTH
    for _ in range(num_steps):
        while driver.policy.num_waiting < 2 * BATCH:
            driver.add(Job(handle, 1, 1, lengths(), handle))
            handle += 1
        ran = driver.policy.schedule(driver.room)
        loads.append(sum(driver.jobs[h].num_tokens for h in ran.decode))
        for h in ran.decode + [h for gang in ran.prefill for h in gang]:
            job = driver.jobs[h]
            job.num_tokens += 1
            if job.num_tokens == job.prompt_len + job.max_tokens:
                driver.policy.remove(h)
                driver.room.release(h)
        assert loads[-1] <= LIMIT * 1.02 if limit is None else loads[-1] <= limit
        assert driver.policy.num_paused == 0
    return sum(loads[num_steps // 2 :]) / (num_steps // 2) / LIMIT


def test_load_control_alone_locks_into_a_sawtooth(drive: Callable[..., Any]) -> None:
    assert 0.48 < mean_load(drive, {"stagger": False}, lambda: LENGTH) < 0.56


@pytest.mark.parametrize("limit", [LIMIT, None])
def test_paced_newcomers_keep_the_load_at_its_limit(
    limit: int | None, drive: Callable[..., Any]
) -> None:
    assert mean_load(drive, {}, lambda: LENGTH, limit=limit) >= 0.97


def test_lengths_that_differ_mix_ages_by_themselves(drive: Callable[..., Any]) -> None:
    draw = random.Random(1)
    settings = {"knows_lengths": True}
    assert mean_load(drive, settings, lambda: draw.randint(1, 2 * LENGTH)) >= 0.88


def test_nobody_is_held_back_where_all_fit(drive: Callable[..., Any]) -> None:
    driver = drive(make_scheduler("load_stabilizing", SchedulerOptions(BATCH, 1 << 30, LIMIT)))
    for handle in range(BATCH // 4):
        driver.add(Job(handle, 1, 1, LENGTH, handle))
    assert len(driver.step().prefill) == BATCH // 4


def test_a_newcomer_must_fit_at_its_own_end(drive: Callable[..., Any]) -> None:
    """The longer one outlives the newcomer and peaks with it, at the newcomer's end."""
    settings = {"knows_lengths": True, "stagger": False}
    options = SchedulerOptions(8, 100, 60)
    driver = drive(make_scheduler("load_stabilizing", options, settings))
    driver.add(Job(1, 10, 10, 40, 1))
    driver.step()
    driver.add(Job(2, 10, 10, 25, 2))  # 10 + 25 and 11 + 25 tokens at its end: more than 60
    assert driver.step().prefill == []
    driver.policy.remove(2)
    driver.add(Job(3, 10, 10, 15, 3))
    assert driver.step().prefill == [(3,)]


@pytest.mark.parametrize("horizon", [1, 5000])
def test_a_forecast_is_what_happens(horizon: int) -> None:
    draw = np.random.default_rng(0)
    tokens, left = draw.integers(1, 500, 300), draw.integers(1, 400, 300)
    forecast = Forecast(tokens, left, horizon)
    forecast.add(3, 40, 200)
    for point, load in zip(forecast.points.tolist(), forecast.load.tolist(), strict=True):
        alive = (left - 1) // forecast.stride * forecast.stride >= point
        expected = int((tokens + point)[alive].sum())
        if 0 < point <= 199 // forecast.stride * forecast.stride + forecast.stride:
            expected += 3 * (40 + point)
        assert load == expected
    assert forecast.peak_with(2, 10, 50) == max(
        load + 2 * (10 + point)
        for point, load in zip(forecast.points.tolist(), forecast.load.tolist(), strict=True)
        if 0 < point <= 49 // forecast.stride * forecast.stride + forecast.stride
    )


def estimate(estimator: LengthEstimator, generated: int, bound: int) -> float:
    return float(estimator.estimate(np.array([generated]), np.array([bound]))[0])


def test_lengths_are_learned_and_corrected() -> None:
    estimator = LengthEstimator()
    assert estimate(estimator, 3, 100) == 100
    for length in (10, 20, 30):
        estimator.add(length, 100)
    assert estimate(estimator, 0, 100) == 20
    assert estimate(estimator, 0, 15) == 15
    assert estimate(estimator, 10, 100) == 25  # the rest of those that got further
    assert estimate(estimator, 30, 100) == 100  # none did
    for _ in range(3):
        estimator.add(50, 50)
    assert estimate(estimator, 0, 100) == 0.5 * 100 + 0.5 * 20
    # of six that started 3 + 1 get past 20 tokens
    assert estimate(estimator, 20, 100) == pytest.approx(0.75 * 100 + 0.25 * 30)
