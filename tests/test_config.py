"""What a KV group and a geometry refuse of sinks and slopes, and how the kernels read them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fastdecode_rdma.config import MAX_HEAD_SCORE, MAX_HEAD_SCORES, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError

GROUP = KVGroup((1, 3), 4, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sinks": ((0.0,) * 4,)}, "1 rows of attention sinks for 2 layers"),
        ({"sinks": ((0.0,) * 4, (0.0,) * 3)}, "3 attention sinks for 4 query heads"),
        ({"sinks": ((0.0,) * 4, (0.0, 0.0, math.nan, 0.0))}, "sinks must be .* got nan"),
        ({"slopes": (0.5,) * 5}, "5 ALiBi slopes for 4 query heads"),
        ({"slopes": (0.5, math.inf, 0.5, 0.5)}, "slopes must be at most 1e.30 in size, got inf"),
        ({"slopes": (0.5, 0.5, 0.5, -2e30)}, "got -2e.30"),
    ],
)
def test_sinks_and_slopes_that_no_kernel_could_use(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(GROUP, **change)


def test_the_largest_slope_at_the_largest_distance_is_finite_in_fp32() -> None:
    group = KVGroup((0,), 1, 1, 8, slopes=(MAX_HEAD_SCORE,))
    longest = AttentionGeometry((group,), 1.0, "fp32", 1, 1 << 27).max_model_len
    assert np.isfinite(group.slope_table * np.float32(longest)).all()
    with pytest.raises(ConfigError, match="max_model_len"):
        AttentionGeometry((group,), 1.0, "fp32", 1, longest + 1)


def test_a_geometry_has_so_many_sinks_and_slopes_at_most() -> None:
    def geometry(num_layers: int, slopes: tuple[float, ...] | None) -> AttentionGeometry:
        row = (1.0,) * 1024
        group = KVGroup(tuple(range(num_layers)), 1024, 1, 8, None, (row,) * num_layers, slopes)
        return AttentionGeometry((group,), 1.0, "fp32", 1, 64)

    assert geometry(MAX_HEAD_SCORES // 1024, None).groups[0].num_scores == MAX_HEAD_SCORES
    with pytest.raises(ConfigError, match=f"at most {MAX_HEAD_SCORES} .*, got 66560"):
        geometry(MAX_HEAD_SCORES // 1024, (0.5,) * 1024)


def test_tables_hold_a_row_per_layer_of_the_group() -> None:
    group = replace(GROUP, sinks=((0.1, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0)), slopes=(0.1,) * 4)
    assert group.sink_table.dtype == group.slope_table.dtype == np.float32
    assert group.sink_table.tolist()[1] == [4.0, 5.0, 6.0, 7.0]
    assert group.slope_table.shape == (4,) and group.num_scores == 12
    assert GROUP.num_scores == 0
