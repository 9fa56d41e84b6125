"""The worker's side of a data socket: the pump serves the rows, this module the cold frames."""

from __future__ import annotations

import logging

from fastdecode_rdma.config import StepCode
from fastdecode_rdma.errors import FastDecodeError, RemoteProtocolError, TransportError
from fastdecode_rdma.transport._pump import FrameServer, Plane
from fastdecode_rdma.transport.base import FrameSizes, Session, decode_entries, step_code
from fastdecode_rdma.wire.frame import (
    MAX_TEXT_BYTES,
    Frame,
    FrameKind,
    unpack_fork,
    unpack_handles,
    unpack_import,
    unpack_range,
)
from fastdecode_rdma.wire.messages import SlotPlan

logger = logging.getLogger(__name__)

_REPLY_KINDS = {
    FrameKind.EXPORT: FrameKind.EXPORT_REPLY,
    FrameKind.IMPORT: FrameKind.IMPORT_REPLY,
}


def serve_cold(session: Session, kind: int, payload: bytes) -> bytes:
    """Runs one cold frame other than BEGIN_STEP on a session; returns the payload of its reply.

    Raises:
        FastDecodeError: the session refused it.
        RemoteProtocolError: the payload is malformed.
    """
    if kind == FrameKind.FREE:
        session.free(unpack_handles(payload))
    elif kind == FrameKind.FORK:
        session.fork(*unpack_fork(payload))
    elif kind == FrameKind.EXPORT:
        return session.export_range(*unpack_range(payload))
    elif kind == FrameKind.IMPORT:
        session.import_range(*unpack_import(payload))
    else:
        raise RemoteProtocolError(f"frames of kind {kind} are not cold")
    return b""


class DataPlane:
    """One engine's data socket in a worker. `fd` is connected and proved to be the engine's; it
    stays the caller's, who ends `run` from another thread by shutting the socket down. `plane`
    carries the frames; None: the socket itself. `bench`: messages of a benchmark are served."""

    def __init__(
        self,
        fd: int,
        epoch: int,
        slots: SlotPlan,
        session: Session,
        plane: Plane | None = None,
        *,
        bench: bool = False,
    ) -> None:
        self.session = session
        self._sizes = FrameSizes.of(session.geometry, bulk_bytes=slots.bulk_nbytes)
        entry = session.native()
        self._server = FrameServer(
            fd,
            self._sizes,
            epoch=epoch,
            latency_slots=slots.num_latency,
            bulk_slots=slots.num_bulk,
            attend=entry.attend_addr,
            store=entry.store_addr,
            ctx=entry.ctx_addr,
            owner=(session, entry),
            plane=plane,
            bench=bench,
        )

    @property
    def num_messages(self) -> int:
        """Moves whenever a frame is begun or done with, so it is odd in the middle of one; callable
        from any thread."""
        return self._server.progress

    def stats(self) -> dict[str, int]:
        """Returns frames, bytes and nanoseconds since the start; callable from any thread."""
        return self._server.stats()

    def run(self) -> None:
        """Serves frames until the engine closes the socket.

        Raises:
            RemoteProtocolError: the engine broke the protocol.
            TransportError: the connection broke.
        """
        while (received := self._server.run()) is not None:
            frame, payload = received
            if frame.kind == FrameKind.BEGIN_STEP:
                self._begin_step(frame, payload)
            else:
                self._serve_cold(frame, payload)

    def _begin_step(self, frame: Frame, payload: bytes) -> None:
        self._server.disarm(frame.table)
        try:
            entries = decode_entries(payload)
            self.session.begin_step(frame.table, frame.step, entries)
        except FastDecodeError as error:
            self._refuse(error)
            return
        except Exception as error:
            logger.exception("a fault of this worker in begin_step")
            self._refuse(error)
            return
        self._server.arm(frame.table, frame.step)
        self._server.reply(FrameKind.STEP_READY)

    def _serve_cold(self, frame: Frame, payload: bytes) -> None:
        reply_kind = _REPLY_KINDS.get(FrameKind(frame.kind))
        try:
            data = serve_cold(self.session, frame.kind, payload)
            if len(data) > self._sizes.max_cold_bytes:
                raise TransportError(
                    f"the range holds {len(data)} bytes, at most {self._sizes.max_cold_bytes} fit "
                    "into a reply: export fewer tokens at a time"
                )
        except RemoteProtocolError:
            raise
        except FastDecodeError as error:
            self._refuse(error, reply_kind)
        except Exception as error:
            logger.exception("a fault of this worker in a frame of kind %d", frame.kind)
            self._refuse(error, reply_kind)
        else:
            if reply_kind is not None:
                self._server.reply(reply_kind, payload=data)

    def _refuse(self, error: Exception, reply_kind: FrameKind | None = None) -> None:
        code = step_code(error)
        known = isinstance(error, FastDecodeError) or code != StepCode.INTERNAL
        text = str(error) if known else "a fault of the worker; its log says more"
        self._server.reply(
            FrameKind.STEP_ERROR if reply_kind is None else reply_kind,
            status=int(code),
            payload=text.encode()[:MAX_TEXT_BYTES],
        )
