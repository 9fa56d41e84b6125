"""OPT: learned positions, LayerNorm before or after each block, a plain MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdecode_rdma.models.layers import Attention, DecoderLayer, DecoderModel, Loader, PlainMLP

# The position table starts with two rows that no token uses.
_POSITION_OFFSET = 2


def _norm_vectors(loader: Loader, prefix: str) -> tuple[Tensor, Tensor]:
    """Returns weight and bias [H]: ones and zeros where the norm has none."""
    hidden = loader.config.hidden_size
    if not loader.config.norm_affine:
        return torch.ones(hidden), torch.zeros(hidden)
    return loader.vector(f"{prefix}.weight", hidden), loader.vector(f"{prefix}.bias", hidden)


class OPTLayer(DecoderLayer):
    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        config, ops = loader.config, loader.ops
        self._attention = Attention(loader, f"{prefix}.self_attn", layer, out_name="out_proj")
        self._attn_norm = _norm_vectors(loader, f"{prefix}.self_attn_layer_norm")
        self._mlp = PlainMLP(loader, f"{prefix}.fc1", f"{prefix}.fc2")
        self._mlp_norm = _norm_vectors(loader, f"{prefix}.final_layer_norm")
        self._norm_before = config.norm_order == "before"
        self._eps = config.norm_eps
        self._layer_norm = ops.layer_norm

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        normed = self._layer_norm(x, *self._attn_norm, self._eps) if self._norm_before else x
        self._attention.project(normed, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        self._attention.output_add_(x, attn_out)
        if self._norm_before:
            normed = self._layer_norm(x, *self._mlp_norm, self._eps)
            return self._mlp.add_(x, normed)
        self._layer_norm(x, *self._attn_norm, self._eps, out=x)
        self._mlp.add_(x, x)
        return self._layer_norm(x, *self._mlp_norm, self._eps, out=x)


class Model(DecoderModel):
    """OPTForCausalLM."""

    embeddings = "model.decoder.embed_tokens"

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        config = self.config
        hidden, decoder = config.hidden_size, "model.decoder"
        # Cut to the positions in use, so that a step looks them up without adding the offset.
        rows = loader.weights.take(
            f"{decoder}.embed_positions.weight", config.max_model_len + _POSITION_OFFSET, hidden
        )
        used = rows[_POSITION_OFFSET : _POSITION_OFFSET + loader.max_model_len]
        self._positions = used.to(torch.float32, copy=True)
        self._norm = (
            _norm_vectors(loader, f"{decoder}.final_layer_norm") if config.final_norm else None
        )
        self._project_in = self._project_out = None
        if config.embed_dim not in (None, hidden):
            self._project_in = loader.linear(
                f"{decoder}.project_in", config.embed_dim, hidden, bias=False
            )
            self._project_out = loader.linear(
                f"{decoder}.project_out", hidden, config.embed_dim, bias=False
            )

    def build_layer(self, loader: Loader, layer: int) -> OPTLayer:
        return OPTLayer(loader, f"model.decoder.layers.{layer}", layer)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(token_ids, positions)
        if self._project_in is not None:
            hidden = x.new_empty(len(x), self.config.hidden_size)
            x = self.ops.linear(x, self._project_in, out=hidden)
        return self.ops.add_(x, self._positions.index_select(0, positions))

    def final_norm(self, x: Tensor) -> Tensor:
        if self._norm is not None:
            x = self.ops.layer_norm(x, *self._norm, self.config.norm_eps)
        if self._project_out is not None:
            # Memory of its own: the head's product must not land in the workspace it reads.
            x = self.ops.linear(
                x, self._project_out, out=x.new_empty(len(x), self.config.embed_dim)
            )
        return x
