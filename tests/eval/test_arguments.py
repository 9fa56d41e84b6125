"""Model arguments as the harness's command line and its Python interface cut them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.utils import simple_parse_args_string

from fastdecode_rdma import ConfigError, Generator
from fastdecode_rdma.eval import arguments
from fastdecode_rdma.eval.arguments import (
    as_dict,
    as_int,
    generator_arguments,
    note_batch_size,
    usable_device,
    worker_addresses,
)
from fastdecode_rdma.eval.settings import open_generator

TWO = ["tcp://host1:18815", "host2"]


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    arguments._told.clear()
    yield
    arguments._told.clear()


@pytest.mark.parametrize("text", ["tcp://host1:18815;host2", " tcp://host1:18815 ; host2; "])
def test_workers_separated_by_semicolons(text: str) -> None:
    for parse in (simple_parse_args_string, key_val_to_dict):
        given = parse(f"pretrained=x,workers={text}")
        assert worker_addresses(given["workers"]) == TWO


def test_workers_as_a_json_list() -> None:
    given = key_val_to_dict('pretrained=x,workers=["tcp://host1:18815","host2"]')
    assert worker_addresses(given["workers"]) == TWO
    assert worker_addresses('["tcp://host1:18815", "host2"]') == TWO == worker_addresses(TWO)
    assert worker_addresses(simple_parse_args_string('workers=["a:1"]')["workers"]) == ["a:1"]
    assert worker_addresses(None) is None


def test_workers_that_were_cut_at_commas_are_explained() -> None:
    cut = simple_parse_args_string("workers=tcp://host1:18815,tcp://host2:18815?x=1,10.0.0.7")
    assert cut.pop("workers") == "tcp://host1:18815"
    with pytest.raises(ConfigError, match=r"'tcp://host2:18815\?x' looks like a worker's address"):
        generator_arguments(cut)
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.7' looks like.*separate workers by ';'"):
        generator_arguments({"10.0.0.7": ""})
    listed = simple_parse_args_string('workers=["a:1","b:1"]')
    with pytest.raises(ConfigError, match=r"is no JSON list.*separate workers by ';'"):
        worker_addresses(listed.pop("workers"))
    with pytest.raises(ConfigError, match="looks like a worker's address"):
        generator_arguments(listed)
    with pytest.raises(ConfigError, match="workers must be a list of addresses, got 5"):
        worker_addresses(5)


def test_what_changes_nothing_is_left_out_and_the_rest_goes_on() -> None:
    given = {
        "revision": "main",
        "trust_remote_code": False,
        "kv_cache_dtype": "int8",
        "nonsense": 1,
    }
    assert generator_arguments(given) == {"kv_cache_dtype": "int8", "nonsense": 1}
    assert generator_arguments({"trust_remote_code": True}) == {"trust_remote_code": True}


def test_a_cuda_device_that_is_not_there_is_the_cpu_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "fastdecode_rdma.eval"):
        assert [usable_device("cuda:0"), usable_device("cuda:0"), usable_device(None)] == [
            "cpu", "cpu", None,
        ]  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "device='cuda:0': a CUDA device is not there, the dense layers run on the CPU"
    ]
    assert usable_device("mps") == "mps"  # the generator says what it thinks of it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usable_device("cuda:0") == usable_device("cpu") == "cpu"


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_device_is_the_generators(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def from_pretrained(path: str, **arguments: object) -> Generator:
        asked.update(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(Generator, "from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match="enough"):
        open_generator(
            "x", tokenizer=None, dtype="bfloat16", device="cuda:0", max_length=7, workers="a:1;b",
            arguments={"kv_cache_dtype": "int8", "revision": "main"},
        )  # fmt: skip
    assert asked == {
        "tokenizer": None, "dtype": "bfloat16", "device": "cpu",
        "max_model_len": 7, "workers": ["a:1", "b"], "kv_cache_dtype": "int8",
    }  # fmt: skip


def test_batch_sizes_are_ignored_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastdecode_rdma.eval"):
        for _ in range(2):
            note_batch_size(1, None)
            note_batch_size("auto:4", 64)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == [
        "batch_size=1 is ignored", "batch_size=auto", "max_batch_size=64 is ignored",
    ]  # fmt: skip
    assert all("packed by tokens" in text for text in told)


def test_numbers_and_dicts_may_come_as_text() -> None:
    assert [as_int("n", value) for value in ("12", 12, None)] == [12, 12, None]
    for bad, message in (("x", "whole number"), (1.5, "whole number"), (-1, "at least 0")):
        with pytest.raises(ConfigError, match=f"n must be .*{message}"):
            as_int("n", bad)
    assert as_dict("d", '{"a": true}') == {"a": True} == as_dict("d", {"a": True})
    assert as_dict("d", None) == {}
    for bad in ("{a", "[1]", 5):
        with pytest.raises(ConfigError, match="d must be a"):
            as_dict("d", bad)
