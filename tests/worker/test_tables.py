"""Step tables as hypothesis draws them, with every option, and sequences at the end of a vast slab.

The oracle is reference.attention() in float64, over K and V as stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, AttentionGeometry, KVGroup
from fastdecode_rdma.reference import attention
from fastdecode_rdma.worker.attention import (
    BLOCK_TOKENS,
    SEGMENT_TOKENS,
    available_isas,
    block_bytes,
    max_rows_per_entry,
)
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

UNIT = 2.0**-24
POOL = np.random.default_rng(11).standard_normal(1 << 21).astype(np.float32)
MAX_CUT = 40  # a window's ring keeps 64 tokens more than its window
BORDERS = [
    border + shift
    for border in (BLOCK_TOKENS, 2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, SEGMENT_TOKENS)
    for shift in (-1, 0, 1)
]


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    count = math.prod(shape)
    start = (seed * 7919) % (len(POOL) - count)
    return POOL[start : start + count].reshape(shape).copy()


@dataclass
class Sequence:
    """Tokens [0, before) are cached, then come the rows. The first `shared` are another one's."""

    before: int
    rows: int
    parent: int | None = None
    shared: int = 0
    loudest: float | None = None  # where its largest score lies, from 0 to 1 of what is cached
    k: np.ndarray | None = None  # [before + rows, Hkv, D]
    v: np.ndarray | None = None
    q: np.ndarray | None = None  # [rows, Hq, D]


@st.composite
def geometries(draw: st.DrawFn) -> AttentionGeometry:
    kv_heads, share = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    heads, dim = kv_heads * share, draw(st.sampled_from([8, 24, 64, 128]))
    per_head = st.tuples(*[st.sampled_from([-9.0, -0.5, 0.0, 1.25, 7.0, 60.0])] * heads)
    slopes = st.tuples(*[st.sampled_from([-(2.0**-12), 0.0, 2.0**-8, 0.1, 0.5])] * heads)
    group = KVGroup(
        (0,),
        heads,
        kv_heads,
        dim,
        draw(st.none() | st.sampled_from([1, 2, 63, 64, 90, 700])),
        draw(st.none() | st.tuples(per_head)),
        draw(st.none() | slopes),
    )
    return AttentionGeometry(
        groups=(group,),
        scale=dim**-0.5,
        softcap=draw(st.none() | st.sampled_from([0.5, 20.0])),
        kv_dtype=draw(st.sampled_from(list(KV_DTYPES))),
        wire_dtype=draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        max_rows=1024,
        max_model_len=4096,
    )


@st.composite
def sequences(draw: st.DrawFn, geometry: AttentionGeometry) -> list[Sequence]:
    rows = st.integers(1, 5) | st.integers(1, min(BLOCK_TOKENS, max_rows_per_entry(geometry)))
    lengths = st.integers(0, 4 * BLOCK_TOKENS + 1) | st.sampled_from(BORDERS)
    loudest = st.sampled_from([None, 0.0, 0.5, 1.0])
    found = [
        Sequence(draw(lengths), draw(rows), loudest=draw(loudest))
        for _ in range(draw(st.integers(1, 4)))
    ]
    for _ in range(draw(st.integers(0, 2))):
        parent = draw(st.integers(0, len(found) - 1))
        before = found[parent].before
        shared = before - draw(st.integers(0, min(before, MAX_CUT)))
        found.append(Sequence(shared, draw(rows), parent, shared))
    return found


def fill(geometry: AttentionGeometry, found: list[Sequence], seed: int) -> None:
    """Gives the sequences their numbers, as the wire's dtype rounds them."""
    group, wire = geometry.groups[0], KV_DTYPES[geometry.wire_dtype]
    for i, seq in enumerate(found):
        shape = (seq.before + seq.rows, group.num_kv_heads, group.head_dim)
        seq.k, seq.v = noise(shape, seed + 3 * i), noise(shape, seed + 3 * i + 1)
        seq.q = noise((seq.rows, group.num_q_heads, group.head_dim), seed + 3 * i + 2)
        if seq.parent is not None:
            for name in ("k", "v"):
                getattr(seq, name)[: seq.shared] = getattr(found[seq.parent], name)[: seq.shared]
        if seq.loudest is not None and seq.before:
            seq.k[int(seq.loudest * (seq.before - 1))] = 4.0 * seq.q[0, 0]
        seq.k, seq.v, seq.q = (wire.decode(wire.encode(x)) for x in (seq.k, seq.v, seq.q))


class Run:
    """A session that holds what comes before the rows of all sequences."""

    def __init__(
        self, geometry: AttentionGeometry, found: list[Sequence], isa: str, threads: int
    ) -> None:
        self.geometry, self.found = geometry, found
        self.wire = KV_DTYPES[geometry.wire_dtype]
        self.session = AttentionSession(geometry, MemoryBudget(1 << 28), threads, isa=isa)
        for handle, seq in enumerate(found):
            if seq.parent is not None:
                self.session.fork(seq.parent, handle, seq.shared)
                continue
            entry = np.array([(handle, 0, seq.before, ENTRY_UPLOAD)], ENTRY_DTYPE)
            self.session.begin_step(2, 0, entry)
            k, v = (self.wire.encode(x[: seq.before]) for x in (seq.k, seq.v))
            self.session.store(2, 0, 0, 0, k, v)

    def attend(self, lines: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """One step of (sequence, first row, last row + 1); outputs [rows, Hq, D] of each."""
        entries, parts = [], []
        for handle, first, last in lines:
            seq = self.found[handle]
            entries.append((handle, seq.before + first, last - first, 0))
            new = slice(seq.before + first, seq.before + last)
            rows = (seq.q[first:last], seq.k[new], seq.v[new])
            parts.append(np.concatenate([x.reshape(last - first, -1) for x in rows], axis=1))
        rows = self.wire.encode(np.concatenate(parts))
        self.session.begin_step(0, 1, np.array(entries, ENTRY_DTYPE))
        out = np.empty((len(rows), self.geometry.out_width(0)), self.wire.storage)
        status = np.full(len(rows), 0xEE, np.uint8)
        self.session.attend(0, 0, rows, out, status)
        assert not status.any()
        cuts = np.cumsum([len(part) for part in parts])[:-1]
        shape = (len(rows), -1, self.geometry.groups[0].head_dim)
        return np.split(self.wire.decode(out).reshape(shape), cuts)


def stored(geometry: AttentionGeometry, x: np.ndarray) -> np.ndarray:
    form = KV_DTYPES[geometry.kv_dtype]
    return form.decode(form.encode(x))[..., : x.shape[-1]].astype(np.float64)


def assert_close(geometry: AttentionGeometry, seq: Sequence, out: np.ndarray) -> None:
    """Errors allowed as test_attention.py derives them, but with the largest bias of all keys.

    Integers' weights, int8 and int4: the shares of the sum that the largest weights of all blocks
    have add up to 1 at most, and so do their squares.
    """
    group = geometry.groups[0]
    k, v = stored(geometry, seq.k), stored(geometry, seq.v)
    sinks = None if group.sinks is None else group.sinks[0]
    expected = attention(
        *(torch.from_numpy(x) for x in (seq.q, k, v)),
        scale=geometry.scale,
        window=group.window,
        softcap=geometry.softcap,
        sinks=sinks,
        slopes=group.slopes,
    ).numpy()
    share, seen = group.num_q_heads // group.num_kv_heads, min(len(k), group.window or len(k))
    keys = np.abs(np.repeat(k, share, axis=1)).transpose(1, 2, 0)  # [Hq, D, L]
    magnitude = (np.abs(seq.q).transpose(1, 0, 2) @ keys).max(axis=2).T * geometry.scale  # [T, Hq]
    score_error = UNIT * (math.sqrt(group.head_dim) + 4) * magnitude
    if geometry.softcap is not None:
        score_error += 8 * UNIT * geometry.softcap
    quantized = KV_DTYPES[geometry.kv_dtype].is_quantized
    lengths = np.repeat(np.linalg.norm(k, axis=2).max(axis=0), share) * geometry.scale  # [Hq]
    rounding = quantized * 4 * np.abs(seq.q).max(axis=2) * lengths / 65534  # [T, Hq]
    score_error += rounding
    bias = seen * np.abs(np.array(group.slopes or [0.0]))
    score_error += UNIT * (4 * bias + 2 * magnitude * (group.slopes is not None))
    spread = 2 * score_error + UNIT * (math.sqrt(seen) + 8)
    spread += quantized * 2.02 * 4 * math.sqrt(BLOCK_TOKENS) / 65536
    allowed = np.abs(v).max() * (spread + seen * np.exp(-87.0))
    size = np.abs(expected).max(axis=2)
    if sinks is not None:
        allowed += size * 2 * rounding
        allowed += size * 2 * UNIT * (np.abs(np.array(sinks)) + magnitude + bias + 4)
    if geometry.wire_dtype != "fp32":
        allowed += size * KV_DTYPES[geometry.wire_dtype].unit_roundoff + 2.0**-25
    error = np.abs(out - expected).max(axis=2)
    assert (error <= allowed).all(), (error / allowed).max()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_drawn_tables_match_the_oracle_and_give_equal_bits_in_any_batch(
    data: st.DataObject,
) -> None:
    """Together on two threads; backwards on one; each alone; some of its rows alone."""
    geometry = data.draw(geometries())
    found = data.draw(sequences(geometry))
    isa = data.draw(st.sampled_from(available_isas()))
    fill(geometry, found, data.draw(st.integers(0, 1000)))
    table = [(handle, 0, seq.rows) for handle, seq in enumerate(found)]
    run, other = Run(geometry, found, isa, 2), Run(geometry, found, isa, 1)
    with run.session, other.session:
        outputs = run.attend(table)
        for seq, out in zip(found, outputs, strict=True):
            assert_close(geometry, seq, out)
        backwards = other.attend(table[::-1])[::-1]
        for line, out, again in zip(table, outputs, backwards, strict=True):
            assert np.array_equal(out, again)
            assert np.array_equal(out, other.attend([line])[0])
            handle, _, rows = line
            for row in sorted({0, rows // 2, rows - 1}, reverse=True):  # each shortens it further
                (alone,) = run.attend([(handle, row, row + 1)])
                assert np.array_equal(alone[0], out[row])


FAR_LAYERS = (0, 512, 1024, 2048, 4095)
"""In fp32 a layer has 4 MiB of a block, in fp16 2 MiB: these lie at 2^31 and 2^32 bytes, and so
would fall on the first one if an offset were cut to 32 bits."""


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_blocks_and_layers_beyond_2_31_elements(kv: str) -> None:
    """A slab of up to 80 GiB of which few pages are touched: the bits are those of a small one.

    Blocks lie 2^32 elements apart, V of the last layer nearly as far behind the block's beginning.
    """
    heads, dim, before, rows = 8, 1024, 2 * BLOCK_TOKENS + 3, 2

    def geometry(num_layers: int) -> AttentionGeometry:
        group = KVGroup(tuple(range(num_layers)), heads, heads, dim)
        return AttentionGeometry((group,), dim**-0.5, kv, 8, 1024)

    def run(form: AttentionGeometry, layers: dict[int, int]) -> list[np.ndarray]:
        """Outputs of `layers`, which take their numbers from a seed each."""
        outputs, data = [], {}
        with AttentionSession(form, MemoryBudget(8 * block_bytes(form, form.groups[0])), 2) as run:
            # what comes first takes the blocks at the slab's beginning
            lines = [(7, 0, 2 * BLOCK_TOKENS, ENTRY_UPLOAD), (1, 0, before, ENTRY_UPLOAD)]
            run.begin_step(3, 0, np.array(lines, ENTRY_DTYPE))
            for layer, seed in layers.items():
                shape = (before + rows, heads * dim)
                k, v, _ = data[layer] = tuple(noise(shape, seed + i) for i in range(3))
                run.store(3, layer, 1, 0, k[:before], v[:before])
            run.begin_step(0, 1, np.array([(1, before, rows, 0)], ENTRY_DTYPE))
            for layer, (k, v, q) in data.items():
                qkv = np.concatenate([q[before:], k[before:], v[before:]], axis=1)
                out, status = np.empty((rows, heads * dim), np.float32), np.empty(rows, np.uint8)
                run.attend(0, layer, qkv, out, status)
                assert not status.any()
                outputs.append(out)
        return outputs

    vast = geometry(FAR_LAYERS[-1] + 1)
    row_bytes = KV_DTYPES[kv].row_bytes(dim)
    assert block_bytes(vast, vast.groups[0]) // row_bytes * dim == 2**32
    outputs = run(vast, {layer: layer + 1 for layer in FAR_LAYERS})
    for layer, out in zip(FAR_LAYERS, outputs, strict=True):
        (expected,) = run(geometry(1), {0: layer + 1})
        assert np.array_equal(out, expected), layer
