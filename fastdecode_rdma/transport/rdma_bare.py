"""A bare queue pair beside a data plane: benchmarks of the verbs themselves, as perftest runs them.

The client asks, over the data plane, for a second queue pair on the ports that the plane uses, and
says what each run is. Both ends then run the same loop in C; the worker's on a thread of its own,
so that its data plane still answers.
"""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError, TransportError
from fastdecode_rdma.transport.base import PlaneUnavailable
from fastdecode_rdma.transport.rdma_bindings import NATIVE, Binding, find_binding
from fastdecode_rdma.transport.rdma_endpoint import Endpoint, Shape
from fastdecode_rdma.transport.rdma_ends import EngineEnd, Machine, WorkerEnd
from fastdecode_rdma.transport.rdma_host import answer_here

MAX_DEPTH = 256
MAX_IDLE_NS = 60 * 10**9
READS = 16
"""That may be under way at once, as far as the adapter allows; perftest takes what it allows."""

_PAGE = 4096
_PATTERN = (np.arange(1 << 16, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


@dataclass(frozen=True)
class BareRun:
    """One run as both ends know it. `test`: latency, bandwidth or both_ways. `iterations` 0: until
    max_ns have passed. `depth`: messages under way, `post_list` of them posted at once, one in
    `cq_mod` reported."""

    kind: str  # write, send or read
    test: str
    nbytes: int
    iterations: int
    max_ns: int
    depth: int
    post_list: int
    cq_mod: int
    events: bool
    check: bool
    idle_ns: int

    @classmethod
    def decode(cls, data: dict[str, Any]) -> BareRun:
        """Returns what a client sent.

        Raises:
            ConfigError: it is none.
        """
        try:
            run = cls(**{field.name: data[field.name] for field in fields(cls)})
            numbers = (run.nbytes, run.iterations, run.max_ns, run.depth, run.post_list, run.cq_mod)
            if not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (*numbers, run.idle_ns)):
                raise ValueError("a number is out of its range")
            if run.test not in ("latency", "bandwidth", "both_ways"):
                raise ValueError(f"no test {run.test!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a malformed benchmark of RDMA messages: {error}") from error
        return run

    @property
    def comes_back(self) -> bool:
        """Whether the worker answers each message."""
        return self.test == "latency" and self.kind != "read"


@dataclass(frozen=True)
class BareResult:
    """`bad_place`: the first byte that came wrong with the last message, from 1; 0: none did."""

    done: int
    elapsed_ns: int
    peak: float
    bad_place: int = 0


def bare_shape(nbytes: int, depth: int) -> Shape:
    """Returns the slots and queues for messages of up to `nbytes`, `depth` under way.

    Raises:
        ConfigError: there cannot be so many.
    """
    if not 1 <= depth <= MAX_DEPTH or nbytes < 1:
        raise ConfigError(f"{depth} messages of {nbytes} bytes under way; at most {MAX_DEPTH} may")
    length = -(-nbytes // _PAGE) * _PAGE
    return Shape(num_slots=1, slot_bytes=length, depth=depth + 1, receives=2 * depth, reads=READS)


def find_native() -> Binding:
    """Returns the compiled queue pairs.

    Raises:
        PlaneUnavailable: they are not what is used here; says how to get them.
    """
    binding = find_binding()
    if binding.name != NATIVE:
        raise PlaneUnavailable(
            f"bare verbs are measured through compiled queue pairs, {binding.name} is used here: "
            "`fastdecode doctor` says how to get them"
        )
    return binding


class BareEnd:
    """One end of the bare queue pair. `stop` and `progress` are for other threads."""

    def __init__(self, endpoint: Endpoint, kind: str) -> None:
        self.endpoint = endpoint
        receives = endpoint.shape.receives if kind == "send" else 0
        verbs = import_module("fastdecode_rdma.transport._verbs")
        self._bench = verbs.VerbsBench(
            endpoint.queue, into=endpoint.recv_address, receives=receives
        )
        length = endpoint.shape.slot_bytes
        memory = np.frombuffer(endpoint.memory, np.uint8)
        self._out, self._in = memory[:length], memory[length:]

    @property
    def progress(self) -> int:
        """Moves whenever messages do."""
        return int(self._bench.progress)

    def prepare(self, run: BareRun, *, client: bool) -> None:
        """Fills the slots and posts the receives of a run; the peer may begin when both have.

        Raises:
            TransportError: the run cannot be, or the device refuses.
        """
        n = run.nbytes
        if n > len(self._in):
            raise TransportError(f"messages of {n} bytes, the slots hold {len(self._in)}")
        if run.check:
            self._out[:n] = np.resize(_PATTERN, n)
        self._in[:n] = np.resize(_PATTERN, n) if run.kind == "read" and not client else 0
        posts = client or run.test == "both_ways" or run.comes_back
        try:
            self._bench.prepare(
                kind=run.kind, posts=posts, answers=not client and run.comes_back,
                both=run.test == "both_ways", events=run.events, nbytes=n,
                iterations=run.iterations, max_ns=run.max_ns if client or not run.comes_back else 0,
                idle_ns=min(run.idle_ns, MAX_IDLE_NS), depth=run.depth, list=run.post_list,
                cq_mod=run.cq_mod,
            )  # fmt: skip
        except (OSError, KeyError, OverflowError) as error:
            raise TransportError(f"{self.endpoint.route}: {error}") from error

    def run(self, run: BareRun, times_ns: np.ndarray, *, client: bool) -> BareResult:
        """Runs what was prepared; `times_ns` takes the last round trips of a latency test.

        Raises:
            TransportError: a message failed, nothing came in time, or it was stopped.
        """
        latency = run.test == "latency" and (client or run.comes_back)
        try:
            done, elapsed_ns, peak = self._bench.run(times_ns, latency=latency)
        except OSError as error:
            text = f"{self.endpoint.route}: {error.args[-1]}"
            raise TransportError(text, error.errno) from error
        return BareResult(done, elapsed_ns, peak)

    def wrong_place(self, run: BareRun, *, client: bool) -> int:
        """Returns the first byte that came wrong with the last message, from 1; 0 if none did or
        nobody looks. Both ends must be through with the run."""
        gets = run.test != "bandwidth" or run.kind == "read" if client else run.kind != "read"
        if not (run.check and gets):
            return 0
        counted = run.kind == "write" and run.test == "latency"  # its last byte is a number
        n = run.nbytes - counted
        wrong = np.flatnonzero(self._in[:n] != np.resize(_PATTERN, n))
        return int(wrong[0]) + 1 if len(wrong) else 0

    def stop(self) -> None:
        """Ends what runs."""
        self._bench.stop()

    def close(self) -> None:
        """Ends the queue pair; nothing may run any more. Idempotent."""
        self.endpoint.close()


class BareServer:
    """The worker's end, driven by commands that come over the data plane."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._end: BareEnd | None = None
        self._thread: threading.Thread | None = None
        self._answer: dict[str, Any] = {}
        self._run: BareRun | None = None
        self._is_cut_off = False  # what the last message left is not whole

    def command(self, data: bytes) -> None:
        """Does what a client asks: open, run or stop.

        Raises:
            ConfigError: it is no such command, or asks for too much.
            TransportError: this machine or device refuses.
        """
        try:
            asked = dict(json.loads(data))
            what = asked.pop("do")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"no command of a benchmark: {error}") from error
        if what == "open":
            self._open(asked)
        elif what == "run":
            self._start(BareRun.decode(asked))
        elif what == "stop":
            self._finish()
        else:
            raise ConfigError(f"no command of a benchmark: {what!r}")

    def answer(self) -> bytes:
        """Returns what the last command has brought, as JSON."""
        return json.dumps(self._answer).encode()

    def _open(self, asked: dict[str, Any]) -> None:
        self.close()
        try:
            nbytes, depth, kind = int(asked["nbytes"]), int(asked["depth"]), str(asked["kind"])
            end = str(asked["end"]).encode()
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no command of a benchmark: {error}") from error
        if nbytes > self._max_bytes:
            raise ConfigError(f"{nbytes} bytes, the session was opened for {self._max_bytes}")
        shape = bare_shape(nbytes, depth)
        endpoint = answer_here(EngineEnd.decode(end, shape), find_native(), shape)
        self._end = BareEnd(endpoint, kind)
        theirs = WorkerEnd(endpoint.offer(), Machine.here(), endpoint.binding.name)
        self._answer = {"end": theirs.encode().decode()}

    def _start(self, run: BareRun) -> None:
        end = self._end
        if end is None or self._thread is not None:
            raise ConfigError("a benchmark runs already, or has no queue pair")
        end.prepare(run, client=False)
        self._answer, self._run, self._is_cut_off = {}, run, False

        def work() -> None:
            try:
                times_ns = np.zeros(1, np.uint64)
                self._answer = asdict(end.run(run, times_ns, client=False))
            except TransportError as error:
                stopped = error.errno == errno.ECANCELED
                self._is_cut_off = stopped
                self._answer = asdict(BareResult(0, 0, 0.0)) if stopped else {"error": str(error)}

        if run.kind == "read" and run.test != "both_ways":
            self._answer = asdict(BareResult(0, 0, 0.0))
            return  # the adapter answers by itself
        self._thread = threading.Thread(target=work, name="bench rdma", daemon=True)
        self._thread.start()

    def _finish(self, wait_s: float = 2.0) -> None:
        thread, self._thread = self._thread, None
        if thread is None or self._end is None or self._run is None:
            return
        run = self._run
        if run.test == "both_ways" or (run.comes_back and run.iterations):
            thread.join(wait_s)  # it ends by itself
        self._end.stop()
        thread.join()
        if not self._is_cut_off and "error" not in self._answer:
            self._answer["bad_place"] = self._end.wrong_place(run, client=False)

    def close(self) -> None:
        """Ends what runs, and the queue pair. Idempotent."""
        self._finish(0.0)
        if self._end is not None:
            self._end.close()
            self._end = None
