"""A worker embedded in the engine's process: the same session, kernel and frames, no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdecode_rdma.attention.backend import WorkerInfo, WorkerLink
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.transport.loopback import LoopbackTransport

if TYPE_CHECKING:
    from fastdecode_rdma.worker.session import MemoryBudget


class LocalWorker(WorkerLink):
    """Runs attention on the engine's own thread and the thread team that it shares with the dense
    layers. Closing it frees the KV-cache."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        budget: MemoryBudget,
        *,
        num_threads: int,
        name: str = "local",
    ) -> None:
        # Here, not above: an engine with remote workers needs no kernel.
        from fastdecode_rdma.worker.machinery import kernel_facts
        from fastdecode_rdma.worker.session import AttentionSession

        self.session = AttentionSession(geometry, budget, num_threads)
        self.transport = LoopbackTransport(name, self.session)
        facts = kernel_facts()
        self.info = WorkerInfo(
            name=name,
            capacity_bytes=budget.limit_bytes,
            num_threads=num_threads,
            isa=facts.isa,
            transport=LoopbackTransport.scheme,
            block_tokens=facts.block_tokens,
            seg_tokens=facts.seg_tokens,
        )

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """A worker of this process is never lost."""

    def delay_reason(self, waited_s: float) -> str:
        """A worker of this process answers before the call returns."""
        return ""

    def close(self) -> None:
        """Frees the session's memory; idempotent."""
        self.session.close()
