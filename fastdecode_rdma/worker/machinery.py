"""Puts the rooms behind the server together: session, kernel and data plane."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode_rdma import _team
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.transport import open_hosts
from fastdecode_rdma.transport._pump import Plane
from fastdecode_rdma.transport.base import FrameSizes, Session, check_slots
from fastdecode_rdma.transport.same_host import is_from_here
from fastdecode_rdma.transport.serve import DataPlane
from fastdecode_rdma.wire.messages import SlotPlan
from fastdecode_rdma.worker.attention import (
    BLOCK_TOKENS,
    BUILT_ISAS,
    SEGMENT_TOKENS,
    available_isas,
    select_isa,
)
from fastdecode_rdma.worker.bench_session import BenchSession
from fastdecode_rdma.worker.session import AttentionSession
from fastdecode_rdma.worker.session_record import Machinery


@dataclass(frozen=True)
class KernelFacts:
    """What the compiled kernel uses on this machine."""

    isa: str
    built: tuple[str, ...]
    available: tuple[str, ...]
    block_tokens: int
    seg_tokens: int


def kernel_facts() -> KernelFacts:
    """Returns what the kernel uses.

    Raises:
        ConfigError: FASTDECODE_ISA names an instruction set that this CPU cannot run.
    """
    return KernelFacts(select_isa(), BUILT_ISAS, available_isas(), BLOCK_TOKENS, SEGMENT_TOKENS)


def buffer_bytes(geometry: AttentionGeometry, slots: SlotPlan) -> int:
    """Returns the bytes of a session's row buffers in the data plane (rows in, rows out, bulk)."""
    return FrameSizes.of(geometry, bulk_bytes=slots.bulk_nbytes).buffer_bytes


def open_data_plane(
    fd: int, epoch: int, slots: SlotPlan, session: Session, plane: Plane | None = None
) -> DataPlane:
    """Returns the data plane of a session, or of a benchmark's."""
    if not isinstance(session, BenchSession):
        if is_from_here(fd) and (plane is None or not plane.spin_ns):
            # Cores are shared with the engine: helpers that look for more work after a layer keep
            # it from its own. Measured on two cores: 0.92 of the embedded worker's tokens/s become
            # 0.99 over shared memory.
            _team.set_spin_ns(0)
        return DataPlane(fd, epoch, slots, session, plane)
    session.attach(fd)
    return DataPlane(fd, epoch, slots, session, plane, bench=True)


def real_machinery() -> Machinery:
    """Returns the rooms that a worker process serves with."""
    return Machinery(
        open_session=AttentionSession,
        open_data_plane=open_data_plane,
        check_slots=check_slots,
        buffer_bytes=buffer_bytes,
        open_hosts=open_hosts,
        open_bench=BenchSession,
    )
