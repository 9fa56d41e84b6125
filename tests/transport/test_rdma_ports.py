"""RDMA ports as read from a kernel's files, and as peers exchange them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastdecode_rdma.errors import RemoteProtocolError
from fastdecode_rdma.transport.rdma_ports import (
    IB,
    ROCE1,
    ROCE2,
    Gid,
    Port,
    decode_ports,
    encode_ports,
    interface_networks,
    numa_distance,
    read_ports,
)

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def add_port(root: Path, device: str, number: int, *, layer: str, **files: str) -> Path:
    place = f"sys/class/infiniband/{device}/ports/{number}"
    defaults = {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "lid": "0x0"}
    write(root, {f"{place}/{k}": v for k, v in {**defaults, "link_layer": layer, **files}.items()})
    write(root, {f"sys/class/infiniband/{device}/node_type": "1: CA"})
    return root / place


def add_gid(port: Path, index: int, gid: str, kind: str = "RoCE v2", netdev: str = "eth0") -> None:
    write(port, {f"gids/{index}": gid})
    if gid != ZERO:
        write(port, {f"gid_attrs/types/{index}": kind, f"gid_attrs/ndevs/{index}": netdev})


def test_a_roce_port(tmp_path: Path) -> None:
    port = add_port(tmp_path, "mlx5_0", 1, layer="Ethernet")
    add_gid(port, 0, "fe80:0000:0000:0000:5054:00ff:fe77:0001", "IB/RoCE v1")
    add_gid(port, 1, "0000:0000:0000:0000:0000:ffff:0a00:0001")
    for index in range(2, 10):
        add_gid(port, index, ZERO)
    add_gid(port, 10, "2001:0db8:0000:0000:0000:0000:0000:0001", netdev="eth0.7")
    write(tmp_path, {"sys/class/infiniband/mlx5_0/device/numa_node": "1"})
    vlans = "VLAN Dev name\t | VLAN ID\nName-Type: VLAN_NAME_TYPE\neth0.7         | 7  | eth0"
    write(tmp_path, {"proc/net/vlan/config": vlans})
    networks = {"10.0.0.1": 24, "2001:db8::1": 64}
    assert read_ports(tmp_path, networks) == [
        Port(
            "mlx5_0",
            1,
            "Ethernet",
            "ACTIVE",
            100.0,
            numa_node=1,
            gids=(
                Gid(0, "fe80::5054:ff:fe77:1", ROCE1, "eth0"),
                Gid(1, "::ffff:10.0.0.1", ROCE2, "eth0", 120),
                Gid(10, "2001:db8::1", ROCE2, "eth0.7", 64, 7),
            ),
        )
    ]


def test_a_long_empty_stretch_ends_a_gid_table_unless_more_is_asked_for(tmp_path: Path) -> None:
    port = add_port(tmp_path, "rxe0", 1, layer="Ethernet")
    for index in range(200):
        add_gid(port, index, ZERO if index % 100 else "0000:0000:0000:0000:0000:ffff:0a00:0001")
    assert [gid.index for gid in read_ports(tmp_path, {})[0].gids] == [0]
    found = read_ports(tmp_path, {}, through=100)
    assert [gid.index for gid in found[0].gids] == [0, 100]


def test_an_infiniband_port(tmp_path: Path) -> None:
    port = add_port(tmp_path, "ibp1", 2, layer="InfiniBand", lid="0x1f", rate="200 Gb/sec (4X HDR)")
    write(port, {"gids/0": "fe80:0000:0000:0000:0002:c903:0000:0001", "pkeys/0": "0xffff"})
    write(port, {"pkeys/1": "0x0000", "pkeys/2": "0x8001", "pkeys/10": "0x0000"})
    (found,) = read_ports(tmp_path, {})
    assert (found.name, found.lid, found.speed_gbps) == ("ibp1:2", 31, 200.0)
    assert found.pkeys == (0xFFFF, 0, 0x8001)
    assert found.gids == (Gid(0, "fe80::2:c903:0:1", IB),)
    assert found.fault() is None


def test_devices_come_in_natural_order_and_iwarp_is_left_out(tmp_path: Path) -> None:
    for device in ("mlx5_10", "mlx5_2", "cxgb4_0"):
        add_port(tmp_path, device, 1, layer="Ethernet")
    write(tmp_path, {"sys/class/infiniband/cxgb4_0/node_type": "4: RNIC"})
    assert [port.device for port in read_ports(tmp_path, {})] == ["mlx5_2", "mlx5_10"]


def test_a_port_without_readable_files_is_only_unusable(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", 1, layer="Ethernet", state="", rate="")
    (found,) = read_ports(tmp_path, {})
    assert found.state == "UNKNOWN"
    assert found.fault() is not None


def test_a_machine_without_devices(tmp_path: Path) -> None:
    assert read_ports(tmp_path, {}) == []


def test_a_software_device_lies_where_its_interface_does(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", 1, layer="Ethernet")
    write(tmp_path, {"sys/class/infiniband/rxe0/parent": "eth1"})
    write(tmp_path, {"sys/class/net/eth1/device/numa_node": "3"})
    assert read_ports(tmp_path, {})[0].numa_node == 3


def test_numa_distance_is_from_the_nearest_node_of_this_process(tmp_path: Path) -> None:
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    node = "sys/devices/system/node/node"
    write(tmp_path, {f"{node}0/cpulist": "100000-100001", f"{node}0/distance": "10 21 31"})
    write(tmp_path, {f"{node}1/cpulist": mine, f"{node}1/distance": "21 10 41"})
    write(tmp_path, {f"{node}2/cpulist": "", f"{node}2/distance": "31 41 10"})
    assert [numa_distance(n, tmp_path) for n in (0, 1, 2, None, 9)] == [21, 10, 41, 10, 10]


def test_this_machines_loopback_address_has_its_prefix() -> None:
    assert interface_networks()["127.0.0.1"] == 8


PORT = Port(
    "mlx5_0",
    1,
    "Ethernet",
    "ACTIVE",
    100.0,
    numa_node=None,
    gids=(Gid(3, "::ffff:10.0.0.1", ROCE2, "eth0", 120, 7),),
)


def test_peers_get_what_was_sent() -> None:
    other = Port("ibp1", 2, "InfiniBand", "ACTIVE", 200.0, 7, (1, 2), 1, 21)
    assert decode_ports(encode_ports([PORT, other])) == [PORT, other]
    assert PORT.gids[0].text == "10.0.0.1"


def damaged(**changes: object) -> bytes:
    item = json.loads(encode_ports([PORT]))[0]
    gid = changes.pop("gid", {})
    return json.dumps([{**item, **changes, "gids": [{**item["gids"][0], **gid}]}]).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b"[" * 100_000,
        b"[{}]",
        damaged(device="a\nb"),
        damaged(device=7),
        damaged(number=None),
        damaged(surprise=1),
        damaged(gid={"address": "nonsense"}),
        damaged(gid={"prefix_len": 129}),
        json.dumps([json.loads(encode_ports([PORT]))[0]] * 65).encode(),
    ],
)
def test_what_is_no_list_of_ports(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed list of RDMA ports"):
        decode_ports(data)
