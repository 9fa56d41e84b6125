"""Tile configurations by shape class: a pure table, so that a new machine starts at once.

The classes follow what bounds a product. Up to 16 rows the weight's bytes do: tiles are narrow, so
that a weight of 4096 outputs already keeps every SM busy, and many loads are in flight. Beyond some
100 rows the tensor cores do: tiles are large. In deterministic mode one configuration serves a
weight at any number of rows, so that a row's bits do not depend on the batch. No configuration
splits K: the order of every sum is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("half", "single", "int8", "int4")
"""What a weight's elements are: fp16 or bf16; fp32; quantised ones."""

ANY_ROWS = 1 << 62


@dataclass(frozen=True)
class TileConfig:
    """One program's tile of the output, its step along K, and the compiler's options.

    A gated product has two weight tiles of `block_n` columns each. For int4, `block_k` is the
    weight's group size whatever is said here.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class RowClass:
    """Configurations of a product with at most `max_rows` rows: plain and gated."""

    max_rows: int
    plain: TileConfig
    gated: TileConfig


MATMUL: dict[str, tuple[RowClass, ...]] = {
    "half": (
        RowClass(16, TileConfig(16, 32, 128, 4, 5), TileConfig(16, 32, 128, 4, 4)),
        RowClass(64, TileConfig(64, 64, 64, 4, 4), TileConfig(64, 32, 64, 4, 4)),
        RowClass(ANY_ROWS, TileConfig(128, 128, 64, 8, 3), TileConfig(128, 64, 64, 8, 3)),
    ),
    "single": (RowClass(ANY_ROWS, TileConfig(32, 64, 32, 4, 3), TileConfig(32, 32, 32, 4, 3)),),
    "int8": (
        RowClass(16, TileConfig(16, 32, 128, 4, 5), TileConfig(16, 32, 128, 4, 4)),
        RowClass(ANY_ROWS, TileConfig(64, 64, 64, 4, 4), TileConfig(64, 32, 64, 4, 4)),
    ),
    "int4": (
        RowClass(16, TileConfig(16, 32, 128, 4, 4), TileConfig(16, 32, 128, 4, 3)),
        RowClass(ANY_ROWS, TileConfig(64, 32, 128, 4, 3), TileConfig(64, 32, 128, 4, 3)),
    ),
}

DETERMINISTIC: dict[str, tuple[TileConfig, TileConfig]] = {
    "half": (TileConfig(64, 64, 64, 4, 4), TileConfig(64, 32, 64, 4, 4)),
    "single": (TileConfig(32, 64, 32, 4, 3), TileConfig(32, 32, 32, 4, 3)),
    "int8": (TileConfig(64, 64, 64, 4, 4), TileConfig(64, 32, 64, 4, 4)),
    # fewer rows: at one row, 64 of them would cost more in the tensor cores than the weight's bytes
    "int4": (TileConfig(32, 64, 128, 4, 3), TileConfig(32, 32, 128, 4, 3)),
}
"""For any number of rows: plain and gated."""

HEAD: dict[str, tuple[tuple[int, TileConfig], ...]] = {
    "half": (
        (16, TileConfig(16, 64, 128, 4, 4)),
        (ANY_ROWS, TileConfig(64, 128, 64, 8, 3)),
    ),
    "single": ((ANY_ROWS, TileConfig(16, 64, 32, 4, 3)),),
}
"""By most rows. The head's vocabulary tile must hold the largest number of candidates."""

HEAD_DETERMINISTIC = {
    "half": TileConfig(32, 64, 64, 4, 4),
    "single": TileConfig(16, 64, 32, 4, 3),
}

HEAD_SPLITS = 128
"""Parts that the vocabulary is cut into, at most. A constant: the order of sums depends on it."""

MAX_CANDIDATES = 64
"""Most top-k candidates of the fused head: beyond that, logits are what one wants."""

MAX_NORM_WIDTH = 1 << 15
"""Longest row that one program of the norm holds in registers."""

PACK_TILE = 2048
"""Elements of a row that one program of the row packing handles: whole heads."""

GATHER_BLOCK = 2048
"""Elements of a reply's row that one program copies."""


def matmul_config(
    kind: str, num_rows: int, *, gated: bool = False, deterministic: bool = False
) -> TileConfig:
    """Returns the configuration for a weight's kind and a number of rows."""
    if deterministic:
        return DETERMINISTIC[kind][gated]
    row_class = next(c for c in MATMUL[kind] if num_rows <= c.max_rows)
    return row_class.gated if gated else row_class.plain


def head_config(kind: str, num_rows: int, *, deterministic: bool = False) -> TileConfig:
    """Returns the configuration of the fused head."""
    if deterministic:
        return HEAD_DETERMINISTIC[kind]
    return next(config for max_rows, config in HEAD[kind] if num_rows <= max_rows)


def norm_warps(block: int) -> int:
    """Returns the warps of a norm over `block` padded elements: 8 or 16 elements a thread."""
    return min(max(block // 512, 1), 16)
