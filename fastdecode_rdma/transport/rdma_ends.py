"""What engine and worker tell each other of their ends of an RDMA connection, as bytes.

The worker offers its ports; the engine chooses a pair and names it with its own queue pair, in the
message that proves its data socket; the worker answers with its queue pair. Both are covered by the
proofs of that handshake.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdecode_rdma.errors import ConfigError, RemoteProtocolError
from fastdecode_rdma.transport.rdma_endpoint import PLANE_SHAPE, Offer, Shape
from fastdecode_rdma.transport.rdma_ports import Gid, Port, canonical, encode_ports
from fastdecode_rdma.transport.rdma_wish import OPTIONS, Wish
from fastdecode_rdma.transport.same_host import SPIN_NS, boot_id, cpu_mask, spin_ns

MAX_OFFER_BYTES = 16000
_MAX_MASK_BYTES = 128
_SETTINGS = ("mtu", "tclass", "sl", "timeout", "retry", "inline", "cq_mod")


def offer_ports(ports: Sequence[Port]) -> bytes:
    """Returns a worker's ports for an engine; of very long GID tables, the beginnings."""
    longest = max((len(port.gids) for port in ports), default=0)
    while True:
        data = encode_ports(replace(port, gids=port.gids[:longest]) for port in ports)
        if len(data) <= MAX_OFFER_BYTES or longest <= 1:
            return data
        longest = longest * 3 // 4


@dataclass(frozen=True)
class Machine:
    """Which machine and cores a process runs on."""

    boot: str
    mask: bytes

    @classmethod
    def here(cls) -> Machine:
        """Returns this process's."""
        mask = cpu_mask()
        return cls(boot_id().decode(), mask if len(mask) <= _MAX_MASK_BYTES else b"")

    def spin_ns(self, other: Machine) -> int:
        """Returns how long both look for news before they sleep: not where they share cores."""
        if self.boot and self.boot == other.boot:
            return spin_ns(self.mask, other.mask)
        return SPIN_NS


@dataclass(frozen=True)
class EngineEnd:
    """The engine's choice and its queue pair."""

    device: str  # of the worker, with `number` and `gid_index`
    number: int
    gid_index: int
    gid: Gid  # the engine's
    lid: int
    offer: Offer
    wish: Wish
    machine: Machine

    def encode(self) -> bytes:
        """Returns it for DataHello."""
        return _pack(
            use=[self.device, self.number, self.gid_index],
            gid=[self.gid.index, self.gid.address, self.gid.kind],
            lid=self.lid,
            offer=self.offer.encode(),
            wish={name: getattr(self.wish, name) for name in _SETTINGS},
            machine=[self.machine.boot, self.machine.mask.hex()],
        )

    @classmethod
    def decode(cls, data: bytes, shape: Shape = PLANE_SHAPE) -> EngineEnd:
        """Returns what an engine sent; `shape` is that of our end.

        Raises:
            RemoteProtocolError: it is malformed.
        """
        try:
            items = _unpack(data)
            device, number, gid_index = items["use"]
            index, address, kind = items["gid"]
            wish = {name: value for name, value in items["wish"].items() if value is not None}
            if not set(wish) <= set(OPTIONS):
                raise ValueError("unknown settings")
            return cls(
                device=str(device),
                number=int(number),
                gid_index=int(gid_index),
                gid=Gid(int(index), canonical(address), str(kind)),
                lid=int(items["lid"]) & 0xFFFF,
                offer=Offer.decode(items["offer"], shape),
                wish=Wish.of(wish, {}),
                machine=_machine(items),
            )
        except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            raise RemoteProtocolError(f"a malformed end of an RDMA connection: {error}") from error


@dataclass(frozen=True)
class WorkerEnd:
    """The worker's queue pair on the port that the engine chose."""

    offer: Offer
    machine: Machine
    binding: str

    def encode(self) -> bytes:
        """Returns it for DataAccepted."""
        machine = [self.machine.boot, self.machine.mask.hex()]
        return _pack(offer=self.offer.encode(), machine=machine, binding=self.binding)

    @classmethod
    def decode(cls, data: bytes, shape: Shape = PLANE_SHAPE) -> WorkerEnd:
        """Returns what a worker sent; `shape` is that of our end.

        Raises:
            RemoteProtocolError: it is malformed.
        """
        try:
            items = _unpack(data)
            binding = str(items["binding"])
            if len(binding) > 64 or not binding.isprintable():
                raise ValueError("no name of a binding")
            return cls(Offer.decode(items["offer"], shape), _machine(items), binding)
        except (ValueError, TypeError, KeyError) as error:
            raise RemoteProtocolError(f"a malformed end of an RDMA connection: {error}") from error


def _pack(**items: Any) -> bytes:
    return json.dumps(items, separators=(",", ":")).encode()


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except RecursionError as error:
        raise ValueError("too deep") from error


def _machine(items: dict[str, Any]) -> Machine:
    boot, mask = items["machine"]
    return Machine(str(boot), bytes.fromhex(mask)[:_MAX_MASK_BYTES])
