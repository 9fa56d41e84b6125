"""The client's end of a bare queue pair: perftest's verbs beside an engine's data plane."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.transport._pump import Pump
from fastdecode_rdma.transport.rdma_bare import (
    BareEnd,
    BareResult,
    BareRun,
    bare_shape,
    find_native,
)
from fastdecode_rdma.transport.rdma_endpoint import Endpoint
from fastdecode_rdma.transport.rdma_ends import Machine, WorkerEnd
from fastdecode_rdma.transport.rdma_transport import RdmaTransport, engine_end
from fastdecode_rdma.wire.frame import FrameKind, pack_import, pack_range
from fastdecode_rdma.worker.bench_session import BARE_ANSWER


class BarePeer:
    """A second queue pair to a benchmark's peer, on the ports that its data plane goes through."""

    def __init__(
        self, name: str, transport: RdmaTransport, pump: Pump, port: int, kind: str, *,
        max_bytes: int, depth: int,
    ) -> None:  # fmt: skip
        """Raises:
        PlaneUnavailable: there are no compiled queue pairs here.
        StepError: the peer refuses; says why.
        TransportError: this machine or device refuses.
        """
        self.name = name
        self._pump, self._port = pump, port
        shape = bare_shape(max_bytes, depth)
        pair, wish = transport.pair, transport.wish
        endpoint = Endpoint(pair.local, pair.local_gid, find_native(), wish, shape=shape)
        try:
            end = engine_end(pair, endpoint, wish, Machine.here()).encode().decode()
            answer = self._command(do="open", nbytes=max_bytes, depth=depth, kind=kind, end=end)
            theirs = WorkerEnd.decode(str(answer["end"]).encode(), shape)
            endpoint.connect(theirs.offer, pair.remote, pair.remote_gid, wish)
        except BaseException:
            endpoint.close()
            raise
        self._end = BareEnd(endpoint, kind)

    def _command(self, **asked: Any) -> dict[str, Any]:
        """Has the peer do something; returns what it answers."""
        payload = pack_import(BARE_ANSWER, 0, json.dumps(asked).encode())
        self._pump.request(self._port, FrameKind.IMPORT, payload=payload)
        question = pack_range(BARE_ANSWER, 0, 0)
        answer = self._pump.request(self._port, FrameKind.EXPORT, payload=question)
        return dict(json.loads(answer))

    @property
    def progress(self) -> int:
        """Moves whenever messages do."""
        return self._end.progress

    def measure(self, run: BareRun, times_ns: np.ndarray) -> tuple[BareResult, BareResult]:
        """Runs at both ends; returns our result and the peer's.

        Raises:
            TransportError: a message failed at one of the ends, or nothing came in time.
            WorkerLostError, StepError: the peer is gone, or refuses.
        """
        self._end.prepare(run, client=True)
        self._command(do="run", **asdict(run))
        ours = self._end.run(run, times_ns, client=True)
        answer = self._command(do="stop")
        if "error" in answer:
            raise TransportError(f"{self.name}: {answer['error']}")
        bad_place = self._end.wrong_place(run, client=True)
        return replace(ours, bad_place=bad_place), BareResult(**answer)

    def stop(self) -> None:
        """Ends what runs, from any thread."""
        self._end.stop()

    def close(self) -> None:
        """Ends the queue pair. Idempotent."""
        self._end.close()
