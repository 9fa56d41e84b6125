"""The planner against the paper's formulas, and `fastdecode plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.catalogue import ALIASES, DEVICES, LINKS, parse_hardware
from fastdecode_rdma.perfmodel.planner import Workload, choose, evaluate, make_plan
from fastdecode_rdma.perfmodel.roles import serving_model
from fastdecode_rdma.perfmodel.shapes import SHAPES, shape_of

HARDWARE = "1x a10 + 8x epyc-7452 @ 100gbe"
SEVEN = ["--model", "llama-2-7b", "--hardware", HARDWARE]


def model(hardware: str = HARDWARE, name: str = "llama-2-7b", **options: str):
    given = {"kv_dtype": "fp16", "weight_dtype": "fp16"} | options
    return serving_model(SHAPES[name], parse_hardware(hardware), **given)


def plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def test_r_of_the_papers_socket() -> None:
    """124 ns per cached token and layer of 7B, fp16."""
    assert model().workers[0].token_s == pytest.approx(124e-9, rel=0.02)


def test_the_balance_is_the_papers() -> None:
    """P = B S R / (2 T(B)), within what whole sequences and fixed costs add."""
    serving = model()
    work = Workload(1024)
    found = make_plan(serving, work)
    b, r = found.point.minibatch, serving.workers[0].token_s
    expected = b * 1024 * r / (2 * serving.dense.block_s(b))
    assert found.workers_needed == pytest.approx(expected, rel=0.06)
    assert found.point.tokens_per_s <= found.point.num_seqs / found.point.step_s


def test_memory_is_halved_by_staggered_starts() -> None:
    serving = model("a10 + 1x epyc-7452 @ 100gbe")
    together, staggered = Workload(8192, stabilised=False), Workload(8192)
    ratio = serving.max_seqs(staggered.mean_held) / serving.max_seqs(together.mean_held)
    assert ratio == pytest.approx(2, rel=0.06)


def test_what_binds() -> None:
    work = Workload(1024)
    assert make_plan(model("a10 + 1x epyc-7452 @ 100gbe"), work).binds == "attention"
    assert make_plan(model("a10 + 64x epyc-9554 @ 400gbe"), work).binds == "dense"
    far = make_plan(model("h200 + 96x epyc-9554 @ 25gbe"), work)
    assert far.binds == "network"
    limited = make_plan(model(), Workload(1024, latency_limit_s=60))
    assert limited.binds == "latency limit" and limited.point.sequence_s <= 60
    small = serving_model(
        SHAPES["llama-2-7b"], parse_hardware(HARDWARE), kv_dtype="fp16", weight_dtype="fp16",
        worker_memory_bytes=1e9,
    )  # fmt: skip
    assert make_plan(small, work).binds == "memory"


def test_the_largest_batch_within_the_limit_is_taken() -> None:
    """With a limit that binds, 2 N S T(B) <= L holds, and for the next larger batch does not."""
    serving, work = model(), Workload(1024, latency_limit_s=60)
    point = choose(serving, work)
    more = evaluate(serving.with_minibatches(2), work, round(point.num_seqs * 2 ** (1 / 6)))
    assert point.sequence_s <= 60 < more.sequence_s


def test_more_helps_or_does_nothing() -> None:
    work = Workload(1024)
    rates = [
        make_plan(model(f"a10 + {count}x epyc-7452 @ 100gbe"), work).point.tokens_per_s
        for count in (1, 2, 8, 16)
    ]
    assert rates == sorted(rates)
    assert rates[1] / rates[0] == pytest.approx(2, rel=0.05)  # attention binds
    quantised = make_plan(model(kv_dtype="int8"), work).point.tokens_per_s
    assert quantised > rates[2]


def test_one_more_worker_is_what_that_hardware_would_do() -> None:
    work = Workload(1024)
    nine = make_plan(model("a10 + 9x epyc-7452 @ 100gbe"), work).point.tokens_per_s
    assert make_plan(model(), work).one_more == pytest.approx(nine)


def test_workloads_that_cannot_be() -> None:
    for arguments in ((10, 10), (10, 0)):
        with pytest.raises(ConfigError, match="must be at least 1 and leave some"):
            Workload(*arguments)
    with pytest.raises(ConfigError, match="cannot be kept: one sequence alone"):
        choose(model(), Workload(1024, latency_limit_s=1e-3))
    with pytest.raises(ConfigError, match="no sequence of 100000000 tokens fits"):
        choose(model(), Workload(100_000_000))


def test_the_command_says_it_all(capsys) -> None:
    assert plan(*SEVEN, "--latency-limit", "60s") == 0
    out = capsys.readouterr().out
    for word in ("mini-batch", "workers", "memory", "throughput", "latency", "binds", "one more",
                 "beside the weights on the GPU alone"):  # fmt: skip
        assert word in out
    assert "GPU-only engine" not in out
    assert plan("--model", "llama-3.1-8b", "--hardware", "h200 + 2x xeon-5218 @ 25gbe") == 0
    assert "a GPU-only engine is likely faster here" in capsys.readouterr().out


def test_json(capsys) -> None:
    assert plan(*SEVEN, "--json", "--kv-cache-dtype", "int8") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1 and found["kv_cache_dtype"] == "int8"
    assert found["num_seqs"] <= found["max_seqs"] and not found["gpu_alone_is_faster"]


def test_the_catalogue_is_listed_with_sources(capsys) -> None:
    assert plan("--list-hardware") == 0
    out = capsys.readouterr().out
    for name in (*DEVICES, *LINKS):
        assert name in out
    assert all(device.source for device in DEVICES.values())
    assert set(ALIASES.values()) <= set(DEVICES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pass --model and --hardware"),
        (["--model", "llama-2-7c", "--hardware", HARDWARE], "did you mean 'llama-2-7b'"),
        ([*SEVEN[:2], "--hardware", "1x a11 + 8x epyc-7452 @ 100gbe"], "did you mean 'a10'"),
        ([*SEVEN[:2], "--hardware", "a10 + epic-7452 @ 100gbe"], "did you mean 'epyc-7452'"),
        ([*SEVEN[:2], "--hardware", "a10 + epyc-7452 @ 90gbe"], "unknown link '90gbe'"),
        ([*SEVEN[:2], "--hardware", "a10"], "does not read like '1x a10 + 8x"),
        ([*SEVEN[:2], "--hardware", "a10 + 2x l4 @ 100gbe"], "l4 cannot be an attention worker"),
        ([*SEVEN[:2], "--hardware", "a10 + 0x epyc-7452 @ 100gbe"], "must name 1 to"),
        (["--model", "llama-3.1-70b", "--hardware", HARDWARE], "take more or larger ones"),
        ([*SEVEN, "--length", "1"], "--length must be 2"),
        ([*SEVEN, "--latency-limit", "soon"], "--latency-limit takes a positive quantity"),
        ([*SEVEN, "--kv-cache-dtype", "fp7"], "fp7"),
        ([*SEVEN, "--weight-dtype", "int3"], "--weight-dtype 'int3' is unknown"),
        ([*SEVEN, "--worker-memory", "much"], "--worker-memory takes a positive quantity"),
        ([*SEVEN, "--num-workers", "3"], "--num-workers goes with --profile"),
        (["--profile", "p.json", "--model", "llama-2-7b"], "so --model cannot"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], words: str, capsys) -> None:
    assert plan(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A10+8x7452@100", "1x a10 + 8x epyc-7452 @ 100gbe"),
        ("2 x h100 + 4x 8480+ + 2x 9554 @ 400 Gb/s", "2x h100 + 4x xeon-8480+ + 2x epyc-9554"),
        ("xeon-8480+ + 3x xeon-5218 @ 25gbe", "1x xeon-8480+ + 3x xeon-5218 @ 25gbe"),
    ],
)
def test_ways_to_write_hardware(text: str, expected: str) -> None:
    assert parse_hardware(text).text.startswith(expected)


def test_shapes_of_config_files(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14336,
        "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    named = SHAPES["llama-3.1-8b"]
    assert shape_of(str(tmp_path)) == replace(named, name=tmp_path.name) == shape_of(str(file))
    local = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
    file.write_text(json.dumps({"text_config": config | local}))
    assert (shape_of(str(file)).num_local_layers, shape_of(str(file)).window) == (16, 512)
    file.write_text(json.dumps(config | {"model_type": "gemma3_text", "sliding_window": 512}))
    assert shape_of(str(file)).num_local_layers == 27
    for change, words in (
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"intermediate_size": None}, "neither intermediate_size nor"),
        ({"hidden_size": 4097}, "does not divide over 32 heads"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=words):
            shape_of(str(file))


def test_parameters_are_those_of_the_models_names() -> None:
    for name, billions in (("llama-2-7b", 6.74), ("llama-2-13b", 13.02), ("llama-3.1-8b", 8.03),
                           ("llama-3.1-70b", 70.55), ("qwen3-8b", 8.19)):  # fmt: skip
        assert SHAPES[name].params / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fastdecode_rdma import cli\n"
        f"assert cli.main(['plan', *{SEVEN!r}]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
