"""Which layers of a decoder have a sliding window, and which have no rotary positions.

A family's rule is one of the functions here: (keys) -> one LayerKind per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.hf_keys import Keys
from fastdecode_rdma.models.hf_rope import FULL, SLIDING


@dataclass(frozen=True)
class LayerKind:
    """A layer's window in tokens, None for all before it, and whose rotary embedding it takes:
    that of a layer type, or none."""

    window: int | None
    rope: str | None = FULL


def full_layers(keys: Keys) -> list[LayerKind]:
    """All layers see everything; a sliding_window in the file means nothing to these families."""
    _same_type(keys, FULL)
    return [LayerKind(None)] * keys.integer("num_hidden_layers")


def one_window(keys: Keys) -> list[LayerKind]:
    """All layers have the window `sliding_window`, or none when that is null."""
    window = keys.nullable_integer("sliding_window")
    _same_type(keys, FULL if window is None else SLIDING)
    return [LayerKind(window)] * keys.integer("num_hidden_layers")


@dataclass(frozen=True)
class TypedLayers:
    """Windows by `layer_types`. Without that list, layer i is full where i % period == full_at.

    `period_key`: the file may give the period under that name. `nope_when_full`: full layers have
    no rotary positions, unless no layer has a window.
    """

    period: int
    full_at: int
    period_key: str | None = None
    nope_when_full: bool = False

    def __call__(self, keys: Keys) -> list[LayerKind]:
        window = keys.nullable_integer("sliding_window")
        types = _given_types(keys)
        if types is None:
            types = self._default_types(keys, has_window=window is not None)
        if window is None and SLIDING in types:
            raise ConfigError("sliding_window is missing, but layer_types has sliding layers")
        full = LayerKind(None, None if self.nope_when_full and window is not None else FULL)
        return [full if kind == FULL else LayerKind(window, SLIDING) for kind in types]

    def _default_types(self, keys: Keys, *, has_window: bool) -> list[str]:
        num_layers = keys.integer("num_hidden_layers")
        if not has_window:
            return [FULL] * num_layers
        period, full_at = self.period, self.full_at
        if self.period_key is not None and keys.get(self.period_key) is not None:
            period = keys.integer(self.period_key)
            if period < 1:
                raise ConfigError(f"{self.period_key} must be at least 1, got {period}")
            full_at = period - 1
        return [FULL if i % period == full_at else SLIDING for i in range(num_layers)]


def upper_layers(keys: Keys) -> list[LayerKind]:
    """Qwen: with `use_sliding_window`, the layers from `max_window_layers` on have a window."""
    num_layers = keys.integer("num_hidden_layers")
    window = keys.nullable_integer("sliding_window") if keys.flag("use_sliding_window") else None
    types = _given_types(keys)
    if types is None:
        first = num_layers if window is None else keys.integer("max_window_layers")
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return _windowed(types, window)


def nope_layers(keys: Keys) -> list[LayerKind]:
    """SmolLM3: `no_rope_layers` holds 0 where a layer has no rotary positions, by default every
    `no_rope_layer_interval`-th; those layers have the window, if there is one."""
    num_layers = keys.integer("num_hidden_layers")
    window = keys.nullable_integer("sliding_window") if keys.flag("use_sliding_window") else None
    rotated = keys.get("no_rope_layers")
    if rotated is None:
        interval = keys.integer("no_rope_layer_interval")
        if interval < 1:
            raise ConfigError(f"no_rope_layer_interval must be at least 1, got {interval}")
        rotated = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    elif isinstance(rotated, list):
        rotated = rotated[:num_layers]  # it may be longer
    _check_list("no_rope_layers", rotated, num_layers, (0, 1))
    types = _given_types(keys)
    if types is None:
        types = [FULL if flag or window is None else SLIDING for flag in rotated]
    kinds = _windowed(types, window)
    return [
        LayerKind(kind.window, kind.rope if flag else None)
        for kind, flag in zip(kinds, rotated, strict=True)
    ]


def _windowed(types: list[str], window: int | None) -> list[LayerKind]:
    if window is None and SLIDING in types:
        raise ConfigError(
            "layer_types has sliding layers, but use_sliding_window or sliding_window gives none"
        )
    return [LayerKind(window if kind == SLIDING else None, kind) for kind in types]


def _given_types(keys: Keys) -> list[str] | None:
    """Returns `layer_types`, or None when the file has none."""
    types = keys.get("layer_types")
    if types is not None:
        _check_list("layer_types", types, keys.integer("num_hidden_layers"), (FULL, SLIDING))
    return types


def _same_type(keys: Keys, wanted: str) -> None:
    types = _given_types(keys)
    if types is not None and set(types) != {wanted}:
        raise ConfigError(
            f"layer_types says {sorted(set(types))}, but this architecture has one kind of layer, "
            f"here {wanted}"
        )


def _check_list(key: str, values: Any, length: int, allowed: tuple[Any, ...]) -> None:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{key} must be a list, got {values!r}")
    unknown = sorted({str(value) for value in values if value not in allowed})
    if unknown:
        raise ConfigError(f"{key} holds {unknown}; only {list(allowed)} are supported")
    if len(values) != length:
        raise ConfigError(f"{key} has {len(values)} entries for {length} layers")
