"""Worker addresses: `tcp://host:port?option=value`, `shm://…`, or just `host` or `host:port`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport.rdma_wish import OPTIONS as RDMA_OPTIONS
from fastdecode_rdma.transport.rdma_wish import Wish
from fastdecode_rdma.wire.address import parse_address

PLANES = ("shm", "rdma", "tcp")
"""Schemes of one plane each; transport/__init__.py has a row for each."""

SCHEMES = ("auto", *PLANES)
"""auto, also for an address without a scheme: the best plane that works."""


@dataclass(frozen=True)
class Option:
    """What may be said behind the ? of an address of these schemes; a number, or text."""

    kind: type
    planes: tuple[str, ...] = PLANES
    may_be_zero: bool = False


OPTIONS: Mapping[str, Option] = {
    "connect_timeout_s": Option(float),
    "buffer_bytes": Option(int, ("tcp",)),
    "bulk_bytes": Option(int),
    "spin_us": Option(float, ("shm",), may_be_zero=True),
    **{name: Option(str, ("rdma",)) for name in RDMA_OPTIONS},
}
"""connect_timeout_s: for connection and handshake. buffer_bytes: of each socket buffer.
bulk_bytes: K/V rows of one frame, up to 16 MiB. spin_us: how long both sides look for each other's
news before they sleep; else their cores decide. Those of rdma: transport/rdma_wish.py."""


@dataclass(frozen=True)
class Address:
    """Where a worker listens, how to reach it, and options by name."""

    host: str
    port: int
    scheme: str = "tcp"
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __str__(self) -> str:
        scheme = "" if self.scheme == "auto" else f"{self.scheme}://"
        return f"{scheme}{self.place}"

    @property
    def place(self) -> str:
        """Host and port, without the way to get there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(text: str) -> Address:
    """Returns the address in a worker's URL; the port is 18815 unless given.

    Raises:
        ConfigError: it is no address, or needs a transport or an option that is not there.
    """
    url, question, query = text.strip().partition("?")
    scheme, separator, place = url.rpartition("://")
    if not separator:
        scheme, place = "auto", url
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{text!r}: unknown transport {scheme!r}; expected {known}")
    host, port = parse_address(place)
    if not host or port == 0:
        raise ConfigError(f"{text!r}: an engine needs the host and the port of a worker")
    return Address(host, port, scheme, _parse_options(text, scheme, query) if question else {})


def require_plane(url: str, plane: str | None) -> str:
    """Returns the URL with the plane that it must be reached over, None for what it says itself.

    Raises:
        ConfigError: it says another one.
    """
    address = parse_url(url)
    if plane is None or address.scheme == plane:
        return url
    if address.scheme != "auto":
        raise ConfigError(f"{url!r} is not reached over {plane}, which require={plane!r} demands")
    return f"{plane}://{url.strip().removeprefix('auto://')}"


def _parse_options(text: str, scheme: str, query: str) -> dict[str, float | str]:
    options: dict[str, float | str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        option = OPTIONS.get(name)
        if option is None:
            raise ConfigError(f"{text!r}: unknown option {name!r}; expected {', '.join(OPTIONS)}")
        if scheme != "auto" and scheme not in option.planes:
            meant = ", ".join(f"{plane}://" for plane in option.planes)
            raise ConfigError(
                f"{text!r}: option {name} says nothing to {scheme}://, only to {meant}"
            )
        options[name] = value if option.kind is str else _parse_number(text, name, option, value)
    try:
        Wish.of(options, {})
    except ConfigError as error:
        raise ConfigError(f"{text!r}: option {error}") from None
    return options


def _parse_number(text: str, name: str, option: Option, value: str) -> float:
    try:
        number = option.kind(value)
    except ValueError:
        raise ConfigError(f"{text!r}: option {name} must be a number, got {value!r}") from None
    if not (0 < number < 1 << 40 or (number == 0 and option.may_be_zero)):
        least = "zero or positive" if option.may_be_zero else "positive"
        raise ConfigError(f"{text!r}: option {name} must be {least}, got {value!r}")
    return number
