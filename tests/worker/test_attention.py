"""The kernel against a float64 oracle, and what its bits may depend on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.isa import ISA_VARIABLE, UNPROVEN
from fastdecode_rdma.worker.attention import (
    SEGMENT_TOKENS,
    available_isas,
    max_rows_per_entry,
    select_isa,
)
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES
from fastdecode_rdma.worker.session import AttentionSession, MemoryBudget

UNIT = 2.0**-24  # unit roundoff of the arithmetic, fp32
POOL = np.random.default_rng(5).standard_normal(1 << 21).astype(np.float32)
BORDERS = (1, 63, 64, 65, 1023, 1024, 1025)
SLOPES = (0.5, 2.0**-8, 0.0, 1.7, -(2.0**-10), 0.03)
SINKS = (0.0, 3.0, -20.0, 90.0, 4.25, -300.0)


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Cheap random numbers: a slice of one pool."""
    count = math.prod(shape)
    start = (seed * 7919) % (len(POOL) - count)
    return POOL[start : start + count].reshape(shape).copy()


def one_layer(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    kv: str = "fp32",
    wire: str = "fp32",
    scale: float | None = None,
    sinks: tuple[float, ...] | None = None,
    slopes: tuple[float, ...] | None = None,
) -> AttentionGeometry:
    rows = None if sinks is None else (sinks,)
    group = KVGroup((0,), heads, kv_heads, dim, window, rows, slopes)
    return AttentionGeometry(
        groups=(group,),
        scale=dim**-0.5 if scale is None else scale,
        kv_dtype=kv,
        wire_dtype=wire,
        max_rows=2048,
        max_model_len=1 << 16,
        softcap=softcap,
    )


@dataclass
class Work:
    """One entry: K and V of all its tokens, queries of the last rows, all fp32."""

    k: np.ndarray  # [n, Hkv, D]
    v: np.ndarray  # [n, Hkv, D]
    q: np.ndarray  # [rows, Hq, D]

    @property
    def before(self) -> int:
        return len(self.k) - len(self.q)


def make_work(geometry: AttentionGeometry, length: int, rows: int = 1, seed: int = 0) -> Work:
    group = geometry.groups[0]
    kv = (length, group.num_kv_heads, group.head_dim)
    q = noise((rows, group.num_q_heads, group.head_dim), seed + 2)
    return Work(noise(kv, seed), noise(kv, seed + 1), q)


def attend(
    geometry: AttentionGeometry,
    works: Sequence[Work],
    *,
    isa: str | None = None,
    threads: int = 2,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Uploads what comes before, attends in one step: outputs [rows, Hq, D] and status per work."""
    wire = KV_DTYPES[geometry.wire_dtype]
    with AttentionSession(geometry, MemoryBudget(1 << 30), threads, isa=isa) as session:
        upload = np.array(
            [(i, 0, w.before, ENTRY_UPLOAD) for i, w in enumerate(works)], ENTRY_DTYPE
        )
        session.begin_step(2, 0, upload)
        for i, work in enumerate(works):
            if work.before:
                k, v = wire.encode(work.k[: work.before]), wire.encode(work.v[: work.before])
                session.store(2, 0, i, 0, k, v)
        step = np.array([(i, w.before, len(w.q), 0) for i, w in enumerate(works)], ENTRY_DTYPE)
        session.begin_step(0, 1, step)
        rows = np.concatenate(
            [
                np.concatenate(
                    [x.reshape(len(w.q), -1) for x in (w.q, w.k[w.before :], w.v[w.before :])], 1
                )
                for w in works
            ]
        )
        rows = wire.encode(rows)
        out = np.empty((len(rows), geometry.out_width(0)), wire.storage)
        status = np.full(len(rows), 0xEE, np.uint8)
        session.attend(0, 0, rows, out, status)
    cuts = np.cumsum([len(w.q) for w in works])[:-1]
    decoded = wire.decode(out).reshape(len(rows), -1, geometry.groups[0].head_dim)
    return np.split(decoded, cuts), np.split(status, cuts)


def integer_errors(
    kv: str, keys: np.ndarray, values: np.ndarray, q: np.ndarray, weights: np.ndarray, first: int
) -> tuple[float, float]:
    """What rounding to integers adds to the errors of scores, and of outputs: int8 and int4.

    A query's values err by up to half of their largest one's 32767th part (of wide heads 16383rd).
    A weight errs by up to half of the 32768th part of its block's largest weight times the largest
    scale, which is V's largest value / 127, or of int4 a 15th part of the range: no more than twice
    the largest and what bf16 adds. Such errors are spread evenly: 4 times the root of the sum of
    their squares is 7 standard deviations.
    """
    if kv not in ("int8", "int4"):
        return 0.0, 0.0
    part = 2 * (32767 if keys.shape[1] <= 512 else 16383)
    score = 4 * np.abs(q).max() * np.linalg.norm(keys, axis=1).max() / part
    blocks = (first + np.arange(len(keys))) // 64
    squares = 0.0
    for block in range(blocks[0], blocks[-1] + 1):
        here = blocks == block
        squares += here.sum() * (weights[here].max() * np.abs(values[here]).max()) ** 2
    return float(score), (2.02 if kv == "int4" else 1.0) * 4 * math.sqrt(squares) / 65536


def oracle(geometry: AttentionGeometry, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Outputs in float64 from K/V as stored and q as sent, and the error allowed per (row, head).

    The score's chain of D products errs by about sqrt(D) roundoffs of sum |q k|, its scaling and
    cap by a few of itself; a weight by twice that plus the exponential's; the sum over n tokens by
    sqrt(n). ALiBi's bias grows with the distance, so its roundoffs, and those of what the
    exponential is taken of, count by the weight of their keys. A sink keeps a share of the sum from
    the values: that shrinks these errors, but errs itself as an exponential does. int8 and int4
    are multiplied as integers, which has errors of its own.
    """
    group, form = geometry.groups[0], KV_DTYPES[geometry.kv_dtype]
    wire = KV_DTYPES[geometry.wire_dtype]

    def sent(x: np.ndarray) -> np.ndarray:
        return wire.decode(wire.encode(x))

    dim = group.head_dim
    k, v = (
        form.decode(form.encode(sent(x)))[..., :dim].astype(np.float64) for x in (work.k, work.v)
    )
    q = sent(work.q).astype(np.float64) * geometry.scale
    share = group.num_q_heads // group.num_kv_heads
    out = np.empty(q.shape)
    allowed = np.empty(q.shape[:2])
    for row in range(len(q)):
        last = work.before + row
        first = 0 if group.window is None else max(0, last - group.window + 1)
        for head in range(group.num_q_heads):
            keys, values = k[first : last + 1, head // share], v[first : last + 1, head // share]
            scores = keys @ q[row, head]
            magnitude = (np.abs(keys) @ np.abs(q[row, head])).max()
            score_error = UNIT * (math.sqrt(group.head_dim) + 4) * magnitude
            if geometry.softcap is not None:
                scores = geometry.softcap * np.tanh(scores / geometry.softcap)
                score_error += 8 * UNIT * geometry.softcap
            bias = np.zeros(len(keys))
            if group.slopes is not None:
                bias = group.slopes[head] * (np.arange(first, last + 1.0) - last)
            scores = scores + bias
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            weights /= total
            out[row, head] = weights @ values
            rounding = integer_errors(geometry.kv_dtype, keys, values, q[row, head], weights, first)
            score_error += rounding[0]
            spread = 2 * score_error + UNIT * (math.sqrt(len(keys)) + 8)
            if group.slopes is not None:
                spread += 2 * UNIT * (weights @ (2 * np.abs(bias) + 2 * np.abs(scores - top)))
            allowed[row, head] = np.abs(values).max() * spread + rounding[1]
            if group.sinks is not None:
                apart = group.sinks[0][head] - top
                kept = 1 / (1 + np.exp(apart) / total)
                out[row, head] *= kept
                allowed[row, head] *= kept
                errors = 2 * score_error + UNIT * (2 * abs(apart) + 8)
                allowed[row, head] += np.abs(out[row, head]).max() * errors
                allowed[row, head] += np.abs(values).max() * total * np.exp(-87.3)  # less is zero
            if geometry.wire_dtype != "fp32":
                allowed[row, head] += np.abs(out[row, head]).max() * wire.unit_roundoff
    return out, allowed


def check(geometry: AttentionGeometry, works: Sequence[Work], *, isa: str | None = None) -> None:
    outputs, statuses = attend(geometry, works, isa=isa)
    for work, out, status in zip(works, outputs, statuses, strict=True):
        expected, allowed = oracle(geometry, work)
        error = np.abs(out - expected).max(axis=2)
        assert (error <= allowed).all(), f"length {len(work.k)}: {(error / allowed).max()}"
        assert not status.any()


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("share", [1, 3, 4, 7])
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 256])
def test_every_shape_at_block_and_segment_borders(isa: str, kv: str, share: int, dim: int) -> None:
    geometry = one_layer(2 * share, 2, dim, kv=kv)
    check(geometry, [make_work(geometry, n, seed=n + dim) for n in BORDERS], isa=isa)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_long_sequence_merges_segments(isa: str, kv: str, biased: bool) -> None:
    scores = {"sinks": SINKS, "slopes": SLOPES, "softcap": 30.0} if biased else {}
    geometry = one_layer(6, 2, 64, kv=kv, **scores)
    check(geometry, [make_work(geometry, n, seed=n) for n in (3000, 8193)], isa=isa)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(71, 1, 64), (130, 1, 8), (5, 1, 1024)])
def test_extreme_shapes(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    geometry = one_layer(heads, kv_heads, dim, kv="fp16")
    check(geometry, [make_work(geometry, 200), make_work(geometry, 1100, seed=9)], isa=isa)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_wire_dtypes(isa: str, wire: str, kv: str) -> None:
    geometry = one_layer(4, 2, 64, kv=kv, wire=wire)
    check(geometry, [make_work(geometry, 77, rows=2), make_work(geometry, 5)], isa=isa)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200, 1024, 1500])
def test_window_sees_exactly_its_keys(isa: str, window: int) -> None:
    geometry = one_layer(4, 1, 24, window=window, kv="fp16")
    lengths = sorted({max(1, window - 1), window, window + 1, 2 * window, 2 * window + 64})
    works = [make_work(geometry, n, seed=n) for n in lengths]
    works += [make_work(geometry, n, rows=min(n, 7), seed=n + 3) for n in lengths]
    check(geometry, works, isa=isa)


def test_a_key_just_outside_the_window_has_no_influence(isa: str) -> None:
    geometry = one_layer(1, 1, 8, window=10)
    work = make_work(geometry, 40)
    (before,), _ = attend(geometry, [work], isa=isa)
    work.k[40 - 10 - 1] += 100.0
    work.v[40 - 10 - 1] += 100.0
    (outside,), _ = attend(geometry, [work], isa=isa)
    work.v[40 - 10] += 100.0
    (inside,), _ = attend(geometry, [work], isa=isa)
    assert np.array_equal(before, outside)
    assert not np.array_equal(before, inside)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
@pytest.mark.parametrize("loud", [1.0, 400.0])
def test_softcap_also_far_above_the_cap(isa: str, softcap: float, loud: float) -> None:
    geometry = one_layer(4, 2, 64, softcap=softcap)
    works = [make_work(geometry, n, seed=n) for n in (1, 70, 1100)]
    for work in works:
        work.q *= loud
    if loud > 1:  # the cap must matter, else this test says nothing
        capped, plain = (oracle(g, works[1])[0] for g in (geometry, one_layer(4, 2, 64)))
        assert np.abs(capped - plain).max() > 0.1
    check(geometry, works, isa=isa)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_largest_score_in_first_middle_and_last_block(isa: str, position: int, kv: str) -> None:
    geometry = one_layer(3, 1, 64, kv=kv)
    work = make_work(geometry, 3000)
    work.k[position] = 20.0 * work.q[0].sum(axis=0)
    check(geometry, [work], isa=isa)
    (out,), _ = attend(geometry, [work], isa=isa)
    stored = KV_DTYPES[kv].decode(KV_DTYPES[kv].encode(work.v[position]))
    assert np.abs(out[0] - stored).max() < 1e-3  # its weight is all but one


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (90, 5.0)])
def test_sinks_and_alibi(isa: str, kv: str, window: int | None, softcap: float | None) -> None:
    """Rows over block and segment borders; sinks above all scores; bits as without a batch."""
    geometry = one_layer(
        6, 2, 24, kv=kv, window=window, softcap=softcap, sinks=SINKS, slopes=SLOPES
    )
    shapes = [(1, 1), (65, 3), (1025, 4), (1030, 30), (2100, 1)]
    works = [make_work(geometry, n, rows=rows, seed=n) for n, rows in shapes]
    check(geometry, works, isa=isa)
    together, _ = attend(geometry, works, isa=isa)
    for work, expected in zip(works, together, strict=True):
        (alone,), _ = attend(geometry, [work], isa=isa, threads=1)
        assert np.array_equal(alone, expected)


def test_a_sink_is_a_key_whose_value_is_zero(isa: str) -> None:
    """One key of score 1 and a sink of logit x: the output is V / (1 + e^(x - 1))."""
    xs = np.linspace(-85.0, 80.0, 100).astype(np.float32)
    geometry = one_layer(100, 1, 8, scale=1.0, sinks=tuple(xs.tolist()))
    k, v, q = (np.zeros(s, np.float32) for s in ((1, 1, 8), (1, 1, 8), (1, 100, 8)))
    k[0, 0, 0], v[0], q[0, :, 0] = 1.0, 3.0, 1.0
    (out,), _ = attend(geometry, [Work(k, v, q)], isa=isa)
    exact = 3.0 / (1 + np.exp(xs.astype(np.float64) - 1))
    assert (np.abs(out[0, :, 0] - exact) / exact).max() < 8 * UNIT


def test_sinks_that_vanish_and_slopes_of_zero_change_no_bit(isa: str) -> None:
    plain, neutral = (
        one_layer(4, 2, 24, sinks=sinks, slopes=slopes)
        for sinks, slopes in ((None, None), ((-1e30,) * 4, (0.0,) * 4))
    )
    works = mixed_works(plain)
    for a, b in zip(*(attend(g, works, isa=isa)[0] for g in (plain, neutral)), strict=True):
        assert np.array_equal(a, b)


def test_alibi_is_exact_at_a_distance(isa: str) -> None:
    """All scores alike but for the slope: the output is the mean of V by powers of e^slope."""
    slopes = (1.0, 0.25, 2.0**-12, 0.0)
    geometry = one_layer(4, 1, 8, slopes=slopes)
    work = make_work(geometry, 5000)
    work.k[:] = 0.0
    (out,), _ = attend(geometry, [work], isa=isa)
    check(geometry, [work], isa=isa)
    for head, slope in enumerate(slopes):
        weights = np.exp(slope * (np.arange(5000.0) - 4999))
        exact = weights @ work.v[:, 0].astype(np.float64) / weights.sum()
        assert np.abs(out[0, head] - exact).max() < 5 * UNIT * (math.sqrt(5000) + 40)


def test_exponential_is_accurate_to_fp32(isa: str) -> None:
    """Two keys, scores x and 0, values 1 and 0: the output is e^x / (1 + e^x)."""
    geometry = one_layer(1, 1, 8, scale=1.0)
    xs = -np.geomspace(1e-6, 87.0, 400).astype(np.float32)
    works = []
    for x in xs:
        k, v, q = (np.zeros(s, np.float32) for s in ((2, 1, 8), (2, 1, 8), (1, 1, 8)))
        k[0, 0, 0], v[0], q[0, 0, 0] = x, 1.0, 1.0
        works.append(Work(k, v, q))
    outputs, _ = attend(geometry, works, isa=isa)
    got = np.array([out[0, 0, 0] for out in outputs], np.float64)
    exact = np.exp(xs.astype(np.float64)) / (1 + np.exp(xs.astype(np.float64)))
    assert (np.abs(got - exact) / exact).max() < 8 * UNIT


def test_weights_that_underflow_are_zero_not_garbage(isa: str) -> None:
    geometry = one_layer(1, 1, 8, scale=1.0)
    work = make_work(geometry, 130)
    work.k[:] = 0.0
    work.q[:] = 1.0
    work.k[77] = 100.0  # score 800 against 0
    (out,), (status,) = attend(geometry, [work], isa=isa)
    assert np.array_equal(out[0, 0], work.v[77, 0])
    assert not status.any()


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_rounding_is_that_of_kv_dtypes_bit_for_bit(isa: str, kv: str) -> None:
    """What store() keeps of random bits, ties, subnormals, overflow and non-finite values."""
    form, geometry = KV_DTYPES[kv], one_layer(1, 1, 1024, kv=kv)
    rng = np.random.default_rng(17)
    bits = rng.integers(0, 1 << 32, (60, 1024), np.uint32)
    bits[:20] = (bits[:20] & 0x8FFFFFFF) | 0x30000000  # exponents around fp16's subnormals
    bits[20:30] &= 0xFFFFF000  # ties of fp16
    bits[30:40] &= 0xFFFF8000  # ties of bf16
    values = bits.view(np.float32)
    with AttentionSession(geometry, MemoryBudget(1 << 26), 1, isa=isa) as session:
        session.begin_step(2, 0, np.array([(1, 0, 60, ENTRY_UPLOAD)], ENTRY_DTYPE))
        session.store(2, 0, 0, 0, values, -values)
        data = session.export_range(1, 0, 60)
    nbytes = 2 * 60 * form.row_bytes(1024)
    stored = np.frombuffer(data[-nbytes:], form.storage).reshape(2, 60, -1)
    for kept, given in zip(stored, (values, -values), strict=True):
        nan = np.isnan(given)
        assert np.isnan(form.decode(kept)[nan]).all()
        if form.is_quantized:
            assert np.array_equal(kept, form.encode(given))
            continue
        unsigned = f"<u{form.storage.itemsize}"
        assert np.array_equal(
            kept[~nan].view(unsigned), form.encode(given[~nan]).astype(form.storage).view(unsigned)
        )


@pytest.mark.parametrize("kv", ["fp16", "bf16"])
def test_every_finite_value_of_a_16_bit_dtype_loads_exactly(isa: str, kv: str) -> None:
    """With a window of one token the output is V itself."""
    form, geometry = KV_DTYPES[kv], one_layer(1, 1, 1024, kv=kv, window=1)
    values = form.decode(np.arange(1 << 16, dtype="<u2").view(form.storage))
    values = np.where(np.isfinite(values), values, 0).reshape(64, 1, 1024).astype(np.float32)
    works = [Work(np.zeros((1, 1, 1024), np.float32), v[None], v[None] * 0) for v in values]
    outputs, _ = attend(geometry, works, isa=isa)
    assert np.array_equal(np.concatenate(outputs), values)


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_heads_that_a_thread_reads_together_are_each_as_alone(isa: str, kv: str) -> None:
    """With work for all threads, heads of a block are taken together: here five of them."""
    geometry = one_layer(15, 5, 64, kv=kv)
    lengths = (1, 63, 64, 65, 200, 90, 1030, 5, 17, 33)
    works = [make_work(geometry, length, seed=length) for length in lengths]
    together, _ = attend(geometry, works, isa=isa, threads=1)
    for work, expected in zip(works, together, strict=True):
        (alone,), _ = attend(geometry, [work], isa=isa, threads=2)
        assert np.array_equal(alone, expected)


def mixed_works(geometry: AttentionGeometry) -> list[Work]:
    shapes = [(1, 1), (70, 3), (1024, 1), (1030, 9), (2500, 1), (300, 60), (90, 1)]
    return [make_work(geometry, n, rows=rows, seed=31 * n) for n, rows in shapes]


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_bits_depend_on_neither_threads_nor_batch(isa: str, kv: str, window: int | None) -> None:
    geometry = one_layer(6, 2, 64, kv=kv, window=window)
    works = mixed_works(geometry)
    reference, _ = attend(geometry, works, isa=isa, threads=1)
    for threads in (2, 3):
        outputs, _ = attend(geometry, works, isa=isa, threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(reference, outputs, strict=True))
    backwards, _ = attend(geometry, works[::-1], isa=isa)
    assert all(np.array_equal(a, b) for a, b in zip(reference, backwards[::-1], strict=True))
    for work, expected in zip(works, reference, strict=True):
        (alone,), _ = attend(geometry, [work], isa=isa)
        assert np.array_equal(alone, expected)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("share", [1, 3, 4, 71])
@pytest.mark.parametrize("window", [None, 3, 90, 1000])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(
    isa: str, share: int, window: int | None, kv: str
) -> None:
    """Replay: many rows at once give the bits of one at a time, across segments and work units."""
    geometry = one_layer(share, 1, 24, kv=kv, window=window)
    rows = min(50, max_rows_per_entry(geometry))
    work = make_work(geometry, SEGMENT_TOKENS + 20, rows=rows)
    (together,), _ = attend(geometry, [work], isa=isa)
    check(geometry, [work], isa=isa)
    for row in range(0, rows, 7):
        end = work.before + row + 1
        alone = Work(work.k[:end], work.v[:end], work.q[row : row + 1])
        (single,), _ = attend(geometry, [alone], isa=isa)
        assert np.array_equal(single[0], together[row])


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_non_finite_is_flagged_on_the_offending_row_alone(
    isa: str, what: str, value: float, kv: str
) -> None:
    geometry = one_layer(3, 1, 8, kv=kv)
    works = [make_work(geometry, n, rows=3, seed=n) for n in (70, 1025, 90)]
    clean, _ = attend(geometry, works, isa=isa)
    getattr(works[1], what)[-2, 0, 3] = value  # second row of three
    outputs, statuses = attend(geometry, works, isa=isa)
    flags = [status.tolist() for status in statuses]
    later = int(what != "q")  # the last row attends to the bad key or value
    assert flags[0] == flags[2] == [0, 0, 0]
    assert flags[1][:2] == [0, 1] and flags[1][2] <= later
    if what == "v" or np.isnan(value):
        assert flags[1][2] == later
    for i in (0, 2):
        assert np.array_equal(outputs[i], clean[i])
    assert np.array_equal(outputs[1][0], clean[1][0])


def test_overflow_of_the_kv_dtype_is_flagged(isa: str) -> None:
    geometry = one_layer(1, 1, 8, kv="fp16")
    works = [make_work(geometry, 3), make_work(geometry, 3, seed=5)]
    works[0].k[-1, 0, 0] = 70000.0
    _, statuses = attend(geometry, works, isa=isa)
    assert [status.tolist() for status in statuses] == [[1], [0]]


@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 200])
def test_quantised_rows_are_those_of_kv_dtypes_bit_for_bit(isa: str, kv: str, dim: int) -> None:
    """Rows of ordinary size, constant, zero, tiny, huge, of one sign; of every tail of a group."""
    form, geometry = KV_DTYPES[kv], one_layer(1, 1, dim, kv=kv)
    values = noise((400, dim), dim)
    values[50:60] = 3.14159
    values[60:70] = 0.0
    values[70:80] *= np.float32(1e-37)
    values[80:90] *= np.float32(1e37)
    values[90:150] = np.abs(values[90:150]) + 7.0
    values[150:200] *= np.float32(2.0) ** np.arange(-25, 25, dtype=np.float32)[:, None]
    values[200:300] = np.rint(values[200:300] * 4) / 8  # ties
    with AttentionSession(geometry, MemoryBudget(1 << 26), 1, isa=isa) as session:
        session.begin_step(2, 0, np.array([(1, 0, 400, ENTRY_UPLOAD)], ENTRY_DTYPE))
        session.store(2, 0, 0, 0, values, -values)
        data = session.export_range(1, 0, 400)
    nbytes = 2 * 400 * form.row_bytes(dim)
    kept = np.frombuffer(data[-nbytes:], np.uint8).reshape(2, 400, -1)
    for stored, given in zip(kept, (values, -values), strict=True):
        assert np.array_equal(stored, form.encode(given))


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_quantised_rows_load_exactly(isa: str, kv: str) -> None:
    """With a window of one token the output is V as stored, whatever the group size."""
    form = KV_DTYPES[kv]
    for share, dim in ((1, 128), (4, 72), (3, 8)):
        geometry = one_layer(share, 1, dim, kv=kv, window=1)
        values = noise((50, 1, 1, dim), 11)
        works = [Work(v * 0, v, np.ones((1, share, dim), np.float32)) for v in values]
        outputs, _ = attend(geometry, works, isa=isa)
        expected = form.decode(form.encode(values))[..., :dim]
        assert np.array_equal(np.stack(outputs), np.broadcast_to(expected, (50, 1, share, dim)))


@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("dim", [8, 512, 520, 1024])
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_sums_do_not_overflow(isa: str, kv: str, dim: int, sign: int) -> None:
    """Every value of Q, K and V, and every weight, is its largest integer."""
    geometry = one_layer(4, 1, dim, kv=kv, scale=1.0)
    k, v, q = (np.full(s, 1.0, np.float32) for s in ((2000, 1, dim), (2000, 1, dim), (1, 4, dim)))
    k[:, :, ::32] = v[:, :, ::32] = 0.0  # int4's groups have a range
    (out,), (status,) = attend(geometry, [Work(sign * k, sign * v, q)], isa=isa)
    assert not status.any()
    form = KV_DTYPES[kv]
    stored = form.decode(form.encode(sign * v[0]))[..., :dim]
    assert np.abs(out[0] - stored).max() < 2000 * UNIT


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_a_faint_token_counts_beside_a_loud_one_of_another_step(isa: str, kv: str) -> None:
    """Weights are relative to their step's largest: one of e^-20 alone keeps its precision."""
    geometry = one_layer(1, 1, 32, kv=kv, scale=1.0)
    k, v, q = (np.zeros(s, np.float32) for s in ((65, 1, 32), (65, 1, 32), (1, 1, 32)))
    q[:], k[0], v[64] = 1.0, 20.0 / 32, 1.0
    v[64, 0, 0] = 0.0
    (out,), _ = attend(geometry, [Work(k, v, q)], isa=isa)
    exact = 1 / (1 + 64 * math.exp(-20.0)) * math.exp(-20.0)
    assert abs(out[0, 0, 5] / exact - 1) < 2.0**-7  # bf16's scales; of int8 the query's roundings


def test_isa_is_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert select_isa() == next(isa for isa in available_isas() if isa not in UNPROVEN)
    assert available_isas()[-1] == "baseline"
    monkeypatch.setenv(ISA_VARIABLE, "baseline")
    assert select_isa() == "baseline"
    assert select_isa(available_isas()[0]) == available_isas()[0]
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"FASTDECODE_ISA='avx1024'.*avx2.*baseline"):
        select_isa()


def test_isa_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdecode_rdma.worker.attention.available_isas", lambda: ("baseline",))
    with pytest.raises(ConfigError, match="cannot run"):
        select_isa("avx2")
