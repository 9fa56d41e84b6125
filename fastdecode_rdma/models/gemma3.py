"""Gemma 3 (text): norms with 1 + w around both blocks, q/k norms, local and global layers."""

from __future__ import annotations

from torch import Tensor

from fastdecode_rdma.models.layers import Attention, DecoderLayer, DecoderModel, GatedMLP, Loader


class Gemma3Layer(DecoderLayer):
    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        config, ops = loader.config, loader.ops
        hidden = config.hidden_size
        self._input_norm = loader.vector(f"{prefix}.input_layernorm.weight", hidden)
        self._attention = Attention(
            loader, f"{prefix}.self_attn", layer, qk_norm=True, unit_offset=True
        )
        self._attn_norm = loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        self._mlp_norm = loader.vector(f"{prefix}.pre_feedforward_layernorm.weight", hidden)
        self._mlp = GatedMLP(loader, f"{prefix}.mlp")
        self._out_norm = loader.vector(f"{prefix}.post_feedforward_layernorm.weight", hidden)
        self._eps = config.norm_eps
        self._rms_norm, self._add_rms_norm, self._add = ops.rms_norm, ops.add_rms_norm, ops.add_

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        normed = self._rms_norm(x, self._input_norm, self._eps, unit_offset=True)
        self._attention.project(normed, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        update = self._attention.output(attn_out)
        self._rms_norm(update, self._attn_norm, self._eps, unit_offset=True, out=update)
        normed = self._add_rms_norm(x, update, self._mlp_norm, self._eps, unit_offset=True)
        update = self._mlp(normed)
        self._rms_norm(update, self._out_norm, self._eps, unit_offset=True, out=update)
        return self._add(x, update)


class Model(DecoderModel):
    """Gemma3ForCausalLM, and the text half of Gemma3ForConditionalGeneration."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._norm = loader.vector("model.norm.weight", self.config.hidden_size)

    def build_layer(self, loader: Loader, layer: int) -> Gemma3Layer:
        return Gemma3Layer(loader, f"model.layers.{layer}", layer)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self._norm, self.config.norm_eps, unit_offset=True)
