"""Tests exercise the installed distribution (wheel or editable), never the bare checkout.

Fixtures here are shared by several rooms: real worker processes, small and real models.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != CHECKOUT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's own threads (transformers, the oracles) must give way to worker processes while they wait.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@dataclass
class WorkerProcess:
    """A real `fastdecode worker` on loopback."""

    process: subprocess.Popen[bytes]
    address: str

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start_workers(tmp_path: Path) -> Iterator[Callable[..., list[WorkerProcess]]]:
    """Starts worker processes; they end with the test."""
    started: list[WorkerProcess] = []

    def start(count: int, *, memory: str = "512MiB", threads: int = 1) -> list[WorkerProcess]:
        ready_files = []
        processes = []
        for _ in range(count):
            ready_files.append(tmp_path / f"ready{len(started) + len(processes)}")
            command = [sys.executable, "-m", "fastdecode_rdma.cli", "worker"]
            command += ["--listen", "127.0.0.1:0", "--memory", memory, "--threads", str(threads)]
            command += ["--ready-file", str(ready_files[-1])]
            processes.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL))
        mine = []
        for process, ready in zip(processes, ready_files, strict=True):
            deadline = time.monotonic() + 60
            while not (ready.exists() and ready.read_text().endswith("\n")):
                assert process.poll() is None, "the worker ended before it was ready"
                assert time.monotonic() < deadline, "the worker was not ready within 60 s"
                time.sleep(0.02)
            address = next(w for w in ready.read_text().split() if w.startswith("tcp://"))
            mine.append(WorkerProcess(process, address))
        started.extend(mine)
        return mine

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait(10)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, converted once into the user's cache."""
    from fastdecode_rdma.hub.demo_models import demo_model_dir

    return demo_model_dir("smollm2")


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    """Gemma 3 270M, converted once into the user's cache."""
    from fastdecode_rdma.hub.demo_models import demo_model_dir

    return demo_model_dir("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once per name) tiny random checkpoints with a byte-level tokenizer of 300 tokens."""
    made: dict[str, Path] = {}

    def make(name: str, **changes: object) -> Path:
        if name not in made:
            made[name] = _save_tiny(tmp_path_factory.mktemp(name), name.split("-")[0], changes)
        return made[name]

    return make


def _save_tiny(path: Path, family: str, changes: dict[str, object]) -> Path:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    common = {
        "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257,
        "pad_token_id": 258,
    }  # fmt: skip
    llama = {"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 16}
    families = {
        "llama": (transformers.LlamaConfig, llama),
        "gemma3": (
            transformers.Gemma3TextConfig,
            {**llama, "num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": 16},
        ),
        "opt": (
            transformers.OPTConfig,
            {"ffn_dim": 80, "word_embed_proj_dim": 48, "num_attention_heads": 3},
        ),
    }
    kind, own = families[family]
    config = kind(**{**common, **own, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight_name, parameter in model.named_parameters():
        if "norm" not in weight_name:
            # larger than the usual initialisation: logits spread, greedy choices have a margin
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    _save_byte_tokenizer(path)
    return path


def _save_byte_tokenizer(path: Path) -> None:
    """Byte-level BPE without merges: 256 bytes, then <s>, </s>, <pad>; ids up to 299 are unused."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
