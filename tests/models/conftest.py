"""Tiny random checkpoints, saved by transformers itself, and its logits for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
                centre = 0.0 if "gemma3" in config.model_type else 1.0
                torch.nn.init.normal_(parameter, mean=centre, std=0.2)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.12)
        return model

    return build


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves a transformers model as a checkpoint directory; edits its config.json if asked."""

    def write(model: torch.nn.Module, *, shards: bool = False, **edits: object) -> Path:
        path = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
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

        def llama_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            mean = x.pow(2).mean(-1, keepdim=True)
            return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

        def gemma_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return self._norm(x) * (1.0 + self.weight)

        llama = transformers.models.llama.modeling_llama.LlamaRMSNorm
        gemma = transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm
        monkeypatch.setattr(llama, "forward", llama_norm)
        monkeypatch.setattr(gemma, "forward", gemma_norm)
        return model.double()

    return convert
