"""`fastdecode bench` over real verbs, and perftest beside it in the same guest."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.bench import serve
from fastdecode_rdma.wire.connection import Connection

ITERS = "20"
SLOWLY = ("--qp-timeout", "18", "--timeout", "30", "--tx-depth", "16")
"""The guest emulates its processor: what takes long must not be sent again."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A benchmark's peer in this process: another interpreter takes half a minute to start here.
    Nobody is lost for silence: perftest takes the guest's only processor for seconds."""
    monkeypatch.setattr(Connection, "is_lost", lambda self, now_s: self.silence_s(now_s) > 60)
    server = serve.make_server(
        argparse.Namespace(listen="127.0.0.1:0", token_file=None, insecure=False)
    )
    server.config = replace(server.config, handshake_timeout_s=60.0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    options = f"gid={os.environ.get('RDMA_VM_GID', 1)}&connect_timeout_s=60"
    yield f"rdma://127.0.0.1:{server.address[1]}?{options}"
    server.stop()
    thread.join()
    server.close(10.0)


def bench(place, *arguments: str) -> list[dict]:
    assert cli.main(["bench", "interconnect", *arguments, "--json", str(place)]) == 0
    return json.loads(place.read_text())["tables"]


KINDS = ("write_imm", "write", "send", "read")


def test_every_byte_and_every_setting(url, tmp_path, capsys) -> None:
    settings = ("--ib_dev", "rxe0", "--mtu", "1024", "--inline_size", "0", "--cq_mod", "1")
    for ways in ((), ("--bidirectional",)):
        tables = bench(
            tmp_path / "o.json", "--workers", url, *settings, *ways, "--size", "64,20000", *SLOWLY,
            "--iters", ITERS, "--warm-up", "2", "--check", "--post-list", "4",
        )  # fmt: skip
        assert [(t["plane"], t["kind"], t["test"]) for t in tables] == [
            ("rdma", kind, test)
            for kind in KINDS
            for test in ("latency", "bandwidth")
            if not (ways and kind == "read" and test == "bandwidth")
        ]
        assert "MTU 1024" in tables[0]["plane_detail"]
        assert all(row["iterations"] == int(ITERS) for t in tables for row in t["rows"])
        assert all(t["latency_is_half_round_trip"] != (t["kind"] == "read") for t in tables[::2])
        assert all(t["client_counters_moved"]["rxe0/1 sent_pkts"] > 0 for t in tables)
    out = capsys.readouterr().out
    assert "half the round trip" in out and "the full round trip" in out
    assert "counters of this end that moved: " in out and "rxe0/1 sent_pkts +" in out


def test_for_a_time_asleep_over_several_queue_pairs(url, tmp_path) -> None:
    tables = bench(
        tmp_path / "o.json", "--workers", url, "--events", "--duration", "0.2", "--qp", "2",
        "--size", "4096", "--warm-up", "2", "--kind", "write,read", *SLOWLY,
    )  # fmt: skip
    found = [(t["kind"], t["test"]) for t in tables]
    assert found == [
        ("write", "bandwidth"), ("read", "latency"), ("read", "bandwidth"),
    ]  # fmt: skip
    assert all(table["rows"][0]["iterations"] >= 4 for table in tables)


def test_sends_both_ways_for_a_time(url, tmp_path) -> None:
    (table,) = bench(
        tmp_path / "o.json", "--workers", url, "--bidirectional", "--duration", "0.2", "--size",
        "4096", *SLOWLY, "--warm-up", "2", "--kind", "send", "--test", "bandwidth",
    )  # fmt: skip
    assert table["mode"] == "both_ways" and table["rows"][0]["bw_average_gbit_per_s"] > 0


def test_bare_verbs_need_compiled_queue_pairs(url, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("FASTDECODE_VERBS", "pyverbs")
    options = ("--workers", url, "--iters", "5", "--warm-up", "0", "--test", "latency")
    tables = bench(tmp_path / "o.json", *options)
    assert [table["kind"] for table in tables] == ["write_imm"]
    assert "not measured: rdma write latency: bare verbs are measured" in capfd.readouterr().out
    assert cli.main(["bench", "interconnect", *options, "--plane", "rdma", "--kind", "send"]) == 2
    assert "compiled queue pairs, pyverbs is used here" in capfd.readouterr().err


def test_perftest_beside_it(url, tmp_path) -> None:
    tables = bench(
        tmp_path / "o.json", "--workers", url, "--size", "65536", "--iters", ITERS, "--warm-up",
        "2", "--compare", "--kind", "write_imm,read", *SLOWLY,
    )  # fmt: skip
    for table in tables:
        (row,) = table["perftest_rows"]
        assert row["message_bytes"] == 65536, table["kind"]
        figure = "t_typical_usec" if table["test"] == "latency" else "bw_average_gbit_per_s"
        assert row[figure] > 0
