"""The order of a step's operations on a device, under a fake clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fastdecode_rdma.engine.doorbells import (
    POISON,
    Doorbell,
    Segment,
    SimulatedDevice,
    enqueue_step,
)
from fastdecode_rdma.errors import LocalProtocolError

NUM_LAYERS = 5


def device(
    count: int, *, stage_s: float = 1.0, attend_s: float = 1.0, **options: float
) -> SimulatedDevice:
    return SimulatedDevice(
        [Doorbell() for _ in range(count)],
        lambda segment: 0.0 if segment is Segment.HEAD else stage_s,
        lambda mini_batch: attend_s,
        **options,
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stage_s", [0.1, 1.0, 3.0])
def test_no_segment_starts_before_its_outputs_are_there(count: int, stage_s: float) -> None:
    simulated = device(count, stage_s=stage_s, latency_s=0.05)
    for _ in range(3):  # counters grow over steps
        simulated.ran.clear()
        enqueue_step(simulated, simulated.doorbells, NUM_LAYERS)
        attention = {(r.mini_batch, r.layer): r for r in simulated.ran if r.what == "ATTENTION"}
        assert len(attention) == count * NUM_LAYERS
        segments = [r for r in simulated.ran if r.what != "ATTENTION"]
        for one, other in pairwise(segments):
            assert one.end_s <= other.start_s
        for ran in segments:
            if ran.what in ("FIRST", "MIDDLE"):  # packs the rows that the workers then have
                assert attention[ran.mini_batch, ran.layer].start_s >= ran.end_s + 0.05
            if ran.what == "MIDDLE":
                assert ran.start_s >= attention[ran.mini_batch, ran.layer - 1].end_s + 0.05
            if ran.what == "LAST":
                assert ran.start_s >= attention[ran.mini_batch, ran.layer].end_s + 0.05
        assert segments[-1].what == "HEAD"
        served = sorted(attention.values(), key=lambda ran: ran.start_s)
        for one, other in pairwise(served):  # all workers serve one mini-batch at a time
            assert one.end_s <= other.start_s
    assert all(bell.request == bell.reply == 3 * NUM_LAYERS for bell in simulated.doorbells)


def test_a_step_takes_the_sum_with_one_mini_batch_and_the_longer_side_with_two() -> None:
    one = device(1, stage_s=2.0, attend_s=2.0)
    enqueue_step(one, one.doorbells, NUM_LAYERS)
    assert one.now_s == 2.0 * (NUM_LAYERS + 1) + 2.0 * NUM_LAYERS
    two = device(2, stage_s=1.0, attend_s=1.0)  # halves: the same work
    enqueue_step(two, two.doorbells, NUM_LAYERS)
    # both sides are busy but for the first segment, when workers wait
    assert two.now_s == 1.0 * 2 * (NUM_LAYERS + 1)


def test_poison_drains_the_stream_and_the_next_step_has_higher_numbers() -> None:
    simulated = device(2, attend_s=5.0, poison_at_s=12.0)
    enqueue_step(simulated, simulated.doorbells, NUM_LAYERS)
    left = [r for r in simulated.ran if r.start_s >= 12.0 and r.what != "ATTENTION"]
    assert simulated.now_s == 12.0 + sum(r.end_s - r.start_s for r in left)  # no wait any more
    with pytest.raises(LocalProtocolError, match="drain the stream"):
        enqueue_step(simulated, simulated.doorbells, NUM_LAYERS)
    issued = [bell.issued for bell in simulated.doorbells]
    again = SimulatedDevice(simulated.doorbells, lambda segment: 1.0, lambda mini_batch: 5.0)
    for bell in again.doorbells:
        bell.reset()
        assert not bell.is_answered(bell.issued + 1)  # nothing late answers a new wait
    enqueue_step(again, again.doorbells, NUM_LAYERS)
    assert [bell.reply for bell in again.doorbells] == [n + NUM_LAYERS for n in issued]
    assert not any(bell.reply & POISON for bell in again.doorbells)


def test_the_twin_refuses_what_would_be_wrong_on_a_device() -> None:
    simulated = device(2)
    simulated.launch(Segment.FIRST, 0, 0)
    simulated.store_request(0, 1)
    with pytest.raises(LocalProtocolError, match="MIDDLE of mini-batch 0 does not wait"):
        simulated.launch(Segment.MIDDLE, 0, 1)
    with pytest.raises(LocalProtocolError, match="HEAD"):
        simulated.launch(Segment.HEAD, -1, 1)
    with pytest.raises(LocalProtocolError, match="request 1 after 1"):
        simulated.store_request(0, 1)
    with pytest.raises(LocalProtocolError, match="reply 7, which was not asked for"):
        simulated.wait_reply(0, 7)
    simulated.launch(Segment.FIRST, 1, 0)  # the other mini-batch does not wait for this one
