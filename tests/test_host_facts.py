"""Facts about a machine: systems that tell little, nothing or nonsense are no error."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import pytest

from fastdecode_rdma import host_facts


def connected() -> socket.socket:
    """A TCP socket whose peer is in the listener's queue."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname())


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (b"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n", "Some CPU @ 2 GHz"),
        (b"processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n", platform.machine()),  # arm64
        (b"processor\t: 0\n\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
        (b"cpu model : MIPS\n", "MIPS"),
        (b"model name without a colon\n:\n", platform.machine()),
        (b"model name\t:\n", platform.machine()),
        (b"\xff\xfe\0", platform.machine()),
        (b"", platform.machine()),
        (None, platform.machine()),
    ],
)
def test_a_cpu_has_a_name_whatever_cpuinfo_says(tmp_path: Path, cpuinfo, name) -> None:
    if cpuinfo is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_bytes(cpuinfo)
    assert host_facts.cpu_model(tmp_path) == name


def test_a_machine_without_proc_and_sys(tmp_path: Path) -> None:
    facts = host_facts.machine_facts(tmp_path)
    assert facts["cpu"] == platform.machine()
    assert facts["governor"] == "" and facts["num_cpus"] >= 1
    assert facts["numa_nodes"] == []
    assert host_facts.rdma_counters(tmp_path) == {}
    with connected() as sock:
        link = host_facts.link_facts(sock.fileno(), tmp_path)
        assert link.keys() == {"interface", "tcp_max_segment_bytes"}
        assert host_facts.counters(sock.fileno(), tmp_path).keys() >= {"tcp_retransmits"}


def test_an_older_kernel_tells_less_of_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "_TCP_INFO_BYTES", 104)
    with connected() as sock:
        assert host_facts.tcp_counters(sock.fileno()) == {"tcp_retransmits": 0}


def test_counters_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    folder.mkdir(parents=True)
    (folder / "rx_write_requests").write_text("12\n")
    (folder / "lifespan").write_text("N/A\n")
    (folder / "unreadable").mkdir()
    assert host_facts.rdma_counters(tmp_path) == {"mlx5_0/1 rx_write_requests": 12}
