"""Which ports and GIDs two machines talk through: a pure function of what both have.

Pairs of ports that can reach each other are ranked by how sure that is (same InfiniBand subnet or
shared IP subnet; routed; link-local; RoCE v1), NUMA distance, speed, agreement with the subnet of
the control connection, and name. Workers of one engine are spread over rails that rank alike. The
caller tries pairs in this order until a ping comes back.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdecode_rdma.errors import ConfigError, TransportError
from fastdecode_rdma.transport.rdma_ports import INFINIBAND, ROCE2, Gid, Port
from fastdecode_rdma.transport.rdma_wish import Wish

MAX_REASONS = 6
"""Of a refusal: enough to see the pattern in a machine with eight adapters."""


class Reach(enum.IntEnum):
    """How two GIDs see each other, the surest first."""

    SUBNET = 0  # same InfiniBand subnet, or a shared IP subnet
    ROUTED = 1  # global addresses of two subnets: somebody has to route
    LINK_LOCAL = 2
    ROCE1 = 3  # Ethernet frames of their own kind: the same segment only


@dataclass(frozen=True)
class Pair:
    """Two ports that can reach each other, and the GIDs to use."""

    local: Port
    local_gid: Gid
    remote: Port
    remote_gid: Gid
    reach: Reach
    on_control: bool  # both in the subnet of the control connection

    @property
    def rank(self) -> tuple[int, int, float, bool]:
        """What decides before names do; smaller is better."""
        distance = self.local.numa_distance + self.remote.numa_distance
        speed = min(self.local.speed_gbps, self.remote.speed_gbps)
        return (self.reach, distance, -speed, not self.on_control)

    @property
    def is_global(self) -> bool:
        """True if packets carry a global route header: always with RoCE, never inside a subnet."""
        return self.local.link_layer != INFINIBAND

    def __str__(self) -> str:
        speed = min(self.local.speed_gbps, self.remote.speed_gbps)
        kind = self.local_gid.kind
        if self.is_global:
            kind += f", GID {self.local_gid.index} {self.local_gid.text}"
            far = f"{self.remote.name} (GID {self.remote_gid.index} {self.remote_gid.text})"
        else:
            kind, far = f"InfiniBand, LID {self.local.lid}", f"{self.remote.name} (LID "
            far += f"{self.remote.lid})"
        return f"{self.local.name} ({kind}, {speed:g} Gb/s) to {far}"


@dataclass(frozen=True)
class Choice:
    """Pairs in the order in which to try them."""

    pairs: tuple[Pair, ...]

    def explain(self, index: int = 0, failed: Sequence[str] = ()) -> str:
        """One line: the pair at `index`, why the ones before failed, and the runners-up."""
        chosen = self.pairs[index]
        line = f"RDMA over {chosen}"
        if failed:
            line += f"; before it failed {'; '.join(failed)}"
        rest = [_behind(chosen, pair) for pair in self.pairs[index + 1 : index + 4]]
        if not rest:
            return line
        more = len(self.pairs) - index - 1 - len(rest)
        return f"{line}; then {', '.join(rest)}" + (f" and {more} more" if more > 0 else "")


def _behind(best: Pair, other: Pair) -> str:
    """A runner-up and what it lost by."""
    route = f"{other.local.name} to {other.remote.name}"
    distances = [p.local.numa_distance + p.remote.numa_distance for p in (best, other)]
    speeds = [min(p.local.speed_gbps, p.remote.speed_gbps) for p in (best, other)]
    if other.reach != best.reach:
        why = {Reach.ROUTED: "routed", Reach.LINK_LOCAL: "link-local"}.get(other.reach, "RoCE v1")
    elif distances[0] != distances[1]:
        why = f"NUMA distance {distances[1]}, not {distances[0]}"
    elif speeds[0] != speeds[1]:
        why = f"{speeds[1]:g} Gb/s"
    elif other.on_control != best.on_control:
        why = "outside the control connection's subnet"
    else:
        why = "equal"
    return f"{route} ({why})"


def usable_ports(ports: Sequence[Port], wish: Wish, *, where: str = "this machine") -> list[Port]:
    """Returns the ports that can carry something and that the wish allows.

    Raises:
        ConfigError: a device, port or GID that was asked for by name is not there, or cannot be
            used; lists what is.
        TransportError: nothing was asked for and there is no usable port.
    """
    present = ", ".join(str(port) for port in ports) or "no RDMA device"
    for device in wish.devices:
        if device not in {port.device for port in ports}:
            raise ConfigError(f"{wish.origin}: no device {device!r}; {where} has {present}")
    named = [
        port
        for port in ports
        if (not wish.devices or port.device in wish.devices)
        and (wish.port is None or port.number == wish.port)
    ]
    usable = [port for port in named if port.fault() is None]
    if wish.gid is not None:
        usable = [
            replace(port, gids=tuple(gid for gid in port.gids if gid.index == wish.gid))
            for port in usable
        ]
        usable = [port for port in usable if port.gids]
    if usable:
        return usable
    faults = "; ".join(f"{port.name}: {port.fault()}" for port in named if port.fault())
    if wish.devices or wish.port is not None or wish.gid is not None:
        raise ConfigError(
            f"{wish.origin}: no such usable port; {faults or f'{where} has {present}'}"
        )
    raise TransportError(f"{where} has no usable RDMA port: {faults or present}")


def choose(
    local: Sequence[Port],
    remote: Sequence[Port],
    *,
    control: tuple[str, str] | None = None,
    worker_index: int = 0,
) -> Choice:
    """Returns the pairs of usable ports that can reach each other, the one to try first in front.

    `control` holds the local and the remote IP address of the control connection; `worker_index`
    spreads the workers of one engine over rails that rank alike.

    Raises:
        TransportError: no pair can; says why of each.
    """
    pairs, reasons = [], []
    for mine in local:
        for theirs in remote:
            found = _best_gids(mine, theirs, control)
            if isinstance(found, Pair):
                pairs.append(found)
            else:
                reasons.append(f"{mine.name} to {theirs.name}: {found}")
    if not pairs:
        more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        text = "; ".join(reasons[:MAX_REASONS]) or "one side has no usable port"
        raise TransportError(f"no RDMA port here reaches one there: {text}{more}")
    pairs.sort(key=lambda pair: (pair.rank, _by_name(pair.local), _by_name(pair.remote)))
    return Choice(_spread(pairs, worker_index))


def _spread(pairs: list[Pair], worker_index: int) -> tuple[Pair, ...]:
    """Puts the pair of this worker's rail in front: of those that rank like the best, the i-th
    local port and, of what that reaches, the i-th remote one."""
    alike = [pair for pair in pairs if pair.rank == pairs[0].rank]
    rails = list(dict.fromkeys(pair.local.name for pair in alike))
    rail = rails[worker_index % len(rails)]
    reached = [pair for pair in alike if pair.local.name == rail]
    first = reached[worker_index % len(reached)]
    return (first, *(pair for pair in pairs if pair is not first))


def _by_name(port: Port) -> tuple[list[tuple[int, int | str]], int]:
    parts = re.split(r"(\d+)", port.device)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts], port.number


def _best_gids(mine: Port, theirs: Port, control: tuple[str, str] | None) -> Pair | str:
    """The best pair of GIDs of two ports, or the reason why there is none."""
    if mine.link_layer != theirs.link_layer:
        return f"{mine.link_layer} here, {theirs.link_layer} there"
    if mine.link_layer == INFINIBAND:
        return _infiniband(mine, theirs)
    best: tuple[tuple[int, int, bool, int, int], Pair] | None = None
    for gid in mine.gids:
        for other in theirs.gids:
            reach = _roce_reach(gid, other)
            if reach is None:
                continue
            agrees = control is not None and _on_control(gid, other, control)
            pair = Pair(mine, gid, theirs, other, reach, agrees)
            # IPv4 before IPv6: it is what switches' quality-of-service rules are written for
            rank = (reach, gid.text == gid.address, not agrees, gid.index, other.index)
            if best is None or rank < best[0]:
                best = (rank, pair)
    if best is None:
        kinds = sorted({f"{gid.kind} {gid.text}" for gid in (*mine.gids, *theirs.gids)})
        return f"no two GIDs of one kind and subnet among {', '.join(kinds[:4])}"
    return best[1]


def _infiniband(mine: Port, theirs: Port) -> Pair | str:
    # the first GID is the port's own, and its upper half the subnet's
    gid, other = mine.gids[0], theirs.gids[0]
    subnets = [int(ipaddress.IPv6Address(g.address)) >> 64 for g in (gid, other)]
    if subnets[0] != subnets[1]:
        return f"InfiniBand subnets {subnets[0]:016x} and {subnets[1]:016x}"
    if pkey_index(mine, theirs) is None:
        return "no partition key in common of which one side is a full member"
    return Pair(mine, gid, theirs, other, Reach.SUBNET, on_control=False)


def pkey_index(mine: Port, theirs: Port) -> int | None:
    """Returns the index of the first partition key of `mine` that `theirs` is in too; two limited
    members of a partition (upper bit clear) may not talk to each other."""
    for index, key in enumerate(mine.pkeys):
        for other in theirs.pkeys:
            if key & 0x7FFF and key & 0x7FFF == other & 0x7FFF and (key | other) & 0x8000:
                return index
    return None


def _roce_reach(gid: Gid, other: Gid) -> Reach | None:
    """How two RoCE GIDs see each other; None if they do not."""
    if gid.kind != other.kind:
        return None
    mine, theirs = ipaddress.IPv6Address(gid.address), ipaddress.IPv6Address(other.address)
    if (mine.ipv4_mapped is None) != (theirs.ipv4_mapped is None):
        return None
    if mine.is_link_local != theirs.is_link_local:
        return None
    if gid.kind != ROCE2:
        return Reach.ROCE1 if gid.vlan == other.vlan else None
    if mine.is_link_local:
        return Reach.LINK_LOCAL if gid.vlan == other.vlan else None
    if mine == theirs or _share_subnet(gid, other):
        return Reach.SUBNET
    return Reach.ROUTED


def _network(gid: Gid) -> ipaddress.IPv6Network | None:
    if gid.prefix_len is None:
        return None
    return ipaddress.IPv6Network((gid.address, gid.prefix_len), strict=False)


def _share_subnet(gid: Gid, other: Gid) -> bool:
    known = [network for network in (_network(gid), _network(other)) if network is not None]
    both = (ipaddress.IPv6Address(gid.address), ipaddress.IPv6Address(other.address))
    return bool(known) and all(address in network for network in known for address in both)


def _on_control(gid: Gid, other: Gid, control: tuple[str, str]) -> bool:
    """True if the control connection runs between the subnets of the two GIDs."""
    return all(
        address is not None
        and (address == ipaddress.IPv6Address(g.address) or address in (_network(g) or ()))
        for g, address in zip((gid, other), map(_mapped, control), strict=True)
    )


def _mapped(text: str) -> ipaddress.IPv6Address | None:
    """An IP address as it stands in a GID; None for what is none (a Unix socket's peer)."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address
    return ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
