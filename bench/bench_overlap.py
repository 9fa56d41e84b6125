"""What two mini-batches in flight gain, by real work: dense layers here, attention in a worker.

    python bench/bench_overlap.py [--model DIR] [--batch 64] [--steps 40] [--json F]

Apart: the engine has one core, the worker another, and the context is as long as makes the worker's
kernel (R) take as much processor time as all the engine does (S: layers, head, sampling, Python).
A step with two mini-batches should then take little more than the longer of the two; the step with
one mini-batch, which takes their sum, is beside it. Shared: engine and worker have the same cores,
with as many threads each, where overlap can gain little; what counts is that the automatic choice
is as good as the better of one and two.

Without --model, a random model with the proportions of Llama-2-7B is made: 2 % of its work is the
head, which no attention overlaps with. Exit status 0 only if both hold.
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

OVERLAP_LIMIT = 1.15
CHOICE_LIMIT = 0.98
SAMPLES = 16
"""Sequences of one prompt: they share its prefill, and each reads all of it in every step."""
PROPORTIONS = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 16384, "tie_word_embeddings": False,
}  # fmt: skip


def make_model(directory: Path) -> Path:
    """Saves a random Llama of Llama-2-7B's proportions."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**PROPORTIONS)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def start_worker(directory: Path, cores: set[int]) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a worker on those cores; returns it with its address."""
    ready = directory / f"ready-{min(cores)}-{len(cores)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fastdecode_rdma.cli", "worker", "--listen", "127.0.0.1:0",
         "--memory", "2GiB", "--no-touch", "--threads", str(len(cores)),
         "--ready-file", str(ready)],
        stdout=subprocess.DEVNULL, cwd=directory,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not ready.exists() or not ready.read_text().endswith("\n"):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError("the worker did not become ready")
        time.sleep(0.05)
    address = next(word for word in ready.read_text().split() if word.startswith("tcp://"))
    return process, address.removeprefix("tcp://")  # the best way that works


def processor_s(pid: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Rig:
    """A generator in this process and its worker; runs decode steps and says what they took."""

    def __init__(self, spec: dict) -> None:
        from fastdecode_rdma import Generator
        from fastdecode_rdma.engine.mini_batches import MiniBatchChooser

        self.make_chooser = MiniBatchChooser
        self.batch, self.steps, self.worker_pid = spec["batch"], spec["steps"], spec["worker_pid"]
        self.gen = Generator.from_pretrained(
            spec["model"], workers=[spec["address"]], max_num_seqs=self.batch,
            max_model_len=spec["max_model_len"],
        )  # fmt: skip

    def run(self, parts: int | None, context: int, steps: int | None = None) -> dict[str, float]:
        """Returns seconds per step with so many mini-batches (None: as chosen) at that context."""
        from fastdecode_rdma import SamplingParams

        steps = steps or self.steps
        engine = self.gen._parts.engine
        engine.chooser = self.make_chooser(fixed=parts, most=2, can_overlap=True)
        samples = min(SAMPLES, self.batch)
        prompts = [
            [2 + (17 * i + 31 * j) % 1000 for j in range(max(1, context - steps // 2))]
            for i in range(self.batch // samples)
        ]
        params = SamplingParams(
            n=samples, max_tokens=steps + 2, temperature=0.8, seed=0, ignore_eos=True
        )
        seen: set[tuple[int, int]] = set()
        before = after = None
        for event in self.gen.generate(prompts, params):
            seen.add((event.request_index, event.sample_index))
            if before is None and len(seen) == samples * len(prompts):
                before = self._snapshot()
            if event.finish_reason is not None and after is None:
                after = self._snapshot()
        assert before is not None and after is not None
        took = {name: after[name] - before[name] for name in before}
        count = took.pop("steps")
        result = {name: seconds / count for name, seconds in took.items()}
        result["S"] = result["step"] - result["wait"]
        return result | {"steps": count, "chosen": engine.chooser.current}

    def _snapshot(self) -> dict[str, float]:
        stats, counters = self.gen.stats(), self.gen._parts.engine.counters
        return {
            "steps": stats.steps,
            "step": counters.step_s - stats.prefill_s,
            "wait": stats.wait_s,
            "dense": stats.dense_s,
            "R": max(worker.kernel_s for worker in stats.workers),
            "engine_cpu": time.process_time(),
            "worker_cpu": processor_s(self.worker_pid),
        }


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def run_apart(rig: Rig, rounds: int) -> dict[str, object]:
    """Finds the context at which R = S, then measures one and two mini-batches in turn."""
    context, longest = 512, rig.gen.max_model_len - 2 * rig.steps
    for _ in range(4):  # R grows about in proportion to the context, S hardly does
        tried = rig.run(2, context)
        if 0.97 < tried["R"] / tried["S"] < 1.03:
            break
        context = max(32, min(round(context * tried["S"] / tried["R"]), longest))
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for parts in (1, 2):
            runs[parts].append(rig.run(parts, context))
    one, two = median_of(runs[1]), median_of(runs[2])
    ratio = two["step"] / max(two["S"], two["R"])
    return {"context": context, "one": one, "two": two, "ratio": ratio}


def run_shared(rig: Rig, rounds: int, context: int) -> dict[str, object]:
    """Measures one, two and the automatic number of mini-batches in turn."""
    runs: dict[str, list[dict[str, float]]] = {"one": [], "two": [], "auto": []}
    for _ in range(rounds):
        for name, parts in (("one", 1), ("two", 2), ("auto", None)):
            runs[name].append(rig.run(parts, context, 4 * rig.steps))
    result = {name: median_of(mine) for name, mine in runs.items()}
    best = min(result["one"]["step"], result["two"]["step"])
    return {"context": context, **result, "ratio": best / result["auto"]["step"]}


def child(spec: dict) -> None:
    """In a process of its own, on the cores that it inherited."""
    rig = Rig(spec)
    try:
        if spec["apart"]:
            result = run_apart(rig, spec["rounds"])
        else:
            result = run_shared(rig, spec["rounds"], spec["context"])
    finally:
        rig.gen.close()
    print(json.dumps(result), flush=True)


def in_child(spec: dict, cores: set[int]) -> dict:
    """Runs `child` with as many threads as it has cores."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(spec)], stdout=subprocess.PIPE, check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, model: Path, directory: Path, *, context: int = 0) -> dict:
    """One case: apart when no context is given, else shared."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    engine_cores, worker_cores = (set(cores),) * 2 if context else ({cores[0]}, {cores[1]})
    worker, address = start_worker(directory, worker_cores)
    try:
        spec = {
            "model": str(model), "address": address, "worker_pid": worker.pid,
            "batch": args.batch, "steps": args.steps, "rounds": args.rounds,
            "max_model_len": args.max_model_len, "apart": not context, "context": context,
        }  # fmt: skip
        return in_child(spec, engine_cores)
    finally:
        worker.terminate()
        worker.wait(10)


def row(name: str, run: dict[str, float]) -> str:
    figures = ("step", "S", "R", "dense", "wait", "engine_cpu", "worker_cpu")
    return f"  {name:8}" + "".join(f"{run[figure] * 1e3:12.2f}" for figure in figures)


HEADER = f"  {'ms/step':8}" + "".join(
    f"{name:>12}" for name in ("step", "S", "R", "dense", "wait", "engine cpu", "worker cpu")
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model directory (default: made, see above)")
    parser.add_argument("--batch", type=int, default=64, help="sequences (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    if args.batch % SAMPLES and args.batch > SAMPLES:
        parser.error(f"--batch must be a multiple of {SAMPLES}, or less")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("this takes two cores")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = (args.model or make_model(directory / "model")).absolute()
        apart = measure(args, model, directory)
        print(f"{model.name}, batch {args.batch}, context {apart['context']}")
        print("engine and worker on a core each: engine cpu and worker cpu include polling")
        print(HEADER, row("one", apart["one"]), row("two", apart["two"]), sep="\n")
        holds = apart["ratio"] <= OVERLAP_LIMIT
        print(
            f"  two: step = {apart['ratio']:.3f} max(S, R), at most {OVERLAP_LIMIT}: "
            f"{'holds' if holds else 'FAILS'}; {apart['one']['step'] / apart['two']['step']:.2f}x "
            "faster than one"
        )
        shared = measure(args, model, directory, context=apart["context"])
        print("engine and worker on the same two cores, two threads each")
        print(HEADER, *(row(name, shared[name]) for name in ("one", "two", "auto")), sep="\n")
        is_as_good = shared["ratio"] >= CHOICE_LIMIT
        print(
            f"  auto (chose {shared['auto']['chosen']:g}): {shared['ratio']:.3f} of the better, "
            f"at least {CHOICE_LIMIT}: {'holds' if is_as_good else 'FAILS'}"
        )
    if args.json:
        args.json.write_text(json.dumps({"apart": apart, "shared": shared}, indent=1))
    return 0 if holds and is_as_good else 1


if __name__ == "__main__":
    sys.exit(main())
