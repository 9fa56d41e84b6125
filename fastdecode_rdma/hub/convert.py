"""GGUF -> a normal Hugging Face directory, tensor by tensor, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma.config import dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.files import atomic_directory, write_json
from fastdecode_rdma.hub.gguf_config import read_config
from fastdecode_rdma.hub.gguf_file import GGUFFile, GGUFTensor
from fastdecode_rdma.hub.gguf_models import Architecture, architecture_of, rotary_row_order, shape
from fastdecode_rdma.hub.gguf_tokenizer import (
    Vocabulary,
    build_tokenizer,
    generation_defaults,
    special_token_ids,
)
from fastdecode_rdma.hub.safetensors_writer import TensorSpec, write_checkpoint

_TORCH_NAME = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Larger magnitudes may round to infinity.
_LARGEST = {"fp32": np.inf, "fp16": 65519.0, "bf16": 3.396e38}
DEFAULT_SHARD_BYTES = 5 * 10**9
"""The Hub's customary shard length."""
# Dequantising makes several fp32 temporaries of a piece; 8 MB pieces keep them in cache.
_PIECE_ELEMENTS = 2 << 20


@dataclass(frozen=True)
class _Source:
    """Where the values of one output tensor come from. `tensor` None: zeros. `order`: rows of the
    file in the order of the output. The values are stored * `scale` - `offset`."""

    shape: tuple[int, ...]
    tensor: GGUFTensor | None = None
    order: np.ndarray | None = None
    scale: float = 1.0
    offset: float = 0.0


def convert_gguf(
    source: Path,
    target: Path,
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the model in GGUF file `source` as the new directory `target`.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json and safetensors in
    `dtype`. `source` may be one of several parts. `progress(done, total)` is called after each
    tensor. `target` appears only when complete. Of several chat templates, the default one is kept.

    Raises:
        ConfigError: the file cannot be read or holds something unsupported, or `target` exists.
    """
    dtype = dtype_name(dtype)
    file = GGUFFile(source)
    architecture = architecture_of(file)
    config = _config(file, architecture)
    sources = _sources(file, architecture, config)
    vocabulary = Vocabulary.of(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise ConfigError(
            f"{source}: {len(vocabulary.tokens)} tokens but only {config['vocab_size']} embedding "
            "rows"
        )
    tokenizer, tokenizer_config = build_tokenizer(
        vocabulary, strips_after_specials=architecture.strips_after_specials
    )
    special_ids = special_token_ids(vocabulary)
    generation = {key: value for key, value in special_ids.items() if value is not None}
    generation |= generation_defaults(file)
    # Without a word of them in config.json, readers would take their own defaults for these ids.
    config |= special_ids | {"torch_dtype": _TORCH_NAME[dtype]}
    specs = [TensorSpec(name, origin.shape, dtype) for name, origin in sources.items()]
    done = 0

    def pieces(spec: TensorSpec) -> Iterator[np.ndarray]:
        nonlocal done
        for piece in _pieces(sources[spec.name]):
            if np.abs(piece).max(initial=0.0) > _LARGEST[dtype]:
                raise ConfigError(f"{spec.name} holds values too large for {dtype}; use another")
            yield piece
        done += 1
        if progress is not None:
            progress(done, len(specs))

    with atomic_directory(target) as scratch:
        write_checkpoint(scratch, specs, pieces, max_shard_bytes=max_shard_bytes)
        write_json(scratch / "config.json", config)
        write_json(scratch / "generation_config.json", generation)
        write_json(scratch / "tokenizer.json", tokenizer, indent=None)
        write_json(scratch / "tokenizer_config.json", tokenizer_config)


def _config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    config = {"architectures": [architecture.model], "model_type": architecture.model_type}
    config |= architecture.constants
    config |= read_config(
        file,
        handled=architecture.handled,
        partial_rotary=architecture.partial_rotary,
        longrope=architecture.longrope,
    )
    layers = range(config["num_hidden_layers"])
    for biases in architecture.biases:
        if biases.flag is not None:
            config[biases.flag] = any(
                f"blk.{layer}.{name}.bias" in file.tensors for layer in layers for name in biases.of
            )
    if architecture.read is not None:
        config |= architecture.read(file, config)
    return config


def _sources(
    file: GGUFFile, architecture: Architecture, config: dict[str, Any]
) -> dict[str, _Source]:
    """Returns output name -> source, in the file's order; nothing is missing, nothing left over."""
    sources: dict[str, _Source] = {}
    for tensor in file.tensors.values():
        found = architecture.find(tensor.name)
        if found is None:
            continue
        prefix, weight, stem, suffix = found
        if suffix == "bias" and not _may_have_bias(architecture, config, stem):
            raise ConfigError(f"{file.path}: {tensor.name} is not supported for this architecture")
        if suffix in ("scale", "input_scale"):
            continue  # of a weight: see below; of its input, where arithmetic is in 4 bits
        expected = shape(weight, suffix, config)
        if tensor.shape != expected:
            raise ConfigError(
                f"{file.path}: {tensor.name} is {tensor.shape}, the metadata says {expected}"
            )
        order = None
        if architecture.permuted and stem in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            order = rotary_row_order(expected[0], heads)
        sources[f"{prefix}{weight.name}.{suffix}"] = _Source(
            expected,
            tensor,
            order,
            scale=_scale(file, tensor.name),
            offset=architecture.norm_offset if weight.name.endswith("norm") else 0.0,
        )
    _complete(file, architecture, config, sources)
    return sources


def _may_have_bias(architecture: Architecture, config: dict[str, Any], stem: str) -> bool:
    return any(
        stem in biases.of and (biases.flag is None or config[biases.flag])
        for biases in architecture.biases
    )


def _scale(file: GGUFFile, name: str) -> float:
    """Returns what the values of a weight are multiplied by (NVFP4 has one number per tensor)."""
    tensor = file.tensors.get(f"{name.removesuffix('.weight')}.scale")
    if tensor is None or not name.endswith(".weight"):
        return 1.0
    if tensor.shape != (1,):
        raise ConfigError(f"{file.path}: {tensor.name} is {tensor.shape}, expected one value")
    return float(tensor.dequantize(slice(None))[0, 0])


def _complete(
    file: GGUFFile,
    architecture: Architecture,
    config: dict[str, Any],
    sources: dict[str, _Source],
) -> None:
    """Adds biases that are zero; refuses a file that lacks anything else."""
    required = [
        f"{architecture.outside[name].name}.weight" for name in ("token_embd", "output_norm")
    ]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        required += [f"{prefix}{weight.name}.weight" for weight in architecture.layer.values()]
        for biases in architecture.biases:
            for stem in biases.of if biases.flag is None or config[biases.flag] else ():
                weight = architecture.layer[stem]
                zeros = _Source(shape(weight, "bias", config))
                sources.setdefault(f"{prefix}{weight.name}.bias", zeros)
    missing = [name for name in required if name not in sources]
    if missing:
        shown = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
        raise ConfigError(f"{file.path}: missing tensors: {shown}")


def _pieces(source: _Source) -> Iterator[np.ndarray]:
    """Yields the tensor's rows in the order of the output as fp32, a few at a time."""
    if source.tensor is None:
        yield np.zeros(source.shape, dtype=np.float32)
    elif len(source.shape) == 1:
        # One row of elements; in a bias it is the elements that are permuted.
        values = source.tensor.dequantize(slice(None)).reshape(-1)
        yield _undo(values if source.order is None else values[source.order], source)
    else:
        step = max(1, _PIECE_ELEMENTS // source.shape[1])
        for start in range(0, source.shape[0], step):
            rows = slice(start, start + step)
            index = rows if source.order is None else source.order[rows]
            yield _undo(source.tensor.dequantize(index), source)


def _undo(values: np.ndarray, source: _Source) -> np.ndarray:
    if source.scale != 1.0:
        values = values * np.float32(source.scale)
    return values - np.float32(source.offset) if source.offset else values
