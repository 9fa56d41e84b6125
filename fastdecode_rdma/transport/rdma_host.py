"""The worker's side of RDMA: offers its ports, and connects a queue pair to each engine's."""

from __future__ import annotations

import errno
import logging
import os

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport._pump import Plane
from fastdecode_rdma.transport.base import FrameSizes, PlaneHost
from fastdecode_rdma.transport.rdma_bindings import Binding, find_binding
from fastdecode_rdma.transport.rdma_endpoint import PLANE_SHAPE, Endpoint, Shape
from fastdecode_rdma.transport.rdma_ends import EngineEnd, Machine, WorkerEnd, offer_ports
from fastdecode_rdma.transport.rdma_ports import Gid, Port, read_ports
from fastdecode_rdma.transport.rdma_select import usable_ports
from fastdecode_rdma.transport.rdma_transport import spin_budget
from fastdecode_rdma.transport.rdma_wish import Wish
from fastdecode_rdma.wire.messages import SlotPlan

logger = logging.getLogger(__name__)


class RdmaHost(PlaneHost):
    """Every usable port of this machine, or those that FASTDECODE_IB_* name.

    Raises:
        OSError: there is no device or no binding to it.
        ConfigError: FASTDECODE_IB_* names what is not there.
    """

    name = "rdma"

    def __init__(self) -> None:
        self._wish = Wish.of({}, os.environ)
        try:
            ports = _usable(self._wish)
            self._binding = find_binding()
        except TransportError as error:
            raise OSError(errno.ENODEV, str(error)) from error
        listed = ", ".join(str(port) for port in ports)
        logger.info("RDMA through %s: %s", self._binding, listed)

    def offer(self) -> bytes:
        """Returns the ports that are usable now."""
        try:
            return offer_ports(_usable(self._wish))
        except TransportError as error:
            logger.warning("no RDMA at the moment: %s", error)
            return offer_ports([])

    def accept(
        self, details: bytes, fd: int | None, slots: SlotPlan, sizes: FrameSizes
    ) -> tuple[Plane, bytes]:
        """Connects a queue pair on the port that the engine chose.

        Raises:
            TransportError: the port is not offered, or this machine or device refuses.
        """
        end = EngineEnd.decode(details)
        endpoint = answer(end, _usable(self._wish), self._binding)
        try:
            ours = Machine.here()
            plane = endpoint.slots().plane(spin_ns=spin_budget(self._binding, ours, end.machine))
        except BaseException:
            endpoint.close()
            raise
        logger.info("RDMA: %s, %s", endpoint.route, self._binding.name)
        return plane, WorkerEnd(endpoint.offer(), ours, self._binding.name).encode()

    def close(self) -> None:
        """Nothing listens here."""


def _usable(wish: Wish) -> list[Port]:
    return usable_ports(read_ports(through=wish.gid or 0), wish)


def answer_here(end: EngineEnd, binding: Binding, shape: Shape) -> Endpoint:
    """Returns `answer` on the ports that this machine lets workers offer.

    Raises: as `answer`.
    """
    return answer(end, _usable(Wish.of({}, os.environ)), binding, shape)


def answer(
    end: EngineEnd, ports: list[Port], binding: Binding, shape: Shape = PLANE_SHAPE
) -> Endpoint:
    """Returns an endpoint that is connected to an engine's, on the port that the engine chose.

    Raises:
        TransportError: the port is not offered, or this machine or device refuses.
    """
    port, gid = _find(end, ports)
    endpoint = Endpoint(port, gid, binding, end.wish, shape=shape)
    try:
        far = Port("", 0, port.link_layer, "ACTIVE", 0, lid=end.lid, pkeys=port.pkeys)
        endpoint.connect(end.offer, far, end.gid, end.wish)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def _find(end: EngineEnd, ports: list[Port]) -> tuple[Port, Gid]:
    for port in ports:
        for gid in port.gids:
            if (port.device, port.number, gid.index) == (end.device, end.number, end.gid_index):
                return port, gid
    raise TransportError(
        f"port {end.device}:{end.number} with GID {end.gid_index} is not there any more"
    )
