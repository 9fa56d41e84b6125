"""Model families: from a Hugging Face directory to a decoder that is split at attention.

To add an architecture: one row in families.py; and where its layers differ from those of
decoder.py, one file here with a class `Model`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from torch import Tensor

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.families import FAMILIES
from fastdecode_rdma.models.interface import Linear, Ops
from fastdecode_rdma.models.layers import DecoderModel, Loader
from fastdecode_rdma.models.rope import length_note, rope_table
from fastdecode_rdma.models.weights import Checkpoint, WeightPlan

__all__ = ["FAMILIES", "DecoderModel", "ModelConfig", "load_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shape:
    in_features: int
    out_features: int


class _PlanOps:
    """Stands in for the ops while a model is only planned."""

    def __getattr__(self, name: str) -> None:
        return None

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return _Shape(weight.shape[1], weight.shape[0])


def load_model(path: str | Path, ops: Ops, *, max_model_len: int | None = None) -> DecoderModel:
    """Loads a checkpoint directory, tensor by tensor through `ops.pack`.

    `max_model_len` bounds positions (the rope tables); None is the config's own. With rope types
    that depend on the length it also decides their frequencies, for all sequences (see rope.py).

    Raises:
        ConfigError: the directory cannot be used; the message names the key, file or tensor.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a model directory")
    config = ModelConfig.from_hf(directory)
    if max_model_len is None:
        max_model_len = config.max_model_len
    longest = config.longest_model_len or config.max_model_len
    if not 1 <= max_model_len <= longest:
        raise ConfigError(
            f"max_model_len must be from 1 to {longest}, which is what the positions "
            f"of {directory} reach, got {max_model_len}"
        )
    build = import_module(f"fastdecode_rdma.models.{config.module}").Model
    specs = {spec for spec in config.ropes if spec is not None}
    for note in filter(None, (length_note(spec, max_model_len) for spec in specs)):
        logger.info(note)
    with Checkpoint(directory, config) as checkpoint:
        plan = WeightPlan()
        build(Loader(config, _PlanOps(), plan, dict.fromkeys(specs), max_model_len))
        checkpoint.check(plan, embeddings=f"{build.embeddings}.weight")
        tables = {spec: rope_table(spec, max_model_len) for spec in specs}
        model = build(Loader(config, ops, checkpoint, tables, max_model_len))
        checkpoint.finish()
    return model
