"""Transports: how rows and cold frames reach a worker. One file and one row here for each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode_rdma.transport.address import Address
    from fastdecode_rdma.transport.base import Transport
    from fastdecode_rdma.wire.messages import SessionOpened

# Imported when used: a transport may need what is not installed everywhere.
_TRANSPORTS = {"tcp": ("fastdecode_rdma.transport.tcp", "TcpTransport")}


def open_transport(
    address: Address, opened: SessionOpened, session_key: bytes, *, timeout_s: float
) -> Transport:
    """Connects the data plane of a session that the worker at `address` has opened.

    Raises:
        TransportError, TransportTimeout, RemoteProtocolError: they name the address.
    """
    module, name = _TRANSPORTS[address.scheme]
    transport = getattr(import_module(module), name)
    return transport.open(address, opened, session_key, timeout_s=timeout_s)
