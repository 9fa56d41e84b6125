"""GGUF -> a normal Hugging Face directory, tensor by tensor, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma.config import dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.files import atomic_directory, write_json
from fastdecode_rdma.hub.gguf_file import GGUFFile, GGUFTensor
from fastdecode_rdma.hub.gguf_models import Architecture, architecture_of, rotary_row_order
from fastdecode_rdma.hub.gguf_tokenizer import build_tokenizer, special_token_ids
from fastdecode_rdma.hub.safetensors_writer import TensorSpec, write_checkpoint

_TORCH_NAME = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DEFAULT_SHARD_BYTES = 5 * 10**9
"""The Hub's customary shard length."""
# Dequantising makes several fp32 temporaries of a piece; 8 MB pieces keep them in cache.
_PIECE_ELEMENTS = 2 << 20


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
    `dtype`. `progress(done, total)` is called after each tensor. `target` appears only when
    complete.

    Raises:
        ConfigError: the file cannot be read or holds something unsupported, or `target` exists.
    """
    dtype = dtype_name(dtype)
    file = GGUFFile(source)
    architecture = architecture_of(file)
    try:
        config = architecture.config(file)
        names = _weight_names(file, architecture, config)
        tokenizer, tokenizer_config = build_tokenizer(file)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as exc:
        # Metadata of a wrong type: a list where a number belongs, say.
        raise ConfigError(f"{source}: the metadata is malformed: {exc!r}") from exc
    if len(tokenizer["model"]["vocab"]) > config["vocab_size"]:
        raise ConfigError(
            f"{source}: {len(tokenizer['model']['vocab'])} tokens but only "
            f"{config['vocab_size']} embedding rows"
        )
    special_ids = special_token_ids(file)
    config |= special_ids | {"torch_dtype": _TORCH_NAME[dtype]}
    specs = [TensorSpec(hf, file.tensor(name).shape, dtype) for hf, name in names.items()]
    done = 0

    def pieces(spec: TensorSpec) -> Iterator[np.ndarray]:
        nonlocal done
        yield from _pieces(file.tensor(names[spec.name]), architecture, config)
        done += 1
        if progress is not None:
            progress(done, len(specs))

    with atomic_directory(target) as scratch:
        write_checkpoint(scratch, specs, pieces, max_shard_bytes=max_shard_bytes)
        write_json(scratch / "config.json", config)
        write_json(scratch / "generation_config.json", special_ids)
        write_json(scratch / "tokenizer.json", tokenizer, indent=None)
        write_json(scratch / "tokenizer_config.json", tokenizer_config)


def _weight_names(
    file: GGUFFile, architecture: Architecture, config: dict[str, Any]
) -> dict[str, str]:
    """Returns Hugging Face name -> GGUF name, after checking that no layer is short of a tensor."""
    names: dict[str, str] = {}
    for name in file.tensors:
        hf = architecture.hf_name(name)
        if hf is not None:
            names[hf] = name
    prefix = "model.layers."
    by_layer: dict[int, set[str]] = {n: set() for n in range(config["num_hidden_layers"])}
    for hf in names:
        if hf.startswith(prefix):
            layer, _, rest = hf[len(prefix) :].partition(".")
            by_layer.setdefault(int(layer), set()).add(rest)
    if len(by_layer) != config["num_hidden_layers"]:
        raise ConfigError(
            f"{file.path}: tensors of {len(by_layer)} layers, the metadata says "
            f"{config['num_hidden_layers']}"
        )
    required = {f"{name}.weight" for name in architecture.layer_names.values()}
    required = required.union(*by_layer.values())
    missing = [f"{prefix}{n}.{r}" for n, have in by_layer.items() for r in required - have]
    missing += [n for n in ("model.embed_tokens.weight", "model.norm.weight") if n not in names]
    if missing:
        raise ConfigError(f"{file.path}: missing tensors: {', '.join(sorted(missing)[:8])}")
    for name in names.values():
        actual, expected = file.tensor(name).shape, architecture.shape(name, config)
        if actual != expected:
            raise ConfigError(f"{file.path}: {name} is {actual}, the metadata says {expected}")
    return names


def _pieces(
    tensor: GGUFTensor, architecture: Architecture, config: dict[str, Any]
) -> Iterator[np.ndarray]:
    """Yields the tensor's rows in Hugging Face order as fp32, a few at a time."""
    num_rows = tensor.rows.shape[0]
    order: np.ndarray | None = None
    if architecture.is_permuted(tensor.name):
        key = "num_key_value_heads" if ".attn_k." in tensor.name else "num_attention_heads"
        # A bias is one row of elements: its elements are what is permuted.
        order = rotary_row_order(tensor.shape[0], config[key])
    offset = np.float32(architecture.offset(tensor.name))
    if len(tensor.shape) == 1:
        values = tensor.dequantize(slice(None)).reshape(-1)
        yield (values if order is None else values[order]) - offset
        return
    step = max(1, _PIECE_ELEMENTS // tensor.shape[-1])
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        yield tensor.dequantize(rows if order is None else order[rows]) - offset
