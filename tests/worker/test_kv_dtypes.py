"""Stored forms: rounding, non-finite values, names."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode_rdma.config import DTYPE_BYTES, KV_ROW_BYTES, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES, kv_dtype
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

NAMES = [name for name, form in KV_DTYPES.items() if not form.is_quantized]
DIMS = (8, 16, 24, 40, 64, 128, 200, 256)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_sizes_and_codes_agree_with_the_other_lists(name: str) -> None:
    form = KV_DTYPES[name]
    for dim in DIMS:
        assert form.encode(np.ones((3, dim), np.float32))[0].nbytes == form.row_bytes(dim)
        group = KVGroup((0,), 2, 2, dim)
        geometry = AttentionGeometry((group,), 1.0, name, 1, 64)
        with AttentionSession(geometry, MemoryBudget(1 << 24), 1) as session:
            (usage,) = session._cache.usage()
        assert usage.block_bytes == 2 * 64 * 2 * form.row_bytes(dim)
    if name in NAMES:
        assert form.storage.itemsize == DTYPE_BYTES[name]
    assert list(KV_ROW_BYTES) == list(KV_DTYPES)
    assert sorted(other.code for other in KV_DTYPES.values()) == list(range(len(KV_DTYPES)))


def test_bytes_of_a_quantised_row() -> None:
    assert kv_dtype("int8").row_bytes(128) == 128 + 4
    assert kv_dtype("int4").row_bytes(128) == 64 + 4 * 4
    assert kv_dtype("int4").row_bytes(24) == 16 + 4


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_int8_error_is_half_a_step_of_the_rows_largest(scale: float) -> None:
    form = KV_DTYPES["int8"]
    values = np.random.default_rng(1).standard_normal((500, 128)) * scale
    values = values.astype(np.float32)
    error = np.abs(form.decode(form.encode(values)).astype(np.float64) - values)
    relative = (error / np.abs(values).max(1, keepdims=True)).max()
    assert form.unit_roundoff * 0.9 < relative <= form.unit_roundoff * (1 + 1e-4)


@pytest.mark.parametrize("offset", [0.0, 5.0, -5.0])
def test_int4_error_is_half_a_step_of_the_groups_range(offset: float) -> None:
    """The step: the range, begun at a bf16 below the minimum, in 15 parts, rounded up to bf16."""
    form = KV_DTYPES["int4"]
    values = np.random.default_rng(1).standard_normal((500, 64)) + offset
    values = values.astype(np.float32)
    error = np.abs(form.decode(form.encode(values)).astype(np.float64) - values)
    groups = values.astype(np.float64).reshape(500, 2, 32)
    spread = np.ptp(groups, axis=2) + 2.0**-7 * np.abs(groups.min(2))
    allowed = spread * (1 + 2.0**-7) * form.unit_roundoff * (1 + 1e-5)
    assert (error.reshape(500, 2, 32).max(2) <= allowed).all()
    assert error.max() > 0.8 * form.unit_roundoff * np.ptp(groups, axis=2).max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_is_not_finite_reads_as_not_a_number(name: str) -> None:
    form = KV_DTYPES[name]
    for bad in (np.nan, np.inf, -np.inf):
        values = np.ones((2, 64), np.float32)
        values[1, 5] = bad
        decoded = form.decode(form.encode(values))
        assert np.isfinite(decoded[0]).all() and np.isnan(decoded[1, :32]).all()


@pytest.mark.parametrize("name", NAMES)
def test_rounding_error_is_within_the_unit_roundoff(name: str) -> None:
    form = KV_DTYPES[name]
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    values = values[np.abs(values) > 1e-3]  # normal numbers in every form
    error = np.abs(form.decode(form.encode(values)).astype(np.float64) - values) / np.abs(values)
    assert error.max() <= form.unit_roundoff
    if name != "fp32":
        assert error.max() > form.unit_roundoff / 2  # the bound is not just loose


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_survives_a_round_trip(name: str) -> None:
    form = KV_DTYPES[name]
    bits = np.arange(1 << 16, dtype=np.uint32)
    stored = (bits << 16).view("<f4") if name == "fp32" else bits.astype("<u2").view(form.storage)
    decoded = form.decode(stored)
    finite = np.isfinite(decoded)
    assert np.array_equal(form.encode(decoded)[finite], stored[finite])
    again = form.decode(form.encode(decoded))
    assert np.array_equal(np.isnan(again), np.isnan(decoded))
    assert np.array_equal(again[np.isinf(decoded)], decoded[np.isinf(decoded)])


def test_bf16_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], dtype=np.uint32)
    assert KV_DTYPES["bf16"].encode(ties.view(np.float32)).tolist() == [
        0x3F80,
        0x3F82,
        0x3F81,
        0x7F80,
    ]


def test_names_and_unknown_names() -> None:
    assert kv_dtype("bfloat16") is KV_DTYPES["bf16"]
    assert kv_dtype("half") is KV_DTYPES["fp16"]
    with pytest.raises(ConfigError, match="int3"):
        kv_dtype("int3")
