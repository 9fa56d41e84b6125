"""Options of workers' addresses as `fastdecode bench tune` has measured them, kept in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.transport.address import OPTIONS, parse_url

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Measured options by place ("host:port") of a worker."""

    workers: Mapping[str, Mapping[str, float | str]]

    def apply(self, url: str) -> str:
        """Returns a worker's URL with the measured options that mean something to it; those that
        it names itself stand."""
        address = parse_url(url)
        measured = self.workers.get(address.place, {})
        added = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in measured.items()
            if name not in address.options
            and (address.scheme == "auto" or address.scheme in OPTIONS[name].planes)
        ]
        if not added:
            return url
        plain = url.strip()
        return f"{plain}{'&' if '?' in plain else '?'}{'&'.join(added)}"


def write_profile(path: Path, profile: Profile, found: Mapping[str, Any]) -> None:
    """Writes a profile, and beside it what it was found from."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "bench": "tune",
        "workers": {place: {"options": dict(o)} for place, o in profile.workers.items()},
        **found,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Returns the profile in a file.

    Raises:
        ConfigError: there is none, or it names what cannot be; says what.
    """
    file = Path(path).expanduser()
    content = read_json(file)
    version, workers = content.get("schema_version"), content.get("workers")
    if content.get("bench") != "tune" or version != SCHEMA_VERSION or not isinstance(workers, dict):
        raise ConfigError(
            f"{file} is no profile of version {SCHEMA_VERSION}: `fastdecode bench tune` writes them"
        )
    options: dict[str, dict[str, float | str]] = {}
    for name, entry in workers.items():
        found = entry.get("options") if isinstance(entry, dict) else None
        if not isinstance(found, dict):
            raise ConfigError(f"{file}: worker {name!r} has no options")
        if unknown := [option for option in found if option not in OPTIONS]:
            raise ConfigError(f"{file}: unknown option {unknown[0]!r} of worker {name!r}")
        try:
            place = parse_url(name).place
            options[place] = found
            parse_url(Profile(options).apply(place))  # complains about values
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    return Profile(options)
