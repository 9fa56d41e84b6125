"""Queue pairs through PyPI's `ibverbs`, and nothing else that imports it.

A wheel that needs no compiler and opens whichever libibverbs is there: for machines without headers
or pyverbs. The calls are those of `_verbs.VerbsQueue`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport.rdma_python import LIMITS, RECEIVE, PythonQueue


def load_ibverbs() -> ModuleType:
    """Returns the module.

    Raises:
        TransportError: it is not installed, or finds no libibverbs.
    """
    try:
        return import_module("ibverbs")
    except ImportError as error:
        raise TransportError(f"ibverbs cannot be imported: {error}") from error


def ibverbs_version() -> str:
    """Returns the version of the installed distribution."""
    return metadata.version("ibverbs")


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Adds to an error of the device what failed."""
    try:
        yield
    except OSError as error:
        text = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, f"{what}: {text}") from error


class IbverbsQueue(PythonQueue):
    """A queue pair on one port of a device, over memory that it registers and the caller keeps."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.ib = load_ibverbs()
        with _doing("opening the RDMA device"):
            found = [each for each in self.ib.get_device_list() if each.name == device]
            if not found:
                raise OSError(errno.ENODEV, device)
            self._context = self._own(found[0].open())

    def limits(self) -> dict[str, int]:
        """Returns what the device allows: bytes of a registration, and numbers of things."""
        with _doing("asking the RDMA device for its limits"):
            found = self._context.query_device()
        return {name: int(getattr(found, name)) for name in LIMITS}

    def active_mtu(self, port: int) -> int:
        """Returns the code of the port's MTU: 1 for 256 bytes, up to 5 for 4096."""
        with _doing(f"asking port {port} of the RDMA device"):
            return int(self._context.query_port(port).active_mtu)

    def make(
        self,
        *,
        memory: int,
        nbytes: int,
        slots: int,
        slot_bytes: int,
        depth: int,
        receives: int,
        max_inline: int,
    ) -> None:
        """Registers the memory and makes the queues."""
        ib = self.ib
        self._slots, self._slot_bytes, self._receives = slots, slot_bytes, receives
        self._access = int(ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE)
        with _doing("making a protection domain"):
            self._pd = self._own(self._context.alloc_pd())
        with _doing("registering memory"):
            self._mr = self._own(self._pd.reg_mr(memory, nbytes, self._access))
        with _doing("making a completion channel"):
            self._channel = self._own(self._context.create_comp_channel())
            self.fd = self._channel.fd
            os.set_blocking(self.fd, False)
        with _doing("making a completion queue"):
            self._cq = self._own(self._context.create_cq(depth + receives, self._channel))
        with _doing("making a queue pair"):
            self._qp = self._own(self._make_qp(depth, receives, max_inline))

    def _make_qp(self, depth: int, receives: int, max_inline: int) -> Any:
        while True:
            wish = self.ib.QPInitAttr(
                self._cq,
                self._cq,
                max_send_wr=depth,
                max_recv_wr=receives,
                max_inline_data=max_inline,
            )
            try:
                made = self._pd.create_qp(wish)
            except OSError:
                if max_inline < 16:
                    raise
                max_inline //= 2  # adapters differ in how much they take inline
            else:
                self.max_inline = max_inline
                return made

    def connect(
        self,
        *,
        port: int,
        dest_qp: int,
        rq_psn: int,
        sq_psn: int,
        rkey: int,
        remote: int,
        gid: bytes,
        is_global: bool,
        gid_index: int,
        lid: int,
        mtu: int,
        sl: int,
        tclass: int,
        timeout: int,
        retry: int,
        pkey_index: int,
        route: str,
    ) -> None:
        """Brings the queue pair to where it sends and receives."""
        ib, mask, qp = self.ib, self.ib.QPAttrMask, self._qp
        self._remote, self._rkey, self._route = remote, rkey, route
        with _doing("bringing the queue pair to INIT"):
            qp.to_init(port, self._access, pkey_index)
        with _doing("posting receives"):
            self.receive(self._receives)
        path = ib.AHAttr(
            dgid=gid,
            sgid_index=gid_index,
            dlid=lid,
            is_global=int(is_global),
            port_num=port,
            hop_limit=64,
            traffic_class=tclass,
            sl=sl,
        )
        with _doing("bringing the queue pair to RTR"):
            qp.modify(
                mask.STATE | mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN
                | mask.MAX_DEST_RD_ATOMIC | mask.MIN_RNR_TIMER,
                ah_attr=path, qp_state=ib.QPState.RTR, path_mtu=mtu, dest_qp_num=dest_qp,
                rq_psn=rq_psn, max_dest_rd_atomic=1, min_rnr_timer=12,
            )  # fmt: skip
        with _doing("bringing the queue pair to RTS"):
            qp.to_rts(sq_psn, timeout=timeout, retry_cnt=retry, rnr_retry=6)

    # ---- the data path: called by the pump's thread ----

    def write(self, slot: int, nbytes: int, imm: int, count: int) -> None:
        """Writes the beginning of a slot to the peer's; `count` != 0 is reported when done."""
        ib = self.ib
        self._check_open()
        offset = slot * self._slot_bytes
        flags = int(ib.SendFlags.SIGNALED) if count else 0
        if nbytes and nbytes <= self.max_inline:
            flags |= int(ib.SendFlags.INLINE)
        parts = [ib.SGE(self._slots + offset, nbytes, self._mr.lkey)] if nbytes else []
        request = ib.SendWR(
            wr_id=count,
            sg_list=parts,
            opcode=ib.WROpcode.RDMA_WRITE_WITH_IMM,
            send_flags=flags,
            remote_addr=self._remote + offset,
            rkey=self._rkey,
            imm_data=imm,
        )
        with _doing("posting a write"):
            self._qp.post_send(request)

    def receive(self, count: int) -> None:
        """Posts `count` more empty receives."""
        self._check_open()
        if count:
            with _doing("posting receives"):
                self._qp.post_recv([self.ib.RecvWR(wr_id=RECEIVE)] * count)

    def arm(self) -> None:
        """The next completion makes the descriptor readable."""
        self._check_open()
        with _doing("arming the completion queue"):
            self._cq.req_notify()

    def _immediate(self, wc: Any) -> int:
        return wc.imm_data  # swapped already, unlike pyverbs'

    def _completions(self, limit: int) -> list[Any]:
        with _doing("polling"):
            return self._cq.poll(limit)

    def _take_event(self) -> None:
        self._channel.get_cq_event().ack_events(1)
