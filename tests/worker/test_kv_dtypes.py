"""Stored forms: rounding, non-finite values, names."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode_rdma.config import DTYPE_BYTES
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES, kv_dtype

NAMES = list(KV_DTYPES)


@pytest.mark.parametrize("name", NAMES)
def test_itemsize_and_codes_agree_with_the_other_lists(name: str) -> None:
    form = KV_DTYPES[name]
    assert form.itemsize == form.storage.itemsize == DTYPE_BYTES[name]
    assert sorted(other.code for other in KV_DTYPES.values()) == list(range(len(KV_DTYPES)))


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
