"""FastDecodeLM beside lm-eval's own `hf` model in one process: metrics of three local tasks, times.

    HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1 python bench/bench_lm_eval.py --model DIR \
        --text alice29.txt [--docs 40] [--batch-size 8]

The tasks are made of the text's sentences: which of four second halves follows a first half
(multiple_choice), how probable five sentences are (loglikelihood_rolling), and the first words of a
greedy continuation (generate_until). Exit status 1 if a metric differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from bench_scoring import cut_into_sentences, halves
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from fastdecode_rdma.eval import FastDecodeLM

SAME = 1e-4
"""Of metrics, relative."""

TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{ends[gold]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "bleu"}, {"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, sentences: list[str], count: int) -> None:
    """Writes the documents and a YAML file for each task."""
    parts = [halves(sentence) for sentence in sentences]
    docs = [
        {
            "begin": parts[i][0],
            "ends": [parts[(i + 7 * k) % len(parts)][1] for k in range(4)],
            "gold": 0,
            "text": " ".join(sentences[i : i + 5]),
        }
        for i in range(count)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        made = {"task": f"fd_{name}", **common, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(made))


def evaluate(model: LM, task: str, manager: TaskManager) -> tuple[dict[str, float], float]:
    """Returns the metrics of a task, and how long it took."""
    started = time.perf_counter()
    found = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    metrics = {
        name.removesuffix(",none"): float(value)
        for name, value in found["results"][task].items()
        if name.endswith(",none") and "stderr" not in name
    }
    return metrics, time.perf_counter() - started


def main() -> int:
    """Prints a table of the metrics and the seconds of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--docs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8, help="of the harness's model")
    args = parser.parse_args()
    sentences = cut_into_sentences(args.text.read_text("latin-1"), args.docs + 5)
    theirs = get_model("hf").create_from_arg_obj(
        {"pretrained": args.model, "dtype": "float32"},
        {"batch_size": args.batch_size, "device": "cpu"},
    )
    ours = FastDecodeLM(args.model, kv_cache_dtype="fp32")  # as the other keeps it
    is_same = True
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
        write_tasks(Path(folder), sentences, args.docs)
        manager = TaskManager(include_path=folder, include_defaults=False)
        print(f"{'task':10}{'metric':18}{'ours':>14}{'hf':>14}")
        for name in TASKS:
            mine, my_s = evaluate(ours, f"fd_{name}", manager)
            other, other_s = evaluate(theirs, f"fd_{name}", manager)
            for metric, value in mine.items():
                print(f"{name:10}{metric:18}{value:14.7g}{other[metric]:14.7g}")
                is_same = is_same and abs(value - other[metric]) <= SAME * abs(other[metric])
            print(f"{name:10}{'seconds':18}{my_s:14.2f}{other_s:14.2f}{other_s / my_s:8.2f}x")
    ours.close()
    print("metrics are the same" if is_same else "metrics DIFFER")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
