"""Strict loading: whatever is missing, left over, mis-shaped, damaged or not finite is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models import load_model
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.weights import Checkpoint, WeightPlan
from fastdecode_rdma.reference import ReferenceOps, reference_forward

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"
IDS = [3, 1, 4, 1, 5]


@pytest.fixture
def checkpoint(make_hf, save):
    """Saves a tiny Llama; keyword arguments go to its config, `shards` to the saving."""

    def build(*, shards: bool = False, **options: object) -> Path:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            **options,
        )
        return save(make_hf(config), shards=shards)

    return build


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of a single-file checkpoint; None removes one."""
    tensors = load_file(path / SINGLE) | changes
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / SINGLE)


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def load(path: Path) -> torch.Tensor:
    return reference_forward(load_model(path, ReferenceOps()), IDS)


def refused(path: Path, *words: str) -> None:
    """Loading must raise one line that holds all the words."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_missing_tensors_are_all_named(checkpoint):
    path = checkpoint()
    rewrite(path, **{UP: None, "model.norm.weight": None})
    refused(path, "lacks 2 tensors", UP, "model.norm.weight")


def test_left_over_tensors_are_named(checkpoint):
    path = checkpoint()
    rewrite(path, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    refused(path, "1 tensor", "does not use", "model.layers.0.self_attn.q_norm.weight", SINGLE)


@pytest.mark.parametrize("kind", ["attention_bias", "mlp_bias"])
def test_biases_exist_exactly_when_the_config_says_so(checkpoint, kind):
    name = "self_attn.o_proj.bias" if kind == "attention_bias" else "mlp.down_proj.bias"
    path = checkpoint(**{kind: True})
    edit_config(path, **{kind: False})
    refused(path, "does not use", f"model.layers.0.{name}")
    path = checkpoint()
    edit_config(path, **{kind: True})
    refused(path, "lacks", f"model.layers.0.{name}")


def test_mis_shaped_tensors_are_named_with_both_shapes(checkpoint):
    path = checkpoint()
    edit_config(path, head_dim=16)  # a wrong head_dim must not be taken silently
    refused(path, "model.layers.0.self_attn.q_proj.weight", "[32, 32]", "[64, 32]", SINGLE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_named(checkpoint, value):
    path = checkpoint()
    damaged = load_file(path / SINGLE)[UP].clone()
    damaged[5, 7] = value
    rewrite(path, **{UP: damaged})
    refused(path, SINGLE, UP, "not finite")


@pytest.mark.parametrize("stored", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(checkpoint, stored):
    path = checkpoint()
    rewrite(path, **{UP: load_file(path / SINGLE)[UP].to(stored)})
    refused(path, UP, "has dtype")


def test_missing_shards_are_all_listed(checkpoint):
    path = checkpoint(shards=True)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(shards) > 2
    for name in shards[:2]:
        (path / name).unlink()
    refused(path, f"2 of {len(shards)} weight files", *shards[:2])


def test_index_and_shards_must_agree(checkpoint):
    path = checkpoint(shards=True)
    index = json.loads((path / INDEX).read_text())
    original = dict(index["weight_map"])
    shards = sorted(set(original.values()))

    def write(weight_map: dict[str, str]) -> None:
        (path / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))

    other = next(name for name in shards if name != original[UP])
    write({**original, UP: other})
    refused(path, "not in the file", UP, other)
    write({name: file for name, file in original.items() if name != UP})
    refused(path, "not listed", UP)
    write({**original, "model.extra.weight": shards[0]})
    refused(path, "not in the file", "model.extra.weight")
    write({**original, UP: f"../{original[UP]}"})
    refused(path, "no file name", UP)
    write({})
    refused(path, "no weight_map")


def test_a_tensor_in_two_shards_is_refused(checkpoint):
    path = checkpoint(shards=True)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(weight_map.values())) if name != weight_map[UP])
    doubled = load_file(path / other) | {UP: load_file(path / weight_map[UP])[UP]}
    save_file(doubled, path / other)
    refused(path, UP, "both", other, weight_map[UP])


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "length", "header", "last_byte"])
def test_files_cut_short_are_named(checkpoint, keep):
    path = checkpoint()
    data = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(data[:keep])
    refused(path, SINGLE, "damaged or cut short")


def test_pytorch_bin_says_what_to_do(checkpoint):
    path = checkpoint()
    (path / SINGLE).rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "convert", "safetensors")


def test_no_weights_and_no_directory(checkpoint, tmp_path):
    path = checkpoint()
    (path / SINGLE).unlink()
    refused(path, "neither", SINGLE, INDEX)
    refused(tmp_path / "nowhere", "not a model directory")


def test_a_tied_model_has_no_head_tensor(checkpoint):
    path = checkpoint(tie_word_embeddings=True)
    assert HEAD not in load_file(path / SINGLE)
    model = load_model(path, ReferenceOps())
    assert model.head is model.embed_tokens  # one copy


def test_a_copy_of_the_embeddings_as_tied_head_is_fine_anything_else_is_not(checkpoint):
    path = checkpoint(tie_word_embeddings=True)
    expected = load(path)
    embeddings = load_file(path / SINGLE)["model.embed_tokens.weight"]
    rewrite(path, **{HEAD: embeddings})
    assert torch.equal(load(path), expected)
    rewrite(path, **{HEAD: embeddings * 2})
    refused(path, "tie_word_embeddings is true", HEAD, "differs")


def test_an_untied_model_needs_and_uses_its_head(checkpoint):
    path = checkpoint()
    before = load(path)
    head = load_file(path / SINGLE)[HEAD]
    rewrite(path, **{HEAD: head * 2})
    assert torch.equal(load(path), before * 2)
    rewrite(path, **{HEAD: None})
    refused(path, "lacks 1 tensor", HEAD)


def test_saved_rope_buffers_are_ignored(checkpoint):
    path = checkpoint()
    expected = load(path)
    rewrite(path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), 9.0)})
    assert torch.equal(load(path), expected)


def test_half_precision_checkpoints_load(checkpoint):
    path = checkpoint()
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(path / SINGLE).items()}
    rewrite(path, **{name: tensor.float() for name, tensor in tensors.items()})
    expected = load(path)
    rewrite(path, **tensors)
    assert torch.equal(load(path), expected)


def test_every_tensor_is_taken_exactly_once(checkpoint):
    path = checkpoint()
    with safe_open(path / SINGLE, framework="pt") as file:
        names = set(file.keys())
    with Checkpoint(path, ModelConfig.from_hf(path)) as weights:
        shape = weights.take(UP, 48, 32).shape
        assert shape == (48, 32)
        with pytest.raises(ConfigError, match=f"{UP} was taken twice"):
            weights.take(UP, 48, 32)
        with pytest.raises(ConfigError, match="tensor nonsense is missing"):
            weights.take("nonsense", 1)
        with pytest.raises(ConfigError, match=rf"{HEAD} is \[64, 32\], not \[1, 32\]"):
            weights.take(HEAD, 1, 32)
        with pytest.raises(ConfigError, match=f"{len(names) - 1} tensors were not loaded"):
            weights.finish()
        for name in names - {UP}:
            with safe_open(path / SINGLE, framework="pt") as file:
                weights.take(name, *file.get_slice(name).get_shape())
        assert weights.finish() == len(names)


def test_fused_parts_of_two_dtypes_lose_nothing(checkpoint):
    path = checkpoint()
    name = "model.layers.0.self_attn.k_proj.weight"
    half = load_file(path / SINGLE)[name].to(torch.bfloat16)
    rewrite(path, **{name: half.float()})
    expected = load(path)
    rewrite(path, **{name: half})
    assert torch.equal(load(path), expected)


def test_a_plan_reads_nothing_and_refuses_doubles():
    plan = WeightPlan()
    assert plan.take("a", 2, 3).is_meta and plan.shapes == {"a": (2, 3)}
    with pytest.raises(ValueError, match="twice"):
        plan.take("a", 2, 3)


def test_tensors_are_packed_one_at_a_time(checkpoint):
    """Never the whole model twice: what lives between two packs is one fused matrix."""
    path = checkpoint()
    packed = []

    class CountingOps(ReferenceOps):
        def pack(self, weight, bias):
            packed.append(weight.numel())
            return super().pack(weight, bias)

    load_model(path, CountingOps())
    with safe_open(path / SINGLE, framework="pt") as file:
        matrices = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert sum(packed) == sum(shape[0] * shape[1] for shape in matrices if len(shape) == 2)
    assert max(packed) == 2 * 48 * 32 and len(packed) == 2 + 2 * 4
