"""What the families are built from: a loader, attention and MLP blocks, and the model around them.

Blocks bind their weights and ops when loaded: the calls between two attentions are the hot path
and do nothing but call ops. `prefix` is always the checkpoint's name of the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.models.interface import Linear, Ops, TensorSource
from fastdecode_rdma.models.rope import RopeSpec
from fastdecode_rdma.reference import RopeTable


@dataclass(frozen=True)
class Loader:
    """All that building a model needs: its config, ops, tensors, rope tables, longest sequence."""

    config: ModelConfig
    ops: Ops
    weights: TensorSource
    rope_tables: Mapping[RopeSpec, RopeTable]
    max_model_len: int

    def vector(self, name: str, length: int) -> Tensor:
        """Returns a norm weight or bias [length], a copy in fp32."""
        return self.weights.take(name, length).to(torch.float32, copy=True)

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool) -> Linear:
        """Packs `name`.weight [N, K] with `name`.bias [N] if there is one."""
        return self.fused((name,), in_features, (out_features,), bias=bias)

    def fused(
        self, names: tuple[str, ...], in_features: int, out_features: tuple[int, ...], *, bias: bool
    ) -> Linear:
        """Packs matrices that share their input as one, stacked in the order given."""
        take = self.weights.take
        rows = list(zip(names, out_features, strict=True))
        parts = [take(f"{name}.weight", num, in_features) for name, num in rows]
        biases = [take(f"{name}.bias", num) for name, num in rows] if bias else []
        return self.ops.pack(_stack(parts), _stack(biases) if biases else None)


def _stack(parts: list[Tensor]) -> Tensor:
    """Returns the parts one after another along their first axis.

    Not torch.cat: of the meta tensors of a plan, that imports sympy (1 to 6 s).
    """
    if len(parts) == 1:
        return parts[0]
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    stacked = torch.empty(shape, dtype=dtype, device=parts[0].device)
    start = 0
    for part in parts:
        stacked[start : start + len(part)].copy_(part)
        start += len(part)
    return stacked


class Attention:
    """The projections around attention: q, k, v as one matrix, q/k norms, rotary, output."""

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        layer: int,
        *,
        out_name: str = "o_proj",
    ) -> None:
        config, ops = loader.config, loader.ops
        head_dim, hidden = config.head_dim, config.hidden_size
        q_width, kv_width = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        rope = config.ropes[layer]
        if config.fused:
            name, bias = f"{prefix}.qkv_proj", config.qkv_bias
            self._qkv = loader.linear(name, hidden, config.qkv_width, bias=bias)
        else:
            self._qkv = loader.fused(
                (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
                hidden,
                (q_width, kv_width, kv_width),
                bias=config.qkv_bias,
            )
        self._out = loader.linear(f"{prefix}.{out_name}", q_width, hidden, bias=config.o_bias)
        self._rope = None if rope is None else loader.rope_tables[rope]
        q_norm = k_norm = None
        if config.qk_norm is not None:
            by_head = config.qk_norm == "head"
            q_norm = loader.vector(f"{prefix}.q_norm.weight", head_dim if by_head else q_width)
            k_norm = loader.vector(f"{prefix}.k_norm.weight", head_dim if by_head else kv_width)
        # Norms over all heads together are ops of their own, on a part of each row.
        self._row_norms: list[tuple[slice, Tensor]] = []
        if config.qk_norm == "row":
            parts = (slice(0, q_width), slice(q_width, q_width + kv_width))
            self._row_norms = list(zip(parts, (q_norm, k_norm), strict=True))
            q_norm = k_norm = None
        self._q_norm, self._k_norm = q_norm, k_norm
        self._plain = rope is None and q_norm is None
        self._eps = config.norm_eps
        self._unit_offset = config.unit_offset
        self._rms_norm = ops.rms_norm
        self._heads = {
            "unit_offset": config.unit_offset,
            "num_q_heads": config.num_q_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": head_dim,
        }
        self._linear, self._linear_add, self._qkv_rows = ops.linear, ops.linear_add_, ops.qkv_rows

    def project(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        """Writes the rows [q | k | v] of x [T, H] into rows_out, in place of the projection."""
        self._linear(x, self._qkv, out=rows_out)
        for columns, weight in self._row_norms:
            part = rows_out[:, columns]
            self._rms_norm(part, weight, self._eps, unit_offset=self._unit_offset, out=part)
        if not self._plain:
            self._qkv_rows(
                rows_out,
                positions,
                self._rope,
                self._q_norm,
                self._k_norm,
                self._eps,
                out=rows_out,
                **self._heads,
            )

    def output(self, attn_out: Tensor) -> Tensor:
        """Returns the output projection of attn_out [T, Hq * D]: [T, H], a workspace."""
        return self._linear(attn_out, self._out)

    def output_add_(self, residual: Tensor, attn_out: Tensor) -> Tensor:
        """Adds the output projection to residual [T, H] in place and returns residual."""
        return self._linear_add(attn_out, self._out, residual)


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, loader: Loader, prefix: str) -> None:
        config = loader.config
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.fused:
            self._gate_up = loader.linear(f"{prefix}.gate_up_proj", hidden, 2 * width, bias=bias)
        else:
            self._gate_up = loader.fused(
                (f"{prefix}.gate_proj", f"{prefix}.up_proj"), hidden, (width, width), bias=bias
            )
        self._down = loader.linear(f"{prefix}.down_proj", width, hidden, bias=bias)
        self._activation = config.activation
        ops = loader.ops
        self._linear, self._linear_add, self._act_mul = ops.linear, ops.linear_add_, ops.act_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, H], a workspace."""
        gate_up = self._linear(x, self._gate_up)
        return self._linear(self._act_mul(gate_up, self._activation), self._down)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds the block's output for x [T, H] to residual [T, H] in place and returns residual."""
        gate_up = self._linear(x, self._gate_up)
        return self._linear_add(self._act_mul(gate_up, self._activation), self._down, residual)


class PlainMLP:
    """second(act(first(x)))."""

    def __init__(self, loader: Loader, first: str, second: str) -> None:
        config = loader.config
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._first = loader.linear(first, hidden, width, bias=bias)
        self._second = loader.linear(second, width, hidden, bias=bias)
        self._activation = config.activation
        ops = loader.ops
        self._linear, self._linear_add, self._act = ops.linear, ops.linear_add_, ops.act

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds the block's output for x to residual in place; x may be residual itself."""
        inner = self._act(self._linear(x, self._first), self._activation)
        return self._linear_add(inner, self._second, residual)


class DecoderLayer(ABC):
    """One layer in two halves, around attention."""

    @abstractmethod
    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None: ...

    @abstractmethod
    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor: ...


class DecoderModel(ABC):
    """A decoder split at attention. It knows nothing of KV-caches or transports.

    Weights must fit the config; `load_model` makes sure of that.
    """

    embeddings: str = "model.embed_tokens"
    """Module name of the token embeddings in a checkpoint."""

    def __init__(self, loader: Loader) -> None:
        config = self.config = loader.config
        self.ops = loader.ops
        width = config.embed_dim or config.hidden_size
        self.embed_tokens = loader.linear(self.embeddings, width, config.vocab_size, bias=False)
        self.head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else loader.linear("lm_head", width, config.vocab_size, bias=False)
        )
        self.layers = [self.build_layer(loader, layer) for layer in range(config.num_layers)]
        self.scale = config.scale
        self.attn_softcap = config.attn_softcap

    @abstractmethod
    def build_layer(self, loader: Loader, layer: int) -> DecoderLayer:
        """Loads one layer."""

    @abstractmethod
    def final_norm(self, x: Tensor) -> Tensor:
        """Returns what the head multiplies: [R, H], which may be a workspace."""

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by window: what the attention workers must know."""
        return self.config.kv_groups

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the hidden states [T, H] of token_ids int64 [T], in memory of their own."""
        x = self.ops.embedding(self.embed_tokens, token_ids)
        scale = self.config.embed_scale
        return x if scale == 1.0 else self.ops.scale_(x, scale)

    def pre_attention(self, layer: int, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        """Writes the attention rows [q | k | v] of x [T, H] at positions int64 [T]."""
        self.layers[layer].pre_attention(x, positions, rows_out)

    def post_attention(self, layer: int, x: Tensor, attn_out: Tensor) -> Tensor:
        """Returns the next hidden states from attn_out [T, Hq * D]; x is updated in place."""
        return self.layers[layer].post_attention(x, attn_out)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits [R, V] of hidden states x [R, H]; may be a workspace."""
        logits = self.ops.linear(self.final_norm(x), self.head)
        softcap = self.config.final_softcap
        return logits if softcap is None else self.ops.softcap_(logits, softcap)
