"""RDMA: frames are written into the worker's registered slots by the adapter."""

from __future__ import annotations

import contextlib
import os

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport._pump import Plane
from fastdecode_rdma.transport.address import Address
from fastdecode_rdma.transport.base import Attempt, FrameSizes, PlaneUnavailable
from fastdecode_rdma.transport.blocking import BlockingConnection
from fastdecode_rdma.transport.connected import ConnectedTransport, data_link, prove_data_socket
from fastdecode_rdma.transport.rdma_bindings import NATIVE, Binding, find_binding
from fastdecode_rdma.transport.rdma_endpoint import Endpoint
from fastdecode_rdma.transport.rdma_ends import EngineEnd, Machine, WorkerEnd
from fastdecode_rdma.transport.rdma_ports import Port, decode_ports, read_ports
from fastdecode_rdma.transport.rdma_select import Choice, Pair, choose, usable_ports
from fastdecode_rdma.transport.rdma_wish import Wish
from fastdecode_rdma.transport.tcp import dial
from fastdecode_rdma.wire import messages as m

PING_TIMEOUT_S = 5.0


class RdmaTransport(ConnectedTransport):
    """Frames through the slots of a queue pair; the data socket stays silent and ends with the
    peer. `detail` names the ports, with the runners-up."""

    scheme = "rdma"
    pair: Pair
    wish: Wish

    @classmethod
    def prepare(cls) -> None:
        """Loads the binding, where there is a device."""
        with contextlib.suppress(TransportError):  # why_not() will say that there is none
            if read_ports(networks={}):
                find_binding()

    @classmethod
    def is_expected(cls, offer: bytes | None) -> bool:
        """Whether this machine or the worker's has RDMA."""
        return offer is not None or bool(read_ports(networks={}))

    @classmethod
    def why_not(cls, address: Address, offer: bytes | None) -> str:
        """Returns why the worker cannot be reached by RDMA, nothing if it may be.

        Raises:
            ConfigError: an option of the address or FASTDECODE_IB_* names what is not there.
        """
        wish = Wish.of(address.options, os.environ)
        try:
            local = _usable(wish)
            if offer is None:
                return "the worker does not offer it: no device or no binding there"
            find_binding()
            choose(local, _ports(offer))
        except TransportError as error:
            return str(error)
        return ""

    @classmethod
    def open(
        cls,
        address: Address,
        opened: m.SessionOpened,
        session_key: bytes,
        *,
        sizes: FrameSizes,
        offer: bytes,
        timeout_s: float,
        attempt: Attempt,
    ) -> RdmaTransport:
        """Connects queue pairs on the best pair of ports that no earlier attempt has given up, and
        tries them out.

        Raises:
            PlaneUnavailable: nothing came through, or this machine or device refuses.
            TransportError, TransportTimeout, RemoteProtocolError: they name the address.
        """
        sock = dial(address, timeout_s)
        with data_link(sock, address, timeout_s) as link:
            control = (sock.getsockname()[0], sock.getpeername()[0])
            wish = Wish.of(address.options, os.environ)
            choice = choose(
                _usable(wish),
                _ports(offer),
                control=control,
                worker_index=attempt.worker_index,
            )
            endpoint, plane = _connect(link, opened, session_key, choice, len(attempt.failed), wish)
        transport = cls(address, sock, opened, plane)
        transport.pair, transport.wish = choice.pairs[len(attempt.failed)], wish
        transport.detail = (
            f"{choice.explain(len(attempt.failed), attempt.failed)}; MTU {endpoint.mtu_bytes}, "
            f"{endpoint.binding.name} queue pairs; {endpoint.settings}"
        )
        return transport


def _usable(wish: Wish) -> list[Port]:
    return usable_ports(read_ports(through=wish.gid or 0), wish)


def _ports(offer: bytes) -> list[Port]:
    return [port for port in decode_ports(offer) if port.fault() is None]


def _connect(
    link: BlockingConnection,
    opened: m.SessionOpened,
    session_key: bytes,
    choice: Choice,
    index: int,
    wish: Wish,
) -> tuple[Endpoint, Plane]:
    pair, binding = choice.pairs[index], find_binding()
    try:
        endpoint = Endpoint(pair.local, pair.local_gid, binding, wish)
    except TransportError as error:
        raise PlaneUnavailable(f"{link.peer}: {error}") from error
    try:
        ours = Machine.here()
        end = engine_end(pair, endpoint, wish, ours)
        answer = prove_data_socket(link, opened, session_key, details=end.encode())
        theirs = WorkerEnd.decode(answer)
        _try_out(link.peer, endpoint, theirs, pair, wish, last=index + 1 == len(choice.pairs))
        return endpoint, endpoint.slots().plane(spin_ns=spin_budget(binding, ours, theirs.machine))
    except BaseException:
        endpoint.close()
        raise


def engine_end(pair: Pair, endpoint: Endpoint, wish: Wish, machine: Machine) -> EngineEnd:
    """Returns what the worker must know of our choice and our queue pair."""
    return EngineEnd(
        device=pair.remote.device,
        number=pair.remote.number,
        gid_index=pair.remote_gid.index,
        gid=pair.local_gid,
        lid=pair.local.lid,
        offer=endpoint.offer(),
        wish=wish,
        machine=machine,
    )


def _try_out(
    peer: str, endpoint: Endpoint, theirs: WorkerEnd, pair: Pair, wish: Wish, *, last: bool
) -> None:
    try:
        endpoint.connect(theirs.offer, pair.remote, pair.remote_gid, wish)
        endpoint.ping(PING_TIMEOUT_S)
    except TransportError as error:
        raise PlaneUnavailable(f"{peer}: {error}", try_again=not last) from error


def spin_budget(binding: Binding, ours: Machine, theirs: Machine) -> int:
    """Returns how long to look for news before sleeping: not at all through the interpreter."""
    return ours.spin_ns(theirs) if binding.name == NATIVE else 0
