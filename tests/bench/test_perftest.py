"""perftest's tables, as its programs print them, and the commands that run them."""

from __future__ import annotations

import math
import socket
import subprocess
import time
from pathlib import Path

import pytest

from fastdecode_rdma.bench import perftest
from fastdecode_rdma.bench.interconnect_options import Case
from fastdecode_rdma.errors import ConfigError, TransportError
from fastdecode_rdma.transport.address import parse_url

LATENCY = """
---------------------------------------------------------------------------------------
                    RDMA_Write Latency Test
 Dual-port       : OFF          Device         : rxe0
 local address: LID 0000 QPN 0x0011 PSN 0x6c7a76 RKey 0x0002a3 VAddr 0x0055d0
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 2       1000          21.11          98.02        22.43              22.91          2.10           31.00                   98.02
 4       1000          21.00          97.02        22.40              22.90          2.11           31.01                   97.02
---------------------------------------------------------------------------------------
"""  # noqa: E501
BANDWIDTH = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 2250.000000 != 1500.000000. CPU Frequency is not max.
 65536      5000             10.50              9.75               0.018597
"""
OLD_UNITS = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]  CPU_Util[%]
 65536      5000             1250.5             1240.1             0.019842       12.5
"""
DURATION = """
 #bytes        #iterations       t_avg[usec]    tps average
 64            12345             3.21           311526.48
"""


def test_latency_tables() -> None:
    rows = perftest.parse_table(LATENCY)
    assert [row["message_bytes"] for row in rows] == [2, 4]
    assert rows[0] == {
        "message_bytes": 2, "iterations": 1000, "t_min_usec": 21.11, "t_max_usec": 98.02,
        "t_typical_usec": 22.43, "t_avg_usec": 22.91, "t_stdev_usec": 2.1,
        "percentile_99_usec": 31.0, "percentile_99_9_usec": 98.02,
    }  # fmt: skip


def test_bandwidth_tables() -> None:
    (row,) = perftest.parse_table(BANDWIDTH)
    assert row["bw_peak_gbit_per_s"] == 10.5 and row["msg_rate_mpps"] == 0.018597
    (row,) = perftest.parse_table(OLD_UNITS)
    assert row["bw_average_mib_per_s"] == 1240.1 and row["cpu_percent"] == 12.5
    (row,) = perftest.parse_table(DURATION)
    assert row["t_avg_usec"] == 3.21 and row["transactions_per_s"] == 311526.48


def test_a_figure_that_is_none() -> None:
    """Fewer messages than it takes for a deviation."""
    (row, _) = perftest.parse_table(LATENCY.replace("2.10 ", "-nan "))
    assert math.isnan(row["t_stdev_usec"])


def test_a_server_that_listens_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(perftest, "SERVER_START_S", 20.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(perftest, "PORT", listener.getsockname()[1])
        with subprocess.Popen(["sleep", "60"]) as server:
            start_s = time.monotonic()
            perftest._await_listener(server)
            server.kill()
    assert time.monotonic() - start_s < 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no figures; its last words: none"),
        ("Unable to open device\n", "its last words: Unable to open device"),
        (BANDWIDTH.replace("0.018597", ""), "a row of 4 figures"),
        (BANDWIDTH.replace("BW peak[Gb/sec]", "BW peek[Gb/sec]"), "a column that is not known"),
    ],
)
def test_what_is_no_table(text: str, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        perftest.parse_table(text)


def a_case(test: str, mode: str, kind: str = "write_imm") -> Case:
    return Case("rdma", kind, test, mode, ())


def test_each_verb_has_its_program() -> None:
    tools = [
        perftest.tool_of(a_case(test, test, kind))
        for kind in ("write", "send", "read")
        for test in ("latency", "bandwidth")
    ]
    assert tools == [f"ib_{v}_{t}" for v in ("write", "send", "read") for t in ("lat", "bw")]


def test_commands_carry_the_options() -> None:
    address = parse_url("rdma://10.0.0.7?dev=mlx5_1&gid=3&mtu=1024&retry=2")
    assert perftest.command_of(a_case("latency", "ping"), address, 64, 100) == [
        "ib_write_lat", "--size", "64", "-F", "--iters", "100", "--ib-dev", "mlx5_1",
        "--gid-index", "3", "--mtu", "1024", "--retry_count", "2", "10.0.0.7",
    ]  # fmt: skip
    command = perftest.command_of(a_case("bandwidth", "pingpong"), address, 64, 0)
    assert command[0] == "ib_write_bw" and command[-3:-1] == ["--report_gbits", "--bidirectional"]


def test_both_ends_run_where_the_worker_is_here(tmp_path: Path, monkeypatch) -> None:
    log = tmp_path / "log"
    tool = tmp_path / "ib_write_lat"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncat <<END\n{LATENCY}\nEND\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(perftest, "SERVER_START_S", 5.0)
    rows = perftest.beside(a_case("latency", "ping"), parse_url("rdma://127.0.0.1"), {2: 7})
    assert len(rows) == 2
    assert sorted(log.read_text().splitlines()) == [
        "--size 2 -F --iters 7",
        "--size 2 -F --iters 7 127.0.0.1",
    ]
    rows = perftest.beside(a_case("latency", "ping"), parse_url("rdma://192.0.2.1"), {2: 7})
    assert len(log.read_text().splitlines()) == 3 and len(rows) == 2


def test_a_failing_tool_says_what_the_other_end_needs(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "ib_write_lat"
    tool.write_text("#!/bin/sh\necho could not connect >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TransportError, match=r"could not connect; on 192\.0\.2\.1 there must run"):
        perftest.beside(a_case("latency", "ping"), parse_url("rdma://192.0.2.1"), {2: 7})


def test_perftest_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt install perftest"):
        perftest.check_installed([perftest.tool_of(a_case("latency", "ping"))])
    assert not perftest.is_own_address("192.0.2.1") and perftest.is_own_address("127.0.0.1")
