"""Transports: how rows and cold frames reach a worker. One file and one row here for each."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from fastdecode_rdma.transport.base import Attempt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdecode_rdma.transport.address import Address
    from fastdecode_rdma.transport.base import FrameSizes, PlaneHost
    from fastdecode_rdma.transport.connected import ConnectedTransport
    from fastdecode_rdma.wire.messages import SessionOpened

logger = logging.getLogger(__name__)

# Imported when used: a transport may need what is not installed everywhere. In the order in which
# an address without a scheme tries them.
_TRANSPORTS = {
    "shm": ("fastdecode_rdma.transport.shm", "ShmTransport"),
    "rdma": ("fastdecode_rdma.transport.rdma_transport", "RdmaTransport"),
    "tcp": ("fastdecode_rdma.transport.tcp", "TcpTransport"),
}

# What a worker offers besides TCP.
_HOSTS = {
    "shm": ("fastdecode_rdma.transport.shm_host", "ShmHost"),
    "rdma": ("fastdecode_rdma.transport.rdma_host", "RdmaHost"),
}


def _load(row: tuple[str, str]) -> type:
    module, name = row
    return getattr(import_module(module), name)


def planes_of(address: Address) -> tuple[str, ...]:
    """Returns the planes that an address allows, best first, and has them ready: a worker that was
    greeted does not wait long."""
    planes = tuple(_TRANSPORTS) if address.scheme == "auto" else (address.scheme,)
    for plane in planes:
        _load(_TRANSPORTS[plane]).prepare()
    return planes


def why_not(plane: str, address: Address, offers: Mapping[str, bytes]) -> str:
    """Returns why a worker with these offers cannot be reached over a plane; nothing if it may."""
    return _load(_TRANSPORTS[plane]).why_not(address, offers.get(plane))


def is_expected(plane: str, offers: Mapping[str, bytes]) -> bool:
    """Says whether one of the two machines has what a plane takes, so that going without it is
    worth a warning."""
    return _load(_TRANSPORTS[plane]).is_expected(offers.get(plane))


def open_transport(
    address: Address,
    opened: SessionOpened,
    session_key: bytes,
    *,
    sizes: FrameSizes,
    offer: bytes = b"",
    timeout_s: float,
    attempt: Attempt | None = None,
) -> ConnectedTransport:
    """Connects the data plane of a session that the worker at `address` has opened.

    Raises:
        PlaneUnavailable: this plane cannot be set up between the two, or not in the way that this
            attempt took.
        TransportError, TransportTimeout, RemoteProtocolError: they name the address.
    """
    transport = _load(_TRANSPORTS[opened.transport])
    return transport.open(
        address,
        opened,
        session_key,
        sizes=sizes,
        offer=offer,
        timeout_s=timeout_s,
        attempt=attempt or Attempt(),
    )


def open_hosts() -> list[PlaneHost]:
    """Returns what this machine lets a worker offer besides TCP; the log says what it does not."""
    hosts: list[PlaneHost] = []
    for name, row in _HOSTS.items():
        try:
            hosts.append(_load(row)())
        except OSError as error:
            logger.info("no %s here: %s", name, error.strerror or error)
    return hosts
