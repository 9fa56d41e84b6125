"""A control connection's two ends, back to back, without I/O."""

from __future__ import annotations

import pytest

from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.connection import NEED_DATA, Connection
from fastdecode_rdma.wire.messages import Role

GEOMETRY = AttentionGeometry(
    groups=(
        KVGroup((0, 2), num_q_heads=6, num_kv_heads=2, head_dim=64, window=512),
        KVGroup(
            (1,),
            num_q_heads=2,
            num_kv_heads=2,
            head_dim=256,
            sinks=((1.5, -2.0),),
            slopes=(0.5, 0.25),
        ),
    ),
    scale=0.125,
    softcap=50.0,
    kv_dtype="fp16",
    wire_dtype="fp32",
    max_rows=256,
    max_model_len=131072,
)
SLOTS = m.SlotPlan(num_latency=2, num_bulk=4, latency_nbytes=65536, bulk_nbytes=1 << 20)

EXAMPLES = (
    m.Hello(Role.ENGINE, bytes(range(32)), "0.1.0"),
    m.Hello(Role.WORKER, bytes(range(32, 64)), "0.1.0", auth_required=True),
    m.Auth(bytes(range(32))),
    m.OpenSession(GEOMETRY, SLOTS),
    m.SessionOpened(7, 2**63 + 1, 1 << 32, 8, "avx2", 64, 1024, SLOTS),
    m.DataHello(7, bytes(range(32)), bytes(32), b"mask"),
    m.DataAccepted(bytes(range(32)), b"ok"),
    m.Heartbeat(12345, 1),
    m.StatusRequest(),
    m.Status("host:17", "0.1.0", 1.5, 1 << 32, 4096, 2, 8, "baseline", 31, 99),
    m.Error(m.ErrorCode.MEMORY, "kein Platz für 3 GiB"),
    m.Bye(),
    m.PlanesRequest(),
    m.Planes((("shm", b"name"), ("rdma", b""))),
    m.OpenBench(GEOMETRY, SLOTS, "shm", force=True),
)


class Pair:
    """Both ends; `pass_` sends one message and returns the event at the other end."""

    def __init__(self, token: bytes | None = None, worker_token: bytes | str | None = "same"):
        self.ends = {
            Role.ENGINE: Connection(Role.ENGINE, now_s=0.0, token=token),
            Role.WORKER: Connection(
                Role.WORKER, now_s=0.0, token=token if worker_token == "same" else worker_token
            ),
        }
        self.now_s = 0.0

    @property
    def engine(self) -> Connection:
        return self.ends[Role.ENGINE]

    @property
    def worker(self) -> Connection:
        return self.ends[Role.WORKER]

    def pass_(self, sender: Role, message: m.Message):
        for data in self.ends[sender].send(message):
            self.ends[sender.peer].receive_data(data, now_s=self.now_s)
        event = self.ends[sender.peer].next_event()
        assert self.ends[sender.peer].next_event() in (NEED_DATA, m.ConnectionClosed())
        return event

    def greet(self) -> None:
        self.pass_(Role.ENGINE, self.engine.hello(b"e" * 32))
        self.pass_(Role.WORKER, self.worker.hello(b"w" * 32))
        self.pass_(Role.ENGINE, self.engine.proof())
        self.pass_(Role.WORKER, self.worker.proof())

    def open(self) -> m.SessionOpened:
        self.greet()
        self.pass_(Role.ENGINE, m.OpenSession(GEOMETRY, SLOTS))
        opened = m.SessionOpened(7, 99, 1 << 30, 2, "avx2", 64, 1024, SLOTS)
        self.pass_(Role.WORKER, opened)
        return opened


@pytest.fixture
def make_pair():
    return Pair


@pytest.fixture
def geometry():
    return GEOMETRY


@pytest.fixture
def slots():
    return SLOTS


@pytest.fixture
def examples():
    return EXAMPLES
