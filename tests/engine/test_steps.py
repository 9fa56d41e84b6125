"""Prefill and decode steps, looked at from inside: logits, aborts, replay rows, memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdecode_rdma.engine.prefill import CHUNK_TOKENS
from fastdecode_rdma.models import load_model
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.reference import ReferenceOps, reference_forward
from fastdecode_rdma.worker.kvcache import kv_bytes

LOGITS_TOLERANCE = 2e-4
"""|our logits - transformers'|, both fp32 with fp32 KV: two summation orders over a few layers of
widths up to 80 and logits below 50; the float64 oracle sits between the two (see
test_contracts.py)."""

VARIANTS = [
    ("llama", {}),
    ("llama-mha", {"num_key_value_heads": 4}),
    ("llama-ratio3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    ("llama-ratio4", {"num_key_value_heads": 1}),
    (
        "llama-ratio7",
        {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24,
        },
    ),
    (
        "llama-untied",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    (
        "llama-llama3rope",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    ("gemma3", {}),
    ("gemma3-wide", {"head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("opt", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_prefill_and_64_teacher_forced_steps_match_transformers(
    name: str,
    changes: dict[str, object],
    tiny_models: Callable[..., Path],
    make_bench: Callable[..., object],
    hf_logits: Callable[..., torch.Tensor],
) -> None:
    path = tiny_models(name, **changes)
    bench = make_bench(path)
    num_clear = num_positions = 0
    for prompt_len in (1, 13, 20, 21, 90):  # around gemma3's window of 20
        generator = torch.Generator().manual_seed(prompt_len)
        ids = torch.randint(0, 300, (prompt_len + 64,), generator=generator).tolist()
        expected = hf_logits(path, ids)[prompt_len - 1 :]
        actual = bench.teacher_forced(ids[:prompt_len], ids[prompt_len:])
        assert (actual - expected).abs().max() < LOGITS_TOLERANCE
        # contract (a): equal choices wherever the oracle's margin says they must be
        top = expected.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * LOGITS_TOLERANCE
        assert torch.equal(actual.argmax(1)[clear], expected.argmax(1)[clear])
        num_clear += int(clear.sum())
        num_positions += len(clear)
    print(f"{name}: {num_positions - num_clear} of {num_positions} positions excepted")
    assert num_clear > 0.99 * num_positions


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_prompts_packed_into_one_job_have_the_bits_of_each_alone(
    name: str, tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    bench = make_bench(tiny_models(name))
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 64, 300, 33, 200]  # several cells, chunks that share one
    prompts = {
        handle: torch.randint(0, 300, (length,), generator=generator).tolist()
        for handle, length in enumerate(lengths, 1)
    }
    packed = bench.prefill(prompts)
    for row, (handle, ids) in enumerate(prompts.items()):
        together = bench.decode([(handle, len(ids), [7])])
        bench.backend.free(0, [handle])
        alone = bench.prefill({handle: ids})
        assert torch.equal(alone.logits[0], packed.logits[row])
        assert torch.equal(bench.decode([(handle, len(ids), [7])]), together)


def test_a_prompt_of_several_chunks_matches_the_float64_oracle(
    tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    path = tiny_models("gemma3-long", max_position_embeddings=2048)
    bench = make_bench(path)
    ids = torch.randint(0, 300, (2 * CHUNK_TOKENS + 77,))
    job = bench.prefill({1: ids.tolist()})
    oracle = reference_forward(load_model(path, ReferenceOps(torch.float64)), ids)
    logits = bench.model.logits(job.hidden.contiguous())
    assert (logits - oracle).abs().max() < LOGITS_TOLERANCE


def test_sinks_and_alibi_reach_prefill_and_decode(
    tiny_models: Callable[..., Path],
    make_bench: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other numbers in every layer and head, in layers with a window and without."""
    path, read = tiny_models("gemma3"), ModelConfig.from_hf

    def with_scores(source: Path) -> ModelConfig:
        config = read(source)
        layers, heads = range(config.num_layers), range(config.num_q_heads)
        sinks = tuple(tuple(2.0 * i - 3.0 * j + 1.0 for j in heads) for i in layers)
        return replace(config, sinks=sinks, slopes=tuple(0.5 ** (1 + j) for j in heads))

    ids = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(4))
    plain = reference_forward(load_model(path, ReferenceOps(torch.float64)), ids)
    monkeypatch.setattr(ModelConfig, "from_hf", with_scores)
    oracle = reference_forward(load_model(path, ReferenceOps(torch.float64)), ids)
    actual = make_bench(path).teacher_forced(ids[:100].tolist(), ids[100:].tolist())
    assert (actual - oracle[99:]).abs().max() < LOGITS_TOLERANCE
    assert (plain - oracle)[99:].abs().max() > 100 * LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_aborted_at_any_layer_and_repeated_gives_the_same_bits(
    name: str, tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    bench = make_bench(tiny_models(name))
    bench.prefill({1: list(range(30)), 2: list(range(50, 75))})
    rows = [(1, 30, [11]), (2, 25, [12])]
    expected = bench.decode(rows)

    class Abort(Exception):
        pass

    exchange = bench.backend.exchange
    for when in ("before", "after"):
        for abort_at in range(bench.model.config.num_layers):

            def dying(table: int, layer: int, at: int = abort_at, when: str = when) -> None:
                if when == "before" and layer == at:
                    raise Abort
                exchange(table, layer)
                if when == "after" and layer == at:
                    raise Abort

            bench.backend.exchange = dying
            with pytest.raises(Abort):
                bench.decode(rows)
            bench.backend.exchange = exchange
            assert torch.equal(bench.decode(rows), expected)
    # and the step after it sees the same cache
    follow = bench.decode([(1, 31, [5]), (2, 26, [6])])
    bench.backend.free(0, [1, 2])
    bench.prefill({1: list(range(30)), 2: list(range(50, 75))})
    bench.decode(rows)
    assert torch.equal(bench.decode([(1, 31, [5]), (2, 26, [6])]), follow)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("split", [[9], [1] * 9, [4, 5], [1, 7, 1]])
def test_several_rows_of_a_sequence_have_the_bits_of_one_row_at_a_time(
    name: str, split: list[int], tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    """Replay after a lost worker feeds generated ids many at a time; nothing may change."""
    bench = make_bench(tiny_models(name))
    prompt, forced = list(range(40)), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = bench.teacher_forced(prompt, forced)[-1]
    bench.prefill({1: prompt})
    at = 0
    for count in split:
        logits = bench.decode([(1, 40 + at, forced[at : at + count])])
        at += count
    assert torch.equal(logits[0], expected)


def test_gemma3_at_8k_tokens_holds_exactly_the_bytes_of_its_kv_groups(
    tiny_models: Callable[..., Path], make_bench: Callable[..., object]
) -> None:
    path = tiny_models("gemma3-8k", max_position_embeddings=8192, sliding_window=512)
    bench = make_bench(path, kv_dtype="bf16")
    ids = torch.randint(0, 300, (8191,)).tolist()
    bench.prefill({1: ids})
    bench.decode([(1, 8191, [7])])
    # 7 layers, every sixth global: 1 global layer holds 8192 / 64 blocks, 6 local ones a ring of
    # (512 + 64) / 64 + 1 blocks; a block is K and V of 64 tokens, 2 heads of 16, 2 bytes, per layer
    block = 2 * 64 * 2 * 16 * 2
    expected = 128 * 1 * block + 10 * 6 * block
    assert bench.worker.session.stats()["kv_bytes_used"] == expected
    assert kv_bytes(bench.geometry, 8192) == expected


LONG_PREFILL = """
import resource, sys, threading, time
import numpy as np, torch
from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.engine.prefill import PrefillItem, PrefillJob, peak_bytes
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.reference import ReferenceOps, reference_forward
from fastdecode_rdma.worker.kvcache import MemoryBudget, kv_bytes

path, length = sys.argv[1], int(sys.argv[2])
model = load_model(path, CpuOps(num_threads=2, deterministic=True))
config = model.config
geometry = AttentionGeometry(config.kv_groups, config.scale, "bf16", 8, config.max_model_len)
backend = AttentionBackend([LocalWorker(geometry, MemoryBudget(1 << 30), num_threads=2)], geometry)

def run(length, handle, step):
    ids = np.random.default_rng(0).integers(0, 300, length)
    job = PrefillJob(model, backend, [PrefillItem((handle,), 0, ids)])
    for _ in job.cells(step):
        pass
    return torch.from_numpy(ids), job

def status(key):
    lines = open('/proc/self/status').read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def rss():
    return status('VmRSS')

run(600, 1, 1)  # pools, code pages and workspaces are there from now on
before = rss()
open('/proc/self/clear_refs', 'w').write('5')  # resets the peak
ids, job = run(length, 2, 2)
peak = status('VmHWM')
slab = max(1 << 24, kv_bytes(geometry, length))
print('used', peak - before, 'allowed', peak_bytes(length, model) + slab + (8 << 20))
places = torch.tensor([0, 511, 512, 1023, length // 2, length - 2, length - 1])
ours = model.logits(job.hidden[places].contiguous()).double()
oracle = load_model(path, ReferenceOps(torch.float64))
worst = (ours - reference_forward(oracle, ids, rows=places)).abs().max()
print('error', float(worst))
"""


def test_a_32k_prompt_stays_within_the_stated_memory_and_matches_the_oracle(
    tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    # five local layers and a global one: keeping all layers' K/V would break the bound by far, and
    # the float64 oracle needs the whole square of scores in no layer but the last, for a few rows
    path = tiny_models(
        "gemma3-32k", max_position_embeddings=32768, hidden_size=32, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16,
        intermediate_size=48, sliding_window=256,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LONG_PREFILL, str(path), "32767"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    used, allowed, error = int(words[1]), int(words[3]), float(words[5])
    assert used <= allowed, done.stdout
    assert error < LOGITS_TOLERANCE
