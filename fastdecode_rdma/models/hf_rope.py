"""Rotary embeddings in a config.json: `rope_scaling` beside `rope_theta`, or `rope_parameters`.

`rope_parameters` is flat, or holds one object per layer type. Every key must be known for its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.hf_keys import Keys, positive
from fastdecode_rdma.models.rope import (
    KINDS,
    ORIGINAL_LEN,
    RopeSpec,
    longrope_attention_factor,
    yarn_attention_factor,
)

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types by the names that config files give them."""

_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
# Written beside kinds that do not use it.
_TOLERATED = {ORIGINAL_LEN}
_ALIASES = {"su": "longrope"}
_MAX_LEN = "max_position_embeddings"

Params = dict[str, float | bool | tuple[float, ...]]


@dataclass(frozen=True)
class _Context:
    """What a kind is read from: its own keys, those around it, and the original length.

    `stated_len` is max_position_embeddings.
    """

    own: Keys
    original_len: int
    stated_len: int

    def factor(self) -> float:
        """The stretch; left out, it is how far the stated length exceeds the original one."""
        return self.own.optional_number("factor") or self.stated_len / self.original_len


def _read_default(context: _Context) -> tuple[Params, float]:
    return {}, 1.0


def _read_linear(context: _Context) -> tuple[Params, float]:
    return {"factor": context.own.number("factor")}, 1.0


def _read_dynamic(context: _Context) -> tuple[Params, float]:
    factor = context.own.number("factor")
    return {"factor": factor, ORIGINAL_LEN: context.stated_len}, 1.0


def _read_llama3(context: _Context) -> tuple[Params, float]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    params: Params = {name: context.own.number(name) for name in names}
    return params | {ORIGINAL_LEN: context.original_len}, 1.0


def _read_yarn(context: _Context) -> tuple[Params, float]:
    own, factor = context.own, context.factor()
    params: Params = {
        "factor": factor,
        "beta_fast": _or_zero(own, "beta_fast") or 32.0,
        "beta_slow": _or_zero(own, "beta_slow") or 1.0,
        "truncate": own.flag("truncate") if own.get("truncate") is not None else True,
        ORIGINAL_LEN: context.original_len,
    }
    implied = yarn_attention_factor(
        factor, _or_zero(own, "mscale"), _or_zero(own, "mscale_all_dim")
    )
    return params, own.optional_number("attention_factor") or implied


def _read_longrope(context: _Context) -> tuple[Params, float]:
    own, original_len = context.own, context.original_len
    params: Params = {
        name: _numbers(own.need(name), name) for name in ("short_factor", "long_factor")
    }
    if original_len < 2:
        raise ConfigError(f"{ORIGINAL_LEN} must be at least 2, got {original_len}")
    implied = longrope_attention_factor(context.factor(), original_len)
    return params | {ORIGINAL_LEN: original_len}, own.optional_number("attention_factor") or implied


@dataclass(frozen=True)
class _Reader:
    """Keys that a kind may have, and what they become: its parameters and attention factor."""

    keys: frozenset[str]
    read: Callable[[_Context], tuple[Params, float]]


_YARN_KEYS = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
_READERS = {
    name: _Reader(frozenset(keys.split()), read)
    for name, keys, read in (
        ("default", "", _read_default),
        ("linear", "factor", _read_linear),
        ("dynamic", "factor", _read_dynamic),
        ("llama3", "factor low_freq_factor high_freq_factor", _read_llama3),
        ("yarn", _YARN_KEYS, _read_yarn),
        ("longrope", "factor attention_factor short_factor long_factor", _read_longrope),
    )
}
assert _READERS.keys() == KINDS.keys()


def read_rope(
    keys: Keys,
    head_dim: int,
    layer_type: str,
    *,
    local_theta: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> RopeSpec | None:
    """Returns the rotary embedding of the layers of one type; None where the file says null.

    `local_theta`: the key of the sliding layers' theta in families whose rope_scaling is meant for
    the full layers alone. `aliases`: kinds that a family calls by another's name.

    Raises:
        ConfigError: naming the kind, key or value that is not understood.
    """
    raw, is_flat = _own_object(keys, layer_type, is_split=local_theta is not None)
    if raw is None:
        return None
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    kind = (_ALIASES | dict(aliases or {})).get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; expected one of {tuple(KINDS)}")
    unknown = sorted(set(raw) - _COMMON - _TOLERATED - _READERS[kind].keys)
    if unknown:
        raise ConfigError(f"rope parameters {unknown} are not supported with rope type {kind!r}")
    own = Keys(raw, {})
    context = _Context(own, _original_len(keys, own, is_flat=is_flat), keys.integer(_MAX_LEN))
    params, attention_factor = _READERS[kind].read(context)
    theta_key = local_theta if local_theta and layer_type == SLIDING else "rope_theta"
    return RopeSpec(
        rot_dim=int(head_dim * _partial(keys, own)),
        theta=positive(own.get("rope_theta") or keys.need(theta_key), "rope_theta"),
        kind=kind,
        params=tuple(params.items()),
        attention_factor=attention_factor,
    )


def _own_object(
    keys: Keys, layer_type: str, *, is_split: bool
) -> tuple[Mapping[str, Any] | None, bool]:
    """Returns the object that describes this layer type, and whether it was the flat one."""
    legacy, nested = keys.raw.get("rope_scaling"), keys.get("rope_parameters")
    if is_split and layer_type == SLIDING:
        legacy = None
    raw = legacy or nested or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"rope parameters must be an object, got {raw!r}")
    if layer_type in raw:
        own = raw[layer_type]
        if own is not None and not isinstance(own, Mapping):
            raise ConfigError(f"the rope parameters of {layer_type} must be an object, got {own!r}")
        return own, False
    if FULL in raw or SLIDING in raw:
        raise ConfigError(f"rope_parameters has no entry for {layer_type}")
    if raw and raw is nested and is_split:
        raise ConfigError("rope_parameters must have one entry per layer type")
    return raw, True


def _original_len(keys: Keys, own: Keys, *, is_flat: bool) -> int:
    """A length beside flat rope parameters wins over the one among them, as in transformers."""
    beside = keys.optional_integer(ORIGINAL_LEN) if is_flat else None
    among = own.optional_integer(ORIGINAL_LEN)
    given = among if beside is None else beside
    return int(positive(keys.integer(_MAX_LEN) if given is None else given, ORIGINAL_LEN))


def _partial(keys: Keys, own: Keys) -> float:
    name = "partial_rotary_factor"
    share = own.optional_number(name) or keys.optional_number(name) or 1.0
    if share > 1:
        raise ConfigError(f"{name} must be at most 1, got {share}")
    return share


def _numbers(value: Any, key: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} must be a list of numbers, got {value!r}")
    return tuple(positive(number, key) for number in value)


def _or_zero(own: Keys, key: str) -> float | None:
    """A number that may be 0, which means the same as leaving it out."""
    return None if own.get(key) == 0 else own.optional_number(key)
