"""Fetching and caching, with a model of a few kilobytes in wheels made here."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import zipfile
from pathlib import Path

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub import demo_models
from fastdecode_rdma.hub.demo_models import (
    DEMO_MODELS,
    DemoModel,
    Wheel,
    demo_model_dir,
    user_cache_dir,
)


@pytest.fixture
def tiny(make_gguf, tmp_path, monkeypatch) -> tuple[DemoModel, Path]:
    """A demo model "tiny" in two wheels; returns it and the folder that holds them."""
    gguf_path, _ = make_gguf("llama")
    data = gguf_path.read_bytes()
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheels = []
    for number, part in enumerate((data[:5000], data[5000:])):
        project = f"tiny-model-part{number}"
        path = folder / f"tiny_model_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/part", part)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(Wheel(project, "1.0", digest, "data/part"))
    model = DemoModel("tiny", "Tiny", "no terms", tuple(wheels), 1)
    monkeypatch.setitem(DEMO_MODELS, "tiny", model)
    return model, folder


def refuse_download(*_: object) -> None:
    raise AssertionError("nothing may be fetched")


def test_from_file_and_then_from_the_cache(tiny, tmp_path, monkeypatch):
    _, folder = tiny
    monkeypatch.setattr(demo_models, "_download", refuse_download)
    cache = tmp_path / "cache"
    lines: list[str] = []
    target = demo_model_dir("tiny", from_files=[folder], cache_dir=cache, log=lines.append)
    assert (target / "model.safetensors").is_file() and lines
    stamp = (target / "config.json").stat().st_mtime_ns
    lines.clear()
    assert demo_model_dir("tiny", cache_dir=cache, log=lines.append) == target
    assert (target / "config.json").stat().st_mtime_ns == stamp and not lines
    assert sorted(p.name for p in cache.iterdir()) == ["tiny-1.0", "tiny.lock"]


def test_renamed_wheels_are_known_by_their_hash(tiny, tmp_path):
    _, folder = tiny
    renamed = []
    for number, path in enumerate(sorted(folder.iterdir())):
        renamed.append(path.rename(folder / f"download({number})"))
    target = demo_model_dir("tiny", from_files=renamed, cache_dir=tmp_path / "cache")
    assert target.is_dir()


def test_wrong_or_missing_files_are_named_and_leave_nothing(tiny, tmp_path):
    model, folder = tiny
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"tiny_model_part1-1\.0-py3-none-any\.whl is not among"):
        first = folder / model.wheels[0].filename
        demo_model_dir("tiny", from_files=[first], cache_dir=cache)
    with (folder / model.wheels[1].filename).open("ab") as file:
        file.write(b"!")
    with pytest.raises(ConfigError, match=f"SHA-256.*{model.wheels[1].sha256}"):
        demo_model_dir("tiny", from_files=[folder], cache_dir=cache)
    assert [p.name for p in cache.iterdir()] == ["tiny.lock"]
    with pytest.raises(ConfigError, match="smollm2"):
        demo_model_dir("nonesuch", cache_dir=cache)


def test_leftovers_of_a_killed_process_are_removed(tiny, tmp_path):
    _, folder = tiny
    cache = tmp_path / "cache"
    stale = cache / ".tiny-1.0.abcdef"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    target = demo_model_dir("tiny", from_files=[folder], cache_dir=cache)
    assert not stale.exists() and (target / "model.safetensors").stat().st_size > 1000


def _convert_in_a_process(folder: Path, cache: Path, barrier, results) -> None:
    converted: list[str] = []
    barrier.wait()
    path = demo_model_dir("tiny", from_files=[folder], cache_dir=cache, log=converted.append)
    results.put((str(path), len(converted)))


def test_two_processes_at_once_convert_once(tiny, tmp_path):
    _, folder = tiny
    context = multiprocessing.get_context("fork")  # keeps the model that was registered here
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (folder, tmp_path / "cache", barrier, results)
    processes = [context.Process(target=_convert_in_a_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert len({path for path, _ in outcomes}) == 1
    assert sorted(bool(lines) for _, lines in outcomes) == [False, False, True]


def fake_command(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
    path.chmod(0o755)
    return path


def test_uv_is_used_where_pip_is_not(tiny, tmp_path, monkeypatch):
    _, folder = tiny
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    fake_command(
        bin_dir,
        "uv",
        "assert sys.argv[1:5] == ['tool', 'run', 'pip', 'download'], sys.argv\n"
        "target = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"shutil.copytree({str(folder)!r}, target, dirs_exist_ok=True)",
    )
    monkeypatch.setattr(demo_models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(bin_dir))
    assert demo_model_dir("tiny", cache_dir=tmp_path / "cache").is_dir()
    fake_command(bin_dir, "uv", "print('ERROR: no route to host', file=sys.stderr); sys.exit(1)")
    with pytest.raises(ConfigError, match=r"no route to host.*--from-file"):
        demo_model_dir("tiny", cache_dir=tmp_path / "other")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ConfigError, match=r"neither pip nor uv.*tiny_model_part0.*--from-file"):
        demo_model_dir("tiny", cache_dir=tmp_path / "other")


def test_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "fastdecode_rdma"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_dir() == tmp_path / "home" / ".cache" / "fastdecode_rdma"


def test_the_real_models_are_pinned():
    for model in DEMO_MODELS.values():
        assert model.terms and model.wheels[0].version
        assert all(len(wheel.sha256) == 64 for wheel in model.wheels)
    assert "Gemma Terms of Use" in DEMO_MODELS["gemma3-270m"].terms


def test_smollm2_is_had_once(smollm2_dir):
    assert demo_model_dir("smollm2", log=refuse_download) == smollm2_dir
    assert (smollm2_dir / "model.safetensors").stat().st_size == 269060552
