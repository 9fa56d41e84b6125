"""Small tasks of the lm-evaluation-harness, made of local files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when `datasets` is imported

DOCS = [
    {
        "question": "The capital of France is",
        "choices": ["Paris", "London", "the moon"],
        "gold": 0,
        "text": "Once upon a time there was a little girl who lived near the forest.",
    },
    {
        "question": "Two plus two is ",  # the space belongs to the answer
        "choices": ["five", "four", "a yellow banana"],
        "gold": 1,
        "text": "The quick brown fox jumps over the lazy dog. " * 12,
    },
    {
        "question": "The sun rises in the",
        "choices": ["east", "west"],
        "gold": 0,
        "text": "Ünïcödé and 😀 are text, too.",
    },
]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
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
        "doc_to_text": "{{question}}",
        "doc_to_target": " Paris",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tasks fd_choice, fd_rolling and fd_answer."""
    path = tmp_path_factory.mktemp("tasks")
    data = path / "data.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(path / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
    }
    for name, task in TASKS.items():
        (path / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"fd_{name}", **common, **task}))
    return path


@pytest.fixture(scope="session")
def evaluate(task_dir: Path) -> Callable[..., dict[str, Any]]:
    """Runs tasks of ours: lm_eval.simple_evaluate without the harness's own tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_dir), include_defaults=False)

    def run(model: object, tasks: list[str], **options: Any) -> dict[str, Any]:
        return lm_eval.simple_evaluate(
            model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
        )

    return run
