"""Tiny random checkpoints, saved by transformers itself, and its logits for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry
from fastdecode_rdma.engine.decode import DecodeBatch, DecodeRunner
from fastdecode_rdma.engine.prefill import PrefillItem, PrefillJob
from fastdecode_rdma.models import DecoderModel, load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.worker.kvcache import MemoryBudget

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="module")
def tiny_matrices(one_thread: None) -> None:
    """All models here are."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_hf() -> Callable[..., torch.nn.Module]:
    """Builds a transformers model from a config, with weights that make every part matter.

    The usual initialisation (norms at 1, biases at 0, everything else small) hides a norm, a bias
    or a rotation that is left out.
    """

    def build(config: object, *, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                centre = 0.0 if "gemma" in config.model_type else 1.0
                torch.nn.init.normal_(parameter, mean=centre, std=0.2)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.12)
        return model

    return build


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a transformers model as a checkpoint directory; edits its config.json if asked."""

    def write(model: torch.nn.Module, *, shards: bool = False, **edits: object) -> Path:
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path, max_shard_size="40KB" if shards else "5GB")
        assert (path / "model.safetensors.index.json").exists() == shards
        config = json.loads((path / "config.json").read_text()) | edits
        (path / "config.json").write_text(json.dumps(config))
        return path

    return write


@pytest.fixture(scope="session")
def hf_logits() -> Callable[..., torch.Tensor]:
    """Returns transformers' logits [T, V] of one sequence that starts at a position."""

    def run(model: torch.nn.Module, ids: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        positions = torch.arange(first_position, first_position + len(ids))
        with torch.no_grad():
            return model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[
                0
            ]

    return run


class DecodePath:
    """A model on the CPU's ops with one embedded worker, run by the engine's own steps."""

    def __init__(self, path: Path, ops: CpuOps | None = None) -> None:
        ops = CpuOps(num_threads=1, deterministic=True) if ops is None else ops
        self.model: DecoderModel = load_model(path, ops)
        config = self.model.config
        geometry = AttentionGeometry(
            groups=config.kv_groups,
            scale=config.scale,
            softcap=config.attn_softcap,
            kv_dtype="fp32",
            max_rows=8,
            max_model_len=config.max_model_len,
        )
        worker = LocalWorker(geometry, MemoryBudget(1 << 28), num_threads=ops.num_threads)
        self.backend = AttentionBackend([worker], geometry)

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> torch.Tensor:
        """Logits after every token of a prefilled prompt and of forced decode steps, [T, V]."""
        job = PrefillJob(
            self.model, self.backend, [PrefillItem((1,), 0, np.asarray(prompt, np.int64))]
        )
        for _ in job.cells(1):
            pass
        assert job.hidden is not None
        logits = [self.model.logits(job.hidden).clone()]
        runner = DecodeRunner(self.model, self.backend)
        for position, token in enumerate(forced, start=len(prompt)):
            entries = np.array([(1, position, 1, 0)], ENTRY_DTYPE)
            rows = (torch.tensor([int(token)]), torch.tensor([position]))
            batch = DecodeBatch([], [], [(0, entries)], *rows, [0])
            logits.append(runner.run(batch, 0, position + 1)[0].clone())
        self.backend.free(0, [1])
        return torch.cat(logits)


@pytest.fixture
def decode_path() -> Iterator[Callable[..., DecodePath]]:
    """Builds decode paths and closes them."""
    made: list[DecodePath] = []

    def make(path: Path, ops: CpuOps | None = None) -> DecodePath:
        made.append(DecodePath(path, ops))
        return made[-1]

    yield make
    for path in made:
        path.backend.close()


@pytest.fixture
def widen(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Turns a transformers model to float64, its fp32 islands (norms, softmax) included.

    Rotary tables stay fp32, which is what both sides define them to be.
    """

    def convert(model: torch.nn.Module) -> torch.nn.Module:
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(
            torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim)
        )

        def plain_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            mean = x.pow(2).mean(-1, keepdim=True)
            return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

        def offset_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return self._norm(x) * (1.0 + self.weight)

        for kind in {type(module) for module in model.modules()}:
            if kind.__name__.endswith("RMSNorm"):
                norm = offset_norm if hasattr(kind, "_norm") else plain_norm
                monkeypatch.setattr(kind, "forward", norm)
        return model.double()

    return convert
