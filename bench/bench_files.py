"""Files of requests beside the engine alone, and the memory that long files take.

    python bench/bench_files.py speed --model DIR [--lines 256] [--tokens 32] [--rounds 3]
    python bench/bench_files.py memory --model DIR [--lines 100000] [--tokens 4] [--score]

speed: the same prompts through one generator, in turn by `Generator.complete` and as a file of
lines, read, answered and written as `fastdecode generate --input` does. memory: what the command
takes at its peak beyond what it takes for one line, each in a process of its own.
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
from pathlib import Path

from fastdecode_rdma import Generator, SamplingParams
from fastdecode_rdma.batch.files import LineSource, LineWriter
from fastdecode_rdma.batch.intake import Intake
from fastdecode_rdma.batch.job import DoneLines
from fastdecode_rdma.batch.line_pass import LinePass
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.progress import Counts, Progress
from fastdecode_rdma.batch.records import OwnLines
from fastdecode_rdma.batch.runner import BatchRun

TEXT = "The quick brown fox jumps over the lazy dog while it rains in the old town."


def prompt(number: int) -> str:
    """A prompt unlike those before it."""
    return f"{number} {TEXT[: 20 + number % 50]}"


def alone(gen: Generator, prompts: list[str], params: SamplingParams) -> float:
    """Tokens per second without files."""
    started = time.perf_counter()
    results = gen.complete(prompts, params)
    tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
    return tokens / (time.perf_counter() - started)


def by_file(gen: Generator, source: Path, params: SamplingParams, output: Path) -> float:
    """Tokens per second of a file."""
    started = time.perf_counter()
    lines = LineSource(str(source))
    writer = LineWriter(str(output), overwrite=True)
    intake = Intake(lines, lambda first: OwnLines(params, 0), DoneLines())
    counts = Counts(total=None)
    progress = Progress(counts, output_is_terminal=True)
    BatchRun(LinePass(gen, lines, intake, Output(writer, ordered=False), counts, progress)).run()
    for each in (intake, writer, lines):
        each.close()
    assert not counts.failed
    return counts.tokens / (time.perf_counter() - started)


def speed(args: argparse.Namespace, folder: Path) -> None:
    """Prints medians of both, and their ratio."""
    prompts = [prompt(number) for number in range(args.lines)]
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"engine": [], "file": []}
    with Generator.from_pretrained(args.model, max_num_seqs=args.max_num_seqs) as gen:
        alone(gen, prompts[:8], params)
        for _ in range(args.rounds):
            rates["engine"].append(alone(gen, prompts, params))
            rates["file"].append(by_file(gen, source, params, folder / "out.jsonl"))
    for name, values in rates.items():
        shown = " ".join(f"{value:.0f}" for value in values)
        print(f"{name:8}{statistics.median(values):10.1f} tokens/s   ({shown})")
    pairs = zip(rates["file"], rates["engine"], strict=True)
    print(f"file / engine, median of rounds: {statistics.median(a / b for a, b in pairs):.3f}")


def peak_bytes(command: list[str]) -> tuple[int, float]:
    """The largest resident set of a command, and its seconds."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{command} failed with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss << 10, time.perf_counter() - started


def memory(args: argparse.Namespace, folder: Path) -> None:
    """Prints the peaks for one line and for all."""
    kind = "score" if args.score else "generate"
    peaks = {}
    for count in (1, args.lines):
        source, out = folder / f"in-{count}.jsonl", folder / f"out-{count}.jsonl"
        with source.open("w") as file:
            for number in range(count):
                line = {"text" if args.score else "prompt": prompt(number), "id": f"id {number}"}
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "fastdecode_rdma.cli", kind, "--model", args.model]
        command += ["-i", str(source), "-o", str(out)]
        command += [] if args.score else ["--max-tokens", str(args.tokens)]
        peaks[count], seconds = peak_bytes(command)
        with out.open("rb") as file:
            assert sum(1 for _ in file) == count
        print(f"{count:8} lines: {peaks[count] / 2**20:8.0f} MiB at the peak, {seconds:.1f} s")
    print(f"beyond one line: {(peaks[args.lines] - peaks[1]) / 2**20:.0f} MiB")


def main() -> int:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--lines", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--score", action="store_true", help="memory: score lines")
    args = parser.parse_args()
    is_speed = args.what == "speed"
    args.lines = args.lines or (256 if is_speed else 100_000)
    args.tokens = args.tokens or (32 if is_speed else 4)
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
        (speed if is_speed else memory)(args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
