"""Rotary position tables. A rope kind is a row of KINDS: its parameters and its frequencies.

Frequencies, angles, cos and sin are computed in fp32, as the models were trained, and in the order
of operations of transformers: at position 60000 the last bit of a frequency moves a logit.

A table is fixed when a model is loaded, because rotated keys stay in the KV-cache. Two kinds depend
on how long a sequence is; for them the loaded `max_model_len` decides, once for all lengths:

* longrope: the long factors if max_model_len exceeds the original length, else the short ones.
* dynamic (NTK): the plain base up to the original length; beyond it, the base that a sequence of
  max_model_len tokens has.

So a model loaded with max_model_len up to the original length gives what transformers gives for
every sequence; a longer one gives that for sequences of the full length, and for shorter ones the
same positions as for the full one, where transformers would change them in mid-sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import RopeTable

ORIGINAL_LEN = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeSpec:
    """One kind of rotary embedding with its parameters; equal specs share one table.

    `rot_dim` is the number of leading dimensions of a head that are rotated. `attention_factor`
    multiplies cos and sin. A parameter is a number, a flag, or one number per frequency.
    """

    rot_dim: int
    theta: float = 10000.0
    kind: str = "default"
    params: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"rope type {self.kind!r} is not supported; expected one of {tuple(KINDS)}"
            )
        if self.rot_dim < 2 or self.rot_dim % 2:
            raise ConfigError(f"the rotary dimension must be even, got {self.rot_dim}")
        numbers = (("rope_theta", self.theta), ("attention_factor", self.attention_factor))
        for name, value in (*numbers, *self.params):
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(value, bool) and not (math.isfinite(number) and number > 0):
                    raise ConfigError(f"rope parameter {name} must be positive, got {number}")
            if isinstance(value, tuple) and len(value) != self.rot_dim // 2:
                raise ConfigError(
                    f"rope parameter {name} must hold {self.rot_dim // 2} numbers, one per "
                    f"frequency, got {len(value)}"
                )
        missing = [name for name in KINDS[self.kind].required if name not in dict(self.params)]
        if missing:
            raise ConfigError(f"rope type {self.kind!r} lacks its parameters {missing}")

    def param(self, name: str) -> float:
        """Returns a number that the kind requires."""
        return dict(self.params)[name]

    def factors(self, name: str) -> tuple[float, ...]:
        """Returns a parameter that holds one number per frequency."""
        return dict(self.params)[name]


@dataclass(frozen=True)
class RopeKind:
    """Parameter names a kind requires, and its function (spec, max_len) -> [rot_dim / 2]."""

    required: tuple[str, ...]
    inv_freq: Callable[[RopeSpec, int], Tensor]


def _exponents(spec: RopeSpec) -> Tensor:
    return torch.arange(0, spec.rot_dim, 2, dtype=torch.float32) / spec.rot_dim


def _default(spec: RopeSpec, max_len: int) -> Tensor:
    return 1.0 / spec.theta ** _exponents(spec)


def _linear(spec: RopeSpec, max_len: int) -> Tensor:
    return _default(spec, max_len) / spec.param("factor")


def _dynamic(spec: RopeSpec, max_len: int) -> Tensor:
    """A base that grows with the length (NTK), here with max_len."""
    original_len, factor = spec.param(ORIGINAL_LEN), spec.param("factor")
    if max_len <= original_len:
        return _default(spec, max_len)
    if spec.rot_dim < 4:
        raise ConfigError(f"dynamic rope needs a rotary dimension above 2, got {spec.rot_dim}")
    growth = factor * max_len / original_len - (factor - 1)
    if growth <= 0:
        raise ConfigError(f"dynamic rope with factor {factor} has no base for {max_len} tokens")
    base = spec.theta * growth ** (spec.rot_dim / (spec.rot_dim - 2))
    return 1.0 / base ** _exponents(spec)


def _llama3(spec: RopeSpec, max_len: int) -> Tensor:
    """Short waves stay, long waves stretch by `factor`, those between are blended linearly."""
    original_len = spec.param(ORIGINAL_LEN)
    low, high = spec.param("low_freq_factor"), spec.param("high_freq_factor")
    if not low < high:
        raise ConfigError(
            f"llama3 rope needs low_freq_factor < high_freq_factor, got {low}, {high}"
        )
    inv_freq = _default(spec, max_len)
    stretched = inv_freq / spec.param("factor")
    wavelength = 2 * math.pi / inv_freq
    blend = (original_len / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched + blend * inv_freq
    result = torch.where(wavelength > original_len / low, stretched, blended)
    return torch.where(wavelength < original_len / high, inv_freq, result)


def _yarn(spec: RopeSpec, max_len: int) -> Tensor:
    """Waves that turn often in the original length stay, those that turn rarely stretch by
    `factor`; between `beta_fast` and `beta_slow` turns they are blended by their place."""
    dim, theta = spec.rot_dim, spec.theta
    if theta <= 1:
        raise ConfigError(f"yarn rope needs rope_theta above 1, got {theta}")

    def place_of(turns: float) -> float:
        length = spec.param(ORIGINAL_LEN) / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(theta))

    low, high = place_of(spec.param("beta_fast")), place_of(spec.param("beta_slow"))
    if spec.param("truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    places = torch.arange(dim // 2, dtype=torch.float32)
    kept = 1 - ((places - low) / (high - low)).clamp(0, 1)
    waves = theta ** _exponents(spec)
    return 1.0 / (spec.param("factor") * waves) * (1 - kept) + 1.0 / waves * kept


def _longrope(spec: RopeSpec, max_len: int) -> Tensor:
    """Every wave stretched by a number of its own, from the short or from the long list."""
    name = "long_factor" if max_len > spec.param(ORIGINAL_LEN) else "short_factor"
    factors = torch.tensor(spec.factors(name), dtype=torch.float32)
    return 1.0 / (factors * spec.theta ** _exponents(spec))


KINDS: dict[str, RopeKind] = {
    "default": RopeKind((), _default),
    "linear": RopeKind(("factor",), _linear),
    "dynamic": RopeKind(("factor", ORIGINAL_LEN), _dynamic),
    "llama3": RopeKind(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LEN), _llama3),
    "yarn": RopeKind(("factor", "beta_fast", "beta_slow", "truncate", ORIGINAL_LEN), _yarn),
    "longrope": RopeKind(("short_factor", "long_factor", ORIGINAL_LEN), _longrope),
}
"""Rope kinds by the name that config files give them."""


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    """Returns what yarn multiplies cos and sin by when no attention_factor is given."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)


def longrope_attention_factor(factor: float, original_len: float) -> float:
    """Returns what longrope multiplies cos and sin by when no attention_factor is given."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))


def length_note(spec: RopeSpec, max_len: int) -> str | None:
    """Returns what a user should know who loads a model for max_len tokens; None if nothing."""
    original_len = dict(spec.params).get(ORIGINAL_LEN)
    if spec.kind not in ("longrope", "dynamic") or max_len <= original_len:
        return None
    return (
        f"rope type {spec.kind!r}: positions are those of long sequences, because max_model_len "
        f"{max_len} exceeds the original {original_len}; with max_model_len={original_len} short "
        "sequences have the positions that they were trained with"
    )


def inv_freq(spec: RopeSpec, max_len: int) -> Tensor:
    """Returns the inverse frequencies fp32 [rot_dim / 2] of a model loaded for max_len tokens."""
    return KINDS[spec.kind].inv_freq(spec, max_len)


def rope_table(spec: RopeSpec, max_len: int) -> RopeTable:
    """Returns cos and sin, fp32 [max_len, rot_dim / 2], of positions 0 .. max_len - 1."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq(spec, max_len)
    cos, sin = angles.cos(), angles.sin_()
    if spec.attention_factor != 1.0:
        cos.mul_(spec.attention_factor)
        sin.mul_(spec.attention_factor)
    return RopeTable(cos, sin)
