"""Rotary position tables. A rope kind is a row of KINDS: its parameters and its frequencies.

Frequencies, angles, cos and sin are computed in fp32, as the models were trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import RopeTable


@dataclass(frozen=True)
class RopeSpec:
    """One kind of rotary embedding with its parameters; equal specs share one table.

    `rot_dim` is the number of leading dimensions of a head that are rotated.
    """

    rot_dim: int
    theta: float = 10000.0
    kind: str = "default"
    params: tuple[tuple[str, float], ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"rope type {self.kind!r} is not supported; expected one of {tuple(KINDS)}"
            )
        if self.rot_dim < 2 or self.rot_dim % 2:
            raise ConfigError(f"the rotary dimension must be even, got {self.rot_dim}")
        for name, value in (("rope_theta", self.theta), *self.params):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"rope parameter {name} must be positive, got {value}")
        missing = [name for name in KINDS[self.kind].required if name not in dict(self.params)]
        if missing:
            raise ConfigError(f"rope type {self.kind!r} lacks its parameters {missing}")

    def param(self, name: str) -> float:
        """Returns a parameter that the kind requires."""
        return dict(self.params)[name]


@dataclass(frozen=True)
class RopeKind:
    """Parameter names a kind requires, and its function spec -> frequencies [rot_dim / 2]."""

    required: tuple[str, ...]
    inv_freq: Callable[[RopeSpec], Tensor]


def _default(spec: RopeSpec) -> Tensor:
    exponents = torch.arange(0, spec.rot_dim, 2, dtype=torch.float32) / spec.rot_dim
    return 1.0 / spec.theta**exponents


def _linear(spec: RopeSpec) -> Tensor:
    return _default(spec) / spec.param("factor")


def _llama3(spec: RopeSpec) -> Tensor:
    """Short waves stay, long waves stretch by `factor`, those between are blended linearly."""
    original_len = spec.param("original_max_position_embeddings")
    low, high = spec.param("low_freq_factor"), spec.param("high_freq_factor")
    if not low < high:
        raise ConfigError(
            f"llama3 rope needs low_freq_factor < high_freq_factor, got {low}, {high}"
        )
    inv_freq = _default(spec)
    stretched = inv_freq / spec.param("factor")
    wavelength = 2 * math.pi / inv_freq
    blend = (original_len / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched + blend * inv_freq
    result = torch.where(wavelength > original_len / low, stretched, blended)
    return torch.where(wavelength < original_len / high, inv_freq, result)


KINDS: dict[str, RopeKind] = {
    "default": RopeKind((), _default),
    "linear": RopeKind(("factor",), _linear),
    "llama3": RopeKind(
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        _llama3,
    ),
}
"""Rope kinds by the name that config files give them."""


def inv_freq(spec: RopeSpec) -> Tensor:
    """Returns the inverse frequencies fp32 [rot_dim / 2]."""
    return KINDS[spec.kind].inv_freq(spec)


def rope_table(spec: RopeSpec, max_len: int) -> RopeTable:
    """Returns cos and sin, fp32 [max_len, rot_dim / 2], of positions 0 .. max_len - 1."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq(spec)
    cos, sin = angles.cos(), angles.sin_()
    if spec.attention_factor != 1.0:
        cos.mul_(spec.attention_factor)
        sin.mul_(spec.attention_factor)
    return RopeTable(cos, sin)
