"""`Generator` over every data plane: the same tokens, and what its statistics say of the way."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams, TransportError

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = ["hello", [5, 6, 7], "a longer prompt " * 9, "x"]


def generator(path: Path, **options: object) -> Generator:
    return Generator.from_pretrained(
        path, deterministic=True, max_model_len=256, kv_cache_dtype="fp16", **options
    )


def ids_of(gen: Generator) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in gen.complete(PROMPTS, GREEDY)]


def test_every_way_to_a_worker_gives_the_same_tokens(
    tiny_models: Callable[..., Path], start_workers: Callable[..., list]
) -> None:
    path = tiny_models("llama")
    with generator(path) as gen:
        expected = ids_of(gen)
        (worker,) = gen.stats().workers
        assert (worker.transport, worker.fallback_reason) == ("loopback", "")
    tcp, other = (worker.address for worker in start_workers(2))
    place = tcp.removeprefix("tcp://")
    for workers, options, transports in (
        ([tcp], {}, ["tcp"]),
        ([f"shm://{place}"], {}, ["shm"]),
        ([place], {}, ["shm"]),
        ([place], {"require": "tcp"}, ["tcp"]),
        ([place], {"require": "shm"}, ["shm"]),
        ([f"shm://{place}?spin_us=30", other], {}, ["shm", "tcp"]),
    ):
        with generator(path, workers=workers, **options) as gen:
            assert ids_of(gen) == expected, workers
            stats = gen.stats()
        assert [worker.transport for worker in stats.workers] == transports
        assert all(worker.bytes_received > 0 for worker in stats.workers)
        assert not any(worker.fallback_reason for worker in stats.workers)
    with pytest.raises(ConfigError, match="which require='shm' demands"):
        generator(path, workers=[tcp], require="shm")


def listen_at(port: int, tmp_path: Path) -> subprocess.Popen[bytes]:
    ready = tmp_path / "ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fastdecode_rdma.cli", "worker", "--threads", "1"]
    command += ["--listen", f"127.0.0.1:{port}", "--memory", "64MiB", "--ready-file", str(ready)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_a_worker_that_restarts_in_mid_generation_changes_no_token(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    """kill -9 of the only worker, and another one at its address: new segment, new epoch."""
    path = tiny_models("llama")
    with generator(path) as gen:
        expected = ids_of(gen)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = listen_at(port, tmp_path)
    got: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    try:
        with generator(path, workers=[f"shm://127.0.0.1:{port}"], max_num_seqs=4) as gen:
            for number, event in enumerate(gen.generate(PROMPTS, GREEDY)):
                got[event.request_index].append(event.token_id)
                if number == 20:
                    worker.kill()
                    worker.wait()
                    worker = listen_at(port, tmp_path)
            stats = gen.stats()
        assert [got[index] for index in got] == expected
        assert stats.recoveries == 1
        assert [worker.transport for worker in stats.workers] == ["shm"]
    finally:
        worker.kill()
        worker.wait()


def test_nobody_at_the_address_is_one_line(tiny_models: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for scheme in ("shm://", "auto://", ""):
        with pytest.raises(TransportError, match=f"127.0.0.1:{port}: cannot connect") as caught:
            generator(tiny_models("llama"), workers=[f"{scheme}127.0.0.1:{port}"])
        assert "\n" not in str(caught.value)
