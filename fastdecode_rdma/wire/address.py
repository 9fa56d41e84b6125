"""Addresses of workers as people write them."""

from __future__ import annotations

from fastdecode_rdma.config import DEFAULT_PORT
from fastdecode_rdma.errors import ConfigError


def parse_address(text: str) -> tuple[str, int]:
    """Returns (host, port) of `host`, `host:port`, `:port`, `[v6]:port` or any behind `tcp://`.

    The host is empty where none is given; port 0 is allowed, for listening.

    Raises:
        ConfigError: it is no such address.
    """
    address = text.strip().removeprefix("tcp://")
    host, separator, port = address.rpartition(":")
    if not separator or address.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = address, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not (address and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"cannot read {text!r} as an address; expected HOST:PORT")
    try:
        host.encode("idna")  # what the resolver does first, and fails at with a plain ValueError
    except UnicodeError as exc:
        raise ConfigError(f"cannot read {text!r} as an address: {exc}") from exc
    if set(host) & set("/[] ,@?"):
        raise ConfigError(f"cannot read {text!r} as an address; expected HOST:PORT")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Returns the `tcp://` address of a worker."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
