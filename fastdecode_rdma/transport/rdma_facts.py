"""What `fastdecode doctor` says of RDMA: ports, bindings, and the command that brings one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.transport.rdma_bindings import binding_facts, find_binding, install_command
from fastdecode_rdma.transport.rdma_limits import MEMORY_BYTES, memlock_text
from fastdecode_rdma.transport.rdma_ports import ROOT, read_ports


def find_rdma(root: Path = ROOT) -> dict[str, Any]:
    """Returns the ports with what is wrong with them, each binding's version or why it does not
    work, the one that is used, and what to do."""
    ports = read_ports(root)
    command = None
    try:
        used: str | None = find_binding(os.environ).name
    except FastDecodeError as error:
        used, command = None, install_command(root)
        if "FASTDECODE_VERBS" in str(error):
            command = f"correct it: {error}"
    return {
        "ports": {port.name: port.fault() or str(port) for port in ports},
        "usable": any(port.fault() is None for port in ports) and used is not None,
        "bindings": binding_facts(),
        "binding": used,
        "memlock": memlock_text(MEMORY_BYTES, root),
        "command": command,
    }


def format_rdma(facts: dict[str, Any]) -> str:
    """Returns the facts as one line."""
    ports = ", ".join(
        text if name in text else f"{name}: {text}" for name, text in facts["ports"].items()
    )
    parts = [ports or "no device"]
    used = facts["binding"]
    parts += [
        f"{name}: {text}{' (used)' if name == used else ''}"
        for name, text in facts["bindings"].items()
    ]
    if facts["command"] is not None:
        when = "" if ports else "for a machine with a device: "
        parts.append(f"{when}`{facts['command']}`")
    if facts["memlock"] is not None and ports:
        parts.append(facts["memlock"])
    return "; ".join(parts)
