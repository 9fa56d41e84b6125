"""Rotary scaling from GGUF metadata and factor tensors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_rope import read_rope_scaling

THETA, HEAD_DIM = 500000.0, 32


def read(path, **options) -> dict | None:
    given = {"theta": THETA, "rot_dim": HEAD_DIM, "max_len": 128, "has_longrope": False}
    return read_rope_scaling(GGUFFile(path), **(given | options))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"type": "none"}, None),
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # linear where not said
        ({"type": "linear", "factor": 1.0}, None),
        (
            {"type": "yarn", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {
                "type": "yarn",
                "factor": 2.5,
                "original_context_length": 64,
                "yarn_attn_factor": 1.25,
                "attn_factor": 1.25,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
                "yarn_ext_factor": 1.0,
                "yarn_log_multiplier": 0.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.5,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_metadata(make_gguf, metadata, expected):
    named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    assert read(make_gguf("llama", metadata=named)[0]) == expected


def test_the_oldest_name_of_linear(make_gguf):
    path, _ = make_gguf("llama", metadata={"llama.rope.scale_linear": 4.0})
    assert read(path) == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"type": "cubic"}, "rope scaling 'cubic'"),
        ({"type": "longrope"}, "rope scaling 'longrope'"),
        ({"type": 3}, "type must be a text, got 3"),
        ({"type": "linear", "factor": -1.0}, "factor must be a positive number"),
        ({"type": "yarn"}, "lacks 'llama.rope.scaling.factor'"),
        ({"type": "yarn", "factor": 2.0, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        (
            {"type": "yarn", "factor": 2.0, "yarn_attn_factor": 1.5, "attn_factor": 2.0},
            "two different attention factors",
        ),
    ],
)
def test_what_no_config_can_say_is_named(make_gguf, metadata, message):
    named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    with pytest.raises(ConfigError, match=message):
        read(make_gguf("llama", metadata=named)[0])


# -- llama3: one divisor per frequency


def divisors(factor: float, low: float, high: float, original: int, head_dim: int) -> np.ndarray:
    wavelength = 2 * math.pi * THETA ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    near = np.where(wavelength < original / high, 1.0, blended)
    return np.where(wavelength > original / low, factor, near).astype(np.float32)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "parameters", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.5, 1.0, 4.0, 4096)]
)
def test_llama3_parameters_are_recovered(make_gguf, parameters, head_dim):
    stored = divisors(*parameters, head_dim)
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": stored})
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    expected = dict(zip(names, parameters, strict=True))
    assert read(path, rot_dim=head_dim) == {"rope_type": "llama3"} | expected


def test_equal_ratios_are_equal_scaling(make_gguf):
    """low, high and the length matter by their ratios only: low is given back as 1."""
    stored = divisors(16.0, 2.0, 6.0, 8192, 128)
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": stored})
    scaling = read(path, rot_dim=128)
    assert scaling["low_freq_factor"] == 1.0
    assert scaling["high_freq_factor"] == 3.0
    assert scaling["original_max_position_embeddings"] == 4096


def test_divisors_of_one_are_none(make_gguf):
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": np.ones(16, np.float32)})
    assert read(path) is None


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (divisors(32.0, 1.0, 4.0, 8192, 32)[::-1].copy(), "does not follow the llama3 rule"),
        (np.linspace(1, 3, 16, dtype=np.float32), "does not follow the llama3 rule"),
        (np.ones(15, np.float32), "expected 16 values"),
        (np.zeros(16, np.float32), "positive values"),
        (np.full(16, np.nan, np.float32), "not finite"),
    ],
)
def test_other_frequency_tables_are_named(make_gguf, tmp_path, stored, message):
    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": stored})
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "out")


def test_divisors_beside_another_scaling_are_named(make_gguf):
    path, _ = make_gguf(
        "llama",
        tensors={"rope_freqs.weight": divisors(8.0, 1.0, 4.0, 8192, 32)},
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    )
    with pytest.raises(ConfigError, match="together with rope scaling 'linear'"):
        read(path)


# -- longrope


def longrope(make_gguf, *, num_short: int = 16, attn_factor: float | None = None, **more):
    metadata = {"llama.rope.scaling.original_context_length": 32} | more
    if attn_factor is not None:
        metadata["llama.rope.scaling.attn_factor"] = attn_factor
    tensors = {
        "rope_factors_long.weight": np.linspace(1, 9, 16, dtype=np.float32),
        "rope_factors_short.weight": np.full(num_short, 1.1, np.float32),
    }
    return make_gguf("llama", tensors=tensors, metadata=metadata)[0]


def test_longrope(make_gguf):
    usual = math.sqrt(1 + math.log(128 / 32) / math.log(32))
    scaling = read(longrope(make_gguf, attn_factor=usual), has_longrope=True)
    assert scaling["rope_type"] == "longrope" and "attention_factor" not in scaling
    assert scaling["short_factor"] == [1.1] * 16  # the decimals that were meant
    np.testing.assert_allclose(scaling["long_factor"], np.linspace(1, 9, 16), rtol=1e-7)
    assert "attention_factor" not in read(longrope(make_gguf), has_longrope=True)
    unusual = read(longrope(make_gguf, attn_factor=1.5), has_longrope=True)
    assert unusual["attention_factor"] == 1.5
    json.dumps(scaling)


def test_longrope_that_is_incomplete_is_named(make_gguf):
    with pytest.raises(ConfigError, match="longrope is not supported for architecture 'llama'"):
        read(longrope(make_gguf))
    with pytest.raises(ConfigError, match=r"factors_short.weight is \(15,\), expected 16 values"):
        read(longrope(make_gguf, num_short=15), has_longrope=True)
    path = longrope(make_gguf, **{"llama.rope.scaling.original_context_length": None})
    with pytest.raises(ConfigError, match=r"lacks 'llama\.rope\.scaling\.original"):
        read(path, has_longrope=True)
