"""`fastdecode doctor`: what this machine has, what is missing, and what will be used.

Every fact is looked up on its own: what cannot be found out is said so and stops nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from fastdecode_rdma import __version__, numa, pages
from fastdecode_rdma.command_line import split_workers
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.isa import ISA_VARIABLE, UNPROVEN
from fastdecode_rdma.transport.pinned import try_pinning
from fastdecode_rdma.transport.rdma_facts import find_rdma, format_rdma
from fastdecode_rdma.wire.token_file import find_token
from fastdecode_rdma.worker import limits
from fastdecode_rdma.worker.memory import SLAB_BYTES, SlabPool

ROOT = Path("/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastdecode doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--workers",
        metavar="A,B",
        help="measure the way to these workers, too, in both directions, for half a second each",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )


def find_python() -> dict[str, str]:
    """Returns the versions of the interpreter, this package, numpy and the system."""
    try:
        numpy = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        numpy = "missing: run `pip install numpy`"
    return {
        "fastdecode_rdma": __version__,
        "python": platform.python_version(),
        "numpy": numpy,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def find_torch() -> dict[str, Any]:
    """Returns torch's version and device; a machine that only runs workers needs none."""
    try:
        torch = import_module("torch")
    except ImportError as exc:
        return {
            "version": None,
            "device": None,
            "note": f"{exc}; fine for a worker, an engine needs it: `pip install torch`",
        }
    if not torch.cuda.is_available():
        return {"version": torch.__version__, "device": "cpu", "note": "no CUDA device"}
    name = torch.cuda.get_device_name(0)
    note = f"{name} is there, this version does not use it"
    return {"version": torch.__version__, "device": "cpu", "note": note}


def find_kernel() -> dict[str, Any]:
    """Returns the instruction sets that this build has, this CPU can run of them, and is chosen.

    `off` are those of the build that are used only when FASTDECODE_ISA names them.
    """
    try:
        machinery = import_module("fastdecode_rdma.worker.machinery")
        facts = machinery.kernel_facts()
    except (ImportError, FastDecodeError) as exc:
        nothing: dict[str, Any] = {"built": [], "available": [], "off": []}
        return {"isa": None, **nothing, "forced": None, "note": str(exc)}
    return {
        "isa": facts.isa,
        "built": list(facts.built),
        "available": list(facts.available),
        "off": [isa for isa in facts.built if isa in UNPROVEN and isa != facts.isa],
        "forced": os.environ.get(ISA_VARIABLE),
        "note": None,
    }


def find_threads(root: Path = ROOT) -> dict[str, Any]:
    """Returns the CPUs that this process may use and the threads a worker would start."""
    affinity = sorted(os.sched_getaffinity(0))
    default = limits.default_threads(root, affinity)
    return {
        "cpus": len(affinity),
        "physical_cores": limits.physical_cores(affinity, root),
        "cgroup_cpus": limits.cgroup_cpus(root),
        "default": default.value,
        "reason": default.reason,
    }


def find_memory(root: Path = ROOT) -> dict[str, Any]:
    """Returns the memory that is free, by the system and by the cgroup, in bytes."""
    cgroup = limits.cgroup_memory(root)
    facts: dict[str, Any] = {
        "available": limits.available_memory(root),
        "cgroup_limit": None if cgroup is None else cgroup[0],
        "cgroup_left": None if cgroup is None else cgroup[1],
    }
    try:
        default = limits.default_memory(root)
    except FastDecodeError as exc:
        return facts | {"default": None, "reason": str(exc)}
    return facts | {"default": default.value, "reason": default.reason}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # this kernel does not have it
        return None


def find_huge_pages(root: Path = ROOT) -> dict[str, Any]:
    """Returns the mode of transparent huge pages, the reserved ones, in pages and in bytes that are
    free, and what KV memory lies on."""
    modes = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = [mode.strip("[]") for mode in modes.split() if mode.startswith("[")]
    reserved = [
        int(line.split()[1])
        for line in (_text(root / "proc/meminfo") or "").splitlines()
        if line.startswith("HugePages_Total:")
    ]
    mode = chosen[0] if chosen else None
    return {
        "transparent": mode,
        "reserved": reserved[0] if reserved else 0,
        "free_bytes": limits.free_huge_bytes(root),
        "used": limits.page_kind(SLAB_BYTES, root),
    }


def find_memlock() -> dict[str, int | None]:
    """Returns how many bytes may be locked (and so registered for RDMA); None is unlimited."""
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value
        for value in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return {"soft": soft, "hard": hard}


def find_numa(root: Path = ROOT) -> dict[str, Any]:
    """Returns the CPUs of each NUMA node; those of each that gets a pool and a team of its own; and
    what, if anything, keeps memory from being bound to them."""
    cpus = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cpus[folder.name] = _text(folder / "cpulist") or ""
    facts: dict[str, Any] = {"nodes": cpus, "used": [], "note": None}
    try:
        nodes = numa.find_nodes(root)
    except FastDecodeError as exc:
        return facts | {"note": str(exc)}
    facts["used"] = [numa.format_cpus(node.cpus) for node in nodes]
    for node in nodes if len(nodes) > 1 else ():
        pool = SlabPool(pages.SMALL_BYTES, node)
        pool.give(pool.take(pages.SMALL_BYTES))
        facts["note"] = pool.binding_error or facts["note"]
    return facts


def find_verbs(root: Path = ROOT) -> dict[str, Any]:
    """Returns the RDMA devices that the kernel shows, and whether user space may open them."""
    folder = root / "sys/class/infiniband"
    devices = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    return {"devices": devices, "openable": (root / "dev/infiniband").is_dir()}


def find_all() -> dict[str, Any]:
    """Returns every section."""
    sections: dict[str, Callable[[], Any]] = {
        "python": find_python,
        "torch": find_torch,
        "kernel": find_kernel,
        "threads": find_threads,
        "memory": find_memory,
        "huge_pages": find_huge_pages,
        "memlock": find_memlock,
        "numa": find_numa,
        "verbs": find_verbs,
        "rdma": find_rdma,
        "gpu_memory": try_pinning,
    }
    facts = {name: find() for name, find in sections.items()}
    facts["used"] = what_is_used(facts)
    return facts


def what_is_used(facts: dict[str, Any]) -> dict[str, str]:
    """Returns what an engine and a worker would do here, in words."""
    torch, kernel, memory = facts["torch"], facts["kernel"], facts["memory"]
    huge = facts["huge_pages"]
    engine = "none: torch is missing"
    if torch["version"] is not None:
        engine = f"torch {torch['version']} on {torch['device']}"
    attention = "none: the compiled kernel is missing"
    if kernel["isa"] is not None:
        attention = f"{kernel['isa']} kernel, {facts['threads']['default']} threads"
    default = memory["default"]
    cache = "pass --memory" if default is None else limits.format_memory(default)
    return {
        "dense layers": engine,
        "attention": attention,
        "KV-cache": f"{cache} ({memory['reason']}), {huge['used']} pages",
        "transport": "shm, rdma or tcp" if facts["rdma"]["usable"] else "shm or tcp",
    }


def _numa_line(facts: dict[str, Any]) -> str:
    text = "; ".join(f"{name}: CPUs {cpus}" for name, cpus in facts["nodes"].items()) or "unknown"
    if len(facts["used"]) > 1:
        text += f"; a pool and a team each for CPUs {', '.join(facts['used'])}"
    return text if facts["note"] is None else f"{text}; {facts['note']}"


def _amount(nbytes: int | None, absent: str) -> str:
    return absent if nbytes is None else limits.format_memory(nbytes)


def _kernel_line(kernel: dict[str, Any]) -> str:
    if kernel["note"] is not None:
        return kernel["note"]
    forced = f" ({ISA_VARIABLE}={kernel['forced']})" if kernel["forced"] else ""
    built, available = ", ".join(kernel["built"]), ", ".join(kernel["available"])
    return f"built for {built}; this CPU runs {available}; chosen {kernel['isa']}{forced}"


def _off_line(kernel: dict[str, Any], isa: str) -> str:
    can = isa in kernel["available"]
    how = f"{ISA_VARIABLE}={isa} turns it on" if can else "this CPU cannot run it"
    return f"nobody has run its tests on such a processor; {how}"


def format_lines(facts: dict[str, Any]) -> str:
    """Returns the facts as one line each, what will be used last."""
    python, torch, kernel = facts["python"], facts["torch"], facts["kernel"]
    threads, memory, huge = facts["threads"], facts["memory"], facts["huge_pages"]
    memlock = facts["memlock"]
    quota = threads["cgroup_cpus"]
    cores = f"{threads['cpus']} CPUs in the affinity mask, {threads['physical_cores']} cores"
    rows = [
        ("python", ", ".join(f"{name} {value}" for name, value in python.items())),
        ("torch", f"{torch['version'] or 'missing'} ({torch['note']})"),
        ("kernel", _kernel_line(kernel)),
        *((f"off: {isa}", _off_line(kernel, isa)) for isa in kernel["off"]),
        ("threads", cores + ("" if quota is None else f", cgroup quota {quota:g} CPUs")),
        (
            "memory",
            f"{_amount(memory['available'], 'unknown')} available, "
            f"cgroup limit {_amount(memory['cgroup_limit'], 'none')}",
        ),
        (
            "huge pages",
            f"transparent {huge['transparent']}, {huge['reserved']} reserved"
            f" ({limits.format_memory(huge['free_bytes'])} free)",
        ),
        (
            "memlock",
            f"{_amount(memlock['soft'], 'unlimited')}, "
            f"at most {_amount(memlock['hard'], 'unlimited')}",
        ),
        ("NUMA", _numa_line(facts["numa"])),
        ("RDMA", format_rdma(facts["rdma"])),
        ("GPU pins rows", facts["gpu_memory"]["pinned"]),
        ("GPUDirect", facts["gpu_memory"]["gpudirect"]),
        *((f"use: {name}", text) for name, text in facts["used"].items()),
        *facts.get("path_lines", ()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def run(args: argparse.Namespace) -> int:
    """Prints the facts; returns 1 if a worker could not be reached.

    Raises:
        ConfigError: --workers or the token file cannot be used.
    """
    facts = find_all()
    paths = []
    if args.workers is not None:
        # read here: a machine without the extensions has facts, too
        measure_paths = import_module("fastdecode_rdma.bench.paths").measure_paths
        paths = measure_paths(split_workers(args.workers), find_token(args.token_file))
        facts["paths"] = [path.json() for path in paths]
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(format_lines({**facts, "path_lines": [(f"to {p.worker}", p.line()) for p in paths]}))
    return int(any(path.error for path in paths))
