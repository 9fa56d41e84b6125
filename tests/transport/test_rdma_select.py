"""Which RDMA ports and GIDs two machines choose: tables of machines and what is right for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdecode_rdma.errors import ConfigError, TransportError
from fastdecode_rdma.transport.rdma_ports import ETHERNET, IB, INFINIBAND, ROCE1, ROCE2, Gid, Port
from fastdecode_rdma.transport.rdma_select import Choice, Reach, choose, pkey_index, usable_ports
from fastdecode_rdma.transport.rdma_wish import Wish

LINK_LOCAL = "fe80::5054:ff:fe77:1"


def v2(index: int, address: str, prefix_len: int | None = 24, **more: object) -> Gid:
    if ":" not in address:
        address = f"::ffff:{address}"
        prefix_len = None if prefix_len is None else 96 + prefix_len
    return Gid(index, address, ROCE2, "eth0", prefix_len, **more)


def v1(index: int, address: str, **more: object) -> Gid:
    return replace(v2(index, address, **more), kind=ROCE1)


def roce(name: str, *gids: Gid, speed: float = 100, **more: object) -> Port:
    device, _, number = name.partition(":")
    return Port(device, int(number or 1), ETHERNET, "ACTIVE", speed, gids=gids, **more)


def ib(name: str, *, lid: int = 3, subnet: str = "fe80::", guid: int = 1, **more: object) -> Port:
    device, _, number = name.partition(":")
    gid = Gid(0, f"{subnet.removesuffix('::')}::{guid:x}", IB)
    return Port(
        device, int(number or 1), INFINIBAND, "ACTIVE", 200, lid=lid, **{"gids": (gid,), **more}
    )


GID_TABLES = [
    # (mine, theirs, indices chosen): what other systems have got wrong
    ("v1_before_v2", [v1(0, "10.0.0.1"), v2(1, "10.0.0.1")], [v2(0, "10.0.0.2")], (1, 0)),
    ("link_local_first", [v2(0, LINK_LOCAL, 64), v2(1, "10.0.0.1")], [v2(3, "10.0.0.2")], (1, 3)),
    ("only_ipv6", [v2(2, "2001:db8::1", 64)], [v2(5, "2001:db8::2", 64)], (2, 5)),
    ("v2_at_7", [v1(0, LINK_LOCAL), v2(7, "10.0.0.1")], [v2(1, "10.0.0.2")], (7, 1)),
    (
        "the_peers_subnet",
        [v2(1, "192.168.9.1"), v2(3, "10.0.0.1")],
        [v2(1, "10.0.0.2"), v2(3, "172.16.0.2")],
        (3, 1),
    ),
    (
        "ipv4_before_ipv6",
        [v2(1, "2001:db8::1", 64), v2(2, "10.0.0.1")],
        [v2(1, "2001:db8::2", 64), v2(2, "10.0.0.2")],
        (2, 2),
    ),
    (
        "routed_before_link_local",
        [v2(0, LINK_LOCAL, 64), v2(1, "10.0.0.1")],
        [v2(0, "fe80::9", 64), v2(1, "10.9.0.2")],
        (1, 1),
    ),
    (
        "link_local_before_v1",
        [v1(0, "10.0.0.1"), v2(1, LINK_LOCAL, 64)],
        [v1(0, "10.0.0.2"), v2(1, "fe80::9", 64)],
        (1, 1),
    ),
    (
        "the_shared_vlan",
        [v2(1, "10.0.0.1"), v2(3, "10.1.0.1", vlan=7)],
        [v2(1, "10.2.0.2"), v2(3, "10.1.0.2", vlan=7)],
        (3, 3),
    ),
    (
        "link_local_within_a_vlan",
        [v2(0, LINK_LOCAL, 64, vlan=7), v2(2, "fe80::3", 64)],
        [v2(0, "fe80::9", 64, vlan=8), v2(1, "fe80::8", 64)],
        (2, 1),
    ),
    ("the_same_port", [v2(1, "10.0.0.1", None)], [v2(1, "10.0.0.1", None)], (1, 1)),
]


@pytest.mark.parametrize(
    ("mine", "theirs", "indices"), [row[1:] for row in GID_TABLES], ids=[r[0] for r in GID_TABLES]
)
def test_gids(mine: list[Gid], theirs: list[Gid], indices: tuple[int, int]) -> None:
    best = choose([roce("a", *mine)], [roce("b", *theirs)]).pairs[0]
    assert (best.local_gid.index, best.remote_gid.index) == indices
    assert best.is_global


REACHES = [
    ([v2(1, "10.0.0.1", 24)], [v2(1, "10.0.0.2", 24)], Reach.SUBNET),
    ([v2(1, "10.0.0.1", 24)], [v2(1, "10.0.0.2", None)], Reach.SUBNET),
    # one side's network holds the other, whose own is smaller: it would ask its router
    ([v2(1, "10.0.0.1", 8)], [v2(1, "10.1.0.2", 24)], Reach.ROUTED),
    ([v2(1, "10.0.0.1", None)], [v2(1, "10.0.0.2", None)], Reach.ROUTED),
    ([v2(1, "2001:db8::1", 64)], [v2(1, "2001:db8:0:1::1", 64)], Reach.ROUTED),
    ([v1(1, "10.0.0.1")], [v1(1, "10.0.0.2")], Reach.ROCE1),
]


@pytest.mark.parametrize(("mine", "theirs", "reach"), REACHES)
def test_how_sure_a_pair_is(mine: list[Gid], theirs: list[Gid], reach: Reach) -> None:
    assert choose([roce("a", *mine)], [roce("b", *theirs)]).pairs[0].reach == reach


UNREACHABLE = [
    (roce("a", v1(0, "10.0.0.1")), roce("b", v2(0, "10.0.0.2")), "no two GIDs of one kind"),
    (roce("a", v2(0, "10.0.0.1")), roce("b", v2(0, "2001:db8::2", 64)), "no two GIDs"),
    (roce("a", v2(0, LINK_LOCAL, 64)), roce("b", v2(0, "2001:db8::2", 64)), "no two GIDs"),
    (roce("a", v2(0, "10.0.0.1")), ib("b"), "Ethernet here, InfiniBand there"),
    (ib("a", subnet="fec0::"), ib("b"), "InfiniBand subnets fec0000000000000 and fe80"),
    (ib("a", pkeys=(0x7FFF,)), ib("b", pkeys=(0x7FFF,)), "full member"),
]


@pytest.mark.parametrize(("mine", "theirs", "reason"), UNREACHABLE)
def test_a_refusal_says_why(mine: Port, theirs: Port, reason: str) -> None:
    with pytest.raises(TransportError, match=f"a:1 to b:1: .*{reason}"):
        choose([mine], [theirs])


def test_a_refusal_is_short_on_large_machines() -> None:
    ports = [ib(f"mlx5_{i}", subnet="fec0::") for i in range(8)]
    with pytest.raises(TransportError) as caught:
        choose(ports, [ib(f"mlx5_{i}") for i in range(8)])
    assert "and 58 more" in str(caught.value)
    assert len(str(caught.value)) < 800


def best(choice: Choice) -> tuple[str, str]:
    return choice.pairs[0].local.name, choice.pairs[0].remote.name


def test_management_ethernet_and_infiniband_without_ipoib() -> None:
    """The control connection runs over a slow RoCE-capable management port: InfiniBand wins."""
    mine = [roce("mgmt0", v2(1, "10.0.0.1"), speed=25), ib("mlx5_0")]
    theirs = [roce("mgmt0", v2(1, "10.0.0.2"), speed=25), ib("mlx5_0", guid=2, lid=4)]
    choice = choose(mine, theirs, control=("10.0.0.1", "10.0.0.2"))
    assert best(choice) == ("mlx5_0:1", "mlx5_0:1")
    assert not choice.pairs[0].is_global
    assert len(choice.pairs) == 2


RANKING = [
    # (mine, control, name of the local port chosen)
    (
        "numa_before_speed",
        [
            roce("far", v2(1, "10.0.0.1"), speed=400, numa_distance=21),
            roce("near", v2(1, "10.0.0.3")),
        ],
        None,
        "near:1",
    ),
    (
        "speed_before_the_control_connection",
        [roce("slow", v2(1, "10.0.0.1"), speed=25), roce("fast", v2(1, "10.1.0.1"))],
        ("10.0.0.1", "10.0.0.2"),
        "fast:1",
    ),
    (
        "the_control_connections_subnet_before_the_name",
        [roce("a", v2(1, "10.1.0.1")), roce("b", v2(1, "10.0.0.1"))],
        ("10.0.0.1", "10.0.0.2"),
        "b:1",
    ),
    (
        "the_name_last_and_naturally",
        [roce("mlx5_10", v2(1, "10.0.0.1")), roce("mlx5_2", v2(1, "10.0.0.3"))],
        None,
        "mlx5_2:1",
    ),
    (
        "a_shared_subnet_before_numa",
        [
            roce("near", v2(1, "10.7.0.1")),
            roce("far", v2(1, "10.0.0.1"), numa_distance=21),
        ],
        None,
        "far:1",
    ),
]


@pytest.mark.parametrize(
    ("mine", "control", "name"), [row[1:] for row in RANKING], ids=[row[0] for row in RANKING]
)
def test_ranking(mine: list[Port], control: tuple[str, str] | None, name: str) -> None:
    theirs = [roce("x", v2(1, "10.0.0.2"), v2(2, "10.1.0.2"), speed=400)]
    choice = choose(mine, theirs, control=control)
    assert best(choice)[0] == name
    again = choose(mine[::-1], theirs, control=control)
    assert best(again)[0] == name  # not the order in which the kernel lists them


def test_the_remote_numa_distance_counts() -> None:
    theirs = [ib("far", guid=2, numa_distance=32), ib("near", guid=3)]
    assert best(choose([ib("a")], theirs)) == ("a:1", "near:1")


def test_two_rails_never_cross_and_workers_spread_over_them() -> None:
    mine = [roce(f"mlx5_{i}", v2(3, f"10.{i}.0.1")) for i in range(2)]
    theirs = [roce(f"mlx5_{i}", v2(3, f"10.{i}.0.2")) for i in range(2)]
    chosen = [best(choose(mine, theirs, worker_index=worker)) for worker in range(4)]
    straight = [("mlx5_0:1", "mlx5_0:1"), ("mlx5_1:1", "mlx5_1:1")]
    assert chosen == straight * 2


def test_infiniband_rails_of_one_fabric_are_spread_on_both_sides() -> None:
    mine = [ib(f"mlx5_{i}", guid=i) for i in range(1, 3)]
    theirs = [ib(f"mlx5_{i}", guid=i + 8) for i in range(1, 3)]
    chosen = [best(choose(mine, theirs, worker_index=worker)) for worker in range(2)]
    assert chosen == [("mlx5_1:1", "mlx5_1:1"), ("mlx5_2:1", "mlx5_2:1")]


def test_a_slower_rail_carries_no_worker() -> None:
    mine = [ib("fast"), replace(ib("slow", guid=2), speed_gbps=25)]
    chosen = {best(choose(mine, [ib("x", guid=9)], worker_index=w))[0] for w in range(4)}
    assert chosen == {"fast:1"}


def test_every_other_pair_is_left_to_try() -> None:
    mine = [ib(f"mlx5_{i}", guid=i) for i in range(1, 4)]
    choice = choose(mine, [ib("x", guid=9)], worker_index=1)
    assert [pair.local.name for pair in choice.pairs] == ["mlx5_2:1", "mlx5_1:1", "mlx5_3:1"]


def test_the_explanation_is_one_line_with_the_runners_up() -> None:
    mine = [
        roce("a", v2(3, "10.0.0.1"), speed=200),
        roce("b", v2(1, "10.0.0.3"), speed=200, numa_distance=21),
        roce("c", v2(1, "10.0.0.4"), speed=25),
        roce("d", v2(1, "10.8.0.4"), speed=25),
    ]
    choice = choose(mine, [roce("x", v2(5, "10.0.0.2"), speed=200)])
    line = choice.explain()
    assert "\n" not in line
    assert line == (
        "RDMA over a:1 (RoCE v2, GID 3 10.0.0.1, 200 Gb/s) to x:1 (GID 5 10.0.0.2); then "
        "c:1 to x:1 (25 Gb/s), b:1 to x:1 (NUMA distance 31, not 20), d:1 to x:1 (routed)"
    )
    second = choice.explain(1, ["a:1 to x:1: no answer"])
    assert second.startswith("RDMA over c:1 (RoCE v2")
    assert "before it failed a:1 to x:1: no answer" in second


def test_infiniband_is_explained_by_its_lids() -> None:
    line = choose([ib("mlx5_0")], [ib("mlx5_1", guid=2, lid=9)]).explain()
    assert line == "RDMA over mlx5_0:1 (InfiniBand, LID 3, 200 Gb/s) to mlx5_1:1 (LID 9)"


# ---- what a machine may offer ----


DOWN = Port("down", 1, ETHERNET, "DOWN", 100, gids=(v2(1, "10.0.0.9"),))
STRANGE = Port("strange", 1, "Unspecified", "ACTIVE", 100, gids=(v2(1, "10.0.0.9"),))
ZERO = roce("zero")
NO_LID = ib("nolid", lid=0)
GOOD = roce("good", v2(0, LINK_LOCAL, 64), v2(3, "10.0.0.1"))
GOOD2 = roce("good:2", v2(3, "10.0.0.5"))


def test_only_sound_ports_are_offered() -> None:
    assert usable_ports([DOWN, STRANGE, ZERO, NO_LID, GOOD], Wish()) == [GOOD]


FAULTS = [
    (DOWN, "the port is DOWN"),
    (STRANGE, "link layer 'Unspecified'"),
    (ZERO, "network namespace and /dev/infiniband"),
    (NO_LID, "no subnet manager"),
]


@pytest.mark.parametrize(("port", "reason"), FAULTS)
def test_without_a_sound_port_each_fault_is_named(port: Port, reason: str) -> None:
    with pytest.raises(TransportError, match=f"no usable RDMA port: {port.name}: .*{reason}"):
        usable_ports([port], Wish())


def test_no_device_at_all() -> None:
    with pytest.raises(TransportError, match="no usable RDMA port: no RDMA device"):
        usable_ports([], Wish())


STRICT = [
    ({"dev": "mlx5_9"}, r"dev=mlx5_9: no device 'mlx5_9'; this machine has .*good:1 \(RoCE"),
    ({"dev": "good,mlx5_9"}, "no device 'mlx5_9'"),
    ({"dev": "down"}, "dev=down: no such usable port; down:1: the port is DOWN"),
    ({"dev": "good", "port": "3"}, "dev=good, port=3: no such usable port"),
    ({"dev": "good", "gid": "5"}, "dev=good, gid=5: no such usable port"),
]


@pytest.mark.parametrize(("options", "message"), STRICT)
def test_what_is_named_is_strict(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        usable_ports([DOWN, GOOD, GOOD2], Wish.of(options, {}))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["good:1", "good:2"]),
        ({"port": "2"}, ["good:2"]),
        ({"dev": "good", "gid": "0"}, ["good:1"]),
    ],
)
def test_a_wish_restricts(options: dict[str, str], names: list[str]) -> None:
    ports = usable_ports([DOWN, GOOD, GOOD2], Wish.of(options, {}))
    assert [port.name for port in ports] == names
    if "gid" in options:
        assert [gid.index for gid in ports[0].gids] == [0]


# ---- options ----


def test_options_win_over_the_environment() -> None:
    environ = {"FASTDECODE_IB_DEV": "mlx5_0", "FASTDECODE_IB_GID": "3", "FASTDECODE_IB_SL": "2"}
    wish = Wish.of({"dev": "mlx5_1,mlx5_2", "mtu": 1024, "retry": "6"}, environ)
    assert wish == Wish(devices=("mlx5_1", "mlx5_2"), gid=3, mtu=1024, sl=2, retry=6)
    assert (
        wish.origin
        == "dev=mlx5_1,mlx5_2, FASTDECODE_IB_GID=3, mtu=1024, FASTDECODE_IB_SL=2, retry=6"
    )


def test_without_options_everything_is_chosen() -> None:
    assert Wish.of({}, {"FASTDECODE_IB_DEV": "", "OTHER": "1"}) == Wish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry": "7"}, "retry must be 0 to 6, got '7'; 7 means for ever"),
        ({"timeout": "0"}, "timeout must be 1 to 31, got '0'"),
        ({"mtu": "1500"}, "mtu must be one of 256, 512, 1024, 2048, 4096"),
        ({"tclass": "256"}, "tclass must be 0 to 255"),
        ({"sl": "-1"}, "sl must be 0 to 15, got '-1'"),
        ({"gid": "three"}, "gid must be 0 to 65535, got 'three'"),
        ({"port": "²"}, "port must be 1 to 255"),
        ({"dev": " , "}, "names no device"),
    ],
)
def test_options_out_of_range(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wish.of(options, {})
    with pytest.raises(ConfigError, match="FASTDECODE_IB_"):
        Wish.of({}, {f"FASTDECODE_IB_{name.upper()}": text for name, text in options.items()})


def test_partitions() -> None:
    full, limited = ib("a", pkeys=(0x8002, 0, 0xFFFF)), ib("b", pkeys=(0, 0x0001, 0x7FFF))
    assert pkey_index(full, limited) == 2
    assert pkey_index(limited, full) == 2
    assert pkey_index(limited, limited) is None
