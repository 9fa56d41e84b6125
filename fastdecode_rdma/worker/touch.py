"""First touch: every page of a worker's KV memory, before it serves, by threads of the page's node.

Afterwards no step waits for the system to find and clear a page, the memory lies next to the
threads that read it even where the system refused to bind it, and a machine that has less than was
asked for says so at the start.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from fastdecode_rdma import pages
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.numa import Node, helper_nodes
from fastdecode_rdma.worker import limits
from fastdecode_rdma.worker.memory import MemoryBudget, SlabPool

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""What a thread touches between two looks at whether to stop: some milliseconds."""

QUIET_S = 1.0
LINE_EVERY_S = 10.0


class Progress:
    """Says on a stream how far it is, once it has taken longer than a second: in one line that
    changes on a terminal, else in a line every ten seconds."""

    def __init__(self, total_bytes: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total_bytes = total_bytes
        self._stream = stream
        self._clock = clock
        self._started_s = clock()
        self._next_s = self._started_s + QUIET_S
        self._width = 0

    def show(self, nbytes: int) -> None:
        """Tells that `nbytes` are done, if it is time to."""
        now_s = self._clock()
        if now_s < self._next_s or not nbytes:
            return
        took_s = now_s - self._started_s
        text = (
            f"touching KV memory: {limits.format_memory(nbytes)} of "
            f"{limits.format_memory(self._total_bytes)}, "
            f"{took_s / nbytes * (self._total_bytes - nbytes):.0f} s left"
        )
        if self._stream.isatty():
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
            self._next_s = now_s + 0.1
        else:
            self._stream.write(text + "\n")
            self._next_s = now_s + LINE_EVERY_S
        self._stream.flush()

    def close(self) -> None:
        """Removes the line from the terminal."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


class _Work:
    """The pieces of one pool that nobody has touched yet, and the threads that do."""

    def __init__(self, pool: SlabPool, *, explicit: bool) -> None:
        mapping = pool.fill(explicit=explicit)
        end = mapping.address + mapping.nbytes
        self.nbytes = mapping.nbytes
        self.pieces = deque(
            (at, min(PIECE_BYTES, end - at)) for at in range(mapping.address, end, PIECE_BYTES)
        )
        self.node = pool.node
        self.done_bytes = 0
        self.error: OSError | None = None

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Touches pieces until there are none, on the CPUs of the node."""
        try:
            if self.node is not None:
                os.sched_setaffinity(0, self.node.cpus)  # of this thread alone
            while self.error is None and not is_stopped():
                address, nbytes = self.pieces.popleft()
                pages.populate(address, nbytes)
                self.done_bytes += nbytes
        except IndexError:  # no pieces left
            return
        except OSError as exc:
            self.error = exc


def touch_memory(
    budget: MemoryBudget,
    num_threads: int,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    stream: TextIO | None = None,
) -> bool:
    """Maps and touches all memory that a budget may give out; False when it was stopped before.

    Raises:
        ConfigError: the system does not have the memory.
    """
    explicit = limits.free_huge_bytes() >= budget.limit_bytes >= pages.HUGE_BYTES
    stream = stream or sys.stderr
    try:
        return _touch(budget, num_threads, explicit=explicit, is_stopped=is_stopped, stream=stream)
    except OSError as exc:
        budget.empty()
        if not explicit:
            raise ConfigError(
                f"the system does not give {limits.format_memory(budget.limit_bytes)} of memory "
                f"({exc.strerror}): lower --memory"
            ) from exc
        logger.warning("reserved 2 MiB pages cannot be used: %s", exc.strerror)
    return _touch(budget, num_threads, explicit=False, is_stopped=is_stopped, stream=stream)


def _touch(
    budget: MemoryBudget,
    num_threads: int,
    *,
    explicit: bool,
    is_stopped: Callable[[], bool],
    stream: TextIO,
) -> bool:
    works = [_Work(pool, explicit=explicit) for pool in budget.pools]
    nodes: Sequence[Node] = budget.nodes or (Node(0, (0,)),)
    # a node without a thread of its own yet is touched all the same
    order = helper_nodes(nodes, max(num_threads, len(nodes)))
    threads = [
        threading.Thread(target=works[index].run, args=(is_stopped,), daemon=True)
        for index in order
    ]
    progress = Progress(sum(work.nbytes for work in works), stream, time.monotonic)
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            progress.show(sum(work.done_bytes for work in works))
    progress.close()
    for work in works:
        if work.error is not None:
            raise work.error
    return not any(work.pieces for work in works)
