"""Decode throughput of this library beside transformers, llama.cpp and the GEMM-only floor.

    python bench/bench_decode.py --model DIR [--gguf FILE] [--batch 1,8,32,128] [--json F]

Every contender is a process of its own (thread pools of two libraries in one process would fight),
kept alive; the parent runs them in turn, round by round, so that a noisy machine hurts all alike,
and reports medians. Tokens/s count from the moment when every sequence has its first token
(decoding alone) to the last one. The floor multiplies the model's own weight matrices, all layers,
by the batch, and does nothing else: with the fastest of torch's and numpy's BLAS per shape
("floor"), and with this library's packed kernel ("packed GEMM").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

PROMPT_TOKENS = 32
NEW_TOKENS = 48
PAUSE_S = 0.5  # threads of the contender before may still spin for a while


def prompt_ids(index: int, vocab_size: int) -> list[int]:
    """A prompt of its own for every sequence: nothing to share."""
    return [100 + (index * 7919 + j * 104729) % (vocab_size - 200) for j in range(PROMPT_TOKENS)]


class Contender(ABC):
    """One system: `run` decodes a batch and returns its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @abstractmethod
    def run(self, batch: int) -> dict[str, float]:
        """Returns at least tokens_per_s."""

    def close(self) -> None:  # noqa: B027
        """Ends what was started."""


class Ours(Contender):
    """This library with an embedded worker."""

    workers: list[str] | None = None
    quantization: str | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from fastdecode_rdma import Generator

        self.gen = Generator.from_pretrained(
            args.model, workers=self.workers, max_model_len=1024, max_num_seqs=256,
            kv_cache_dtype=args.kv_cache_dtype, quantization=self.quantization,
        )  # fmt: skip

    def run(self, batch: int) -> dict[str, float]:
        from fastdecode_rdma import SamplingParams

        vocab = self.gen._encoder.vocab_size
        prompts = [prompt_ids(i, vocab) for i in range(batch)]
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        seen: set[int] = set()
        started, before = time.perf_counter(), self.gen.stats()
        first = tokens = 0
        for event in self.gen.generate(prompts, params):
            seen.add(event.request_index)
            if len(seen) == batch:
                if not first:
                    first, before = time.perf_counter(), self.gen.stats()
                    continue
                tokens += 1
        now = time.perf_counter()
        after = self.gen.stats()
        split = {
            name: getattr(after, name) - getattr(before, name)
            for name in ("dense_s", "attention_s", "transport_s", "python_s")
        }
        return {
            "tokens_per_s": tokens / (now - first),
            "end_to_end": batch * NEW_TOKENS / (now - started),
            **split,
        }

    def close(self) -> None:
        self.gen.close()


class OursInt8(Ours):
    """This library with an embedded worker and weights rounded to int8."""

    quantization = "int8"


class OursTcp(Ours):
    """This library with one worker process over TCP on loopback."""

    plane = "tcp"

    def __init__(self, args: argparse.Namespace) -> None:
        ready = Path(tempfile.mkdtemp()) / "ready"
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "fastdecode_rdma.cli", "worker", "--listen", "127.0.0.1:0",
             "--memory", "2GiB", "--ready-file", str(ready)],
            stdout=subprocess.DEVNULL, cwd=ready.parent,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not ready.exists() or not ready.read_text().endswith("\n"):
            if time.monotonic() > deadline or self.worker.poll() is not None:
                raise RuntimeError("the worker did not become ready")
            time.sleep(0.05)
        url = next(word for word in ready.read_text().split() if word.startswith("tcp://"))
        self.workers = [url.replace("tcp://", f"{self.plane}://")]
        super().__init__(args)

    def close(self) -> None:
        super().close()
        self.worker.terminate()
        self.worker.wait(10)


class OursShm(OursTcp):
    """This library with one worker process over shared memory."""

    plane = "shm"


class Transformers(Contender):
    """transformers.generate, greedy, static prompts of equal length."""

    dtype = "float32"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, self.dtype)
        ).eval()

    def run(self, batch: int) -> dict[str, float]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(
                self, ids: torch.Tensor, scores: torch.Tensor, **_: object
            ) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        vocab = self.model.config.get_text_config().vocab_size
        ids = torch.tensor([prompt_ids(i, vocab) for i in range(batch)])
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )  # fmt: skip
        return {
            "tokens_per_s": batch * (len(times) - 1) / (times[-1] - times[0]),
            "end_to_end": batch * NEW_TOKENS / (times[-1] - started),
        }


class TransformersBf16(Transformers):
    dtype = "bfloat16"


class LlamaCpp(Contender):
    """llama.cpp through the xllamacpp wheel: its server, a slot per sequence, Q4_1 weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.servers: dict[int, object] = {}

    def _server(self, batch: int) -> object:
        import xllamacpp as xlc

        if batch not in self.servers:
            self.servers.clear()
            params = xlc.CommonParams()
            params.model.path = self.args.gguf
            params.n_parallel = batch
            params.n_ctx = 256 * batch
            params.n_batch = 2048
            params.cpuparams.n_threads = os.cpu_count()
            params.warmup = True
            self.servers[batch] = xlc.Server(params)
        return self.servers[batch]

    def run(self, batch: int) -> dict[str, float]:
        server = self._server(batch)
        vocab = 40_000
        results: list[dict] = []
        started = time.perf_counter()

        def one(index: int) -> None:
            results.append(
                server.handle_completions(
                    {
                        "prompt": prompt_ids(index, vocab),
                        "max_tokens": NEW_TOKENS,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "cache_prompt": False,
                    }
                )
            )

        threads = [threading.Thread(target=one, args=(i,)) for i in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - started
        if len(results) != batch:
            raise RuntimeError(f"{batch - len(results)} completions failed")
        # all slots decode together after the prompts: the mean of the server's own decode times
        per_token_s = statistics.mean(r["timings"]["predicted_per_token_ms"] for r in results) / 1e3
        return {"tokens_per_s": batch / per_token_s, "end_to_end": batch * NEW_TOKENS / elapsed}


class Floor(Contender):
    """The model's matrices times the batch: the faster of torch and numpy for each shape."""

    backends = ("torch", "numpy")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from gemm_floor import GemmFloor  # beside this file

        self.floor = GemmFloor(args.model, self.backends)

    def run(self, batch: int) -> dict[str, float]:
        return {"tokens_per_s": self.floor.tokens_per_s(batch)}


class PackedFloor(Floor):
    """The same with this library's packed kernel."""

    backends = ("packed",)


CONTENDERS: dict[str, type[Contender]] = {
    "embedded": Ours,
    "embedded int8": OursInt8,
    "tcp": OursTcp,
    "shm": OursShm,
    "transformers fp32": Transformers,
    "transformers bf16": TransformersBf16,
    "llama.cpp": LlamaCpp,
    "floor": Floor,
    "packed GEMM": PackedFloor,
}


def serve(name: str, args: argparse.Namespace) -> None:
    """Child process: one JSON line in (the batch), one out (the figures)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    contender = CONTENDERS[name](args)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(contender.run(json.loads(line))), file=answers, flush=True)
    contender.close()


class Child:
    """The parent's side of a contender."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv, "--serve", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,

        )  # fmt: skip
        self.error = ""
        threading.Thread(target=self._drain, daemon=True).start()
        if self.process.stdout.readline().strip() != "ready":
            self.process.wait()
            time.sleep(0.2)
            raise RuntimeError(self.error.strip().splitlines()[-1] if self.error else "no answer")

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.error = (self.error + line)[-4000:]

    def run(self, batch: int) -> dict[str, float]:
        time.sleep(PAUSE_S)
        print(batch, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.error.strip().splitlines()[-1])
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the rounds, and the slowest and fastest round."""
    rates = [run["tokens_per_s"] for run in runs]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return medians | {"slowest": min(rates), "fastest": max(rates)}


def measure(args: argparse.Namespace, argv: list[str]) -> dict[str, dict[int, dict[str, float]]]:
    """Starts the contenders and runs them in turn; reports those that cannot run."""
    children: dict[str, Child] = {}
    for name in args.only or CONTENDERS:
        if name == "llama.cpp" and not args.gguf:
            print("llama.cpp: left out (--gguf FILE names the model)")
            continue
        try:
            children[name] = Child(name, argv)
        except RuntimeError as error:
            print(f"{name}: left out ({error})")
    results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in children}
    for batch in args.batch:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in children}
        for turn in range(args.rounds + 1):
            for name, child in children.items():
                figures = child.run(batch)
                if turn:  # the first is the warm-up
                    runs[name].append(figures)
        for name in children:
            results[name][batch] = median_of(runs[name])
        print_batch(batch, {name: results[name][batch] for name in children})
    for child in children.values():
        child.close()
    return results


def print_batch(batch: int, rows: dict[str, dict[str, float]]) -> None:
    load = os.getloadavg()[0]
    print(f"\nbatch {batch}   (load average {load:.2f}, {os.cpu_count()} cpus)")
    print(
        f"{'system':<18} {'tokens/s':>9} {'rounds':>15} {'end to end':>10} {'/ floor':>8} "
        f"{'/ hf':>6}   split"
    )
    floor = rows.get("floor", {}).get("tokens_per_s")
    hf = max((r["tokens_per_s"] for n, r in rows.items() if n.startswith("transf")), default=None)
    for name, row in rows.items():
        rate = row["tokens_per_s"]
        total = sum(row.get(f"{p}_s", 0.0) for p in ("dense", "attention", "transport", "python"))
        split = " ".join(
            f"{part} {row[f'{part}_s'] / total:.0%}"
            for part in ("dense", "attention", "transport", "python")
            if f"{part}_s" in row
        )
        print(
            f"{name:<18} {rate:>9.1f} {row['slowest']:>7.1f}-{row['fastest']:<7.1f} "
            f"{row.get('end_to_end', float('nan')):>10.1f} "
            f"{rate / floor if floor else float('nan'):>8.2f} "
            f"{rate / hf if hf else float('nan'):>6.2f}   {split}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--batch", default="1,8,32,128", help="batch sizes (1,8,32,128)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (3)")
    parser.add_argument("--only", help="contenders, comma-separated: " + ", ".join(CONTENDERS))
    parser.add_argument("--kv-cache-dtype", default="auto", help="of this library (auto)")
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args)
        return 0
    args.batch = [int(part) for part in args.batch.split(",")]
    args.only = args.only.split(",") if args.only else None
    argv = sys.argv[1:]
    results = measure(args, argv)
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {"load": os.getloadavg(), "cpus": os.cpu_count(), "results": results}, indent=1
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
