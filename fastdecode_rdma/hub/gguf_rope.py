"""What a GGUF file says of rotary embeddings, as the `rope_scaling` of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile

ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Tensors that carry configuration, not weights."""

_LLAMA3_RTOL = 1e-4
# Enough for the decimals that people write into configurations, and for fp32.
_ATTENTION_FACTOR_RTOL = 1e-4


def read_rope_scaling(
    file: GGUFFile, *, theta: float, rot_dim: int, max_len: int, has_longrope: bool
) -> dict[str, Any] | None:
    """Returns `rope_scaling`, or None where frequencies are not scaled.

    `rot_dim`: elements of a head that are rotated. `has_longrope`: whether the architecture knows
    that kind.

    Raises:
        ConfigError: the scaling is of a kind that cannot be said in a config.json.
    """
    kind = file.text(file.arch_key("rope.scaling.type"), None)
    has_factors = "rope_factors_long.weight" in file.tensors
    has_freqs = "rope_freqs.weight" in file.tensors
    if has_freqs and (has_factors or kind in ("linear", "yarn", "longrope")):
        raise ConfigError(
            f"{file.path}: rope_freqs.weight together with rope scaling {kind!r} is not supported"
        )
    if has_freqs:
        return _llama3(file, theta=theta, rot_dim=rot_dim)
    if has_factors and has_longrope:
        return _longrope(file, rot_dim=rot_dim, max_len=max_len)
    if has_factors:
        raise ConfigError(
            f"{file.path}: longrope is not supported for architecture {file.architecture!r}"
        )
    # Where the kind is not said, llama.cpp takes a factor for linear scaling.
    if kind in (None, "linear"):
        factor = file.number(file.arch_key("rope.scaling.factor"), None)
        factor = factor or file.number(file.arch_key("rope.scale_linear"), 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "none":
        return None
    if kind == "yarn":
        return _yarn(file, max_len=max_len)
    raise ConfigError(f"{file.path}: rope scaling {kind!r:.80} is not supported")


def _yarn(file: GGUFFile, *, max_len: int) -> dict[str, Any]:
    def key(name: str) -> str:
        return file.arch_key(f"rope.scaling.{name}")

    # DeepSeek's mscale, and mixtures of interpolation that no config.json can state.
    for name, neutral in (("yarn_log_multiplier", 0), ("yarn_ext_factor", 1)):
        if file.get(key(name), neutral) not in (neutral, -1):
            raise ConfigError(f"{file.path}: rope scaling with {name} is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": file.number(key("factor")),
        "original_max_position_embeddings": file.count(key("original_context_length"), max_len),
    }
    # Some conversions write the attention factor under the one name, some under the other.
    attention = {file.number(key(name), None) for name in ("yarn_attn_factor", "attn_factor")}
    attention.discard(None)
    if len(attention) > 1:
        raise ConfigError(f"{file.path}: two different attention factors of rope scaling")
    optional = {
        "attention_factor": next(iter(attention), None),
        "beta_fast": file.number(key("yarn_beta_fast"), None),
        "beta_slow": file.number(key("yarn_beta_slow"), None),
    }
    return scaling | {name: value for name, value in optional.items() if value is not None}


def _longrope(file: GGUFFile, *, rot_dim: int, max_len: int) -> dict[str, Any]:
    original = file.count(file.arch_key("rope.scaling.original_context_length"))
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for name in ("short", "long"):
        values = _values(file, f"rope_factors_{name}.weight", rot_dim // 2)
        # The decimals that were meant, not those of the fp32 nearest to them.
        scaling[f"{name}_factor"] = [float(str(value)) for value in values]
    ratio = max_len / original
    usual = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    given = file.number(file.arch_key("rope.scaling.attn_factor"), usual)
    if not math.isclose(given, usual, rel_tol=_ATTENTION_FACTOR_RTOL):
        scaling["attention_factor"] = given
    return scaling


def _values(file: GGUFFile, name: str, length: int) -> np.ndarray:
    tensor = file.tensor(name)
    if math.prod(tensor.shape) != length:
        raise ConfigError(f"{file.path}: {name} is {tensor.shape}, expected {length} values")
    values = tensor.dequantize(slice(None)).reshape(-1)
    if not (values > 0).all():
        raise ConfigError(f"{file.path}: {name} must hold positive values")
    return values


def _llama3(file: GGUFFile, *, theta: float, rot_dim: int) -> dict[str, Any] | None:
    """Recovers llama3 scaling from the per-frequency divisors that GGUF keeps in its place.

    The divisor of a frequency is 1, or `factor`, or between them 1 / ((1 - s) / factor + s), where
    s is linear in the frequency; the parameters that give it back are checked against the file.
    """
    stored = _values(file, "rope_freqs.weight", rot_dim // 2).astype(np.float64)
    if np.allclose(stored, 1.0, rtol=_LLAMA3_RTOL):
        return None
    wavelength = 2 * math.pi * theta ** (np.arange(0, rot_dim, 2) / rot_dim)
    factor = round(float(stored.max()), 4)
    for low, high, original in [(1.0, 4.0, 8192), *_fit_llama3(stored, wavelength, factor)]:
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(stored, expected, rtol=_LLAMA3_RTOL):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{file.path}: rope_freqs.weight does not follow the llama3 rule, the only one whose "
        "frequency tables are supported"
    )


def _fit_llama3(
    stored: np.ndarray, wavelength: np.ndarray, factor: float
) -> list[tuple[float, float, int]]:
    """Returns (low, high, original length) that may have made the divisors.

    s = (original / wavelength - low) / (high - low) is a straight line over 1 / wavelength, which
    two divisors between 1 and `factor` determine; only ratios of the three matter, so low is 1.
    """
    blended = (stored > 1 + 1e-3) & (stored < factor * (1 - 1e-3))
    if blended.sum() < 2:
        # At most one divisor depends on them: any usual length that explains it will do.
        return [(1.0, 4.0, 1 << power) for power in range(8, 21)]
    smooth = (1 / stored[blended] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(1 / wavelength[blended], smooth, 1)
    if intercept >= 0 or slope <= 0:
        return []
    high = round(float(1 - 1 / intercept), 3)
    return [(1.0, high, round(float(-slope / intercept)))]
