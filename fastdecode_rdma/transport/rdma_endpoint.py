"""One side of an RDMA connection: slots in registered memory and a queue pair, tried out."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import mmap
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from fastdecode_rdma.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
)
from fastdecode_rdma.transport._rdma import RECEIVED, SPARE_RECEIVES, SlotPlane
from fastdecode_rdma.transport.rdma_bindings import Binding, Queue
from fastdecode_rdma.transport.rdma_limits import (
    NUM_SLOTS,
    SLOT_BYTES,
    check_limits,
    explain_failure,
)
from fastdecode_rdma.transport.rdma_ports import INFINIBAND, Gid, Port
from fastdecode_rdma.transport.rdma_select import pkey_index
from fastdecode_rdma.transport.rdma_wish import MTUS, Wish

DEPTH = 2 * NUM_SLOTS + 32
RECEIVES = NUM_SLOTS + SPARE_RECEIVES
PING = 0xFF << 24
"""Immediate value of a ping: to the plane, a message that returns no slots."""

_PSN = 1 << 24


@dataclass(frozen=True)
class Shape:
    """Slots of each direction and lengths of queues; both ends' must be the same. `reads`: that may
    be under way at once, 0 for a data plane, whose peer only writes."""

    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES
    depth: int = DEPTH
    receives: int = RECEIVES
    reads: int = 0

    @property
    def memory_bytes(self) -> int:
        """What one end registers."""
        return 2 * self.num_slots * self.slot_bytes


PLANE_SHAPE = Shape()


@dataclass(frozen=True)
class Offer:
    """What a peer has to know to write into this side's slots."""

    qp_num: int
    psn: int
    mtu: int  # code: 1 for 256 bytes, up to 5 for 4096
    address: int
    rkey: int
    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES

    def encode(self) -> dict[str, int]:
        """Returns it for JSON."""
        return asdict(self)

    @classmethod
    def decode(cls, data: Any, shape: Shape = PLANE_SHAPE) -> Offer:
        """Returns a peer's offer.

        Raises:
            RemoteProtocolError: it is none, or of slots that do not fit ours.
        """
        try:
            offer = cls(**{str(name): int(value) for name, value in dict(data).items()})
        except (TypeError, ValueError) as error:
            raise RemoteProtocolError(f"a malformed RDMA offer: {error}") from error
        bounds = {"qp_num": 24, "psn": 24, "rkey": 32, "address": 64}
        if any(not 0 <= getattr(offer, name) < 1 << bits for name, bits in bounds.items()):
            raise RemoteProtocolError("a malformed RDMA offer: a number is out of its range")
        if not 1 <= offer.mtu <= len(MTUS):
            raise RemoteProtocolError(f"a malformed RDMA offer: MTU code {offer.mtu}")
        if (offer.num_slots, offer.slot_bytes) != (shape.num_slots, shape.slot_bytes):
            raise RemoteProtocolError(
                f"the peer has {offer.num_slots} slots of {offer.slot_bytes} bytes, this side "
                f"{shape.num_slots} of {shape.slot_bytes}: run the same version on both"
            )
        return offer


class Endpoint:
    """Slots and a queue pair on one port. Everything is freed with `close` or by its plane.

    Raises:
        TransportError: a limit of this machine or device, with the figures, or what it refused.
    """

    def __init__(
        self,
        port: Port,
        gid: Gid,
        binding: Binding,
        wish: Wish | None = None,
        *,
        shape: Shape = PLANE_SHAPE,
    ) -> None:
        wish = wish or Wish()
        self.shape = shape
        self._cq_mod = wish.cq_mod
        self.port = port
        self.gid = gid
        self.binding = binding
        self.psn = secrets.randbelow(_PSN)
        self.mtu_bytes = 0
        self.route = ""
        self._slots: SlotPlane | None = None
        self.settings = (
            f"tclass {wish.tclass}, sl {wish.sl}, timeout {wish.timeout}, retry {wish.retry}"
        )
        nbytes = shape.memory_bytes
        try:
            self.queue: Queue = binding.open_queue(port.device)
        except OSError as error:
            raise explain_failure(port.name, error, nbytes) from error
        try:
            self._mtu = self.queue.active_mtu(port.number)
            check_limits(
                port.name,
                self.queue.limits(),
                nbytes=nbytes,
                depth=shape.depth,
                receives=shape.receives,
            )
            self._memory = mmap.mmap(-1, nbytes)
            # a child must not share pages that the adapter writes to
            self._memory.madvise(mmap.MADV_DONTFORK)
            self._send = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self.queue.make(
                memory=self._send,
                nbytes=nbytes,
                slots=self._send,
                slot_bytes=shape.slot_bytes,
                depth=shape.depth,
                receives=shape.receives,
                max_inline=wish.inline,
                **({"reads": shape.reads} if shape.reads else {}),  # pyverbs' queues have none
            )
        except OSError as error:
            self.queue.close()
            raise explain_failure(port.name, error, nbytes) from error
        except BaseException:
            self.queue.close()
            raise

    @property
    def recv_address(self) -> int:
        """Where the peer writes."""
        return self._send + self.shape.num_slots * self.shape.slot_bytes

    @property
    def memory(self) -> memoryview:
        """The slots to send from, then those that the peer writes into."""
        return memoryview(self._memory)

    def offer(self) -> Offer:
        """Returns what the peer has to know."""
        return Offer(
            self.queue.qp_num,
            self.psn,
            self._mtu,
            self.recv_address,
            self.queue.rkey,
            self.shape.num_slots,
            self.shape.slot_bytes,
        )

    def connect(self, theirs: Offer, port: Port, gid: Gid, wish: Wish) -> None:
        """Connects to the peer's queue pair behind `port` and `gid`.

        Raises:
            TransportError: the device refused; names both ends.
        """
        mtu = min(self._mtu, theirs.mtu)
        if wish.mtu is not None:
            mtu = min(mtu, MTUS.index(wish.mtu) + 1)
        self.mtu_bytes = MTUS[mtu - 1]
        self.route = (
            f"{self.port.device}:{self.port.number} GID {self.gid.index} {self.gid.text} QP "
            f"{self.queue.qp_num} to {gid.text} QP {theirs.qp_num}, MTU {self.mtu_bytes}"
        )
        roce = self.port.link_layer != INFINIBAND
        try:
            self.queue.connect(
                port=self.port.number,
                dest_qp=theirs.qp_num,
                rq_psn=theirs.psn,
                sq_psn=self.psn,
                rkey=theirs.rkey,
                remote=theirs.address,
                gid=ipaddress.IPv6Address(gid.address).packed,
                is_global=roce,
                gid_index=self.gid.index,
                lid=port.lid,
                mtu=mtu,
                sl=wish.sl,
                tclass=wish.tclass,
                timeout=wish.timeout,
                retry=wish.retry,
                pkey_index=0 if roce else pkey_index(self.port, port) or 0,
                route=self.route,
            )
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> TransportError:
        text = f"{self.route}: {error.args[-1]}"
        if error.errno in (errno.EINVAL, errno.ENODATA, errno.ENETUNREACH, errno.EHOSTUNREACH):
            text += (
                f"; GID {self.gid.index} of {self.port.name} must hold an address of an interface "
                "that is up and from which the peer can be reached: see `ip address`"
            )
        return TransportError(text, error.errno)

    def ping(self, timeout_s: float) -> None:
        """Writes a packet of full length into the peer's first slot and waits until the peer's
        adapter has acknowledged it. The peer's plane takes no notice; it must send nothing before.

        Raises:
            TransportError: it was not acknowledged; says why, with both ends.
            TransportTimeout: not in time.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self.queue.write(0, self.mtu_bytes, PING, 1)
            while not (done := self.queue.poll(1)):
                if time.monotonic() > deadline_s:
                    raise TransportTimeout(
                        f"{self.route}: no answer to a ping in {timeout_s:g} s; {self.settings}"
                    )
                time.sleep(0)
            kind, status, *_ = done[0]
            if status:
                raise TransportError(f"{self.queue.explain(status)}; {self.settings}")
            if kind == RECEIVED:
                raise RemoteProtocolError(f"{self.route}: the peer spoke before it was asked")
        except OSError as error:
            raise self._refused(error) from error

    def slots(self) -> SlotPlane:
        """Returns the state of the data plane, which closes the queue pair with its connection."""
        self._slots = SlotPlane(
            self.queue,
            send=self._send,
            recv=self.recv_address,
            num_slots=self.shape.num_slots,
            slot_bytes=self.shape.slot_bytes,
            depth=self.shape.depth,
            signal_every=self._cq_mod,
            memory=self._memory,
        )
        return self._slots

    def close(self) -> None:
        """Ends the queue pair and lets go of its memory. Idempotent.

        Raises:
            LocalProtocolError: a connection uses it; its end closes the queue pair.
        """
        if self._slots is not None and self._slots.running:
            raise LocalProtocolError(f"{self.route}: its data plane runs: close the connection")
        self.queue.close()
