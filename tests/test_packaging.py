"""The package list, the layering of imports, and what a worker may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastdecode_rdma

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "fastdecode_rdma"

LAYERS = [
    {"errors", "config", "isa", "param_checks", "sequence", "stats", "wire", "__init__"}
    | {"json_files", "command_line", "pages", "numa", "host_facts"},
    {"transport", "worker", "attention"},
    {"text_decoders", "detokenizer", "chat", "chat_template", "tokenizer_files", "huge_pages"},
    {"reference", "ops", "tokenizer", "logit_rules", "logprobs", "sampling", "prompt_logprobs"},
    {"scheduler"},
    {"models"},
    {"engine", "prompts", "stream", "results", "requests", "inbox", "handles", "scoring"}
    | {"score_text"},
    {"generator"},
    {"batch", "bench", "eval", "perfmodel", "terminal", "hub", "doctor", "cli"}
    | {"generate_command", "score_command", "ray"},
]
"""Rooms from bottom to top: a file imports from its own layer or those below."""

SERVING = ("worker", "cli", "doctor", "hub", "engine", "bench", "perfmodel", "ray")
"""Rooms that start workers, or ask what one would take."""

NO_TORCH = (
    "errors",
    "config",
    "sequence",
    "stats",
    "wire",
    "transport",
    "worker",
    "attention",
    "scheduler",
    "perfmodel",
)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of this package that a file imports anywhere, lazily too."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "fastdecode_rdma":
                names = [f"fastdecode_rdma.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("fastdecode_rdma."):
                rooms.add(name.split(".")[1])
    return {room for room in rooms if not room.startswith("_")}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_package_directory_is_in_the_wheel() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    block = re.search(r"^packages = \[(.*?)\]", text, re.S | re.M)
    assert block is not None
    listed = set(re.findall(r'"([^"]+)"', block[1]))
    present = {
        ".".join(path.parent.relative_to(CHECKOUT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert (CHECKOUT / "triton_kernels" / "__init__.py").exists()
    assert listed == present | {"fastdecode_rdma.triton_kernels"}  # a folder of its own, mapped


def test_the_cython_folder_does_not_hide_cython() -> None:
    assert not (CHECKOUT / "cython" / "__init__.py").exists()


def test_tests_run_against_the_installed_package() -> None:
    assert all(Path(entry or ".").resolve() != CHECKOUT for entry in sys.path)


def test_every_room_has_its_layer() -> None:
    known = set().union(*LAYERS)
    assert {room_of(path) for path in sources()} <= known


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    room = room_of(path)
    # the command line and lazily loaded commands reach everywhere by name; a session is embedded in
    # one place only
    for target in imported_rooms(path) - {room}:
        assert level[target] <= level[room], f"{room} must not import {target}"
        if target == "worker" and room not in SERVING:
            assert path.name in ("local.py", "__init__.py"), (
                "only attention/local.py embeds a worker"
            )


@pytest.mark.parametrize("room", NO_TORCH)
def test_lower_rooms_import_no_torch(room: str) -> None:
    code = (
        "import importlib, pkgutil, sys, fastdecode_rdma\n"
        f"m = importlib.import_module('fastdecode_rdma.{room}')\n"
        "for info in pkgutil.walk_packages(getattr(m, '__path__', []), m.__name__ + '.'):\n"
        "    if not info.name.endswith('__main__'):\n"
        "        importlib.import_module(info.name)\n"
        "sys.exit(any(n == 'torch' or n.startswith('triton') for n in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or f"{room} imports torch"


def test_the_public_names_resolve() -> None:
    for name in fastdecode_rdma.__all__:
        assert getattr(fastdecode_rdma, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        fastdecode_rdma.Nothing  # noqa: B018


def test_the_version_is_the_projects() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    assert f'version = "{fastdecode_rdma.__version__}"' in text
