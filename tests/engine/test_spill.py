"""Memory for a quarter of what is asked: all finish, with the bits of each request alone."""

from __future__ import annotations

import itertools
import logging
import os
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.attention.placement import Placement
from fastdecode_rdma.engine import setup
from fastdecode_rdma.engine.spill_tiers import (
    COPY_BIT,
    PREFIX,
    Chunk,
    FileTier,
    SpillError,
    SpillGone,
    WorkerTier,
)
from fastdecode_rdma.errors import StepError
from fastdecode_rdma.scheduler.spill import SpillCosts
from fastdecode_rdma.worker.kvcache import MemoryBudget
from fastdecode_rdma.worker.limits import default_memory

BLOCK = 2 * 3 * 64 * 2 * 16 * 4  # K and V, layers, tokens, heads, head_dim, fp32: the tiny llama's
COUNT = 16
PROMPTS = [[1 + i, 2, 3 + i % 5] * (5 + 3 * (i % 4)) for i in range(COUNT)]
PARAMS = [
    SamplingParams(
        max_tokens=100 + 10 * (i % 5), temperature=0.7 * (i % 2), seed=i, ignore_eos=True,
        logprobs=1,
    )
    for i in range(COUNT)
]  # fmt: skip

Results = list[tuple[list[int], list[float]]]


def results(outputs: list) -> Results:
    """Ids and log-probabilities."""
    found = []
    for output in outputs:
        ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
        pairs = zip(ids, logprobs, strict=True)
        found.append((ids, [of_token[i].logprob for i, of_token in pairs]))
    return found


@pytest.fixture(scope="module")
def alone(tiny_models: Callable[..., Path]) -> Callable[..., Results]:
    """Each request by itself, with plenty of memory."""
    known: dict[tuple[str, str], Results] = {}

    def run(name: str = "llama", kv_dtype: str = "fp32") -> Results:
        if (name, kv_dtype) not in known:
            with Generator.from_pretrained(
                tiny_models(name), deterministic=True, kv_cache_dtype=kv_dtype
            ) as gen:
                known[name, kv_dtype] = [
                    results(gen.complete([prompt], params))[0]
                    for prompt, params in zip(PROMPTS, PARAMS, strict=True)
                ]
        return known[name, kv_dtype]

    return run


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says what the costs come to: these models are too small for times to be reliable."""

    def choose(spills: bool) -> None:
        monkeypatch.setattr(SpillCosts, "spill_pays", lambda *_: spills)
        monkeypatch.setattr(SpillCosts, "restore_pays", lambda *_: spills)

    return choose


@pytest.fixture
def tight(
    tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Generator]]:
    """Makes generators whose embedded worker has so many bytes of KV-cache."""
    made: list[Generator] = []

    def make(nbytes: int, *, name: str = "llama", **options: object) -> Generator:
        limit = replace(default_memory(), value=nbytes)
        monkeypatch.setattr(setup, "default_memory", lambda: limit)
        monkeypatch.setattr(setup, "MemoryBudget", lambda limit, nodes: MemoryBudget(limit))
        made.append(
            Generator.from_pretrained(
                tiny_models(name),
                **{
                    "kv_cache_dtype": "fp32",
                    "deterministic": True,
                    "max_num_seqs": COUNT,
                    "max_model_len": 256,
                    **options,
                },
            )
        )
        return made[-1]

    yield make
    for gen in made:
        gen.close()


OWN = {"skip_join_mlfq": {"quantum_s": 1e-3, "alpha_s": 0.05}}


@pytest.mark.parametrize("policy", ["fcfs", "skip_join_mlfq"])
@pytest.mark.parametrize("spills", [True, False])
def test_four_times_too_little_memory(
    policy: str,
    spills: bool,
    tight: Callable[..., Generator],
    alone: Callable[..., Results],
    always: Callable[[bool], None],
    tmp_path: Path,
) -> None:
    always(spills)
    # sixteen sequences come to three blocks each
    gen = tight(12 * BLOCK, scheduler=policy, scheduler_options=OWN.get(policy), spill_dir=tmp_path)
    assert results(gen.complete(PROMPTS, PARAMS)) == alone()
    stats = gen.stats()
    assert stats.num_preemptions_total > 0 and stats.spill_faults == 0
    if spills:
        assert stats.kv_spills > 0 and stats.kv_restores > 0
        assert stats.spilled_bytes > 0 and stats.restored_bytes > 0 and stats.spill_restore_s > 0
    else:
        assert stats.kv_recomputes >= stats.num_preemptions_total > 0
        assert stats.kv_spills == stats.kv_restores == stats.spilled_bytes == 0
    assert not gen._parts.engine.has_work() and gen._parts.engine.placement.used_bytes(0) == 0
    (home,) = tmp_path.iterdir()
    gen.close()
    assert not home.exists()


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8", "int4"])
def test_every_kv_dtype_comes_back_as_it_was(
    kv_dtype: str,
    tight: Callable[..., Generator],
    alone: Callable[..., Results],
    always: Callable[[bool], None],
    tmp_path: Path,
) -> None:
    always(True)
    share = {"fp16": 2, "bf16": 2, "int8": 3, "int4": 5}[kv_dtype]
    gen = tight(13 * BLOCK // share, kv_cache_dtype=kv_dtype, spill_dir=tmp_path)
    assert results(gen.complete(PROMPTS, PARAMS)) == alone(kv_dtype=kv_dtype)
    assert gen.stats().kv_restores > 0 and gen.stats().spill_faults == 0


def test_window_groups_come_back_as_they_were(
    tight: Callable[..., Generator],
    alone: Callable[..., Results],
    always: Callable[[bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks shorter than the ring, so that copies are caught half made."""
    monkeypatch.setattr("fastdecode_rdma.engine.spill.CHUNK_BYTES", 70_000)
    always(True)
    gen = tight(32 * BLOCK, name="gemma3", spill_dir=tmp_path)
    assert results(gen.complete(PROMPTS, PARAMS)) == alone("gemma3")
    assert gen.stats().kv_restores > 0 and gen.stats().spill_faults == 0


def test_decoding_goes_on_while_copies_move(
    tight: Callable[..., Generator],
    always: Callable[[bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between one chunk of a sequence and its next, others get tokens."""
    always(True)
    monkeypatch.setattr("fastdecode_rdma.engine.spill.CHUNK_BYTES", 20_000)  # 26 tokens
    monkeypatch.setattr("fastdecode_rdma.engine.spill.MIN_SHARE_S", 0.0)
    monkeypatch.setattr("fastdecode_rdma.engine.spill.STEP_SHARE", 0.0)
    gen = tight(12 * BLOCK, spill_dir=tmp_path)
    backend, moved = gen._parts.backend, []
    for name in ("export_range", "import_range"):
        method = getattr(backend, name)

        def noted(*args: object, name: str = name, method: Callable = method) -> object:
            moved.append((name, args[1], gen._parts.engine.counters.steps))
            return method(*args)

        monkeypatch.setattr(backend, name, noted)
    gen.complete(PROMPTS, PARAMS)
    for name in ("export_range", "import_range"):
        pairs = itertools.pairwise(moved)
        mine = [(a, b) for a, b in pairs if a[:2] == b[:2] and a[0] == name]
        assert any(b[2] > a[2] for a, b in mine), name


def test_a_cancelled_sequence_leaves_no_copy(
    tight: Callable[..., Generator], always: Callable[[bool], None], tmp_path: Path
) -> None:
    always(True)
    gen = tight(8 * BLOCK, spill_dir=tmp_path)
    params = replace(PARAMS[0], max_tokens=180)
    handles = [gen.submit(prompt, params) for prompt in PROMPTS]
    (home,) = tmp_path.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    deadline = time.monotonic() + 30
    spiller = gen._parts.engine.spiller
    while not list(home.glob("*.kv")):
        assert time.monotonic() < deadline and not all(h.done() for h in handles)
        time.sleep(0.001)
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.glob("*.kv")} <= {0o600}
    for handle in handles:
        handle.cancel()
    while spiller._copies or list(home.glob("*.kv")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert gen._parts.engine.placement.used_bytes(0) == 0


def test_a_tier_that_breaks_is_told_once_and_costs_no_answer(
    tight: Callable[..., Generator],
    alone: Callable[..., Results],
    always: Callable[[bool], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastdecode_rdma.engine.spill.RETRY_S", 0.0)
    always(True)
    gen = tight(12 * BLOCK, spill_dir=tmp_path)
    (home,) = tmp_path.iterdir()
    (home / "lock").unlink()
    home.rmdir()
    with caplog.at_level(logging.WARNING, logger="fastdecode_rdma"):
        assert results(gen.complete(PROMPTS, PARAMS)) == alone()
    assert gen.stats().spill_faults > 1 and gen.stats().kv_recomputes > 0
    told = [r.getMessage() for r in caplog.records if "spilling fails" in r.getMessage()]
    assert len(told) == 1 and "No such file or directory" in told[0]


def test_a_damaged_copy_is_not_used(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    try:
        data = b"x" * 1000
        chunk = Chunk(0, 10, 0, 1000, zlib.crc32(data))
        tier.put(7, chunk, data)
        assert tier.get(7, chunk).result(10) == data
        (path,) = tmp_path.glob("*/7.kv")
        path.write_bytes(b"x" * 999 + b"y")
        with pytest.raises(SpillError, match="damaged"):
            tier.get(7, chunk).result(10)
        tier.drop(7)
        with pytest.raises(SpillError, match="No such file"):
            tier.get(7, chunk).result(10)
    finally:
        tier.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_by_writing(tmp_path: Path) -> None:
    """The kernel's own limit on the length of a file stands in for the disk's."""
    code = (
        "import resource, sys, zlib, pathlib\n"
        "from fastdecode_rdma.engine.spill_tiers import Chunk, FileTier\n"
        "tier = FileTier(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for handle, length in ((1, 900), (2, 1100)):\n"
        "    data = bytes(length)\n"
        "    chunk = Chunk(0, 1, 0, length, zlib.crc32(data))\n"
        "    tier.put(handle, chunk, data)\n"
        "assert tier.get(1, chunk).exception(10) is not None\n"
        "failed = tier.take_failed()\n"
        "assert list(failed) == [2] and 'File too large' in str(failed[2]), failed\n"
        "tier.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from fastdecode_rdma.engine.spill_tiers import FileTier\n"
        "tier = FileTier(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    (left,) = tmp_path.glob(PREFIX + "*")
    first = FileTier(tmp_path)
    assert not left.exists()
    (mine,) = tmp_path.iterdir()
    second = FileTier(tmp_path)
    assert mine.exists()
    second.close()
    first.close()


# -- several workers: rows eight times as wide, as a worker's memory is a few MiB at least


@pytest.fixture(autouse=True)
def wide_model(tiny_models: Callable[..., Path]) -> None:
    tiny_models("llama-wide_heads", head_dim=128)


@pytest.mark.parametrize("policy", ["fcfs", "skip_join_mlfq"])
def test_copies_in_the_memory_of_other_workers(
    policy: str,
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list],
    always: Callable[[bool], None],
    alone: Callable[..., Results],
) -> None:
    always(True)
    workers = [*start_workers(1, memory="3MiB"), *start_workers(1, memory="5MiB")]
    with Generator.from_pretrained(
        tiny_models("llama-wide_heads"),
        workers=[w.address for w in workers],
        scheduler=policy,
        scheduler_options=OWN.get(policy),
        kv_cache_dtype="fp32",
        deterministic=True,
        max_model_len=256,
        max_num_seqs=COUNT,
        spill_to="workers",
    ) as gen:
        assert results(gen.complete(PROMPTS, PARAMS)) == alone("llama-wide_heads")
        stats = gen.stats()
        assert stats.kv_spills > 0 and stats.num_preemptions_total > 0 and stats.spill_faults == 0
        assert not gen._parts.engine.placement._copies  # sequences needed all room, or are over


def test_a_copy_on_another_worker_comes_back_or_gives_way(
    make_bench: Callable, tiny_models: Callable[..., Path]
) -> None:
    bench = make_bench(tiny_models("llama"))
    other = LocalWorker(bench.geometry, MemoryBudget(8 * BLOCK), num_threads=1)
    backend = bench.backend
    assert backend.add_worker(other) == 1
    placement = Placement(bench.geometry, [20 * BLOCK, 4 * BLOCK])
    tier = WorkerTier(backend, placement)
    bench.prefill({1: list(range(1, 151)), 2: list(range(9, 49))})

    def copy_out(handle: int, start: int, stop: int, offset: int) -> tuple[Chunk, bytes]:
        data = backend.export_range(0, handle, start, stop)
        chunk = Chunk(start, stop, offset, len(data), zlib.crc32(data))
        assert tier.has_room(handle, 0, stop)
        tier.put(handle, chunk, data)
        return chunk, data

    first, first_data = copy_out(1, 0, 100, 0)
    second, second_data = copy_out(1, 100, 150, first.nbytes)
    third, _ = copy_out(2, 0, 40, 0)
    assert not tier.has_room(3, 0, 1)  # three blocks and one: the other is full
    assert tier.get(1, first).result() == first_data
    assert tier.get(1, second).result() == second_data
    backend.import_range(0, 5, 0, first_data)  # what is there again is what was there
    backend.import_range(0, 5, 100, second_data)
    assert backend.export_range(0, 5, 0, 150) == backend.export_range(0, 1, 0, 150)
    # a sequence that needs a block gets it: the oldest copy goes, the other stays
    placement.lose_worker(0)
    assert placement.reserve_gang([7], 64) and placement.worker_of(7) == 1
    tier.flush()
    assert tier.take_failed() == {1: None} and placement.copy_on(1) is None
    with pytest.raises(SpillGone):
        tier.get(1, first).result()
    with pytest.raises(StepError):
        backend.export_range(1, 1 | COPY_BIT, 0, 1)
    assert tier.get(2, third).result()
    tier.lose_worker(1)
    assert tier.take_failed() == {2: None} and placement.copy_on(2) is None


def test_a_worker_killed_while_sequences_are_spilled(
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list],
    always: Callable[[bool], None],
    alone: Callable[..., Results],
    tmp_path: Path,
) -> None:
    """Copies in files outlive it: what it held is taken back by the other."""
    always(True)
    workers = start_workers(2, memory="4MiB")
    (tmp_path / "spill").mkdir()
    with Generator.from_pretrained(
        tiny_models("llama-wide_heads"),
        workers=[w.address for w in workers],
        kv_cache_dtype="fp32",
        deterministic=True,
        max_model_len=256,
        max_num_seqs=COUNT,
        spill_dir=tmp_path / "spill",
    ) as gen:
        handles = [gen.submit(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
        deadline = time.monotonic() + 30
        while len(gen._parts.engine.spiller._copies) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        workers[0].kill()
        assert results([handle.result() for handle in handles]) == alone("llama-wide_heads")
        stats = gen.stats()
        assert stats.recoveries == 1 and stats.kv_restores > 0


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spill_dir": "/nowhere/at/all"}, "spill_dir /nowhere/at/all is no directory"),
        ({"spill_dir": 3}, "spill_dir must be a path"),
        ({"spill_to": "disk"}, "spill_to must be None or 'workers', got 'disk'"),
        ({"spill_to": "workers"}, "spill_to='workers' needs at least two workers"),
        ({"spill_dri": "/tmp"}, "spill_dir"),
    ],
)
def test_wrong_options_are_told_in_a_line(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Generator.from_pretrained(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    if os.getuid() == 0:
        target = Path("/proc/self")  # nobody may, root included
    else:
        target = tmp_path
        tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"spill_dir .*: "):
        FileTier(target)
