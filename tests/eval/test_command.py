"""`fastdecode lm-eval`: the harness's command line with our model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdecode_rdma import cli
from fastdecode_rdma.eval import arguments


def test_a_run_by_command_line(
    tiny_models: Callable[..., Path],
    start_workers: Callable[..., list[Any]],
    task_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Arguments as users write them; the device and the batch size come from the harness."""
    import lm_eval.tasks

    # its own thousands of tasks take a quarter of a minute to look through
    only_ours = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_ours)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # what it sets is taken back
    monkeypatch.setattr(arguments, "_told", set())
    workers = ";".join(worker.address for worker in start_workers(2, memory="64MiB"))
    before = list(sys.argv)
    command = [
        "lm-eval", "run", "--model", "fastdecode",
        "--model_args", f"pretrained={tiny_models('llama')},max_length=256,workers={workers}",
        "--tasks", "fd_choice,fd_answer", "--include_path", str(task_dir),
        "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    assert cli.main(command) == 0
    table = capsys.readouterr().out.replace(" ", "")
    assert "|fd_answer|" in table and "exact_match" in table and "acc_norm" in table
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"].keys() == {"fd_choice", "fd_answer"}
    assert len(list((tmp_path / "out").rglob("samples_fd_*.jsonl"))) == 2
    told = [r.getMessage() for r in caplog.records if r.name == "fastdecode_rdma.eval.arguments"]
    assert sum("batch_size=1 is ignored" in text for text in told) == 1
    if not torch.cuda.is_available():
        assert sum("a CUDA device is not there" in text for text in told) == 1
    assert sys.argv == before


def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["lm-eval"]) == 2
    assert capsys.readouterr().err == (
        "fastdecode: error: lm-eval needs a subcommand: run, ls or validate\n"
    )
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "run"]) == 2
    error = capsys.readouterr().err
    assert "install it with `pip install 'fastdecode_rdma[eval]'`" in error
    assert error.count("\n") == 1
