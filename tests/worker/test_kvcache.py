"""KV storage: sizes, all-or-nothing steps, sharing, rings, 1000 random rounds against dicts."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from fastdecode_rdma.config import (
    ENTRY_DTYPE,
    ENTRY_UPLOAD,
    AttentionGeometry,
    KVGroup,
    StepCode,
)
from fastdecode_rdma.errors import CacheFullError, FastDecodeError
from fastdecode_rdma.worker.kv_ranges import StepRefusedError
from fastdecode_rdma.worker.kvcache import MemoryBudget, kv_blocks, kv_bytes
from fastdecode_rdma.worker.session import AttentionSession, code_of

WINDOW = 70
RING = 4  # ceil((70 + 64) / 64) + 1 blocks
DIM = 8
SMALL = AttentionGeometry(
    groups=(KVGroup((0, 2), 1, 1, DIM, None), KVGroup((1,), 2, 2, DIM, WINDOW)),
    scale=1.0,
    kv_dtype="fp32",
    max_rows=256,
    max_model_len=4096,
)
SMALL_BLOCKS = (2 * 2 * 64 * DIM * 4, 2 * 2 * 64 * DIM * 4)  # bytes of a block of either group


def entries(*lines: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(list(lines), dtype=ENTRY_DTYPE)


@pytest.fixture
def budget() -> Iterator[MemoryBudget]:
    budget = MemoryBudget(64 << 20)
    yield budget
    assert budget.used_bytes == 0, "a session kept memory after close()"


@pytest.fixture
def session(budget: MemoryBudget) -> Iterator[AttentionSession]:
    with AttentionSession(SMALL, budget, 1) as session:
        yield session


def signature(first: int, count: int) -> np.ndarray:
    """One value per token, exact in fp32."""
    return np.arange(first, first + count, dtype=np.float32)


def upload(session: AttentionSession, handle: int, start: int, values: np.ndarray) -> None:
    """Writes tokens from `start` on: K = value + layer / 4 in all elements, V = -K."""
    session.begin_step(2, 0, entries((handle, start, len(values), ENTRY_UPLOAD)))
    write_rows(session, values)


def write_rows(session: AttentionSession, values: np.ndarray) -> None:
    for layer in range(SMALL.num_layers):
        width = SMALL.group_of(layer).num_kv_heads * DIM
        k = np.repeat(values[:, None] + layer / 4, width, axis=1)
        session.store(2, layer, 0, 0, k, -k)


def read_back(session: AttentionSession, handle: int, length: int) -> list[np.ndarray]:
    """Exports [0, length) and returns the values each group holds, [tokens from its first one on];
    checks that all layers, heads and elements of K and V say the same."""
    data = session.export_range(handle, 0, length)
    at, values = struct.calcsize("<4sIQQ"), []
    for group in SMALL.groups:
        (first,) = struct.unpack_from("<Q", data, at)
        shape = (len(group.layers), 2, group.num_kv_heads, length - first, DIM)
        raw = np.frombuffer(data, "<f4", int(np.prod(shape)), at + 8).reshape(shape)
        at += 8 + raw.nbytes
        layers = np.array(group.layers, np.float32)[:, None, None, None] / 4
        tokens = raw[:, 0] - layers
        assert np.array_equal(raw[:, 1], -raw[:, 0])
        assert np.array_equal(tokens, np.broadcast_to(tokens[:1, :1, :, :1], tokens.shape))
        values.append(tokens[0, 0, :, 0])
    assert at == len(data)
    return values


def used(session: AttentionSession) -> list[int]:
    return session.stats()["blocks_used"]


def assert_holds(session: AttentionSession, handle: int, expected: np.ndarray) -> None:
    whole, ring = read_back(session, handle, len(expected))
    assert np.array_equal(whole, expected)
    assert np.array_equal(ring, expected[len(expected) - len(ring) :])
    assert len(ring) >= min(len(expected), WINDOW)


def test_budget_counts_and_refuses() -> None:
    budget = MemoryBudget(100)
    budget.reserve(60)
    with pytest.raises(CacheFullError, match=r"41 .*40 of 100") as caught:
        budget.reserve(41)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (41, 40)
    budget.release(60)
    with pytest.raises(ValueError, match="0 are reserved"):
        budget.release(1)


def test_budget_is_thread_safe() -> None:
    budget = MemoryBudget(10_000)

    def churn() -> None:
        for _ in range(2000):
            budget.reserve(3)
            budget.release(3)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 0


def test_bytes_of_a_gemma_like_pattern_at_8k() -> None:
    """Gemma 3 270M: 15 local layers of window 512, 3 global ones, 1 KV head of 256, fp16."""
    local = tuple(layer for layer in range(18) if layer % 6 != 5)
    geometry = AttentionGeometry(
        groups=(KVGroup(local, 4, 1, 256, 512), KVGroup((5, 11, 17), 4, 1, 256, None)),
        scale=1 / 16,
        kv_dtype="fp16",
        max_rows=16,
        max_model_len=1 << 15,
    )
    token = 2 * 1 * 256 * 2  # K and V bytes per layer
    assert kv_blocks(geometry, 8192) == (10, 128)  # ceil((512 + 64) / 64) + 1, 8192 / 64
    assert kv_bytes(geometry, 8192) == 10 * 64 * 15 * token + 8192 * 3 * token
    assert kv_bytes(geometry, 1) == 64 * 18 * token
    assert kv_bytes(geometry, 0) == 0
    budget = MemoryBudget(1 << 30)
    with AttentionSession(geometry, budget, 1) as session:
        session.begin_step(2, 0, entries((1, 0, 8192, ENTRY_UPLOAD)))
        assert session.stats()["kv_bytes_used"] == kv_bytes(geometry, 8192)
        assert used(session) == [10, 128]
        session.free([1])
        assert budget.used_bytes == 0


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 300, 1000])
def test_blocks_in_use_follow_the_formula(session: AttentionSession, length: int) -> None:
    upload(session, 1, 0, signature(0, length))
    assert used(session) == list(kv_blocks(SMALL, length))
    assert session.stats()["kv_bytes_used"] == kv_bytes(SMALL, length)
    assert_holds(session, 1, signature(0, length))


def test_shortening_gives_blocks_back(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 500))
    session.begin_step(0, 1, entries((1, 450, 1, 0)))
    assert used(session) == [8, RING]
    session.begin_step(2, 1, entries((1, 0, 10, ENTRY_UPLOAD)))
    assert used(session) == [1, 1]


def test_cache_full_changes_nothing() -> None:
    budget = MemoryBudget(7 * SMALL_BLOCKS[0])
    with AttentionSession(SMALL, budget, 1) as session:
        upload(session, 1, 0, signature(0, 64))
        upload(
            session, 2, 0, signature(1000, 100)
        )  # 3 blocks of either group are in use, 1 is left
        before = session.stats()
        step = entries((1, 64, 1, 0), (2, 100, 1, 0), (3, 0, 1, 0))
        with pytest.raises(CacheFullError) as caught:
            session.begin_step(0, 1, step)
        assert code_of(caught.value) is StepCode.CACHE_FULL
        assert caught.value.needed_bytes > caught.value.free_bytes
        after = session.stats()
        assert {k: after[k] for k in ("blocks_used", "sequences", "kv_bytes_used")} == {
            k: before[k] for k in ("blocks_used", "sequences", "kv_bytes_used")
        }
        assert_holds(session, 1, signature(0, 64))
        assert_holds(session, 2, signature(1000, 100))
        session.free([2])
        session.begin_step(0, 2, entries((1, 64, 1, 0), (3, 0, 1, 0)))
        assert used(session) == [3, 3]
    assert budget.used_bytes == 0


def test_blocks_freed_by_the_step_itself_count(budget: MemoryBudget) -> None:
    tight = MemoryBudget(2 * SMALL_BLOCKS[0])
    with AttentionSession(SMALL, tight, 1) as session:
        upload(session, 1, 0, signature(0, 64))
        session.begin_step(2, 0, entries((1, 0, 0, ENTRY_UPLOAD), (2, 0, 64, ENTRY_UPLOAD)))
        assert used(session) == [1, 1]


def test_sessions_share_a_budget() -> None:
    budget = MemoryBudget(4 * SMALL_BLOCKS[0])
    with AttentionSession(SMALL, budget, 1) as one, AttentionSession(SMALL, budget, 1) as two:
        upload(one, 1, 0, signature(0, 100))
        with pytest.raises(CacheFullError):
            upload(two, 1, 0, signature(0, 1))
        assert two.stats()["sequences"] == 0
        one.close()
        upload(two, 1, 0, signature(0, 100))
    assert budget.used_bytes == 0


def test_fork_shares_until_written(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 100))
    session.fork(1, 2, 100)
    session.fork(1, 3, 64)
    assert used(session) == [2, 2]
    upload(session, 2, 100, signature(5000, 3))
    assert used(session) == [3, 3]  # only the last block was copied
    upload(session, 3, 64, signature(6000, 1))
    assert_holds(session, 1, signature(0, 100))
    assert_holds(session, 2, np.concatenate([signature(0, 100), signature(5000, 3)]))
    assert_holds(session, 3, np.concatenate([signature(0, 64), signature(6000, 1)]))
    session.free([1])
    assert_holds(session, 2, np.concatenate([signature(0, 100), signature(5000, 3)]))
    session.free([2, 3])
    assert used(session) == [0, 0]


def test_fork_of_a_wrapped_ring_copies_what_is_overwritten(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 700))
    session.fork(1, 2, 700)
    upload(session, 1, 700, signature(1000, 90))
    upload(session, 2, 700, signature(2000, 200))
    assert_holds(session, 1, np.concatenate([signature(0, 700), signature(1000, 90)]))
    assert_holds(session, 2, np.concatenate([signature(0, 700), signature(2000, 200)]))


def test_writing_both_owners_of_the_last_free_block_needs_one_copy() -> None:
    tight = MemoryBudget(2 * (SMALL_BLOCKS[0] + SMALL_BLOCKS[1]))
    with AttentionSession(SMALL, tight, 1) as session:
        upload(session, 1, 0, signature(0, 10))
        session.fork(1, 2, 10)
        session.begin_step(0, 1, entries((1, 10, 1, 0), (2, 10, 1, 0)))
        assert used(session) == [2, 2]


def test_fork_and_export_refuse_what_is_not_there(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 700))
    cases = [
        (lambda: session.fork(9, 2, 1), StepCode.SEQUENCE),
        (lambda: session.fork(1, 1, 1), StepCode.SEQUENCE),
        (lambda: session.fork(1, 2, 701), StepCode.RANGE),
        (lambda: session.fork(1, 2, 300), StepCode.RANGE),  # the ring has overwritten 231 .. 299
        (lambda: session.export_range(9, 0, 1), StepCode.SEQUENCE),
        (lambda: session.export_range(1, 0, 701), StepCode.RANGE),
        (lambda: session.export_range(1, 5, 4), StepCode.RANGE),
    ]
    for call, code in cases:
        with pytest.raises(StepRefusedError) as caught:
            call()
        assert caught.value.code is code
    assert session.stats()["sequences"] == 1


@pytest.mark.parametrize("length", [1, 64, 100, 700])
def test_export_import_round_trip_whole_and_in_pieces(
    session: AttentionSession, budget: MemoryBudget, length: int
) -> None:
    upload(session, 1, 0, signature(0, length))
    with AttentionSession(SMALL, budget, 1) as other:
        other.import_range(7, 0, session.export_range(1, 0, length))
        for start in range(0, length, 150):
            stop = min(length, start + 150)
            other.import_range(8, start, session.export_range(1, start, stop))
        for handle in (7, 8):
            assert_holds(other, handle, signature(0, length))
            upload(other, handle, length, signature(9000, 5))
            assert_holds(other, handle, np.concatenate([signature(0, length), signature(9000, 5)]))


def test_import_that_would_leave_a_gap_is_refused(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 100))
    upload(session, 2, 0, signature(0, 40))
    tail = session.export_range(1, 50, 100)
    with pytest.raises(StepRefusedError, match="unknown"):
        session.import_range(3, 50, tail)
    with pytest.raises(StepRefusedError, match="gap"):
        session.import_range(2, 50, tail)
    session.import_range(2, 20, session.export_range(1, 20, 100))
    assert_holds(session, 2, signature(0, 100))
    assert session.stats()["sequences"] == 2


def test_steps_that_cannot_be_are_named_and_change_nothing(session: AttentionSession) -> None:
    upload(session, 1, 0, signature(0, 700))
    most = RING * 64 - WINDOW + 1
    cases = [
        (entries((1, 700, 1, 0), (5, 3, 1, 0)), StepCode.SEQUENCE, "entry 1"),
        (entries((1, 701, 1, 0)), StepCode.RANGE, "entry 0"),
        (entries((1, 300, 1, 0)), StepCode.RANGE, "ring"),
        (entries((1, 700, 4000, ENTRY_UPLOAD)), StepCode.RANGE, "max_model_len=4096"),
        (entries((1, 700, most + 1, 0)), StepCode.ROWS, f"at most {most}"),
        (entries(*((h, 0, 60, 0) for h in range(10, 15))), StepCode.ROWS, "256 of a step"),
        (entries((1, 700, 1, 0), (1, 700, 1, 0)), StepCode.PROTOCOL, "twice"),
        (entries((1, 700, 1, 2)), StepCode.PROTOCOL, "flag"),
        (entries((2**64 - 1, 2**64 - 1, 2**32 - 1, 0)), StepCode.SEQUENCE, "unknown"),
        (entries((1, 2**64 - 1, 2, 0)), StepCode.RANGE, "entry 0"),
    ]
    before = used(session)
    for lines, code, words in cases:
        with pytest.raises(StepRefusedError, match=words) as caught:
            session.begin_step(0, 1, lines)
        assert caught.value.code is code
    for table in (-1, 8):
        with pytest.raises(StepRefusedError, match="table"):
            session.begin_step(table, 1, entries((1, 700, 1, 0)))
    assert used(session) == before and session.stats()["sequences"] == 1
    session.begin_step(0, 1, entries((1, 700, most, 0)))


class Model:
    """What a session should hold: handle -> signature values. Knows nothing of blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequences: dict[int, np.ndarray] = {}
        self.next_handle = 1
        self.next_value = 1

    def fresh(self, count: int) -> np.ndarray:
        self.next_value += count
        return signature(self.next_value - count, count)

    def pick(self) -> int:
        return self.random.choice(list(self.sequences))

    def new_handle(self) -> int:
        self.next_handle += 1
        return self.next_handle


def random_round(model: Model, session: AttentionSession) -> None:
    action = model.random.choice(["new", "extend", "extend", "shorten", "fork", "free", "move"])
    if action == "new" or not model.sequences:
        handle, values = model.new_handle(), model.fresh(model.random.randint(1, 400))
        upload(session, handle, 0, values)
        model.sequences[handle] = values
        return
    handle = model.pick()
    held = model.sequences[handle]
    if action == "extend":
        values = model.fresh(model.random.choice([1, 1, 2, 63, 64, 130]))
        upload(session, handle, len(held), values)
        model.sequences[handle] = np.concatenate([held, values])
    elif action == "shorten":  # within the slack that a ring keeps, or anew from the start
        keep = model.random.choice([0, max(0, len(held) - model.random.randint(1, 64))])
        values = model.fresh(model.random.randint(1, 3))
        upload(session, handle, keep, values)
        model.sequences[handle] = np.concatenate([held[:keep], values])
    elif action == "fork":
        length = max(0, len(held) - model.random.randint(0, 20))
        new = model.new_handle()
        session.fork(handle, new, length)
        model.sequences[new] = held[:length]
    elif action == "free":
        session.free([handle, 10**9])
        del model.sequences[handle]
    else:
        data = session.export_range(handle, 0, len(held))
        new = model.new_handle()
        session.import_range(new, 0, data)
        session.free([handle])
        model.sequences[new] = model.sequences.pop(handle)


def test_random_rounds_against_plain_dicts() -> None:
    """Every sequence keeps its own signature through churn, reuse, sharing and failed steps."""
    budget = MemoryBudget(120 * SMALL_BLOCKS[0])
    model = Model(seed=11)
    full = 0
    with AttentionSession(SMALL, budget, 1) as session:
        for number in range(1000):
            try:
                random_round(model, session)
            except CacheFullError:
                full += 1
                victim = model.pick()
                assert_holds(session, victim, model.sequences[victim])
                session.free([victim])
                del model.sequences[victim]
            assert session.stats()["sequences"] == len(model.sequences)
            check = list(model.sequences) if number % 100 == 99 else list(model.sequences)[-2:]
            for handle in check:
                expected = model.sequences[handle]
                whole, ring = read_back(session, handle, len(expected))
                assert np.array_equal(whole, expected)  # a shortened ring may hold less than W
                assert np.array_equal(ring, expected[len(expected) - len(ring) :])
            assert budget.used_bytes <= budget.limit_bytes
        assert full > 10, "the budget was never short: this test says less than it should"
        session.free(list(model.sequences))
        assert used(session) == [0, 0] and budget.used_bytes == 0


def test_code_of_other_errors() -> None:
    assert code_of(FastDecodeError("x")) is StepCode.INTERNAL
