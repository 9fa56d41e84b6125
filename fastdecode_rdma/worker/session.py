"""One engine's attention session: KV-cache, step tables and kernel. No sockets, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np

from fastdecode_rdma.config import AttentionGeometry, StepCode
from fastdecode_rdma.errors import CacheFullError, FastDecodeError
from fastdecode_rdma.worker.attention import select_isa
from fastdecode_rdma.worker.kv_ranges import StepRefusedError
from fastdecode_rdma.worker.kvcache import KVCache
from fastdecode_rdma.worker.memory import MemoryBudget

__all__ = [
    "AttentionSession",
    "MemoryBudget",
    "NativeEntry",
    "StepRefusedError",
    "code_of",
]


@dataclass(frozen=True)
class NativeEntry:
    """Addresses of fd_attend_fn and fd_store_fn (cython/entry.h) and of their context.

    Calls need no GIL; after the session is closed they return FD_E_TABLE. `owner` keeps the context
    alive: hold the NativeEntry for as long as the addresses are in use.
    """

    attend_addr: int
    store_addr: int
    ctx_addr: int
    owner: object


def code_of(error: FastDecodeError) -> StepCode:
    """Returns the code by which an error of a session goes over the wire."""
    if isinstance(error, CacheFullError):
        return StepCode.CACHE_FULL
    return error.code if isinstance(error, StepRefusedError) else StepCode.INTERNAL


class AttentionSession:
    """What one engine does on a worker.

    All methods come from one thread; attend() and store() may also come from C through native().
    A sequence is created by the first step, fork or import that names its handle.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        budget: MemoryBudget,
        num_threads: int,
        *,
        isa: str | None = None,
    ) -> None:
        """`isa` forces an instruction set, as FASTDECODE_ISA does.

        Raises:
            ConfigError: the instruction set or number of threads cannot be.
        """
        self.geometry = geometry
        self.num_threads = num_threads
        self.isa = select_isa(isa)
        self._cache = KVCache(geometry, budget, num_threads=num_threads, isa=self.isa)
        self._context = self._cache.context

    def __enter__(self) -> AttentionSession:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def begin_step(self, table: int, step: int, entries: np.ndarray) -> None:
        """Replaces a step table and makes room for its rows; `entries` has dtype ENTRY_DTYPE.

        Lengths may be shorter than before: the tokens behind are dropped. All or nothing; when it
        raises, the old table is still armed.

        Raises:
            CacheFullError: no room for the new blocks.
            StepRefusedError: an entry cannot be; it is named, with a code.
        """
        if table < 0:
            raise StepRefusedError(StepCode.TABLE, f"no step table {table}")
        self._cache.begin_step(table, step, entries)

    def attend(
        self,
        table: int,
        layer: int,
        qkv: np.ndarray,  # [num_rows, row_width(layer)] wire dtype, contiguous
        out: np.ndarray,  # [num_rows, out_width(layer)] wire dtype, contiguous
        row_status: np.ndarray,  # uint8 [num_rows]; bit 0: a value was not finite
    ) -> None:
        """Writes k, v of every row at its position and attends, in place in `out` and `row_status`.

        Raises:
            StepRefusedError: with the code that the native call returned.
        """
        code = self._context.attend(
            table, layer, len(qkv), qkv.ctypes.data, out.ctypes.data, row_status.ctypes.data
        )
        self._check(code, f"attend of {len(qkv)} rows, table {table}, layer {layer}")

    def store(
        self,
        table: int,
        layer: int,
        entry: int,
        offset: int,
        k: np.ndarray,  # [num_rows, Hkv * D] wire dtype, contiguous
        v: np.ndarray,  # [num_rows, Hkv * D] wire dtype, contiguous
    ) -> None:
        """Writes rows of an upload entry from its token `offset` on, in ascending order per layer.

        Raises:
            StepRefusedError: with the code that the native call returned.
        """
        code = self._context.store(
            table, layer, entry, offset, len(k), k.ctypes.data, v.ctypes.data
        )
        self._check(code, f"store of {len(k)} rows at {offset}, table {table}, entry {entry}")

    def _check(self, code: int, what: str) -> None:
        if code != StepCode.OK:
            raise StepRefusedError(StepCode(code), f"{what}: refused ({StepCode(code).name})")

    def free(self, handles: np.ndarray) -> None:
        """Frees sequences; unknown handles are skipped."""
        self._cache.free(handles)

    def fork(self, src: int, dst: int, length: int) -> None:
        """Makes a new sequence `dst` share the first `length` tokens of `src`, copied when written.

        Tables that name `src` must be armed again before they write.

        Raises:
            StepRefusedError: `src` is unknown, `dst` exists, or `src` no longer holds those tokens.
        """
        self._cache.fork(src, dst, length)

    def export_range(self, handle: int, start: int, stop: int) -> bytes:
        """Returns tokens [start, stop) in stored form; see KVCache.export_range()."""
        return self._cache.export_range(handle, start, stop)

    def import_range(self, handle: int, start: int, data: bytes) -> None:
        """Writes an exported range; see KVCache.import_range()."""
        self._cache.import_range(handle, start, data)

    def native(self) -> NativeEntry:
        """Returns the addresses through which C drives this session."""
        context = self._context
        return NativeEntry(
            context.attend_address, context.store_address, context.address, owner=context
        )

    def stats(self) -> dict[str, object]:
        """Returns kv_bytes_used, blocks_used and blocks_free (per KV group), free_bytes (per NUMA
        node), pages (what the memory lies on), sequences, attends and kernel_ns, the time inside
        them."""
        usage = self._cache.usage()
        attends, kernel_ns = self._context.counters()
        return {
            "kv_bytes_used": sum(group.used_blocks * group.block_bytes for group in usage),
            "blocks_used": [group.used_blocks for group in usage],
            "blocks_free": [group.free_blocks for group in usage],
            "free_bytes": self._cache.node_free_bytes(),
            "pages": self._cache.page_kind,
            "sequences": self._cache.num_sequences,
            "attends": attends,
            "kernel_ns": kernel_ns,
        }

    def close(self) -> None:
        """Frees all memory. Idempotent; waits for an attend that is running."""
        self._cache.close()
