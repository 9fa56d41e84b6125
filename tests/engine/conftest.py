"""An engine's inner parts on an embedded worker, for tests that look inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Bench:
    """A model and one embedded worker, driven by hand."""

    def __init__(self, path: Path, *, kv_dtype: str = "fp32", max_rows: int = 64) -> None:
        self.model: DecoderModel = load_model(path, CpuOps(num_threads=2, deterministic=True))
        config = self.model.config
        self.geometry = AttentionGeometry(
            groups=config.kv_groups,
            scale=config.scale,
            softcap=config.attn_softcap,
            kv_dtype=kv_dtype,
            max_rows=max_rows,
            max_model_len=config.max_model_len,
        )
        self.worker = LocalWorker(self.geometry, MemoryBudget(1 << 30), num_threads=2)
        self.backend = AttentionBackend([self.worker], self.geometry)
        self.runner = DecodeRunner(self.model, self.backend)
        self.step = 0

    def prefill(self, prompts: dict[int, list[int]]) -> PrefillJob:
        """Prefills prompts by handle; returns the finished job."""
        items = [PrefillItem((h,), 0, np.asarray(ids, np.int64)) for h, ids in prompts.items()]
        job = PrefillJob(self.model, self.backend, items)
        self.step += 1
        for _ in job.cells(self.step):
            pass
        return job

    def batch(self, rows: list[tuple[int, int, list[int]]]) -> DecodeBatch:
        """A decode batch of (handle, cached tokens, new ids)."""
        entries = np.array([(h, length, len(ids), 0) for h, length, ids in rows], ENTRY_DTYPE)
        ids = [i for _, _, new in rows for i in new]
        positions = [n + j for _, n, new in rows for j in range(len(new))]
        last = list(np.cumsum([len(new) for _, _, new in rows]) - 1)
        return DecodeBatch([], [], [(0, entries)], torch.tensor(ids), torch.tensor(positions), last)

    def decode(self, rows: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """One step; the logits after the last id of each row, [len(rows), V]."""
        self.step += 1
        return self.runner.run(self.batch(rows), 0, self.step)[0].clone()

    def teacher_forced(self, prompt: list[int], forced: list[int]) -> torch.Tensor:
        """Logits after the prompt and after each forced id: [1 + len(forced), V]."""
        logits = [self.prefill({1: prompt}).logits[0]]
        for place, token in enumerate(forced):
            logits.append(self.decode([(1, len(prompt) + place, [token])])[0])
        self.backend.free(0, [1])
        return torch.stack(logits)


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Builds benches and closes them."""
    made: list[Bench] = []

    def make(path: Path, **options: object) -> Bench:
        made.append(Bench(path, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.backend.close()


@pytest.fixture(scope="session")
def hf_logits() -> Callable[[Path, list[int]], torch.Tensor]:
    """transformers' own logits [T, V] of a sequence: eager attention, fp32."""
    import transformers

    models: dict[Path, torch.nn.Module] = {}

    def run(path: Path, ids: list[int]) -> torch.Tensor:
        if path not in models:
            models[path] = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        with torch.inference_mode():
            return models[path](input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    return run
