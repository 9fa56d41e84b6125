"""A worker elsewhere: a control connection (handshake, heartbeat) and a data plane."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastdecode_rdma.attention.backend import WorkerInfo, WorkerLink
from fastdecode_rdma.attention.control import ControlLink
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError, RemoteProtocolError
from fastdecode_rdma.transport import is_expected, open_transport, planes_of, why_not
from fastdecode_rdma.transport.address import Address, parse_url
from fastdecode_rdma.transport.base import (
    Attempt,
    FrameSizes,
    PlaneUnavailable,
    Transport,
    plan_slots,
)
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.tcp import dial
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import Connection

CONNECT_TIMEOUT_S = 10.0

Opening = m.OpenSession | m.OpenBench

logger = logging.getLogger(__name__)


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
        worker_index: int = 0,
        opening: Callable[[str], Opening] | None = None,
    ) -> RemoteWorker:
        """Connects to a worker, opens a session for a model and beats for it from now on. The
        workers of an engine are spread over adapters by `worker_index`. `opening(plane)` says what
        to ask the worker for; None: a session with the usual slots.

        Raises:
            ConfigError: the URL cannot be used.
            RemoteProtocolError: the worker refused: version, token, geometry or memory; says which.
            PlaneUnavailable: the data plane that the URL demands cannot be used.
            TransportError, TransportTimeout: it cannot be reached.
        """
        address = parse_url(url)
        timeout_s = float(address.options.get("connect_timeout_s", timeout_s))
        planes, reasons = list(planes_of(address)), []
        attempt = Attempt(worker_index)
        while True:
            sock = dial(address, timeout_s)
            try:
                conn = Connection(m.Role.ENGINE, token=token, now_s=time.monotonic())
                link = BlockingConnection(sock, conn, peer=str(address), timeout_s=timeout_s)
                offers = _greet(link, ask=planes != ["tcp"])
                while reason := why_not(planes[0], address, offers):
                    said = is_expected(planes[0], offers)
                    _give_up(planes, reasons, reason, address, is_news=said)
                offer = offers.get(planes[0], b"")
                ask = opening or usual_opening(geometry, address)
                opened = _open_session(link, ask(planes[0]))
                # from here on: a plane may take longer to set up than the worker's patience
                control = ControlLink(sock, conn)
                heartbeats.watch(control)
                transport = _open_plane(control, link, address, opened, geometry, offer, attempt)
                break
            except PlaneUnavailable as error:
                sock.close()
                if not planes:
                    raise
                reason = str(error).removeprefix(f"{address}: ")
                if error.try_again:
                    attempt = replace(attempt, failed=(*attempt.failed, reason))
                    continue
                _give_up(
                    planes, reasons, "; ".join((*attempt.failed, reason)), address, is_news=True
                )
                attempt = Attempt(worker_index)
            except BaseException:
                sock.close()
                raise
        info = _info(address, opened, geometry, "; ".join(reasons))
        return cls(control, transport, replace(info, transport_detail=transport.detail))

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
    addresses = [parse_url(url).place for url in urls]  # one worker, whatever the way to it
    twice = sorted({name for name in addresses if addresses.count(name) > 1})
    if twice:
        raise ConfigError(f"workers given twice: {', '.join(twice)}")
    heartbeats = Heartbeats()
    workers: list[RemoteWorker] = []
    try:
        for index, url in enumerate(urls):
            workers.append(
                RemoteWorker.connect(
                    url,
                    geometry,
                    heartbeats=heartbeats,
                    token=token,
                    timeout_s=timeout_s,
                    worker_index=index,
                )
            )
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def _open_plane(
    control: ControlLink,
    link: BlockingConnection,
    address: Address,
    opened: m.SessionOpened,
    geometry: AttentionGeometry,
    offer: bytes,
    attempt: Attempt,
) -> Transport:
    """Connects the data plane of a session; ends the session if that fails."""
    try:
        return open_transport(
            address,
            opened,
            link.conn.session_key,
            sizes=FrameSizes.of(geometry, bulk_bytes=opened.slots.bulk_nbytes),
            offer=offer,
            timeout_s=link.timeout_s,
            attempt=attempt,
        )
    except BaseException:
        control.close()
        raise


def _give_up(
    planes: list[str], reasons: list[str], reason: str, address: Address, *, is_news: bool
) -> None:
    """Takes the first plane out, in place; the next one's turn is next. `is_news`: whoever set
    these machines up would have expected this plane.

    Raises:
        PlaneUnavailable: there is none left.
    """
    reasons.append(f"{planes.pop(0)}: {reason}")
    if not planes:
        raise PlaneUnavailable(f"{address}: {reason}")
    level = logging.WARNING if is_news else logging.INFO
    text = "%s: goes on over %s: %s; `fastdecode doctor` says what is here and what is missing"
    logger.log(level, text, address, planes[0], reasons[-1])


def _info(
    address: Address, opened: m.SessionOpened, geometry: AttentionGeometry, fallback_reason: str
) -> WorkerInfo:
    sizes = FrameSizes.of(geometry, bulk_bytes=opened.slots.bulk_nbytes)
    return WorkerInfo(
        name=str(address),
        # row buffers come out of the same budget
        capacity_bytes=max(0, opened.capacity_bytes - sizes.buffer_bytes),
        num_threads=opened.num_threads,
        isa=opened.isa,
        transport=opened.transport,
        block_tokens=opened.block_tokens,
        seg_tokens=opened.seg_tokens,
        fallback_reason=fallback_reason,
    )


def _greet(link: BlockingConnection, *, ask: bool) -> dict[str, bytes]:
    """Proves both sides; returns the planes that the worker offers besides TCP, if asked for."""
    link.send(link.conn.hello(os.urandom(m.NONCE_BYTES)))
    link.receive(m.Hello)
    link.send(link.conn.proof())
    link.receive(m.Auth)
    if not ask:
        return {}
    link.send(m.PlanesRequest())
    return dict(link.receive(m.Planes).offers)


def usual_opening(geometry: AttentionGeometry, address: Address) -> Callable[[str], Opening]:
    """Returns what an engine asks a worker for, by plane.

    Raises:
        ConfigError: an option of the address asks for too long slots.
    """
    bulk_bytes = address.options.get("bulk_bytes")
    slots = plan_slots(geometry, bulk_bytes=None if bulk_bytes is None else int(bulk_bytes))
    return lambda plane: m.OpenSession(geometry, slots, transport=plane)


def _open_session(link: BlockingConnection, opening: Opening) -> m.SessionOpened:
    slots, plane = opening.slots, opening.transport
    link.send(opening)
    opened = link.receive(m.SessionOpened)
    granted = opened.slots
    if (granted.latency_nbytes, granted.bulk_nbytes) != (slots.latency_nbytes, slots.bulk_nbytes):
        raise RemoteProtocolError(f"{link.peer}: granted slots of another length than asked for")
    if not (1 <= granted.num_latency <= slots.num_latency):
        raise RemoteProtocolError(f"{link.peer}: granted {granted.num_latency} slots for rows")
    if not (1 <= granted.num_bulk <= slots.num_bulk):
        raise RemoteProtocolError(f"{link.peer}: granted {granted.num_bulk} slots for K/V rows")
    if opened.transport != plane:
        raise RemoteProtocolError(f"{link.peer}: granted {opened.transport}, asked for {plane}")
    return opened
