"""`fastdecode bench tune` and the profile it writes, which a Generator reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.attention.remote import RemoteWorker
from fastdecode_rdma.bench import tune
from fastdecode_rdma.bench.layer_session import LayerSession
from fastdecode_rdma.bench.tune import best_of, with_options
from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.engine.options import GeneratorOptions
from fastdecode_rdma.engine.setup import _urls
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport.address import OPTIONS, PLANES, parse_url
from fastdecode_rdma.transport.base import BULK_BYTES, plan_slots
from fastdecode_rdma.transport.profile import Profile, read_profile, write_profile

GEOMETRY = AttentionGeometry((KVGroup((0,), 2, 1, 16),), 0.25, "fp32", 8, 64)


@pytest.mark.parametrize("scheme", ["", "tcp://"])
def test_a_profile_is_found_written_and_read(peer, scheme, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tune, "WARM_UP_S", 0.0)
    place = tmp_path / "profile.json"
    code = cli.main(
        ["bench", "tune", "--workers", f"{scheme}{peer.place}", "--heads", "2", "--head-dim", "16",
         "--batch", "2", "--iters", "5", "--repeats", "1", "--upload-mib", "1",
         "--output", str(place)]
    )  # fmt: skip
    assert code == 0
    plane = "tcp" if scheme else "shm"
    found = json.loads(place.read_text())
    tried = {(t["plane"], t["option"]) for t in found["trials"]}
    swept = [name for name, _ in tune.LATENCY_OPTIONS[plane]]
    assert tried == {(plane, name) for name in (*swept, "bulk_bytes")}
    assert set(read_profile(place).workers) == {peer.place}
    assert f"profile='{place}'" in capsys.readouterr().out


def test_options_that_cannot_be(capfd) -> None:
    options = ["bench", "tune", "--workers", "127.0.0.1:1", "--model", "llama-3.1-8b"]
    for more, words in (
        (["--repeats", "0"], "--repeats must be 1"),
        (["--upload-mib", "0"], "--upload-mib must be 1"),
        (["--batch", "x"], "--batch takes integers"),
        (["--heads", "2"], "--model says the shape"),
    ):
        assert cli.main([*options, *more]) == 2
        assert words in capfd.readouterr().err


def test_every_plane_has_its_sweeps() -> None:
    assert set(tune.LATENCY_OPTIONS) == set(PLANES)
    for plane, sweeps in tune.LATENCY_OPTIONS.items():
        for name, values in sweeps:
            assert plane in OPTIONS[name].planes
            for value in values:
                parse_url(f"{plane}://h?{name}={value}")


def test_only_what_is_clearly_better_is_set() -> None:
    noisy = [[100, 100, 100, 100, 100], [90, 90, 90, 110, 120], [97, 97, 97, 97, 97]]
    assert best_of([None, 1, 2], noisy) is None
    assert best_of([None, 1, 2], [[100] * 5, [80, 80, 80, 80, 101], [90] * 5]) == 1
    assert best_of([None, 0], [[100], [10]]) == 0


def test_urls_with_options() -> None:
    assert with_options("h:1", "shm", {"spin_us": 5}) == "shm://h:1?spin_us=5"
    assert with_options("tcp://h?buffer_bytes=9", None, {"bulk_bytes": 7}) == (
        "tcp://h?buffer_bytes=9&bulk_bytes=7"
    )


def test_a_generator_reads_the_profile(tmp_path: Path) -> None:
    place = tmp_path / "p.json"
    profile = Profile({"h:1": {"spin_us": 2.5, "bulk_bytes": 65536}, "h:2": {}})
    write_profile(place, profile, {"trials": []})
    options = GeneratorOptions(
        workers=("h:1", "tcp://h:1", "shm://h:1?spin_us=0", "h:2", "h:3"), profile=place
    )
    assert _urls(options) == [
        "h:1?spin_us=2.5&bulk_bytes=65536",
        "tcp://h:1?bulk_bytes=65536",
        "shm://h:1?spin_us=0&bulk_bytes=65536",
        "h:2",
        "h:3",
    ]
    with pytest.raises(ConfigError, match="profile is for workers"):
        GeneratorOptions(profile=place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "is no profile"),
        ('{"bench": "tune", "schema_version": 2, "workers": {}}', "is no profile of version 1"),
        ('{"bench": "tune", "schema_version": 1, "workers": {"h": 1}}', "'h' has no options"),
        (
            '{"bench": "tune", "schema_version": 1, "workers": {"h": {"options": {"x": 1}}}}',
            "unknown option 'x'",
        ),
        (
            '{"bench": "tune", "schema_version": 1, "workers": {"h": {"options": {"spin_us": -1}}}'
            "}",
            "spin_us must be zero or positive",
        ),
        ("[", "cannot read"),
    ],
)
def test_profiles_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    place = tmp_path / "p.json"
    place.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_profile(place)


def test_slots_of_the_length_that_an_address_asks_for(start_workers) -> None:
    assert plan_slots(GEOMETRY).bulk_nbytes == BULK_BYTES
    assert plan_slots(GEOMETRY, bulk_bytes=1).bulk_nbytes == 128  # a row of k and one of v
    with pytest.raises(ConfigError, match="bulk_bytes must be at most"):
        plan_slots(GEOMETRY, bulk_bytes=(16 << 20) + 1)
    assert parse_url("rdma://h?bulk_bytes=4096").options == {"bulk_bytes": 4096}
    (worker,) = start_workers(1, memory="64MiB")
    with pytest.raises(ConfigError, match="bulk_bytes must be at most"):
        RemoteWorker.connect(
            f"{worker.address}?bulk_bytes=99999999", GEOMETRY, heartbeats=Heartbeats()
        )
    outputs = []
    for options in ("", "?bulk_bytes=300"):  # two rows a frame
        session = LayerSession(
            [f"{worker.address}{options}"], GEOMETRY, with_kernel=True, token=None, force=False,
            timeout_s=5.0,
        )  # fmt: skip
        rows = session.begin(3, 40)
        before = session._pump.stats(0)["messages"]
        session.exchange(1, rows)
        outputs.append((session._buffers[1].tobytes(), before))
        session.close()
    assert outputs[0][0] == outputs[1][0] and np.any(np.frombuffer(outputs[0][0], np.uint8))
    assert outputs[1][1] > outputs[0][1] + 3 * 18  # the same K/V rows in more frames
