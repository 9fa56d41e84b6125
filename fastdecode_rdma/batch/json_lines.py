"""Lines of JSON, strictly: in and out, UTF-8 without NaN, Infinity or keys that stand twice."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fastdecode_rdma.batch.files import MAX_LINE_BYTES, RawLine
from fastdecode_rdma.errors import ConfigError

MAX_DEPTH = 200
"""Levels of a carried value: what can be read can then be written, too."""

LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; vLLM's server writes this number, too."""


def load_line(line: RawLine) -> dict[str, Any]:
    """Returns the object of a line.

    Raises:
        ConfigError: the line is none; says why.
    """
    if line.data is None:
        raise ConfigError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the line is not UTF-8: byte {error.start + 1} is wrong") from None
    try:
        values = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"the line is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ConfigError("the line is no JSON that can be read: it nests too deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"the line is no JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"a line must hold a JSON object, got {type(values).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(values):
        raise ConfigError(f"the line nests deeper than {MAX_DEPTH} levels")
    return values


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in inner for item in each if isinstance(item, (dict, list))]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"the line is no JSON: {name} is no number there")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ConfigError(f"the line holds a number that is too large: {digits[:40]}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the line has the key {twice!r} twice")
    return values


def dump_line(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; lone surrogates, which UTF-8 has not, stay escaped."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(values, allow_nan=False).encode() + b"\n"


def shown(value: Any) -> str:
    """Returns a value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def finite_logprob(value: float) -> float:
    """Returns a log-probability, or a sum of them, as JSON can hold it."""
    return value if math.isfinite(value) else LOWEST_LOGPROB
