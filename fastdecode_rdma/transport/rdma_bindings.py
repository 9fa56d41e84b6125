"""Which binding to libibverbs drives RDMA here: the compiled queue pairs, pyverbs, or ibverbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fastdecode_rdma.errors import ConfigError, TransportError

ENV_VERBS = "FASTDECODE_VERBS"
NATIVE, PYVERBS, IBVERBS = "native", "pyverbs", "ibverbs"

INSTALL_COMMANDS = {
    # /etc/os-release's ID or ID_LIKE -> what brings libibverbs, its drivers and its headers
    "debian": "apt install libibverbs-dev ibverbs-providers",
    "fedora": "dnf install rdma-core-devel libibverbs",
    "suse": "zypper install rdma-core-devel libibverbs",
    "arch": "pacman -S rdma-core",
    "alpine": "apk add rdma-core-dev",
}
_REBUILD = "pip install --force-reinstall --no-deps ."


class Queue(Protocol):
    """A queue pair: `_verbs.VerbsQueue` or a `PythonQueue`. OSError says what failed."""

    fd: int
    qp_num: int
    rkey: int
    max_inline: int

    def limits(self) -> dict[str, int]: ...

    def active_mtu(self, port: int) -> int: ...

    def make(
        self,
        *,
        memory: int,
        nbytes: int,
        slots: int,
        slot_bytes: int,
        depth: int,
        receives: int,
        max_inline: int,
    ) -> None: ...

    def connect(self, **route: Any) -> None: ...

    def write(self, slot: int, nbytes: int, imm: int, count: int) -> None: ...

    def receive(self, count: int) -> None: ...

    def poll(self, limit: int) -> list[tuple[int, int, int, int, int]]: ...

    def explain(self, status: int) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Binding:
    """A way to libibverbs that works in this process."""

    name: str
    version: str
    open_queue: Callable[[str], Queue]

    def __str__(self) -> str:
        return f"{self.name} ({self.version})"


def _load_native() -> Binding:
    try:
        module = import_module("fastdecode_rdma.transport._verbs")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = "not built: infiniband/verbs.h was not there" if missing else str(error)
        raise TransportError(f"the compiled queue pairs are {reason}") from error
    return Binding(NATIVE, f"libibverbs {_library_version()}", module.VerbsQueue)


def _load_pyverbs() -> Binding:
    module = import_module("fastdecode_rdma.transport.rdma")
    module.load_pyverbs()
    return Binding(PYVERBS, f"pyverbs {module.pyverbs_version()}", module.PyverbsQueue)


def _load_ibverbs() -> Binding:
    module = import_module("fastdecode_rdma.transport.rdma_ibverbs")
    module.load_ibverbs()
    return Binding(IBVERBS, f"ibverbs {module.ibverbs_version()}", module.IbverbsQueue)


_LOADERS: Mapping[str, Callable[[], Binding]] = {
    NATIVE: _load_native,
    PYVERBS: _load_pyverbs,
    IBVERBS: _load_ibverbs,
}
"""The fastest first, then rdma-core's own."""


def find_binding(environ: Mapping[str, str] = os.environ) -> Binding:
    """Returns the first binding that works, or the one that FASTDECODE_VERBS names.

    Raises:
        ConfigError: the variable names none.
        TransportError: none works; says why of each, and the command that helps.
    """
    forced = environ.get(ENV_VERBS) or None
    if forced is not None and forced not in _LOADERS:
        raise ConfigError(f"{ENV_VERBS} must be one of {', '.join(_LOADERS)}, got {forced!r}")
    reasons = []
    for name in _LOADERS if forced is None else (forced,):
        try:
            return _LOADERS[name]()
        except TransportError as error:
            reasons.append(str(error))
    raise TransportError(f"no binding to RDMA: {'; '.join(reasons)}; run `{install_command()}`")


def binding_facts() -> dict[str, str]:
    """Returns, for each binding, its version or why it does not work."""
    facts = {}
    for name, load in _LOADERS.items():
        try:
            facts[name] = load().version
        except TransportError as error:
            facts[name] = str(error)
    return facts


def install_command(root: Path = Path("/")) -> str:
    """Returns the one command that brings a binding to this machine."""
    try:
        lines = (root / "etc/os-release").read_text().splitlines()
    except OSError:  # not a Linux distribution that says what it is
        lines = []
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    names = [values.get("ID", ""), *values.get("ID_LIKE", "").strip('"').split()]
    aliases = {"ubuntu": "debian", "rhel": "fedora", "centos": "fedora", "opensuse": "suse"}
    for name in names:
        known = INSTALL_COMMANDS.get(aliases.get(name.strip('"'), name.strip('"')))
        if known is not None:
            return f"{known} && {_REBUILD}"
    return f"install libibverbs with its headers (rdma-core), then {_REBUILD}"


def _library_version() -> str:
    """The version of the libibverbs that this process has loaded, as its file is called."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libibverbs.so" in path:
            return os.path.realpath(path).rpartition(".so.")[2]
    return "of unknown version"
