"""KV memory of one session: sequences, blocks and slabs.

The blocks themselves, their reference counts and tables live in C (cython/attention_kv.h); this
side maps handles to slots, chooses a NUMA node for each sequence, buys slabs from the budget and
words the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.config import ENTRY_DTYPE, ENTRY_UPLOAD, AttentionGeometry, StepCode
from fastdecode_rdma.errors import CacheFullError, FastDecodeError
from fastdecode_rdma.worker.attention import (
    BLOCK_TOKENS,
    block_bytes,
    max_rows_per_entry,
    open_context,
    ring_blocks,
)
from fastdecode_rdma.worker.kv_ranges import (
    StepRefusedError,
    pack_range,
    parse_range,
    token_bytes,
)
from fastdecode_rdma.worker.memory import SLAB_BYTES, MemoryBudget

SLAB_SHARE = 64
"""A slab is no larger than this fraction of the budget: groups and sessions must not starve each
other."""


def kv_blocks(geometry: AttentionGeometry, length: int) -> tuple[int, ...]:
    """Returns the blocks per KV group of one unshared sequence of `length` tokens.

    ceil(length / 64) without a window; with one never more than its ring, ceil((W + 64) / 64) + 1.
    """
    whole = -(-length // BLOCK_TOKENS)
    return tuple(
        min(whole, ring_blocks(group)) if group.window is not None else whole
        for group in geometry.groups
    )


def kv_bytes(geometry: AttentionGeometry, length: int) -> int:
    """Returns the bytes that one unshared sequence of `length` tokens holds.

    Sum over groups of blocks * (2 * layers * 64 * KV heads * head_dim * bytes of the KV dtype).
    """
    return sum(
        blocks * block_bytes(geometry, group)
        for blocks, group in zip(kv_blocks(geometry, length), geometry.groups, strict=True)
    )


@dataclass(frozen=True)
class GroupUsage:
    """Blocks of one KV group: in use, free inside its slabs, and bytes of each."""

    used_blocks: int
    free_blocks: int
    block_bytes: int


class KVCache:
    """One session's sequences. Not thread-safe, but attends may run in another thread meanwhile."""

    def __init__(
        self, geometry: AttentionGeometry, budget: MemoryBudget, *, num_threads: int, isa: str
    ) -> None:
        self.context = open_context(geometry, num_threads, isa, budget.nodes)
        self._geometry = geometry
        self._budget = budget
        self._slots: dict[int, int] = {}
        # blocks that a step lacks: [group, node], and of all nodes together last
        self._missing = np.zeros((len(geometry.groups), len(budget.pools) + 1), dtype=np.int64)
        self._block_bytes = [block_bytes(geometry, group) for group in geometry.groups]
        self._closed = False

    @property
    def num_sequences(self) -> int:
        return len(self._slots)

    @property
    def page_kind(self) -> str:
        """What the memory lies on, in words."""
        return self._budget.page_kind()

    def usage(self) -> tuple[GroupUsage, ...]:
        """Returns the blocks of each KV group."""
        if self._closed:
            return tuple(GroupUsage(0, 0, nbytes) for nbytes in self._block_bytes)
        groups = range(len(self._block_bytes))
        return tuple(GroupUsage(*self.context.group_blocks(group)) for group in groups)

    def begin_step(self, table: int, step: int, entries: np.ndarray) -> None:
        """Arms a table (-1: none) and makes room for its rows. All or nothing.

        Raises:
            CacheFullError: the budget has no room for the new blocks.
            StepRefusedError: an entry cannot be; the message names it.
        """
        entries = np.ascontiguousarray(entries, dtype=ENTRY_DTYPE)
        handles = entries["handle"].tolist()
        created = self._create_missing(handles, entries)
        try:
            slots = np.fromiter(map(self._slots.__getitem__, handles), np.int32, len(handles))
            self._begin(table, step, entries, slots)
        except FastDecodeError:
            for handle in created:
                self.context.free_sequence(self._slots.pop(handle))
            self._release_slabs()
            raise

    def _create_missing(self, handles: list[int], entries: np.ndarray) -> list[int]:
        """Gives new handles an empty sequence; a known sequence cannot begin in its middle."""
        known = self._slots
        fresh = [i for i, handle in enumerate(handles) if handle not in known]
        for i in fresh:
            if entries["kv_len_before"][i]:
                raise StepRefusedError(
                    StepCode.SEQUENCE,
                    f"entry {i}: sequence {handles[i]} is unknown here, but the step expects "
                    f"{entries['kv_len_before'][i]} cached tokens of it",
                )
        created = list(dict.fromkeys(handles[i] for i in fresh))
        nodes = self._choose_nodes(entries["q_len"][fresh])
        for handle, node in zip(created, nodes, strict=False):
            known[handle] = self._new_slot(node)
        return created

    def _choose_nodes(self, lengths: np.ndarray) -> list[int]:
        """Returns a node for each new sequence: the one with most free memory once those before it
        have theirs."""
        if not self._budget.nodes:
            return [0] * len(lengths)
        free = self.node_free_bytes()
        nodes = []
        for length in lengths.tolist():
            nodes.append(max(range(len(free)), key=free.__getitem__))
            free[nodes[-1]] -= kv_bytes(self._geometry, length)
        return nodes

    def node_free_bytes(self) -> list[int]:
        """Returns the bytes that new blocks may still take, for each node."""
        free = [self._budget.free_bytes(node) for node in range(len(self._budget.pools))]
        for group, nbytes in enumerate(self._block_bytes):
            for node, blocks in enumerate(self.context.free_blocks(group)):
                free[node] += blocks * nbytes
        return free

    def _new_slot(self, node: int = 0) -> int:
        slot = self.context.new_sequence(node)
        if slot < 0:
            raise StepRefusedError(StepCode(slot), "no memory for a sequence, or session closed")
        return slot

    def _begin(self, table: int, step: int, entries: np.ndarray, slots: np.ndarray) -> None:
        for attempt in range(2):
            code, bad = self.context.begin(
                table,
                step,
                len(entries),
                entries.ctypes.data,
                slots.ctypes.data,
                attempt,
                self._missing.ctypes.data,
            )
            if code == StepCode.OK:
                return
            if code != StepCode.CACHE_FULL or attempt:
                raise StepRefusedError(StepCode(code), self._refusal(code, bad, entries))
            self._buy_slabs()

    def _refusal(self, code: int, bad: int, entries: np.ndarray) -> str:
        what = {
            StepCode.TABLE: "no such table, or the session is closed",
            StepCode.SEQUENCE: "unknown sequence",
            StepCode.PROTOCOL: "the sequence stands in the step twice, or a flag is unknown",
            StepCode.ROWS: f"too many query rows: at most {max_rows_per_entry(self._geometry)} of "
            f"one sequence and {self._geometry.max_rows} of a step",
            StepCode.RANGE: "tokens before the step are not in the cache (never written, or fallen "
            f"out of a window's ring), or beyond max_model_len={self._geometry.max_model_len}",
        }.get(StepCode(code), "internal error")
        return f"step entry {bad} {entries[bad]}: {what}" if bad >= 0 else what

    def _buy_slabs(self) -> None:
        """Buys the blocks that the C side found missing, in slabs as large as the budget allows:
        those of each node's sequences on that node, and elsewhere what it has no room for.

        Raises:
            CacheFullError: not even the missing blocks fit; slabs just bought are still empty.
        """
        missing = self._missing.tolist()
        needed = sum(
            row[-1] * nbytes for row, nbytes in zip(missing, self._block_bytes, strict=True)
        )
        spare = self._budget.free_bytes() - needed
        for group, (*counts, total) in enumerate(missing):
            for node, count in enumerate(counts):
                bought = self._buy_slab(group, node, count, total, spare)
                spare -= max(0, bought - total) * self._block_bytes[group]
                total = max(0, total - bought)
            for node in range(len(counts)):
                total -= self._buy_slab(group, node, total, total, 0)
            if total > 0:
                free = self._budget.free_bytes()
                raise CacheFullError(
                    f"the step needs {needed} more bytes of KV-cache, {free} of "
                    f"{self._budget.limit_bytes} are free",
                    needed_bytes=needed,
                    free_bytes=free,
                )

    def _buy_slab(self, group: int, node: int, count: int, total: int, spare: int) -> int:
        """Buys up to `count` blocks of a group on a node, or more to fill a slab; returns how many.
        `total` of them must be, the others only if `spare` bytes pay for them: other groups'
        missing blocks have to fit beside them."""
        nbytes = self._block_bytes[group]
        if count < 1:
            return 0
        slab_bytes = min(SLAB_BYTES, self._budget.limit_bytes // SLAB_SHARE)
        must = min(count, total)
        wanted = min(max(count, slab_bytes // nbytes), must + max(0, spare) // nbytes)
        wanted = min(wanted, self._budget.free_bytes(node) // nbytes)
        if wanted < 1:
            return 0
        slab = self._budget.take(wanted * nbytes, node)
        code = self.context.add_slab(group, node, wanted, slab.address, slab)
        if code != StepCode.OK:
            self._budget.give(slab)
            raise StepRefusedError(StepCode(code), "no memory for blocks, or session closed")
        return wanted

    def free(self, handles: np.ndarray) -> None:
        """Frees sequences. Unknown handles are skipped: a lost step may never have made them."""
        for handle in np.asarray(handles, dtype=np.uint64).tolist():
            slot = self._slots.pop(handle, None)
            if slot is not None:
                self.context.free_sequence(slot)
        self._release_slabs()

    def _release_slabs(self) -> None:
        for slab in self.context.trim():
            self._budget.give(slab)

    def fork(self, src: int, dst: int, length: int) -> None:
        """Makes `dst` share the first `length` tokens of `src`; blocks are copied when written.

        Raises:
            StepRefusedError: `src` is unknown, `dst` exists, or `src` no longer holds those tokens.
        """
        slot = self._slot(src)
        if dst in self._slots:
            raise StepRefusedError(StepCode.SEQUENCE, f"fork: sequence {dst} exists already")
        new = self._new_slot()
        code = self.context.fork(slot, new, length)
        if code != StepCode.OK:
            self.context.free_sequence(new)
            raise StepRefusedError(
                StepCode(code), f"fork: sequence {src} does not hold {length} tokens to share"
            )
        self._slots[dst] = new

    def _slot(self, handle: int) -> int:
        slot = self._slots.get(handle)
        if slot is None:
            raise StepRefusedError(StepCode.SEQUENCE, f"unknown sequence {handle}")
        return slot

    def export_range(self, handle: int, start: int, stop: int) -> bytes:
        """Returns tokens [start, stop) in stored form, for import_range() of an equal geometry.

        A window group gives only what its ring still holds.

        Raises:
            StepRefusedError: the sequence is unknown or has no such tokens.
        """
        slot = self._slot(handle)
        written = self.context.written(slot)
        if not 0 <= start <= stop <= written:
            raise StepRefusedError(
                StepCode.RANGE,
                f"export of tokens {start} to {stop} of sequence {handle}, which has {written}",
            )
        groups = []
        for group in range(len(self._block_bytes)):
            first = min(stop, self.context.export_start(slot, group, start))
            data = np.empty((stop - first) * token_bytes(self._geometry, group), dtype=np.uint8)
            code = self.context.copy_range(slot, group, first, stop, data.ctypes.data, 0)
            if code != StepCode.OK:
                raise StepRefusedError(StepCode(code), f"export of sequence {handle} failed")
            groups.append((first, data))
        return pack_range(self._geometry, start, stop, groups)

    def import_range(self, handle: int, start: int, data: bytes) -> None:
        """Writes what export_range() gave at its tokens; the sequence then ends with them.

        Raises:
            CacheFullError: the budget has no room.
            StepRefusedError: the data is damaged, of another geometry or start, or leaves a gap.
        """
        tokens = parse_range(self._geometry, start, data)
        entry = np.array([(handle, start, tokens.stop - start, ENTRY_UPLOAD)], dtype=ENTRY_DTYPE)
        known = self._slots.get(handle)
        if start and known is not None and self.context.written(known) < start:
            raise StepRefusedError(
                StepCode.RANGE, f"import at token {start} leaves a gap in sequence {handle}"
            )
        self.begin_step(-1, 0, entry)
        for group, (first, raw) in enumerate(tokens.groups):
            code = self.context.copy_range(
                self._slots[handle], group, first, tokens.stop, raw.ctypes.data, 1
            )
            if code != StepCode.OK:
                raise StepRefusedError(StepCode(code), f"import into sequence {handle} failed")

    def close(self) -> None:
        """Frees all memory and returns it to the budget. Idempotent; waits for a running attend."""
        if self._closed:
            return
        self._closed = True
        self._slots.clear()
        for slab in self.context.close():
            self._budget.give(slab)
