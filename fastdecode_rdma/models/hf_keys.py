"""Typed look-ups in the JSON that Hugging Face directories hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastdecode_rdma.errors import ConfigError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations -> ours."""

MAX_INTEGER = 2**31 - 1
"""No size, count or id of a model is larger."""

MAX_LAYERS = 4096
"""As many as a worker serves (config.AttentionGeometry); for more, nothing is even built."""


class Keys:
    """Typed look-ups in one config dict, falling back to the family's defaults.

    null is absent, except to `nullable`: there it is a value of its own, "none".
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.nulls = raw.keys() - self.raw.keys()
        self.defaults = defaults

    def get(self, key: str) -> Any:
        return self.raw.get(key, self.defaults.get(key))

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{key} is missing")
        return value

    def integer(self, key: str) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be an integer, got {value!r}")
        if key == "num_hidden_layers" and not 1 <= value <= MAX_LAYERS:
            raise ConfigError(f"{key} must be from 1 to {MAX_LAYERS}, got {value}")
        if abs(value) > MAX_INTEGER:
            raise ConfigError(f"{key} must be at most {MAX_INTEGER}, got {str(value)[:40]}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def nullable_integer(self, key: str) -> int | None:
        """Returns the value; None where the file says null, whatever the default."""
        return None if key in self.nulls else self.optional_integer(key)

    def number(self, key: str) -> float:
        return positive(self.need(key), key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def nullable_number(self, key: str) -> float | None:
        """Returns the value; None where the file says null, whatever the default."""
        return None if key in self.nulls else self.optional_number(key)

    def flag(self, key: str) -> bool:
        value = self.need(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return value

    def activation(
        self, key: str, allowed: tuple[str, ...], renames: Mapping[str, str] | None = None
    ) -> str:
        """Returns our name of an activation; `renames` holds names that a family means otherwise.

        Raises:
            ConfigError: it is none of `allowed`.
        """
        known = {hf: ours for hf, ours in _ACTIVATIONS.items() if ours in allowed} | (renames or {})
        given = str(self.need(key))
        if given not in known:
            raise ConfigError(
                f"{key} {given!r} is not supported here; expected one of {tuple(known)}"
            )
        return known[given]


def positive(value: Any, key: str) -> float:
    """Returns a positive, finite number.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest double
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{key} must be positive, got {str(value)[:40]}")
    return number
