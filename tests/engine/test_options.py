"""Arguments of from_pretrained: what they mean, and one clear line for each mistake."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.engine.options import GeneratorOptions, resolve_model_dir

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"worker": ["a"]}, "unknown argument 'worker': did you mean 'workers'?"),
        ({"max_seqs": 3}, "did you mean 'max_num_seqs'?"),
        ({"model": "x"}, "did you mean 'path'?"),
        ({"torch_dtype": "x"}, "did you mean 'dtype'?"),
        ({"max_seq_len": 9}, "did you mean 'max_model_len'?"),
        ({"n_ctx": 9}, "did you mean 'max_model_len'?"),
        ({"eos_token_ids": 9}, "did you mean 'eos_token_id'?"),
        ({"gpu_memory_utilization": 0.9}, "'gpu_memory_utilization': memory is a worker's"),
        ({"tensor_parallel_size": 2}, "attention runs in workers"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"load_in_4bit": True}, "quantization='int8' rounds the weights as they are loaded"),
        ({"quantization": "awq"}, "quantization must be None or one of 'int8', got 'awq'"),
        ({"quantization": True}, "quantization must be None or one of 'int8', got True"),
        ({"quantization": ["int8"]}, "quantization must be None or one of 'int8'"),
        ({"token": "x"}, "the workers' token is token_file"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"eos_token_id": 1.5}, "eos_token_id must be a token id or a list"),
        ({"eos_token_id": True}, "eos_token_id must be a token id or a list"),
        ({"eos_token_id": [3, -1]}, "eos_token_id must hold token ids, got -1"),
        ({"eos_token_id": [3, None]}, "eos_token_id must hold token ids, got None"),
        ({"eos_token_id": 300}, "eos_token_id holds 300, which is outside the vocabulary of 300"),
        ({"qqq": 1, "timeout": 2}, "unknown argument 'qqq': expected one of path, workers, "),
        ({"qqq": 1, "timeout": 2}, "unknown argument 'timeout': did you mean 'timeout_s'?"),
        ({"workers": "tcp://h"}, "workers must be a list of addresses, got 'tcp://h'"),
        ({"workers": b"h"}, "workers must be a list of addresses"),
        ({"workers": 5}, "workers must be a list of addresses"),
        ({"workers": {"h": 1}}, "workers must be a list of addresses"),
        ({"workers": []}, "workers is an empty list"),
        ({"workers": [5]}, "workers must hold addresses as text, got 5"),
        ({"workers": ["h", None]}, "workers must hold addresses as text, got None"),
        ({"workers": [""]}, "cannot read '' as an address"),
        ({"workers": ["http://h"]}, "unknown transport 'http'"),
        ({"workers": ["rdma://h?port=0"]}, "option port"),
        ({"workers": ["127.0.0.1:1", "tcp://127.0.0.1:1"]}, "workers given twice: 127.0.0.1:1"),
        ({"dtype": "bfloat16"}, "a CPU computes in float32"),
        ({"dtype": torch.float32}, "must be a name such as 'auto' or 'float32', got torch.float32"),
        ({"dtype": []}, "dtype must be a name"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be a name"),
        ({"kv_cache_dtype": "fp8"}, "dtype 'fp8' is not supported here; expected one of"),
        ({"device": "cuda"}, "on 'cpu' only"),
        ({"max_model_len": 1}, "max_model_len must be an integer from 2"),
        ({"max_model_len": 513}, "max_model_len must be from 1 to 512"),
        ({"max_model_len": 2.5}, "max_model_len must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1 to 65536, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be an integer"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be an integer"),
        ({"seed": "abc"}, "seed must be an integer, got 'abc'"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"deterministic": "yes"}, "deterministic must be True or False, got 'yes'"),
        ({"deterministic": 1}, "deterministic must be True or False"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"timeout_s": float("inf")}, "timeout_s must be a positive number"),
        ({"timeout_s": "5"}, "timeout_s must be a positive number"),
        ({"timeout_s": True}, "timeout_s must be a positive number"),
        ({"tokenizer": "/no/such"}, "no such directory: /no/such"),
        ({"tokenizer": 5}, "tokenizer must be a path (str or pathlib.Path), got int"),
        ({"chat_template": 5}, "chat_template must be text, got int"),
        ({"chat_template": "{{"}, "not valid Jinja"),
        ({"token_file": 5}, "token_file must be a path (str or pathlib.Path), got int"),
        ({"token_file": "/no/such"}, "token_file is for workers: give their addresses, too"),
        ({"token_file": "/no/such", "workers": ["localhost:1"]}, "cannot read token file '/no"),
        ({"require": "ib"}, "require must be None or one of 'shm', "),
        ({"require": "shm"}, "require='shm' is for workers: give their addresses, too"),
        ({"require": "shm", "workers": ["tcp://localhost:1"]}, "which require='shm' demands"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(
    arguments: dict[str, object], complaint: str, tiny_models: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Generator.from_pretrained(tiny_models("llama"), **arguments)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpy_integers_are_integers(tiny_models: Callable[..., Path]) -> None:
    with Generator.from_pretrained(
        str(tiny_models("llama")),
        max_model_len=np.int64(64),
        max_num_seqs=np.int32(4),
        timeout_s=np.float32(5),
        seed=-(2**80),
    ) as gen:
        assert gen.max_model_len == 64
        assert len(gen.complete("a", GREEDY)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, ()),
        (7, (7,)),
        (np.int64(7), (7,)),
        ([7, 9], (7, 9)),
        ((7,), (7,)),
        ({7}, (7,)),
        ([], ()),
    ],
)
def test_end_of_sequence_is_an_id_or_several(given: object, kept: tuple[int, ...]) -> None:
    assert GeneratorOptions(eos_token_id=given).eos_token_id == kept


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (None, "path must be a path (str or pathlib.Path), got NoneType"),
        (5, "path must be a path (str or pathlib.Path), got int"),
        ("", "path must be a path, got an empty text"),
        (b"/tmp", "path must be a path (str or pathlib.Path), got bytes"),
        ("a\0b", "path must be a path, got a text with a NUL character"),
        ("/no/such/dir", "no model at /no/such/dir, and none of that name in"),
        ("no-such/name", "no model at no-such/name"),
        ("x" * 5000, "no model at xxx"),
    ],
)
def test_a_path_that_is_none(path: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model_dir(path)
    assert complaint in str(caught.value)


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match="is a file; expected a model directory"):
        resolve_model_dir(tmp_path / "model.gguf")


def test_a_name_in_the_local_hugging_face_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_models: Callable[..., Path]
) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no model at org/tiny"):  # a ref without its snapshot
        resolve_model_dir("org/tiny")
    shutil.copytree(tiny_models("llama"), repo / "snapshots" / "abc123")
    assert resolve_model_dir("org/tiny") == repo / "snapshots" / "abc123"
    with Generator.from_pretrained("org/tiny") as gen:
        assert gen.complete("a", GREEDY)[0].finished
