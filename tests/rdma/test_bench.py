"""`fastdecode bench` over real verbs, and perftest beside it in the same guest."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator

import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.bench import serve

ITERS = "20"


@pytest.fixture
def url() -> Iterator[str]:
    """A benchmark's peer in this process: another interpreter takes half a minute to start here."""
    server = serve.make_server(
        argparse.Namespace(listen="127.0.0.1:0", token_file=None, insecure=False)
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"rdma://127.0.0.1:{server.address[1]}?gid={os.environ.get('RDMA_VM_GID', 1)}"
    server.stop()
    thread.join()
    server.close(10.0)


def bench(place, *arguments: str) -> list[dict]:
    assert cli.main(["bench", "interconnect", *arguments, "--json", str(place)]) == 0
    return json.loads(place.read_text())["tables"]


def test_every_byte_and_every_setting(url, tmp_path, capsys) -> None:
    settings = ("--ib_dev", "rxe0", "--mtu", "1024", "--inline_size", "0", "--cq_mod", "1")
    for ways in ((), ("--bidirectional",)):
        tables = bench(
            tmp_path / "o.json", "--workers", url, *settings, *ways, "--size", "64,150000",
            "--iters", ITERS, "--warm-up", "2", "--check",
        )  # fmt: skip
        assert [(t["plane"], t["kind"], t["test"]) for t in tables] == [
            ("rdma", "write_imm", "latency"), ("rdma", "write_imm", "bandwidth"),
        ]  # fmt: skip
        assert "MTU 1024" in tables[0]["plane_detail"]
        assert all(row["iterations"] == int(ITERS) for t in tables for row in t["rows"])
    assert "half the round trip" in capsys.readouterr().out


def test_perftest_beside_it(url, tmp_path) -> None:
    tables = bench(
        tmp_path / "o.json", "--workers", url, "--size", "65536", "--iters", ITERS, "--warm-up",
        "2", "--compare",
    )  # fmt: skip
    latency, bandwidth = (table["perftest_rows"][0] for table in tables)
    assert latency["message_bytes"] == 65536 and latency["t_typical_usec"] > 0
    assert bandwidth["bw_average_gbit_per_s"] > 0
