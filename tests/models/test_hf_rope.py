"""Rotary embeddings as config files spell them, and what they say of the longest sequence."""

from __future__ import annotations

import math

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.rope import ORIGINAL_LEN

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "max_position_embeddings": 131072,
    ORIGINAL_LEN: 4096,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL_LEN: 1024}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def read(base=LLAMA, **changes):
    return ModelConfig.from_hf(base | changes)


def rope_of(base=LLAMA, **changes):
    return read(base, **changes).ropes[0]


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_both_spellings_mean_the_same(name):
    rope = {key: value for key, value in YARN.items() if key != "rope_type"} | {name: "yarn"}
    old = rope_of(rope_scaling=rope, rope_theta=5e5)
    new = rope_of(rope_parameters=rope | {"rope_theta": 5e5})
    assert old == new
    assert (old.kind, old.theta, old.param("factor")) == ("yarn", 5e5, 4.0)


def test_parameters_per_layer_type():
    gemma2 = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2}
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3},
        "sliding_attention": {"rope_type": "default"},
    }
    sliding, full = read(gemma2, rope_parameters=rope).ropes
    assert (full.kind, full.theta) == ("linear", 7e3)
    assert (sliding.kind, sliding.theta) == ("default", 1e4)


def test_original_length_beside_flat_parameters_wins_but_not_beside_nested_ones():
    assert rope_of(rope_scaling=YARN).param(ORIGINAL_LEN) == 1024
    assert rope_of(rope_scaling=YARN, **{ORIGINAL_LEN: 512}).param(ORIGINAL_LEN) == 512
    nested = {"full_attention": YARN}
    assert rope_of(rope_parameters=nested, **{ORIGINAL_LEN: 512}).param(ORIGINAL_LEN) == 1024
    absent = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of(rope_scaling=absent).param(ORIGINAL_LEN) == 4096


def test_an_explicit_factor_wins_over_the_ratio_of_lengths():
    config = read(rope_scaling=YARN, max_position_embeddings=40960)
    assert config.ropes[0].param("factor") == 4.0
    absent = {"rope_type": "yarn", ORIGINAL_LEN: 1024}
    assert rope_of(rope_scaling=absent).param("factor") == 4096 / 1024


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1),
        ({"attention_factor": 1.0}, 1.0),
        ({"attention_factor": 1}, 1.0),
        ({"attention_factor": None}, 0.1 * math.log(4.0) + 1),
        ({"attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 2.0}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4.0) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 1.0},
         (0.2 * math.log(4.0) + 1) / (0.1 * math.log(4.0) + 1)),
    ],
)  # fmt: skip
def test_yarn_attention_factor(given, expected):
    assert rope_of(rope_scaling=YARN | given).attention_factor == pytest.approx(expected, rel=1e-15)


def test_yarn_parameters_and_their_defaults():
    spec = rope_of(rope_scaling=YARN)
    assert dict(spec.params) == {
        "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, ORIGINAL_LEN: 1024,
    }  # fmt: skip
    given = {"beta_fast": 16, "beta_slow": 2, "truncate": False}
    assert dict(rope_of(rope_scaling=YARN | given).params).items() >= given.items()
    assert rope_of(rope_scaling=YARN | {"beta_fast": 0}).param("beta_fast") == 32.0


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_names_of_longrope(name):
    spec = rope_of(PHI3, rope_scaling={"type": name, **LONG})
    assert spec.kind == "longrope" and spec.factors("long_factor") == (2.0,) * 8
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    assert spec.attention_factor == pytest.approx(expected, rel=1e-15)


def test_longrope_attention_factor():
    rope = {"rope_type": "longrope", **LONG}
    assert rope_of(PHI3, rope_scaling=rope | {"attention_factor": 1.0}).attention_factor == 1.0
    spec = rope_of(PHI3, rope_scaling=rope | {"factor": 4096})
    assert spec.attention_factor == pytest.approx(math.sqrt(2), rel=1e-15)
    spec = rope_of(PHI3, rope_scaling=rope, max_position_embeddings=4096)
    assert spec.attention_factor == 1.0


def test_partial_rotary_in_both_places():
    assert rope_of(partial_rotary_factor=0.5).rot_dim == 8
    assert rope_of(rope_parameters={"partial_rotary_factor": 0.5}).rot_dim == 8
    with pytest.raises(ConfigError, match="partial_rotary_factor must be at most 1"):
        rope_of(partial_rotary_factor=1.5)


@pytest.mark.parametrize(
    ("base", "rope", "default", "longest"),
    [
        (LLAMA, {}, 4096, 4096),
        (LLAMA, {"rope_type": "linear", "factor": 2.0}, 8192, 8192),
        (LLAMA, {"rope_type": "dynamic", "factor": 2.0}, 4096, 8192),
        (LLAMA, {"rope_type": "yarn", "factor": 4.0}, 16384, 16384),
        (LLAMA, YARN, 4096, 4096),
        (PHI3, {"rope_type": "longrope", **LONG}, 131072, 131072),
        (GEMMA3, {"rope_type": "linear", "factor": 8.0}, 131072, 131072),
    ],
    ids=["default", "linear", "dynamic", "yarn", "yarn_stated", "longrope", "gemma3"],
)
def test_longest_sequence(base, rope, default, longest):
    config = read(base, rope_scaling=rope)
    assert (config.max_model_len, config.longest_model_len) == (default, longest)


REFUSED = {
    "kind": ({"rope_type": "mrope"}, "rope type 'mrope' is not supported; expected one of"),
    "kind_is_no_name": ({"rope_type": ["yarn"]}, "rope type"),
    "foreign_key": ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.0},
                    r"\['attention_factor'\] are not supported with rope type 'linear'"),
    "llama4": (YARN | {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
    "mscales": ({"rope_type": "longrope", "short_mscale": 1.0, **LONG}, "short_mscale"),
    "no_factor": ({"rope_type": "dynamic"}, "factor is missing"),
    "factor": ({"rope_type": "linear", "factor": "8"}, "factor must be a number"),
    "negative": (YARN | {"attention_factor": -1.0}, "attention_factor must be positive"),
    "truncate": (YARN | {"truncate": "yes"}, "truncate must be true or false"),
    "factors": ({"rope_type": "longrope", **LONG, "long_factor": 2.0}, "must be a list of numbers"),
    "short_list": ({"rope_type": "longrope", **LONG, "long_factor": [2.0] * 7},
                   "long_factor must hold 8 numbers"),
    "zero_factor": ({"rope_type": "longrope", **LONG, "long_factor": [0.0] * 8}, "positive"),
    "no_list": ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor is missing"),
    "no_length": (YARN | {ORIGINAL_LEN: 0}, f"{ORIGINAL_LEN} must be positive"),
    "length_1": ({"rope_type": "longrope", **LONG, ORIGINAL_LEN: 1}, "at least 2, got 1"),
    "no_object": ([4.0], "must be an object"),
    "entry_no_object": ({"full_attention": 4.0}, "full_attention must be an object"),
    "entry_missing": ({"sliding_attention": {}}, "no entry for full_attention"),
}  # fmt: skip


@pytest.mark.parametrize(("rope", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_what_is_not_understood_is_refused_by_name(key, rope, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(**{key: rope})
    assert "\n" not in str(caught.value)
