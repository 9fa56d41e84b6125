"""`fastdecode bench interconnect` and `serve`, against real peers; no speeds are asserted."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdecode_rdma.transport._pump import Pump

from fastdecode_rdma import cli, host_facts
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.attention.remote import RemoteWorker
from fastdecode_rdma.bench import interconnect_report
from fastdecode_rdma.bench.interconnect_figures import Bandwidth, Latency
from fastdecode_rdma.bench.interconnect_options import PLANES
from fastdecode_rdma.bench.interconnect_peer import Measurement, Peer, at_once, slots_for
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import WorkerLostError
from fastdecode_rdma.transport import address
from fastdecode_rdma.transport.base import FrameSizes


def bench(*arguments: str) -> int:
    return cli.main(["bench", "interconnect", *arguments])


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert bench(*arguments) == 2
    text = capfd.readouterr().err.strip()
    assert "\n" not in text
    return text


def test_every_plane_can_be_measured() -> None:
    assert set(PLANES) == set(address.PLANES)


def test_tables_json_and_csv(peer, tmp_path: Path, capsys) -> None:
    place = tmp_path / "o.json"
    code = bench(
        "--workers", peer.place, "--plane", "tcp,shm", "--all", "--min", "64", "--max", "8192",
        "--factor", "128", "--iters", "40", "--warm_up", "5", "--json", str(place),
        "--csv", str(tmp_path / "o.csv"), "--report", "MiB",
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    for column in ("#bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]"):
        assert column in out
    for column in ("99%[usec]", "99.9%[usec]", "BW peak[MiB/sec]", "MsgRate[Mpps]"):
        assert column in out
    assert "half the round trip" in out and "the full round trip" in out
    result = strict_json(place)
    assert result["complete"] and result["schema_version"] == 1 and result["error"] is None
    found = [(t["plane"], t["kind"], t["test"]) for t in result["tables"]]
    assert found == [
        (plane, kind, test)
        for plane, kinds in (("tcp", ("send", "read")), ("shm", ("write", "read")))
        for kind in kinds
        for test in ("latency", "bandwidth")
    ]
    for table in result["tables"]:
        assert [row["message_bytes"] for row in table["rows"]] == [64, 8192]
        assert all(row["iterations"] == 40 for row in table["rows"])
        assert table["latency_is_half_round_trip"] == (table["mode"] == "ping")
        assert table["server_machine"]["pid"] == peer.process.pid
        for row in table["rows"]:
            check_row(table["test"], row)
    assert {t["client_link"].get("mtu_bytes") for t in result["tables"]} == {None, 65536}
    assert result["client_machine"]["versions"]["numpy"] == np.__version__
    with (tmp_path / "o.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16 and lines[0]["t_typical_usec"] and lines[2]["bw_average_mib_per_s"]


def test_a_plot_shows_every_table(peer, tmp_path, monkeypatch, capfd) -> None:
    figures = []
    real = interconnect_report.draw
    monkeypatch.setattr(
        interconnect_report,
        "draw",
        lambda figure, tables: (figures.append(figure), real(figure, tables)),
    )
    place, picture = tmp_path / "o.json", tmp_path / "o.png"
    options = ["--workers", f"tcp://{peer.place}", "--size", "64,4096", "--iters", "20"]
    assert bench(*options, "--json", str(place), "--plot", str(picture)) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    tables = strict_json(place)["tables"]
    for axis, test, key in zip(
        figures[0].axes, ("latency", "bandwidth"), ("t_typical_usec", "bw_average_gbit_per_s"),
        strict=True,
    ):  # fmt: skip
        shown = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        assert shown == {
            f"tcp {t['kind']} {t['worker']}": [
                [row["message_bytes"], pytest.approx(row[key])] for row in t["rows"]
            ]
            for t in tables
            if t["test"] == test
        }
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log") and axis.get_legend()
    assert bench(*options, "--test", "latency", "--plot", str(tmp_path / "o.svg")) == 0
    assert b"<svg" in (tmp_path / "o.svg").read_bytes()
    capfd.readouterr()
    words = refusal(capfd, *options, "--plot", str(tmp_path / "o.txt"))
    assert "expected a file that ends in" in words and ".png" in words
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    words = refusal(capfd, *options, "--plot", str(picture))
    assert "--plot needs matplotlib: pip install" in words


def check_row(test: str, row: dict[str, Any]) -> None:
    if test == "latency":
        assert 0 < row["t_min_usec"] <= row["t_typical_usec"] <= row["percentile_99_usec"]
        assert row["percentile_99_usec"] <= row["percentile_99_9_usec"] <= row["t_max_usec"]
        return
    assert 0 < row["bw_average_mib_per_s"] <= row["bw_peak_mib_per_s"]
    moved = row["msg_rate_mpps"] * 1e6 * row["message_bytes"] / 2**20
    assert row["bw_average_mib_per_s"] == pytest.approx(moved)


def strict_json(path: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return dict(json.loads(path.read_text(), parse_constant=refuse))


def test_several_workers_connections_and_both_ways(peer, start_peer, tmp_path, capsys) -> None:
    place = tmp_path / "o.json"
    workers = f"tcp://{peer.place},tcp://{start_peer().place}"
    code = bench(
        "--workers", workers, "--kind", "send", "--test", "bandwidth", "--size", "3000,5",
        "--iters", "50", "--qp", "2", "--bidirectional", "--check", "--json", str(place),
    )  # fmt: skip
    assert code == 0
    tables = strict_json(place)["tables"]
    assert [t["worker"] for t in tables] == [*workers.split(","), "all"]
    assert [row["iterations"] for row in tables[2]["rows"]] == [200, 200]
    assert "both directions together" in capsys.readouterr().out


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_a_duration_instead_of_iterations(peer, plane, tmp_path) -> None:
    place = tmp_path / "o.json"
    url = f"{plane}://{peer.place}"
    assert bench("--workers", url, "--duration", "0.05", "--size", "100", "--json", str(place)) == 0
    rows = [table["rows"][0] for table in strict_json(place)["tables"]]
    assert len(rows) == 4 and all(row["iterations"] > 20 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mtu", "1024"], "--mtu concerns rdma alone"),
        (["--gid_index", "3"], "--gid-index concerns rdma alone"),
        (["--inline_size", "0"], "--inline-size concerns rdma alone"),
        (["--cq-mod", "4"], "--cq-mod concerns rdma alone"),
        (["--post_list", "2"], "--post-list concerns rdma alone"),
        (["--plane", "rdma", "--kind", "write_imm", "--post-list", "2"], "--post-list must be 1"),
        (["--plane", "rdma", "--post-list", "65"], "--post-list must be from 1 to 64"),
        (["--plane", "rdma", "--post-list", "9", "--tx-depth", "8"], "must be from 1 to 8"),
        (["--compare"], "--compare concerns rdma alone"),
        (["--events"], "tcp sleeps in the system in any case"),
        (["--size", "4k"], "numbers between commas"),
        (["--size", "0"], "--size must be from 1"),
        (["--size", "4", "--all"], "--size says which sizes"),
        (["--min", "4"], "--min goes with --all"),
        (["--all", "--min", "64", "--max", "8"], "--max 8 is less than --min 64"),
        (["--all", "--factor", "1"], "--factor must be from 2"),
        (["--iters", "0"], "--iters must be from 1"),
        (["--iters", "5", "--duration", "1"], "exclude each other"),
        (["--duration", "nan"], "--duration must be above 0"),
        (["--tx-depth", "257"], "--tx-depth must be from 1 to 256"),
        (["--kind", "write_imm"], "--kind 'write_imm' is unknown; expected send, read"),
        (["--plane", "pigeon"], "--plane 'pigeon' is unknown"),
        (["--plane", "shm"], "is not reached over shm"),
        (["--kind", "read", "--bidirectional"], "goes one way"),
        (["--test", ","], "--test names nothing"),
        (["--report", "Mb"], "invalid choice"),
        (["--pidgeon"], "unrecognized arguments"),
    ],
)
def test_options_that_cannot_be(capfd, arguments, words) -> None:
    assert words in refusal(capfd, "--workers", "tcp://127.0.0.1:1", *arguments)


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
@pytest.mark.parametrize(
    ("name", "words"),
    [("-", "instead of -"), ("", "it is a folder"), ("nowhere/o.png", "there is no folder")],
)
def test_results_that_cannot_be_written_are_told_before_measuring(
    tmp_path, monkeypatch, capfd, option, name, words
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(capfd, "--workers", "tcp://127.0.0.1:1", option, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_leaves_what_it_measured(peer, tmp_path, number, code) -> None:
    place = tmp_path / "o.json"
    place.write_text("old")
    command = [sys.executable, "-m", "fastdecode_rdma.cli", "bench", "interconnect"]
    command += ["--workers", f"tcp://{peer.place}", "--kind", "send", "--test", "latency"]
    command += ["--size", "64,128,256", "--duration", "5", "--json", str(place)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    while "#bytes" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.3)  # it measures
    assert place.read_text() == "old"
    process.send_signal(number)
    assert process.wait(5) == code
    assert "Traceback" not in process.stderr.read()
    result = strict_json(place)
    assert not result["complete"] and result["error"] == "interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


def test_a_server_killed_in_mid_run_is_one_line_and_valid_json(start_peer, tmp_path, capfd) -> None:
    peer, place = start_peer(), tmp_path / "o.json"
    threading.Timer(0.8, lambda: os.kill(peer.process.pid, signal.SIGKILL)).start()
    options = ["--workers", f"tcp://{peer.place}", "--kind", "send", "--test", "latency"]
    start_s = time.monotonic()
    options += ["--size", "64,128", "--duration", "0.6", "--json", str(place)]
    words = refusal(capfd, *options)
    assert peer.place in words and time.monotonic() - start_s < 4
    result = strict_json(place)
    assert not result["complete"] and result["error"] in words
    assert [len(table["rows"]) for table in result["tables"]] == [1]  # what was whole is kept


def test_rdma_by_name_is_not_replaced(peer, capfd) -> None:
    words = refusal(capfd, "--workers", peer.place, "--plane", "rdma", "--iters", "1")
    assert "RDMA" in words


def test_a_changed_byte_is_noticed(spoiling_proxy, tmp_path, capfd) -> None:
    url, place = f"tcp://127.0.0.1:{spoiling_proxy.port}", tmp_path / "o.json"
    options = ["--workers", url, "--kind", "send", "--size", "30000", "--iters", "20"]
    options += ["--warm-up", "0", "--json", str(place)]
    assert bench(*options, "--test", "latency") == 0  # nobody looks
    capfd.readouterr()
    words = refusal(capfd, *options, "--test", "latency", "--check")
    assert re.search(r"1 of 20 messages of 30000 bytes .* the first at byte \d+", words)
    result = strict_json(place)
    assert not result["complete"] and "with other bytes" in result["error"]
    for ways in ([], ["--bidirectional"]):
        words = refusal(capfd, *options, "--test", "bandwidth", "--check", *ways)
        assert "1 of 20 messages" in words


def test_a_worker_with_sequences_is_left_alone(start_workers, capfd) -> None:
    (worker,) = start_workers(1, memory="64MiB")
    geometry = AttentionGeometry((KVGroup((0,), 1, 1, 64),), 0.125, "fp32", 4, 64)
    engine = RemoteWorker.connect(worker.address, geometry, heartbeats=Heartbeats())
    pump = Pump(FrameSizes.of(geometry), timeout_s=5.0)
    port = engine.transport.attach(pump)
    pump.begin(0, 1, [(port, np.array([(1, 0, 1, 0)], ENTRY_DTYPE))])
    pump.wait_ready(port, 0)
    options = ["--workers", worker.address, "--iters", "5", "--test", "latency", "--kind", "send"]
    words = refusal(capfd, *options)
    assert "holds 1 sequences of engines" in words and "--force" in words
    assert bench(*options, "--force") == 0
    pump.close()
    engine.close()


def test_a_peer_takes_no_models(peer) -> None:
    geometry = AttentionGeometry((KVGroup((0,), 1, 1, 64),), 0.125, "fp32", 4, 64)
    with pytest.raises(Exception, match="holds no KV-cache: start `fastdecode worker`"):
        RemoteWorker.connect(f"tcp://{peer.place}", geometry, heartbeats=Heartbeats())


@pytest.mark.parametrize("plane", ["tcp", "shm"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_peer_is_noticed_in_time(start_peer, plane, end) -> None:
    peer = start_peer()
    one = Peer(
        f"{plane}://{peer.place}", heartbeats=Heartbeats(), max_bytes=64, depth=4, timeout_s=1.0
    )
    died: list[float] = []

    def die() -> None:
        died.append(time.monotonic())
        os.kill(peer.process.pid, end)

    threading.Timer(0.1, die).start()
    what = Measurement("ping", 64, 0, 0, duration_s=20.0)
    with pytest.raises(WorkerLostError):
        at_once([one], lambda peer: peer.measure(what), timeout_s=1.0)
    assert time.monotonic() - died[0] < 2.0
    one.close()
    one.close()


def test_counters_that_moved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        assert host_facts.link_facts(ours.fileno())["interface"] == "lo"
        found = host_facts.tcp_counters(ours.fileno())
        assert {"tcp_retransmits", "tcp_out_of_order"} <= set(found)
        ours.close()
    assert host_facts.moved({"a": 1, "b": 2}, {"a": 1, "b": 5, "c": 1}) == {"b": 3, "c": 1}


def test_rdma_counters_come_from_the_kernels_files(tmp_path) -> None:
    for name in ("counters/port_xmit_data", "hw_counters/out_of_sequence", "counters/symbol_error"):
        file = tmp_path / "sys/class/infiniband/mlx5_0/ports/1" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("7\n")
    assert host_facts.rdma_counters(tmp_path) == {
        "mlx5_0/1 port_xmit_data": 7,
        "mlx5_0/1 symbol_error": 7,
        "mlx5_0/1 out_of_sequence": 7,
    }


def test_figures() -> None:
    times = np.arange(1, 1001, dtype=np.uint64) * 2000
    row = Latency.of(8, 1000, times, is_half=True)
    assert (row.t_min, row.t_max, row.t_typical, row.t_avg) == (1, 1000, 500.5, 500.5)
    assert (row.p99, row.p999) == (991, 1000)
    assert Latency.of(8, 1000, times, is_half=False).t_max == 2000
    rate = Bandwidth.of(100, 50, 0.5, peak=0.0, directions=2)
    assert (rate.average_bytes_per_s, rate.messages_per_s) == (20000, 200)
    assert rate.peak_bytes_per_s == 20000
    assert rate.json("Gb")["bw_average_gbit_per_s"] == pytest.approx(20000 * 8e-9)
    assert slots_for(64, 128) == 128 and slots_for(8 << 20, 128) == 32 and slots_for(1, 1) == 2


def test_json_has_no_nan(tmp_path) -> None:
    place = tmp_path / "o.json"
    interconnect_report.write_json(place, "x", {"a": [float("nan"), {"b": float("inf")}]}, "died")
    result = strict_json(place)
    assert result["a"] == [None, {"b": None}] and not result["complete"]
