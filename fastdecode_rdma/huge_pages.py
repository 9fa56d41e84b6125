"""Long-lived arrays on 2 MiB pages.

Weights are read in full at every step. Spread over thousands of 4 KiB pages, wherever the kernel
found one, their speed depends on the luck of the process: the prefetchers stop at each page's end,
and pages collide in the caches. An allocator of our own also packs small weights together, which
numpy, asking for huge pages array by array and only from 4 MiB on, does not.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20
ALIGN_BYTES = 64


class HugePageArena:
    """Hands out uninitialised arrays. Memory goes back when the last array of a chunk is gone."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, count: int, dtype: type[np.generic]) -> np.ndarray:
        """An array of `count` elements that starts on a cache line.

        Raises:
            MemoryError: the system has no such range of addresses.
        """
        nbytes = count * np.dtype(dtype).itemsize
        if self._used + nbytes > self._chunk.nbytes:
            self._chunk = _map(max(nbytes, CHUNK_BYTES))
            self._used = 0
        array = self._chunk[self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return array


def _map(nbytes: int) -> np.ndarray:
    """Anonymous memory of whole huge pages; the array keeps the mapping alive."""
    nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, nbytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"no {nbytes} bytes of memory for weights: {exc.strerror}") from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: `doctor` says so
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    skip = -raw.ctypes.data % PAGE_BYTES
    return raw[skip : skip + nbytes]
