"""Rotary tables against transformers', bit for bit, at short and at far positions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import load_model
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.rope import KINDS, ORIGINAL_LEN, RopeSpec, inv_freq, rope_table
from fastdecode_rdma.reference import ReferenceOps, reference_forward

LOGITS_ATOL = 2e-4
# Vectorised cos may differ in the last bit with the length of the row.
ONE_ULP = 2 * torch.finfo(torch.float32).eps

POSITIONS = (0, 1, 1000, 8192, 60000)
MAX_LEN = 65536
ORIGINAL = 8192
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 8.0,
    ORIGINAL_LEN: ORIGINAL,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        ORIGINAL_LEN: ORIGINAL,
    },
    "yarn": YARN,
    "yarn-attention_factor_1": YARN | {"attention_factor": 1.0},
    "yarn-attention_factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-mscale_alone": YARN | {"mscale": 0.707},
    "yarn-betas": YARN | {"beta_fast": 64, "beta_slow": 2},
    "yarn-not_truncated": YARN | {"truncate": False},
    "yarn-short": YARN | {"factor": 1.0},
    "yarn-conflict": YARN | {"factor": 4.0, ORIGINAL_LEN: 2048},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.01 * i for i in range(64)],
        "long_factor": [1.0 + 0.7 * i for i in range(64)],
        ORIGINAL_LEN: ORIGINAL,
    },
}
ROPES["longrope-attention_factor_1"] = ROPES["longrope"] | {"attention_factor": 1.0}
ROPES["longrope-factor"] = ROPES["longrope"] | {"factor": 16.0}
NEEDS_LENGTH = ("dynamic", "longrope")


def config_of(rope: dict, head_dim: int, **changes: object) -> LlamaConfig:
    """A tiny model; its stated length is the original one where the kind stretches it itself."""
    rope = dict(rope)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][: head_dim // 2]
    sizes = {
        "vocab_size": 101,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": ORIGINAL if rope["rope_type"] == "dynamic" else MAX_LEN,
        "rope_parameters": rope,
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaConfig(**(sizes | changes))


def freeze(rotary: LlamaRotaryEmbedding, max_len: int) -> None:
    """Fixes the frequencies for sequences of max_len, as a loaded model does."""
    config = rotary.config
    kind = config.rope_parameters["rope_type"]
    if kind in NEEDS_LENGTH:
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=max_len)
        rotary.rope_type, rotary.inv_freq = "frozen", frequencies


def test_every_kind_is_compared_here():
    assert {name.split("-")[0] for name in ROPES} == KINDS.keys()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_match_transformers(rope, head_dim):
    hf = config_of(rope, head_dim)
    spec = ModelConfig.from_hf(hf.to_dict()).ropes[0]
    rotary = LlamaRotaryEmbedding(hf)
    max_len = 60001
    freeze(rotary, max_len)
    assert torch.equal(inv_freq(spec, max_len), rotary.inv_freq)
    assert spec.attention_factor == rotary.attention_scaling
    table = rope_table(spec, max_len)
    assert table.cos.shape == (max_len, head_dim // 2) and table.cos.is_contiguous()
    for position in POSITIONS:
        cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
        for ours, theirs in ((table.cos, cos), (table.sin, sin)):
            torch.testing.assert_close(
                ours[position], theirs[0, 0, : head_dim // 2], atol=ONE_ULP, rtol=0
            )


@pytest.mark.parametrize("kind", NEEDS_LENGTH)
def test_up_to_the_original_length_every_sequence_is_as_in_transformers(kind):
    hf = config_of(ROPES[kind], 64)
    spec = ModelConfig.from_hf(hf.to_dict()).ropes[0]
    rotary = LlamaRotaryEmbedding(hf)  # not frozen: it follows the length of each sequence
    table = rope_table(spec, ORIGINAL)
    for last in (5, ORIGINAL - 1):
        cos, _ = rotary(torch.zeros(1), torch.arange(last + 1)[None])
        torch.testing.assert_close(table.cos[: last + 1], cos[0, :, :32], atol=ONE_ULP, rtol=0)


@pytest.mark.parametrize("kind", NEEDS_LENGTH)
def test_beyond_it_the_loaded_length_decides_for_all_sequences(kind):
    spec = ModelConfig.from_hf(config_of(ROPES[kind], 64).to_dict()).ropes[0]
    short, long = inv_freq(spec, ORIGINAL), inv_freq(spec, ORIGINAL + 1)
    assert torch.equal(short, inv_freq(spec, 1))
    assert not torch.equal(short, long)
    assert torch.equal(long, inv_freq(spec, MAX_LEN)) == (kind == "longrope")


@pytest.mark.parametrize("kind", NEEDS_LENGTH)
def test_the_choice_is_told(kind, make_hf, save, caplog):
    path = save(make_hf(config_of(ROPES[kind], 16)))
    with caplog.at_level("INFO", "fastdecode_rdma"):
        load_model(path, ReferenceOps(), max_model_len=ORIGINAL)
        assert not caplog.messages
        load_model(path, ReferenceOps(), max_model_len=ORIGINAL + 1)
    assert f"'{kind}'" in caplog.text and f"max_model_len={ORIGINAL}" in caplog.text


@pytest.mark.parametrize("kind", [name for name in ROPES if name in KINDS])
def test_logits_at_far_positions(kind, make_hf, save, hf_logits):
    """An ignored rope scaling passes short tests and fails at long contexts only."""
    model = make_hf(config_of(ROPES[kind], 16))
    path = save(model)
    ids = torch.arange(3, 15)
    for first in (0, 1000, 8192 - len(ids), 60000):
        max_len = first + len(ids)
        freeze(model.model.rotary_emb, max_len)
        ours = load_model(path, ReferenceOps(), max_model_len=max_len)
        got = reference_forward(ours, ids, first_position=first)
        expected = hf_logits(model, ids, first)
        torch.testing.assert_close(got, expected, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("kind", [name for name in ROPES if name in KINDS and name != "default"])
def test_a_kind_that_is_ignored_shows_in_the_logits(kind, make_hf, save):
    """The comparison above can fail: without its kind a model says something else."""
    model = make_hf(config_of(ROPES[kind], 16))
    plain = {"rope_type": "default", "rope_theta": ROPES[kind]["rope_theta"]}
    ids = torch.randint(3, 101, (300,), generator=torch.Generator().manual_seed(0))
    options = {"max_model_len": MAX_LEN}
    scaled = load_model(save(model), ReferenceOps(), **options)
    unscaled = load_model(
        save(model, rope_parameters=plain, max_position_embeddings=MAX_LEN),
        ReferenceOps(),
        **options,
    )
    difference = reference_forward(scaled, ids) - reference_forward(unscaled, ids)
    assert difference.abs().max() > 100 * LOGITS_ATOL


def test_old_checkpoint_spelling_gives_the_same_logits(make_hf, save):
    """rope_theta and rope_scaling at the top, as before transformers 5, "type" included."""
    model = make_hf(config_of(ROPES["llama3"], 16))
    new = save(model)
    scaling = {key: value for key, value in ROPES["llama3"].items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = save(model, rope_parameters=None, rope_scaling=scaling, rope_theta=500000.0)
    ids = torch.arange(3, 83)
    got = [reference_forward(load_model(path, ReferenceOps()), ids) for path in (new, old)]
    assert torch.equal(*got)


def test_attention_factor_scales_both_tables():
    plain = rope_table(RopeSpec(16), 50)
    scaled = rope_table(RopeSpec(16, attention_factor=1.5), 50)
    assert torch.equal(scaled.cos, plain.cos * 1.5)
    assert torch.equal(scaled.sin, plain.sin * 1.5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rot_dim": 16, "kind": "mrope"}, "rope type 'mrope' is not supported"),
        ({"rot_dim": 15}, "must be even, got 15"),
        ({"rot_dim": 16, "theta": float("nan")}, "rope_theta must be positive"),
        ({"rot_dim": 16, "attention_factor": 0.0}, "attention_factor must be positive"),
        ({"rot_dim": 16, "kind": "linear"}, r"lacks its parameters \['factor'\]"),
        ({"rot_dim": 16, "kind": "linear", "params": (("factor", 0.0),)}, "factor must be pos"),
        (
            {"rot_dim": 4, "kind": "longrope", "params": (("short_factor", (1.0, -2.0)),)},
            "short_factor must be positive, got -2.0",
        ),
        (
            {"rot_dim": 16, "kind": "longrope", "params": (("short_factor", (1.0,)),)},
            "short_factor must hold 8 numbers, one per frequency, got 1",
        ),
    ],
)
def test_bad_specs_raise(spec, message):
    with pytest.raises(ConfigError, match=message):
        RopeSpec(**spec)


def test_parameters_that_leave_no_frequencies_raise():
    llama3 = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, ORIGINAL_LEN: 8192}
    with pytest.raises(ConfigError, match="low_freq_factor"):
        inv_freq(RopeSpec(16, kind="llama3", params=tuple(llama3.items())), 100)
    dynamic = (("factor", 2.0), (ORIGINAL_LEN, 50))
    with pytest.raises(ConfigError, match="above 2, got 2"):
        inv_freq(RopeSpec(2, kind="dynamic", params=dynamic), 100)
    yarn = {"factor": 8.0, "beta_fast": 32, "beta_slow": 1, "truncate": True, ORIGINAL_LEN: 8192}
    with pytest.raises(ConfigError, match=r"rope_theta above 1, got 0\.5"):
        inv_freq(RopeSpec(16, 0.5, kind="yarn", params=tuple(yarn.items())), 100)
