"""Tokens per second as the performance model predicts them, and as they are then measured.

    python bench/predict_then_measure.py --model DIR [--rounds 3] [--limit 0.15] [--json FILE]

`fastdecode profile` measures this machine at the batches and lengths of PROFILED, once with the
embedded worker and once with one worker process, and nothing else. From these profiles come the
predictions at points that were not profiled: other batches, other lengths, another number of
workers. They are written down before the first of them is measured; rounds of all points alternate,
medians count. Exit status 1 if a signed error is beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_rdma import Generator, SamplingParams
from fastdecode_rdma.perfmodel.profile_file import read_measured

if TYPE_CHECKING:
    from collections.abc import Iterator

CLI = [sys.executable, "-m", "fastdecode_rdma.cli"]
PROFILED = {"batch": "1,4,16,64", "lengths": "128,1024"}
NEW_TOKENS = 32
KV_DTYPE = "fp16"


@dataclass(frozen=True)
class Point:
    """`workers` 0: the embedded one. `length`: cached tokens of a sequence, half way."""

    workers: int
    batch: int
    length: int


POINTS = (
    Point(0, 2, 64), Point(0, 8, 256), Point(0, 24, 384), Point(0, 48, 200), Point(0, 96, 100),
    Point(2, 8, 256), Point(2, 32, 300),
)  # fmt: skip


@contextmanager
def worker_processes(count: int, folder: Path) -> Iterator[list[str]]:
    """Addresses of workers with a thread each."""
    with ExitStack() as stack:
        addresses = []
        for number in range(count):
            ready = folder / f"ready-{count}-{number}"
            command = [*CLI, "worker", "--listen", "127.0.0.1:0", "--memory", "1GiB"]
            command += ["--threads", "1", "--ready-file", str(ready)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.terminate)
            deadline = time.monotonic() + 60
            while not (ready.exists() and ready.read_text().endswith("\n")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("a worker did not start")
                time.sleep(0.05)
            addresses.append(next(w for w in ready.read_text().split() if "://" in w))
        yield addresses


def profile(model: str, path: Path, workers: list[str]) -> None:
    """Measures what predictions are made from."""
    command = [*CLI, "profile", "--model", model, "--output", str(path), "--kv-dtypes", KV_DTYPE]
    for flag, value in PROFILED.items():
        command += [f"--{flag}", value]
    if workers:
        command += ["--workers", ",".join(workers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def predict(point: Point, path: Path) -> float:
    """Tokens per second."""
    measured = read_measured(path)
    serving = measured.serving_model(KV_DTYPE, num_workers=point.workers or None)
    return point.batch / serving.decode_s(point.batch, point.batch * point.length)


def decode(gen: Generator, point: Point) -> float:
    """Tokens per second from the moment when all sequences have their first token."""
    prompt = point.length - NEW_TOKENS // 2
    prompts = [[(31 * i + 7 * j) % 256 for j in range(prompt)] for i in range(point.batch)]
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False
    )
    begun: set[int] = set()
    start, tokens = 0.0, 0
    for event in gen.generate(prompts, params):
        if start:
            tokens += 1
        begun.add(event.request_index)
        if not start and len(begun) == point.batch:
            start = time.perf_counter()
    return tokens / (time.perf_counter() - start)


def measure(model: str, rounds: int, folder: Path) -> dict[Point, list[float]]:
    """All rounds of all points; one generator for each number of workers."""
    rates: dict[Point, list[float]] = {point: [] for point in POINTS}
    options = {
        "max_num_seqs": 128, "max_model_len": 512, "kv_cache_dtype": KV_DTYPE,
        "num_mini_batches": 1,
    }  # fmt: skip
    for number in range(rounds):
        for count in sorted({point.workers for point in POINTS}):
            with worker_processes(count, folder / str(number)) as addresses:
                gen = Generator.from_pretrained(model, workers=addresses or None, **options)
                with gen:
                    decode(gen, POINTS[0])
                    for point in POINTS:
                        if point.workers == count:
                            rates[point].append(decode(gen, point))
    return rates


def main() -> int:
    """Profiles, predicts, measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as name:
        folder = Path(name)
        for number in range(args.rounds):
            (folder / str(number)).mkdir()
        paths = {0: folder / "embedded.json", 2: folder / "workers.json"}
        profile(args.model, paths[0], [])
        with worker_processes(1, folder) as addresses:
            profile(args.model, paths[2], addresses)
        predicted = {point: predict(point, paths[point.workers]) for point in POINTS}
        rates = measure(args.model, args.rounds, folder)
    print(f"{'workers':<10}{'batch':>6}{'length':>8}{'predicted':>11}{'measured':>10}{'error':>9}")
    errors = []
    for point, expected in predicted.items():
        found = statistics.median(rates[point])
        errors.append(expected / found - 1)
        shown = " ".join(f"{rate:.0f}" for rate in rates[point])
        print(
            f"{point.workers or 'embedded':<10}{point.batch:>6}{point.length:>8}{expected:>11.1f}"
            f"{found:>10.1f}{errors[-1]:>+9.1%}   ({shown})"
        )
    print(f"tokens/s; load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cpus")
    if args.json is not None:
        rows = [
            {**vars(point), "predicted": predicted[point], "measured": rates[point]}
            for point in POINTS
        ]
        args.json.write_text(json.dumps({"rows": rows, "load": os.getloadavg()}, indent=1))
    return int(max(map(abs, errors)) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
