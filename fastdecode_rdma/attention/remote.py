"""A worker elsewhere: a control connection (handshake, heartbeat) and a data plane."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from fastdecode_rdma.attention.backend import WorkerInfo, WorkerLink
from fastdecode_rdma.attention.control import ControlLink
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError, RemoteProtocolError
from fastdecode_rdma.transport import open_transport
from fastdecode_rdma.transport.address import Address, parse_url
from fastdecode_rdma.transport.base import FrameSizes, Transport, plan_slots
from fastdecode_rdma.transport.tcp import BlockingConnection, dial
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection

CONNECT_TIMEOUT_S = 10.0


class RemoteWorker(WorkerLink):
    """A session on a worker that listens somewhere."""

    def __init__(self, control: ControlLink, transport: Transport, info: WorkerInfo) -> None:
        self.transport = transport
        self.info = info
        self._control = control

    @classmethod
    def connect(
        cls,
        url: str,
        geometry: AttentionGeometry,
        *,
        heartbeats: Heartbeats,
        token: bytes | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> RemoteWorker:
        """Connects to a worker, opens a session for a model and beats for it from now on.

        Raises:
            ConfigError: the URL cannot be used.
            RemoteProtocolError: the worker refused: version, token, geometry or memory; says which.
            TransportError, TransportTimeout: it cannot be reached.
        """
        address = parse_url(url)
        timeout_s = float(address.options.get("connect_timeout_s", timeout_s))
        sock = dial(address, timeout_s)
        try:
            conn = Connection(m.Role.ENGINE, token=token, now_s=time.monotonic())
            link = BlockingConnection(sock, conn, peer=str(address), timeout_s=timeout_s)
            opened = _open_session(link, address, geometry)
            transport = open_transport(address, opened, conn.session_key, timeout_s=timeout_s)
        except BaseException:
            sock.close()
            raise
        info = WorkerInfo(
            name=str(address),
            # row buffers come out of the same budget
            capacity_bytes=max(0, opened.capacity_bytes - FrameSizes.of(geometry).buffer_bytes),
            num_threads=opened.num_threads,
            isa=opened.isa,
            transport=address.scheme,
            block_tokens=opened.block_tokens,
            seg_tokens=opened.seg_tokens,
        )
        control = ControlLink(sock, conn)
        heartbeats.watch(control)
        return cls(control, transport, info)

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """`tell(reason)` is called once, on any thread, when the worker falls silent or leaves."""
        self._control.on_lost(tell)

    def delay_reason(self, waited_s: float) -> str:
        """Says what is known of an answer that did not come in `waited_s`."""
        return self._control.delay_reason(waited_s)

    def close(self) -> None:
        """Says goodbye if the worker still listens; idempotent."""
        self.transport.close()
        self._control.close()


def open_sessions(
    urls: Sequence[str],
    geometry: AttentionGeometry,
    *,
    token: bytes | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> list[RemoteWorker]:
    """Returns a session on every worker, all or none; one heartbeat thread serves them all.

    Raises: as RemoteWorker.connect; ConfigError when an address is given twice.
    """
    addresses = [str(parse_url(url)) for url in urls]
    twice = sorted({name for name in addresses if addresses.count(name) > 1})
    if twice:
        raise ConfigError(f"workers given twice: {', '.join(twice)}")
    heartbeats = Heartbeats()
    workers: list[RemoteWorker] = []
    try:
        for url in urls:
            workers.append(
                RemoteWorker.connect(
                    url, geometry, heartbeats=heartbeats, token=token, timeout_s=timeout_s
                )
            )
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def _open_session(
    link: BlockingConnection, address: Address, geometry: AttentionGeometry
) -> m.SessionOpened:
    link.send(link.conn.hello(os.urandom(m.NONCE_BYTES)))
    link.receive(m.Hello)
    link.send(link.conn.proof())
    link.receive(m.Auth)
    slots = plan_slots(geometry)
    link.send(m.OpenSession(geometry, slots, transport=address.scheme))
    opened = link.receive(m.SessionOpened)
    if (opened.slots.latency_nbytes, opened.slots.bulk_nbytes) != (
        slots.latency_nbytes,
        slots.bulk_nbytes,
    ):
        raise RemoteProtocolError(f"{address}: granted slots of another length than asked for")
    return opened
