"""The exported form of token ranges: round trip and every kind of damage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastdecode_rdma.config import AttentionGeometry, KVGroup, StepCode
from fastdecode_rdma.worker.kv_ranges import (
    StepRefusedError,
    pack_range,
    parse_range,
    token_bytes,
)

GEOMETRY = AttentionGeometry(
    groups=(KVGroup((0, 2), 3, 1, 8, None), KVGroup((1,), 4, 2, 8, 70)),
    scale=1.0,
    kv_dtype="fp16",
    max_rows=8,
    max_model_len=2000,
)
START, STOP, RING_START = 10, 400, 300


def random_range() -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        (first, rng.integers(0, 256, (STOP - first) * token_bytes(GEOMETRY, group), np.uint8))
        for group, first in enumerate((START, RING_START))
    ]


def test_bytes_of_a_token() -> None:
    assert token_bytes(GEOMETRY, 0) == 2 * 2 * 1 * 8 * 2  # layers, K and V, heads, elements, fp16
    assert token_bytes(GEOMETRY, 1) == 1 * 2 * 2 * 8 * 2


def test_round_trip() -> None:
    groups = random_range()
    parsed = parse_range(GEOMETRY, START, pack_range(GEOMETRY, START, STOP, groups))
    assert (parsed.start, parsed.stop) == (START, STOP)
    for (first, data), (parsed_first, parsed_data) in zip(groups, parsed.groups, strict=True):
        assert parsed_first == first
        assert np.array_equal(parsed_data, data)


def refused(data: bytes, words: str, geometry: AttentionGeometry = GEOMETRY) -> None:
    with pytest.raises(StepRefusedError, match=words) as caught:
        parse_range(geometry, START, data)
    assert caught.value.code is StepCode.PROTOCOL


def test_damage_is_refused() -> None:
    (first, whole), (ring_first, ring) = random_range()
    good = pack_range(GEOMETRY, START, STOP, [(first, whole), (ring_first, ring)])
    for cut in (0, 10, 23, 24, 31, 40, len(good) - 1):
        refused(good[:cut], "too short")
    refused(good + b"x", "1 bytes too many")
    refused(b"X" + good[1:], "no exported range")
    refused(pack_range(GEOMETRY, 11, STOP, []), "tokens 11 to 400, wanted were 10")
    refused(pack_range(GEOMETRY, START, 2001, []), "10 to 2001")
    refused(pack_range(GEOMETRY, START, 9, []), "10 to 9")
    refused(pack_range(GEOMETRY, START, STOP, [(11, whole)]), "no window but begins at token 11")
    for bad in (9, 401, 2**64 - 1, 100):  # the ring holds 256 tokens
        groups = [(first, whole), (bad, ring)]
        refused(pack_range(GEOMETRY, START, STOP, groups), f"group 1 begins at token {bad}")
    for other in (
        dataclasses.replace(GEOMETRY, kv_dtype="bf16"),
        dataclasses.replace(GEOMETRY, groups=GEOMETRY.groups[::-1]),
    ):
        refused(good, "another model geometry or KV dtype", other)
