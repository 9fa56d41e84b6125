"""Frozen descriptions shared by engine, wire and workers. Standard library and numpy only."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fastdecode_rdma.errors import ConfigError

DEFAULT_PORT = 18815
NUM_DECODE_TABLES = 2
UPLOAD_TABLE = 2  # tables 0 and 1 are the decode mini-batches, the rest carry prefill uploads

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one element, by the names used on the command line and on the wire."""

KV_ROW_BYTES: dict[str, Callable[[int], int]] = {
    "fp32": lambda dim: 4 * dim,
    "fp16": lambda dim: 2 * dim,
    "bf16": lambda dim: 2 * dim,
    "int8": lambda dim: 4 + dim,
    "int4": lambda dim: 4 * -(-dim // 32) + 8 * -(-dim // 16),
}
"""Bytes of one token's K (or V) of one head, by head_dim and KV dtype, scales included."""

QUANTIZATIONS = ("int8",)
"""How weights may be kept other than in the checkpoint's dtype."""

DTYPE_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
"""What PyTorch, transformers and vLLM call them."""

MAX_HEAD_SCORE = 1e30
"""Size of a sink or slope: times the 2^27 tokens of the longest sequence it is finite in fp32."""

MAX_HEAD_SCORES = 1 << 16
"""Sinks and slopes of a model: 512 layers of 128 query heads, 512 KiB when a session opens."""

ENTRY_UPLOAD = 1
"""Entry flag: the rows of this entry come as K/V uploads, not as attention rows."""

ENTRY_DTYPE = np.dtype(
    [("handle", "<u8"), ("kv_len_before", "<u8"), ("q_len", "<u4"), ("flags", "<u4")]
)
"""One line of a step table: sequence, tokens cached before this step, query tokens, flags."""


class StepCode(enum.IntEnum):
    """Why a worker refused a step; the same numbers as FD_E_* in cython/entry.h."""

    OK = 0
    TABLE = -1
    LAYER = -2
    ROWS = -3
    RANGE = -4
    CACHE_FULL = -5
    SEQUENCE = -6
    PROTOCOL = -7
    INTERNAL = -8


def dtype_name(name: str, *, allowed: tuple[str, ...] = tuple(DTYPE_BYTES)) -> str:
    """Returns our short name of a dtype ("bfloat16" -> "bf16").

    Raises:
        ConfigError: the name is unknown or not in `allowed`.
    """
    short = DTYPE_ALIASES.get(name, name)
    if short not in allowed:
        raise ConfigError(f"dtype {name!r} is not supported here; expected one of {allowed}")
    return short


def kv_dtype_name(name: str) -> str:
    """Returns our short name of a KV-cache dtype: a float dtype, "int8" or "int4".

    Raises:
        ConfigError: there is no such KV dtype.
    """
    return dtype_name(name, allowed=tuple(KV_ROW_BYTES))


def quantization_name(value: object) -> str | None:
    """Returns how weights are to be kept: None as in the checkpoint, or "int8".

    Raises:
        ConfigError: there is no such quantization.
    """
    if value is None or (isinstance(value, str) and value in QUANTIZATIONS):
        return value
    names = ", ".join(map(repr, QUANTIZATIONS))
    raise ConfigError(f"quantization must be None or one of {names}, got {value!r}")


@dataclass(frozen=True)
class KVGroup:
    """Layers whose K/V rows have the same shape and window: one pool, one block table per sequence.

    `window` W means that token i attends to tokens i-W+1 .. i; None means to all before it.
    `sinks`, one row per layer, one logit per query head: each adds e^sink to its softmax's
    denominator, as a key without a value would. `slopes`, one per query head (ALiBi): each adds
    slope * (position of the key - position of the query) to a score that is scaled and capped.
    """

    layers: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: tuple[tuple[float, ...], ...] | None = None
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"a KV group needs ascending layer numbers, got {self.layers}")
        if not 1 <= self.num_kv_heads <= self.num_q_heads <= 1024:
            raise ConfigError(
                f"need 1 <= KV heads <= query heads <= 1024, got {self.num_kv_heads} and "
                f"{self.num_q_heads}"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_q_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 8 or not 8 <= self.head_dim <= 1024:
            raise ConfigError(
                f"head_dim must be a multiple of 8 from 8 to 1024, got {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window holds at least 1 token, got {self.window}")
        if self.sinks is not None:
            if len(self.sinks) != len(self.layers):
                raise ConfigError(
                    f"{len(self.sinks)} rows of attention sinks for {len(self.layers)} layers"
                )
            for sinks in self.sinks:
                self._check_per_head("attention sinks", sinks)
        if self.slopes is not None:
            self._check_per_head("ALiBi slopes", self.slopes)

    def _check_per_head(self, what: str, values: tuple[float, ...]) -> None:
        if len(values) != self.num_q_heads:
            raise ConfigError(f"{len(values)} {what} for {self.num_q_heads} query heads")
        for value in values:
            if not abs(value) <= MAX_HEAD_SCORE:
                raise ConfigError(f"{what} must be at most {MAX_HEAD_SCORE:g} in size, got {value}")

    @cached_property
    def sink_table(self) -> np.ndarray:
        """The sinks as the kernels read them: float32 [layers of the group, query heads]."""
        return np.array(self.sinks, dtype=np.float32)

    @cached_property
    def slope_table(self) -> np.ndarray:
        """The slopes as the kernels read them: float32 [query heads]."""
        return np.array(self.slopes, dtype=np.float32)

    @property
    def num_scores(self) -> int:
        """Sinks and slopes: numbers that the session's opening carries."""
        return len(self.sinks or ()) * self.num_q_heads + len(self.slopes or ())

    @property
    def row_width(self) -> int:
        """Elements of one [q | k | v] row."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def out_width(self) -> int:
        """Elements of one attention output row."""
        return self.num_q_heads * self.head_dim


@dataclass(frozen=True)
class AttentionGeometry:
    """All an attention worker must know of a model.

    `max_rows` bounds the rows of one step table, `max_model_len` the tokens of one sequence.
    `softcap` caps the scores: s = softcap * tanh(s / softcap); None leaves them.
    """

    groups: tuple[KVGroup, ...]
    scale: float
    kv_dtype: str
    max_rows: int
    max_model_len: int
    softcap: float | None = None
    wire_dtype: str = "fp32"

    def __post_init__(self) -> None:
        kv_dtype_name(self.kv_dtype)
        dtype_name(self.wire_dtype)
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))) or len(layers) > 4096:
            raise ConfigError(f"the KV groups must cover layers 0 .. n-1 once each, got {layers}")
        num_scores = sum(group.num_scores for group in self.groups)
        if num_scores > MAX_HEAD_SCORES:
            raise ConfigError(
                f"at most {MAX_HEAD_SCORES} attention sinks and ALiBi slopes, got {num_scores}"
            )
        if not 1 <= self.max_rows <= 1 << 16:
            raise ConfigError(f"max_rows must be from 1 to 65536, got {self.max_rows}")
        if not 1 <= self.max_model_len <= 1 << 27:
            raise ConfigError(f"max_model_len must be from 1 to 2^27, got {self.max_model_len}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"the attention scale must be positive, got {self.scale}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ConfigError(f"the attention softcap must be positive, got {self.softcap}")

    @cached_property
    def _group_by_layer(self) -> dict[int, KVGroup]:
        return {layer: group for group in self.groups for layer in group.layers}

    @property
    def num_layers(self) -> int:
        return len(self._group_by_layer)

    def group_of(self, layer: int) -> KVGroup:
        """Returns the KV group that holds `layer`."""
        return self._group_by_layer[layer]

    def row_width(self, layer: int) -> int:
        """Elements of one [q | k | v] row of `layer`."""
        return self.group_of(layer).row_width

    def out_width(self, layer: int) -> int:
        """Elements of one attention output row of `layer`."""
        return self.group_of(layer).out_width

    @property
    def max_row_width(self) -> int:
        return max(group.row_width for group in self.groups)

    @property
    def max_out_width(self) -> int:
        return max(group.out_width for group in self.groups)
