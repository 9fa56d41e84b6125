"""Worker addresses: `tcp://host:port?option=value`, or just `host` or `host:port`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.wire.address import parse_address

SCHEMES = ("tcp",)
"""Schemes that this version speaks; transport/__init__.py has a row for each."""

PLANNED_SCHEMES = ("auto", "shm", "rdma")

OPTIONS: Mapping[str, type] = {"connect_timeout_s": float, "buffer_bytes": int}
"""connect_timeout_s: for connection and handshake. buffer_bytes: of each socket buffer."""


@dataclass(frozen=True)
class Address:
    """Where a worker listens, how to reach it, and options by name."""

    host: str
    port: int
    scheme: str = "tcp"
    options: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_url(text: str) -> Address:
    """Returns the address in a worker's URL; the port is 18815 unless given.

    Raises:
        ConfigError: it is no address, or needs a transport or an option that is not there.
    """
    url, question, query = text.strip().partition("?")
    scheme, separator, place = url.rpartition("://")
    if not separator:
        scheme, place = "tcp", url
    if scheme in PLANNED_SCHEMES:
        raise ConfigError(
            f"{text!r}: the {scheme} transport is not available in this version; use tcp://"
        )
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{text!r}: unknown transport {scheme!r}; expected {known}")
    host, port = parse_address(place)
    if not host or port == 0:
        raise ConfigError(f"{text!r}: an engine needs the host and the port of a worker")
    return Address(host, port, scheme, _parse_options(text, query) if question else {})


def _parse_options(text: str, query: str) -> dict[str, float]:
    options: dict[str, float] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        kind = OPTIONS.get(name)
        if kind is None:
            raise ConfigError(f"{text!r}: unknown option {name!r}; expected {', '.join(OPTIONS)}")
        try:
            options[name] = kind(value)
        except ValueError:
            raise ConfigError(f"{text!r}: option {name} must be a number, got {value!r}") from None
        if not 0 < options[name] < 1 << 40:
            raise ConfigError(f"{text!r}: option {name} must be positive, got {value!r}")
    return options
