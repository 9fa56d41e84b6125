"""The RDMA ports of a machine as its kernel shows them, and the form in which peers exchange them.

Read from sysfs alone, so it needs no binding. A GID stands for an address of a network interface;
its prefix length is what tells a shared subnet from a routed one.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import RemoteProtocolError

ROOT = Path("/")
INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"
IB = "IB"
ROCE1 = "RoCE v1"
ROCE2 = "RoCE v2"
LOCAL_DISTANCE = 10
"""What the kernel calls the distance of a NUMA node to itself."""

MAX_PORTS = 64
MAX_PKEYS = 128
MAX_GIDS = 128
"""Of one port; containers and VLANs fill tables, nobody needs more of them than this to choose."""

MAX_EMPTY = 32
"""So many empty lines in a row end a GID table."""

_ZERO = "::"
_RTM_GETADDR = 22
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2


@dataclass(frozen=True)
class Gid:
    """One line of a port's GID table: an IPv6 address, for RoCE that of an interface."""

    index: int
    address: str
    kind: str  # IB, ROCE1 or ROCE2
    netdev: str = ""
    prefix_len: int | None = None  # of the interface's address, as bits of an IPv6 one
    vlan: int = 0  # 0: none

    @property
    def text(self) -> str:
        """The address as people write it: IPv4 where it is one."""
        mapped = ipaddress.IPv6Address(self.address).ipv4_mapped
        return self.address if mapped is None else str(mapped)


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    link_layer: str
    state: str
    speed_gbps: float
    lid: int = 0
    pkeys: tuple[int, ...] = (0xFFFF,)  # by index; 0: none
    numa_node: int | None = None
    numa_distance: int = LOCAL_DISTANCE  # from where its process runs, seen on its own machine
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    def fault(self) -> str | None:
        """Says why the port cannot carry anything; None if it can."""
        if self.link_layer not in (INFINIBAND, ETHERNET):
            return f"link layer {self.link_layer!r} is neither InfiniBand nor RoCE"
        if self.state != "ACTIVE":
            return f"the port is {self.state}, not ACTIVE: check the cable and `ip link`"
        if not self.gids:
            return (
                "all its GIDs are zero: in a container, share the host's network namespace and "
                "/dev/infiniband; else give its interface an address"
            )
        if self.link_layer == INFINIBAND and not self.lid:
            return "it has no LID: no subnet manager runs on its fabric"
        return None

    def __str__(self) -> str:
        layer = self.link_layer if self.link_layer == INFINIBAND else "RoCE"
        numa = "" if self.numa_node is None else f", NUMA {self.numa_node}"
        return f"{self.name} ({layer}, {self.state}, {self.speed_gbps:g} Gb/s{numa})"


def canonical(text: str) -> str:
    """Returns an IPv6 address in its one spelling, as `Gid.address` holds it.

    Raises:
        ValueError: it is none.
    """
    address = ipaddress.IPv6Address(text)
    mapped = address.ipv4_mapped  # whose spelling depends on the version of Python
    return str(address) if mapped is None else f"::ffff:{mapped}"


# ---- reading this machine ----


def read_ports(
    root: Path = ROOT, networks: Mapping[str, int] | None = None, *, through: int = 0
) -> list[Port]:
    """Returns every port of every RDMA device, usable or not; an empty list where there is none.

    `networks` maps the addresses of the interfaces to prefix lengths (`interface_networks()`). GID
    tables are read up to index `through` and on until they look empty.
    """
    known = interface_networks() if networks is None else networks
    vlans = _vlans(root)
    ports = []
    for device in sorted((root / "sys/class/infiniband").glob("*"), key=_natural):
        if not _text(device / "node_type").startswith("1"):
            continue  # a switch, or iWARP, which has no write with immediate data
        node = _numa_node(device, root)
        for folder in sorted((device / "ports").glob("*"), key=_natural):
            gids = _read_gids(folder, known, vlans, through)
            ports.append(_read_port(device.name, folder, node, root, gids))
    return ports


def _read_port(
    device: str, folder: Path, node: int | None, root: Path, gids: tuple[Gid, ...]
) -> Port:
    places = sorted((folder / "pkeys").glob("*"), key=_natural)[:MAX_PKEYS]
    pkeys = [_integer(_text(path)) for path in places]
    while pkeys and not pkeys[-1]:
        pkeys.pop()
    rate = _text(folder / "rate").split()
    return Port(
        device=device,
        number=int(folder.name),
        link_layer=_text(folder / "link_layer"),
        state=_text(folder / "state").partition(":")[2].strip() or "UNKNOWN",
        speed_gbps=float(rate[0]) if rate else 0.0,
        lid=_integer(_text(folder / "lid")),
        pkeys=tuple(pkeys) or (0xFFFF,),
        numa_node=node,
        numa_distance=numa_distance(node, root),
        gids=gids,
    )


def _read_gids(
    folder: Path, networks: Mapping[str, int], vlans: Mapping[str, int], through: int
) -> tuple[Gid, ...]:
    """Tables have up to 1024 lines, most of them empty, and each is a file."""
    layer = _text(folder / "link_layer")
    gids: list[Gid] = []
    index = empty = 0
    while (empty < MAX_EMPTY or index <= through) and len(gids) < MAX_GIDS:
        text = _text(folder / "gids" / str(index))
        if not text:
            break
        address = canonical(text)
        empty = empty + 1 if address == _ZERO else 0
        if not empty:
            gid = _read_gid(folder / "gid_attrs", index, address, layer, networks)
            if gid is not None:
                gids.append(replace(gid, vlan=vlans.get(gid.netdev, 0)))
        index += 1
    return tuple(gids)


def _read_gid(
    attributes: Path, index: int, address: str, layer: str, networks: Mapping[str, int]
) -> Gid | None:
    if layer == INFINIBAND:
        return Gid(index, address, IB)
    kind = _text(attributes / "types" / str(index))
    netdev = _text(attributes / "ndevs" / str(index))
    if kind not in (ROCE2, "IB/RoCE v1", ROCE1):
        return None  # a kind that later kernels may bring
    gid = Gid(index, address, ROCE2 if kind == ROCE2 else ROCE1, netdev)
    length = networks.get(gid.text)
    if length is not None and gid.text != gid.address:
        length += 96  # IPv4 inside IPv6
    return replace(gid, prefix_len=length)


def _numa_node(device: Path, root: Path) -> int | None:
    places = [device / "device"]
    parent = _text(device / "parent")  # software devices name the interface that they lie on
    if parent:
        places.append(root / "sys/class/net" / parent / "device")
    for place in places:
        text = _text(place / "numa_node")
        if text and int(text) >= 0:
            return int(text)
    return None


def numa_distance(node: int | None, root: Path = ROOT) -> int:
    """Returns the distance of a NUMA node from the nearest one that this process may run on."""
    folder = root / "sys/devices/system/node"
    if node is None or not (folder / f"node{node}").is_dir():
        return LOCAL_DISTANCE
    mine = os.sched_getaffinity(0)
    distances = []
    nodes = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    for place in folder.glob("node[0-9]*"):
        row = [int(value) for value in _text(place / "distance").split()]
        if mine & _cpus(_text(place / "cpulist")) and len(row) == len(nodes):
            distances.append(row[nodes.index(node)])
    return min(distances, default=LOCAL_DISTANCE)


def _cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _vlans(root: Path) -> dict[str, int]:
    vlans = {}
    for line in _text(root / "proc/net/vlan/config").splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[1].isdigit():
            vlans[fields[0]] = int(fields[1])
    return vlans


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # empty lines of a GID table cannot be read either
        return ""


def _integer(text: str) -> int:
    return int(text, 0) if text else 0


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Sorts mlx5_2 before mlx5_10."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def interface_networks() -> dict[str, int]:
    """Returns the prefix length of every address of this machine's interfaces."""
    request = struct.pack(
        "=IHHIIBBBBi", 24, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0, socket.AF_UNSPEC, 0, 0, 0, 0
    )
    networks: dict[str, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
            link.settimeout(2.0)
            link.send(request)
            while _take_addresses(link.recv(1 << 16), networks):
                pass
    except OSError:  # no netlink in this sandbox: every other subnet then counts as routed
        return networks
    return networks


def _take_addresses(data: bytes, networks: dict[str, int]) -> bool:
    """Adds the addresses of one netlink datagram; False after the last."""
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
            return False
        family, prefix_len = struct.unpack_from("=BB", data, 16)
        attributes = data[24:length]
        while len(attributes) >= 4:
            size, name = struct.unpack_from("=HH", attributes)
            if size < 4:
                break
            if name in (_IFA_ADDRESS, _IFA_LOCAL):
                address = socket.inet_ntop(family, attributes[4:size])
                networks[address] = prefix_len
            attributes = attributes[(size + 3) & ~3 :]
        data = data[(length + 3) & ~3 :]
    return True


# ---- exchanging them ----


def encode_ports(ports: Iterable[Port]) -> bytes:
    """Returns ports as JSON for the peer."""
    return json.dumps([asdict(port) for port in ports], separators=(",", ":")).encode()


def decode_ports(data: bytes) -> list[Port]:
    """Returns the ports that a peer sent.

    Raises:
        RemoteProtocolError: they are malformed.
    """
    try:
        items = json.loads(data)
        if not isinstance(items, list) or len(items) > MAX_PORTS:
            raise ValueError(f"expected at most {MAX_PORTS} ports")
        return [_decode_port(dict(item)) for item in items]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RemoteProtocolError(f"a malformed list of RDMA ports: {error}") from error


def _decode_port(item: dict[str, Any]) -> Port:
    gids = [_decode_gid(dict(gid)) for gid in item.pop("gids")][:MAX_GIDS]
    pkeys = tuple(int(key) for key in item.pop("pkeys"))[:MAX_PKEYS]
    for name, kind in (("number", int), ("lid", int), ("numa_distance", int)):
        item[name] = kind(item[name])
    item["speed_gbps"] = float(item["speed_gbps"])
    if item["numa_node"] is not None:
        item["numa_node"] = int(item["numa_node"])
    for name in ("device", "link_layer", "state"):
        item[name] = _printable(item[name])
    return Port(**item, pkeys=pkeys, gids=tuple(gids))


def _decode_gid(item: dict[str, Any]) -> Gid:
    item["index"], item["vlan"] = int(item["index"]), int(item["vlan"])
    item["address"] = canonical(item["address"])
    item["kind"], item["netdev"] = _printable(item["kind"]), _printable(item["netdev"])
    length = item["prefix_len"] = None if item["prefix_len"] is None else int(item["prefix_len"])
    if length is not None and not 0 <= length <= 128:
        raise ValueError(f"{length} is no prefix length")
    return Gid(**item)


def _printable(text: object) -> str:
    """A peer's words end in logs and error messages."""
    if not isinstance(text, str) or len(text) > 64 or not text.isprintable():
        raise ValueError("expected a short printable text")
    return text
