"""The split at attention: what an engine may rely on, for every family."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    SmolLM3Config,
)

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.reference import ReferenceOps, attention, reference_forward

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=80, num_key_value_heads=2),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        intermediate_size=80,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "granite": GraniteConfig(
        **SIZES,
        intermediate_size=80,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=6.0,
    ),
    "olmo2": Olmo2Config(**SIZES, intermediate_size=80, num_key_value_heads=2, pad_token_id=0),
    "phi3": Phi3Config(**SIZES, intermediate_size=80, num_key_value_heads=2, pad_token_id=0),
    "smollm3": SmolLM3Config(
        **SIZES,
        intermediate_size=80,
        num_key_value_heads=2,
        no_rope_layers=[0, 1, 1, 0],
        pad_token_id=0,
    ),
    "opt": OPTConfig(**SIZES, ffn_dim=80, max_position_embeddings=64),
    "opt_norm_after": OPTConfig(
        **SIZES,
        ffn_dim=80,
        max_position_embeddings=64,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
    ),
}
IDS = torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(5))

# fp32 sums of at most 80 terms through 4 layers, logits of order 10.
FP32_ATOL = 2e-4


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, make_hf, save):
    return save(make_hf(CONFIGS[request.param]))


class RecordingOps(ReferenceOps):
    """Counts calls, and returns every result without `out` in memory that the next call spoils.

    That is the liberty the interface gives ops; a model that leans on a stale workspace yields NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._workspaces: dict[str, torch.Tensor] = {}

    def _spoil(self, name: str) -> None:
        self.calls.append(name)
        if name in self._workspaces:
            self._workspaces.pop(name).fill_(float("nan"))

    def _keep(self, name: str, result: torch.Tensor) -> torch.Tensor:
        self._workspaces[name] = result
        return result

    def linear(self, x, linear, *, out=None):
        result = super().linear(x, linear)  # reads x before its workspace is spoiled
        self._spoil("linear")
        return self._keep("linear", result) if out is None else out.copy_(result)

    def linear_add_(self, x, linear, residual):
        self.calls.append("linear_add_")
        return residual.add_(super().linear(x, linear))

    def rms_norm(self, x, weight, eps, *, unit_offset=False, out=None):
        result = super().rms_norm(x, weight, eps, unit_offset=unit_offset)
        self._spoil("norm")
        return self._keep("norm", result) if out is None else out.copy_(result)

    def add_rms_norm(self, x, y, weight, eps, *, unit_offset=False, out=None):
        return self.rms_norm(x.add_(y), weight, eps, unit_offset=unit_offset, out=out)

    def layer_norm(self, x, weight, bias, eps, *, out=None):
        result = super().layer_norm(x, weight, bias, eps)
        self._spoil("norm")
        return self._keep("norm", result) if out is None else out.copy_(result)

    def act_mul(self, gate_up, activation, *, out=None):
        result = super().act_mul(gate_up, activation)
        self._spoil("act_mul")
        return self._keep("act_mul", result) if out is None else out.copy_(result)

    def act(self, x, activation):
        self.calls.append("act")
        return super().act(x, activation)

    def add_(self, x, y):
        self.calls.append("add_")
        return super().add_(x, y)

    def scale_(self, x, factor):
        self.calls.append("scale_")
        return super().scale_(x, factor)

    def qkv_rows(self, qkv, *args, **kwargs):
        self.calls.append("qkv_rows")
        return super().qkv_rows(qkv, *args, **kwargs)


def test_models_never_read_a_stale_workspace(checkpoint):
    expected = reference_forward(load_model(checkpoint, ReferenceOps()), IDS)
    got = reference_forward(load_model(checkpoint, RecordingOps()), IDS)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_few_ops_per_layer(checkpoint):
    """Between two attentions nothing runs but a handful of op calls."""
    ops = RecordingOps()
    model = load_model(checkpoint, ops)
    positions = torch.arange(2)
    x = model.embed(IDS[:2], positions)
    rows = torch.empty(2, model.kv_groups()[0].row_width)
    ops.calls.clear()
    model.pre_attention(0, x, positions, rows)
    assert ops.calls in (
        ["norm", "linear", "qkv_rows"],
        ["norm", "linear"],  # no positions
        ["linear"],
        ["linear", "norm", "norm", "qkv_rows"],  # norms of q and k over all heads together
    )
    ops.calls.clear()
    model.post_attention(0, x, torch.ones(2, model.kv_groups()[0].out_width))
    assert len(ops.calls) <= 8


def test_one_row_at_a_time_gives_the_same_logits(checkpoint):
    """Decoding: single rows at explicit positions over K/V kept aside equal the whole prompt."""
    model = load_model(checkpoint, ReferenceOps())
    groups = {layer: group for group in model.kv_groups() for layer in group.layers}
    cached = {layer: [] for layer in groups}
    logits = []
    for position, token in enumerate(IDS):
        at = torch.tensor([position])
        x = model.embed(token[None], at)
        for layer, group in sorted(groups.items()):
            rows = torch.empty(1, group.row_width)
            model.pre_attention(layer, x, at, rows)
            heads = rows.view(-1, group.head_dim)
            q, kv = heads[: group.num_q_heads], heads[group.num_q_heads :]
            cached[layer].append(kv)
            k, v = torch.stack(cached[layer]).chunk(2, dim=1)
            out = attention(q[None], k, v, scale=model.scale, window=group.window)
            x = model.post_attention(layer, x, out.flatten(1).float())
        logits.append(model.logits(x).clone())
    torch.testing.assert_close(
        torch.cat(logits), reference_forward(model, IDS), atol=FP32_ATOL, rtol=0
    )


def test_the_fast_ops_agree_with_the_oracle(checkpoint):
    oracle = reference_forward(load_model(checkpoint, ReferenceOps(torch.float64)), IDS)
    got = reference_forward(load_model(checkpoint, CpuOps()), IDS)
    torch.testing.assert_close(got.double(), oracle, atol=FP32_ATOL, rtol=0)


def test_embeddings_are_memory_of_their_own(checkpoint):
    model = load_model(checkpoint, ReferenceOps())
    first = model.embed(IDS[:3], torch.arange(3))
    kept = first.clone()
    model.embed(IDS[3:6], torch.arange(3)).fill_(7.0)
    assert torch.equal(first, kept)
    first.fill_(9.0)
    assert torch.equal(model.embed(IDS[:3], torch.arange(3)), kept)


def test_max_model_len_bounds_the_tables(checkpoint):
    model = load_model(checkpoint, ReferenceOps(), max_model_len=10)
    assert reference_forward(model, IDS[:10]).shape == (10, 96)
    with pytest.raises(IndexError):
        reference_forward(model, IDS[:11])
    with pytest.raises(ConfigError, match="max_model_len"):
        load_model(checkpoint, ReferenceOps(), max_model_len=0)


def test_scales_of_one_cost_nothing(make_hf, save):
    """Multipliers are ops of their own only where a model has them."""
    calls = {}
    for scale in (1.0, 0.22):
        config = GraniteConfig(**SIZES, intermediate_size=80, residual_multiplier=scale)
        model = load_model(save(make_hf(config)), ops := RecordingOps())
        x = model.embed(IDS[:2], torch.arange(2))
        ops.calls.clear()
        model.logits(model.post_attention(0, x, torch.ones(2, model.kv_groups()[0].out_width)))
        calls[scale] = list(ops.calls)
    assert "scale_" not in calls[1.0] and calls[0.22].count("scale_") == 2
