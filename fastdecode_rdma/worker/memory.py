"""The worker's memory: how much sessions may hold, and where slabs of KV blocks come from.

A slab lies on reserved 2 MiB pages if enough are free, else on transparent ones, else on small
pages. By default it is mapped when it is bought and goes back to the system with its last block. A
worker may also map all of its limit at once and touch it (touch.py): then slabs are cut from that
memory and come back to it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from fastdecode_rdma import pages
from fastdecode_rdma.errors import CacheFullError
from fastdecode_rdma.numa import Node
from fastdecode_rdma.pages import HUGE_BYTES, SMALL_BYTES, Mapping, round_up
from fastdecode_rdma.worker import limits

logger = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20
"""What a session buys at once: 32 huge pages, few mappings even for a terabyte."""


class Slab:
    """Memory for blocks, from one pool. Dropped without release(), it stays counted."""

    def __init__(self, pool: SlabPool, mapping: Mapping, nbytes: int, *, is_own: bool) -> None:
        self.address = mapping.address
        self.nbytes = nbytes
        self.pool = pool
        self.mapping = mapping
        # memory cut from a larger mapping stays with that
        self.unmap = weakref.finalize(self, pages.unmap, mapping.address, mapping.nbytes)
        self.unmap.atexit = False
        if not is_own:
            self.unmap.detach()


class SlabPool:
    """The KV memory of one NUMA node, or of the machine when `node` is None. Thread-safe."""

    def __init__(self, limit_bytes: int, node: Node | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.node = node
        self.explicit_bytes = 0
        self.other_bytes = 0
        self.binding_error = ""
        """Why the system did not bind memory to the node; "" when it did, or there is none."""
        self._free: list[Mapping] = []  # mapped and touched, by address; none in a lazy pool
        self._is_kept = False
        self._lock = threading.Lock()

    @property
    def mapped_bytes(self) -> int:
        return self.explicit_bytes + self.other_bytes

    def take(self, nbytes: int) -> Slab:
        """Returns memory for a slab.

        Raises:
            OSError: the system gives none.
        """
        with self._lock:
            length = round_up(nbytes, SMALL_BYTES)
            fitting = [free for free in self._free if free.nbytes >= length]
            if fitting:
                best = min(fitting, key=lambda free: free.nbytes)
                self._free.remove(best)
                if best.nbytes > length:
                    rest = Mapping(best.address + length, best.nbytes - length, best.is_explicit)
                    self._put(rest)
                piece = Mapping(best.address, length, best.is_explicit)
                return Slab(self, piece, nbytes, is_own=False)
            if self._is_kept:  # enough is free, but in pieces: other addresses for the same bytes
                self._unmap_free(self.mapped_bytes + length - self.limit_bytes)
            mapping = self._map(length)
            return Slab(self, mapping, nbytes, is_own=not self._is_kept)

    def give(self, slab: Slab) -> None:
        """Takes a slab's memory back."""
        mapping = slab.mapping
        with self._lock:
            if self._is_kept:
                slab.unmap.detach()
                self._put(mapping)
            elif slab.unmap.alive:
                self._count(mapping, -1)
                slab.unmap()

    def fill(self, *, explicit: bool) -> Mapping:
        """Maps the whole limit and keeps what is given back from now on; the caller touches it.

        Raises:
            OSError: the system has no such pages.
        """
        unit = HUGE_BYTES if self.limit_bytes >= HUGE_BYTES else SMALL_BYTES
        nbytes = self.limit_bytes // unit * unit
        mapping = pages.map_pages(nbytes, explicit=explicit)
        self._bind(mapping)
        with self._lock:
            self._is_kept = True
            self._count(mapping, 1)
            self._put(mapping)
        return mapping

    def empty(self) -> None:
        """Gives what fill() mapped back to the system, before any of it was taken."""
        with self._lock:
            self._is_kept = False
            for piece in self._free:
                pages.unmap(piece.address, piece.nbytes)
                self._count(piece, -1)
            self._free = []

    def shrink(self, nbytes: int) -> int:
        """Gives free pages of a kept pool, about `nbytes` of them, back to the system; returns how
        many bytes it gave."""
        with self._lock:
            before = self.mapped_bytes
            self._unmap_free(nbytes)
            return before - self.mapped_bytes

    def _map(self, nbytes: int) -> Mapping:
        size = round_up(nbytes, HUGE_BYTES)
        if nbytes >= HUGE_BYTES and limits.free_huge_bytes() >= size:
            try:
                return self._map_pages(size, explicit=True)
            except OSError as exc:  # somebody else was faster, or a limit that no file shows
                logger.info("no reserved 2 MiB pages: %s", exc.strerror)
        return self._map_pages(nbytes, explicit=False)

    def _map_pages(self, nbytes: int, *, explicit: bool) -> Mapping:
        mapping = pages.map_pages(nbytes, explicit=explicit)
        self._bind(mapping)
        if explicit:
            try:
                pages.populate(mapping.address, mapping.nbytes)
            except OSError:
                pages.unmap(mapping.address, mapping.nbytes)
                raise
        self._count(mapping, 1)
        return mapping

    def _bind(self, mapping: Mapping) -> None:
        if self.node is None or self.binding_error:
            return
        try:
            pages.bind_to_node(mapping.address, mapping.nbytes, self.node.number)
        except OSError as exc:
            self.binding_error = exc.strerror or str(exc)
            logger.warning(
                "KV memory is not bound to NUMA node %d: %s; it lies where it is touched first",
                self.node.number,
                self.binding_error,
            )

    def _count(self, mapping: Mapping, sign: int) -> None:
        if mapping.is_explicit:
            self.explicit_bytes += sign * mapping.nbytes
        else:
            self.other_bytes += sign * mapping.nbytes

    def _put(self, free: Mapping) -> None:
        """Adds a free piece, joined with its neighbours of the same kind."""
        pieces = sorted([*self._free, free], key=lambda piece: piece.address)
        joined = pieces[:1]
        for piece in pieces[1:]:
            last = joined[-1]
            touching = last.address + last.nbytes == piece.address
            if touching and last.is_explicit == piece.is_explicit:
                joined[-1] = Mapping(last.address, last.nbytes + piece.nbytes, last.is_explicit)
            else:
                joined.append(piece)
        self._free = joined

    def _unmap_free(self, nbytes: int) -> None:
        """Gives whole 2 MiB pages of free pieces back to the system until `nbytes` are gone."""
        for piece in list(self._free):
            if nbytes <= 0:
                return
            start = round_up(piece.address, HUGE_BYTES)
            end = piece.address + piece.nbytes
            end = min(end // HUGE_BYTES * HUGE_BYTES, start + round_up(nbytes, HUGE_BYTES))
            if end <= start:
                continue
            pages.unmap(start, end - start)
            nbytes -= end - start
            self._free.remove(piece)
            self._count(Mapping(start, end - start, piece.is_explicit), -1)
            for a, b in ((piece.address, start), (end, piece.address + piece.nbytes)):
                if b > a:
                    self._put(Mapping(a, b - a, piece.is_explicit))


class MemoryBudget:
    """Bytes that all sessions of a worker share. Thread-safe.

    With more than one node each has a pool of its own, which holds its share of the bytes.
    """

    def __init__(self, limit_bytes: int, nodes: Sequence[Node] = ()) -> None:
        self.limit_bytes = limit_bytes
        self.nodes = tuple(nodes) if len(nodes) > 1 else ()
        self.pools = tuple(
            SlabPool(int(limit_bytes * node.share), node) for node in self.nodes
        ) or (SlabPool(limit_bytes),)
        self._used_bytes = 0
        self._pool_bytes = [0] * len(self.pools)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of slabs, and of memory that was mapped ahead for them."""
        return sum(pool.mapped_bytes for pool in self.pools)

    def free_bytes(self, node: int | None = None) -> int:
        """Returns the bytes that are left, on all nodes or on one."""
        free = self.limit_bytes - self._used_bytes
        if node is None or len(self.pools) == 1:
            return free
        return max(0, min(free, self.pools[node].limit_bytes - self._pool_bytes[node]))

    def reserve(self, nbytes: int) -> None:
        """Takes bytes from the budget, for other memory than slabs.

        Raises:
            CacheFullError: they are not there.
        """
        self._reserve(nbytes)
        others = self._used_bytes - sum(self._pool_bytes)
        excess = self.mapped_bytes + others - self.limit_bytes
        for pool in self.pools:
            excess -= pool.shrink(excess)

    def _reserve(self, nbytes: int) -> None:
        with self._lock:
            free = self.limit_bytes - self._used_bytes
            if nbytes > free:
                raise CacheFullError(
                    f"the KV-cache needs {nbytes} more bytes, {free} of {self.limit_bytes} are "
                    "free",
                    needed_bytes=nbytes,
                    free_bytes=free,
                )
            self._used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Gives bytes back.

        Raises:
            ValueError: more than was reserved.
        """
        with self._lock:
            if not 0 <= nbytes <= self._used_bytes:
                raise ValueError(f"release of {nbytes} bytes, {self._used_bytes} are reserved")
            self._used_bytes -= nbytes

    def page_kind(self) -> str:
        """Returns the pages that its memory lies on, or will, in words."""
        explicit = sum(pool.explicit_bytes for pool in self.pools)
        others = sum(pool.other_bytes for pool in self.pools)
        if not explicit:
            return limits.page_kind(0 if others else min(self.limit_bytes, SLAB_BYTES))
        return "reserved 2MiB" if not others else "some reserved 2MiB"

    def empty(self) -> None:
        """Gives memory that was mapped ahead back to the system, before any of it was taken."""
        for pool in self.pools:
            pool.empty()

    def take(self, nbytes: int, node: int = 0) -> Slab:
        """Returns memory for a slab on a node (an index), reserved here until give().

        Raises:
            CacheFullError: the budget or the system does not have it.
        """
        self._reserve(nbytes)
        try:
            slab = self.pools[node].take(nbytes)
        except OSError as exc:
            self.release(nbytes)
            raise CacheFullError(
                f"the system gave no {nbytes} bytes for the KV-cache: {exc.strerror}",
                needed_bytes=nbytes,
                free_bytes=self.free_bytes(),
            ) from exc
        with self._lock:
            self._pool_bytes[node] += nbytes
        return slab

    def give(self, slab: Slab) -> None:
        """Takes a slab back."""
        node = self.pools.index(slab.pool)
        slab.pool.give(slab)
        with self._lock:
            self._pool_bytes[node] -= slab.nbytes
        self.release(slab.nbytes)
