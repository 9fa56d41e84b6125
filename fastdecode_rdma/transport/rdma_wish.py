"""What the user asks of RDMA: options of an address, or `FASTDECODE_IB_*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastdecode_rdma.errors import ConfigError

MTUS = (256, 512, 1024, 2048, 4096)
ENV_PREFIX = "FASTDECODE_IB_"


@dataclass(frozen=True)
class _Range:
    low: int
    high: int
    why: str = ""


_NUMBERS = {
    "port": _Range(1, 255),
    "gid": _Range(0, 65535),
    "mtu": _Range(256, 4096),
    "tclass": _Range(0, 255),
    "sl": _Range(0, 15),
    "timeout": _Range(1, 31, "; it stands for 4.096 us * 2^timeout, and 0 for never"),
    "retry": _Range(0, 6, "; 7 means for ever on some devices, so a dead peer is never noticed"),
    "inline": _Range(0, 1024),
    "cq_mod": _Range(1, 16, ", a quarter of the writes that may be under way"),
}

OPTIONS = ("dev", *_NUMBERS)
"""Names of the options of an `rdma://` address."""


@dataclass(frozen=True)
class Wish:
    """Restrictions and settings; what is None is chosen. A named device is strict."""

    devices: tuple[str, ...] = ()
    port: int | None = None
    gid: int | None = None
    mtu: int | None = None
    tclass: int = 0
    sl: int = 0
    timeout: int = 14  # 67 ms: with 3 retries a dead peer is noticed in well under 2 s
    retry: int = 3
    inline: int = 256  # bytes that the processor hands over with a request, if the adapter does
    cq_mod: int = 16  # writes per report that they are done
    origin: str = field(default="", compare=False)  # how the user said it, for messages

    @classmethod
    def of(cls, options: Mapping[str, object], environ: Mapping[str, str]) -> Wish:
        """Returns what the options of an address say, and where they are silent the environment.

        Raises:
            ConfigError: a value is out of its range.
        """
        said: dict[str, str] = {}
        names: dict[str, str] = {}
        for option in OPTIONS:
            variable = ENV_PREFIX + option.upper()
            if option in options:
                said[option], names[option] = str(options[option]), option
            elif environ.get(variable):
                said[option], names[option] = environ[variable], variable
        numbers = {
            option: _number(names[option], option, text)
            for option, text in said.items()
            if option != "dev"
        }
        devices = tuple(name.strip() for name in said.get("dev", "").split(",") if name.strip())
        if "dev" in said and not devices:
            raise ConfigError(f"{names['dev']} names no device; expected one, as in dev=mlx5_0")
        origin = ", ".join(f"{names[option]}={text}" for option, text in said.items())
        return cls(devices=devices, origin=origin, **numbers)


def _number(name: str, option: str, text: str) -> int:
    allowed = _NUMBERS[option]
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not allowed.low <= value <= allowed.high:
        raise ConfigError(
            f"{name} must be {allowed.low} to {allowed.high}, got {text!r}{allowed.why}"
        )
    if option == "mtu" and value not in MTUS:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, MTUS))}, got {text!r}")
    return value
