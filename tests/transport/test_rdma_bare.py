"""Benchmarks over a bare queue pair, as far as they need no device; tests/rdma runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport import rdma_bare
from fastdecode_rdma.transport.base import PlaneUnavailable
from fastdecode_rdma.transport.rdma_bare import BareRun, BareServer, bare_shape, find_native
from fastdecode_rdma.transport.rdma_bindings import Binding
from fastdecode_rdma.transport.rdma_endpoint import Offer, Shape

RUN = BareRun("send", "latency", 64, 100, 0, 16, 1, 4, events=False, check=True, idle_ns=10**9)


def test_a_run_arrives_as_it_was_sent():
    assert BareRun.decode(json.loads(json.dumps(asdict(RUN)))) == RUN


@pytest.mark.parametrize(
    "changes",
    [
        {"test": "sideways"},
        {"nbytes": -1},
        {"depth": "9"},
        {"idle_ns": 1 << 62},
        {"iterations": 1.5},
    ],
)
def test_a_malformed_run(changes):
    with pytest.raises(ConfigError, match="a malformed benchmark"):
        BareRun.decode({**asdict(RUN), **changes})
    with pytest.raises(ConfigError, match="a malformed benchmark"):
        BareRun.decode({})


def test_only_what_comes_back_is_answered():
    assert RUN.comes_back and replace(RUN, kind="write").comes_back
    assert not replace(RUN, kind="read").comes_back
    assert not replace(RUN, test="bandwidth").comes_back


def test_slots_are_whole_pages_and_both_ends_agree_on_them():
    shape = bare_shape(5000, 16)
    assert (shape.num_slots, shape.slot_bytes, shape.memory_bytes) == (1, 8192, 16384)
    offer = Offer(7, 8, 5, 1 << 40, 9, shape.num_slots, shape.slot_bytes)
    assert Offer.decode(offer.encode(), shape) == offer
    with pytest.raises(Exception, match="1 slots of 8192 bytes, this side 16 of 131072"):
        Offer.decode(offer.encode(), Shape())
    for nbytes, depth in ((0, 16), (64, 0), (64, 257)):
        with pytest.raises(ConfigError, match="under way; at most 256 may"):
            bare_shape(nbytes, depth)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (b"", "no command of a benchmark"),
        (b"[1]", "no command of a benchmark"),
        (b"{}", "no command of a benchmark"),
        (b'{"do": "dance"}', "no command of a benchmark: 'dance'"),
        (b'{"do": "open"}', "no command of a benchmark"),
        (b'{"do": "open", "nbytes": 65, "depth": 1, "kind": "read", "end": ""}', "opened for 64"),
        (json.dumps({"do": "run", **asdict(RUN)}).encode(), "or has no queue pair"),
    ],
)
def test_a_peer_that_asks_for_nonsense_is_refused(command, words):
    server = BareServer(64)
    with pytest.raises(ConfigError, match=words):
        server.command(command)
    assert json.loads(server.answer()) == {}
    server.command(b'{"do": "stop"}')
    server.close()
    server.close()


def test_bare_verbs_are_not_measured_through_the_interpreter(monkeypatch):
    monkeypatch.setattr(
        rdma_bare, "find_binding", lambda: Binding("pyverbs", "1", lambda name: None)
    )
    with pytest.raises(
        PlaneUnavailable, match="pyverbs is used here: `fastdecode doctor` says how"
    ):
        find_native()
