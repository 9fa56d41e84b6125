"""Queue pairs through pyverbs, rdma-core's own Python binding, and nothing else that imports it.

The calls are those of `_verbs.VerbsQueue`, so one can stand for the other.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport.rdma_python import LIMITS, RECEIVE, PythonQueue

_EVENT_LINK = "anon_inode:[infinibandevent]"
_channel_lock = threading.Lock()

MODULES = ("addr", "cq", "device", "mr", "pd", "qp", "wr", "pyverbs_error")
ENUM_MODULES = ("libibverbs_enums", "enums")
"""The constants moved: `enums` up to rdma-core 44 or so, `libibverbs_enums` in later versions, of
which those built with Cython 3 keep them as members of enumerations alone."""


def load_pyverbs() -> SimpleNamespace:
    """Returns the names of pyverbs that are used here, whichever version it is.

    Raises:
        TransportError: it is not installed, or does not fit this interpreter or this libibverbs.
    """
    try:
        modules = {name: import_module(f"pyverbs.{name}") for name in MODULES}
    except ImportError as error:
        raise TransportError(f"pyverbs cannot be imported: {error}") from error
    names: dict[str, Any] = {}
    for module in modules.values():
        names.update({name: value for name, value in vars(module).items() if name[0] != "_"})
    for name in ENUM_MODULES:
        try:
            return SimpleNamespace(**names, e=_constants(import_module(f"pyverbs.{name}")))
        except ImportError:
            continue
    raise TransportError(f"this pyverbs has no constants: neither {' nor '.join(ENUM_MODULES)}")


def _constants(module: Any) -> SimpleNamespace:
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        if isinstance(value, EnumMeta):
            found.update({member: int(each) for member, each in value.__members__.items()})
        elif name.startswith("IBV_"):
            found[name] = int(value)
    return SimpleNamespace(**found)


def pyverbs_version() -> str:
    """Returns pyverbs' version, or where it lies: distributions package it without one."""
    try:
        return metadata.version("pyverbs")
    except metadata.PackageNotFoundError:
        return os.path.dirname(import_module("pyverbs").__file__ or "")


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Turns pyverbs' errors into OSError that say what failed."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            raise
        number = getattr(error, "error_code", None) or getattr(error, "errno", None) or 0
        text = os.strerror(number) if number else str(error)
        raise OSError(number or None, f"{what}: {text}") from error


class PyverbsQueue(PythonQueue):
    """A queue pair on one port of a device, over memory that it registers and the caller keeps."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.v = load_pyverbs()
        with _doing("opening the RDMA device"):
            self._context = self._own(self.v.Context(name=device))

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
        v, e = self.v, self.v.e
        self._slots, self._slot_bytes, self._receives = slots, slot_bytes, receives
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        with _doing("making a protection domain"):
            self._pd = self._own(v.PD(self._context))
        with _doing("registering memory"):
            self._mr = self._own(v.MR(self._pd, nbytes, access, address=memory))
        with _doing("making a completion channel"):
            self._channel, self.fd = self._make_channel()
        with _doing("making a completion queue"):
            self._cq = self._own(v.CQ(self._context, depth + receives, None, self._channel, 0))
        with _doing("making a queue pair"):
            self._qp = self._own(self._make_qp(depth, receives, max_inline))

    def _make_channel(self) -> tuple[Any, int]:
        """pyverbs hides the channel's descriptor: it is the one of its kind that appears."""
        with _channel_lock:
            before = _event_fds()
            channel = self._own(self.v.CompChannel(self._context))
            new = _event_fds() - before
        if len(new) != 1:
            raise OSError(None, "pyverbs' completion channel has no descriptor of its own")
        fd = new.pop()
        os.set_blocking(fd, False)
        return channel, fd

    def _make_qp(self, depth: int, receives: int, max_inline: int) -> Any:
        v = self.v
        while True:
            cap = v.QPCap(
                max_send_wr=depth,
                max_recv_wr=receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=max_inline,
            )
            wish = v.QPInitAttr(
                qp_type=v.e.IBV_QPT_RC,
                scq=self._cq,
                rcq=self._cq,
                cap=cap,
                sq_sig_all=0,  # pyverbs' own default reports every write
            )
            try:
                made = v.QP(self._pd, wish)
            except v.PyverbsError:
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
        v = self.v
        self._remote, self._rkey, self._route = remote, rkey, route
        attributes = v.QPAttr(port_num=port)
        attributes.pkey_index = pkey_index
        attributes.qp_access_flags = v.e.IBV_ACCESS_REMOTE_WRITE
        attributes.dest_qp_num, attributes.path_mtu = dest_qp, mtu
        attributes.rq_psn, attributes.sq_psn = rq_psn, sq_psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        attributes.timeout, attributes.retry_cnt = timeout, retry
        if is_global:
            grh = v.GlobalRoute(
                dgid=v.GID(_full(gid)),
                sgid_index=gid_index,
                hop_limit=64,
                traffic_class=tclass,
            )
            path = v.AHAttr(gr=grh, is_global=1, port_num=port, sl=sl, dlid=lid)
        else:
            path = v.AHAttr(is_global=0, port_num=port, sl=sl, dlid=lid)
        attributes.ah_attr = path
        with _doing("bringing the queue pair to INIT"):
            self._qp.to_init(attributes)
        with _doing("posting receives"):
            self.receive(self._receives)
        with _doing("bringing the queue pair to RTR"):
            self._qp.to_rtr(attributes)
        with _doing("bringing the queue pair to RTS"):
            self._qp.to_rts(attributes)

    # ---- the data path: called by the pump's thread ----

    def write(self, slot: int, nbytes: int, imm: int, count: int) -> None:
        """Writes the beginning of a slot to the peer's; `count` != 0 is reported when done."""
        v, e = self.v, self.v.e
        offset = slot * self._slot_bytes
        flags = e.IBV_SEND_SIGNALED if count else 0
        if nbytes and nbytes <= self.max_inline:
            flags |= e.IBV_SEND_INLINE
        self._check_open()
        part = v.SGE(self._slots + offset, nbytes, self._mr.lkey)  # pyverbs demands one, if empty
        request = v.SendWR(
            wr_id=count,
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[part],
            send_flags=flags,
            imm_data=socket.htonl(imm),
        )
        request.set_wr_rdma(self._rkey, self._remote + offset)
        with _doing("posting a write"):
            self._qp.post_send(request)

    def receive(self, count: int) -> None:
        """Posts `count` more empty receives."""
        self._check_open()
        empty = self.v.SGE(self._slots, 0, self._mr.lkey)
        request = self.v.RecvWR(wr_id=RECEIVE, num_sge=1, sg=[empty])
        for _ in range(count):
            self._qp.post_recv(request)

    def arm(self) -> None:
        """The next completion makes the descriptor readable."""
        self._check_open()
        with _doing("arming the completion queue"):
            self._cq.req_notify()

    def _completions(self, limit: int) -> list[Any]:
        with _doing("polling"):
            return self._cq.poll(limit)[1]

    def _take_event(self) -> None:
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)


def _event_fds() -> set[int]:
    """The open descriptors that are channels of RDMA events."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_LINK:
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


def _full(gid: bytes) -> str:
    """A GID as pyverbs reads it: eight groups in full."""
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))
