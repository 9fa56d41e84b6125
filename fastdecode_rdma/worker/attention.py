"""The attention kernel as Python sees it: instruction sets, block shapes, opening a C context."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.isa import ISAS, choose_isa
from fastdecode_rdma.numa import Node, helper_nodes
from fastdecode_rdma.pages import cpu_mask
from fastdecode_rdma.worker.kv_dtypes import kv_dtype

try:
    from fastdecode_rdma import _team
    from fastdecode_rdma.worker import _attention
except ImportError as exc:
    raise ImportError(
        "compiled kernels not found: run `pip install -e .`, or leave the checkout directory"
    ) from exc

BLOCK_TOKENS: int = _attention.BLOCK_TOKENS
SEGMENT_TOKENS: int = _attention.SEGMENT_TOKENS
NUM_TABLES: int = _attention.NUM_TABLES
BUILT_ISAS: tuple[str, ...] = _attention.ISA_NAMES
MAX_NODES: int = _attention.MAX_NODES
RING_SLACK = 64
"""Tokens that a window group keeps beyond its window, so that a step can shorten a sequence."""


def available_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this build has and this CPU can run, best first."""
    return tuple(isa for isa in ISAS if _attention.has_isa(isa))


def select_isa(requested: str | None = None) -> str:
    """Returns the instruction set to run: `requested`, else FASTDECODE_ISA, else the best proven.

    Raises:
        ConfigError: the name is unknown, or this CPU cannot run it.
    """
    return choose_isa(lambda isa: isa in available_isas(), requested)


def ring_blocks(group: KVGroup) -> int:
    """Blocks that a window group holds of a long sequence; 0 for a group without a window.

    The partly filled block at either end of the window needs the +1.
    """
    if group.window is None:
        return 0
    return -(-(group.window + RING_SLACK) // BLOCK_TOKENS) + 1


def max_rows_per_entry(geometry: AttentionGeometry) -> int:
    """Returns the query rows that one sequence may bring in one step.

    Its rows are written before the oldest of them has attended, so all windows must fit the ring.
    """
    rings = [
        ring_blocks(group) * BLOCK_TOKENS - group.window + 1
        for group in geometry.groups
        if group.window is not None
    ]
    return min([geometry.max_rows, *rings])


def block_bytes(geometry: AttentionGeometry, group: KVGroup) -> int:
    """Bytes of one block: K and V of BLOCK_TOKENS tokens in all layers of the group."""
    row = group.num_kv_heads * kv_dtype(geometry.kv_dtype).row_bytes(group.head_dim)
    return 2 * len(group.layers) * BLOCK_TOKENS * row


def _cpu_nodes(nodes: Sequence[Node]) -> bytes:
    """The node (an index) of each CPU, from CPU 0 on; nothing when there is one node."""
    if len(nodes) < 2:
        return b""
    table = bytearray(max(cpu for node in nodes for cpu in node.cpus) + 1)
    for index, node in enumerate(nodes):
        for cpu in node.cpus:
            table[cpu] = index
    return bytes(table)


def place_team(nodes: Sequence[Node]) -> None:
    """Binds the helpers of the process's team to nodes, spread as their CPUs are: a node's team."""
    masks = [cpu_mask(node.cpus, _team.MASK_BYTES) for node in nodes]
    # number 0 is whoever calls: nobody's to bind, but counted
    for number, index in enumerate(helper_nodes(nodes, _team.MAX_THREADS)):
        if number:
            _team.place(number, masks[index])


def open_context(
    geometry: AttentionGeometry, num_threads: int, isa: str, nodes: Sequence[Node] = ()
) -> _attention.Context:
    """Returns the C side of a session; `isa` comes from select_isa(). Two or more `nodes` each have
    their sequences and their share of the process's team.

    Raises:
        ConfigError: fewer than one thread.
    """
    if not 1 <= num_threads <= 4096:
        raise ConfigError(f"an attention session needs 1 to 4096 threads, got {num_threads}")
    groups = [
        (
            group.layers,
            group.num_q_heads,
            group.num_kv_heads,
            group.head_dim,
            group.window or 0,
            ring_blocks(group),
            group.sink_table.ctypes.data if group.sinks is not None else 0,
            group.slope_table.ctypes.data if group.slopes is not None else 0,
        )
        for group in geometry.groups
    ]
    _attention.bind_team(_team.address())
    if len(nodes) > 1:
        place_team(nodes)
    return _attention.Context(
        groups,
        geometry.num_layers,
        num_threads,
        isa,
        kv_dtype(geometry.kv_dtype).code,
        kv_dtype(geometry.wire_dtype).code,
        geometry.max_rows,
        geometry.max_model_len,
        geometry.scale,
        geometry.softcap or 0.0,
        _cpu_nodes(nodes),
    )
