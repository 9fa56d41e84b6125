"""Llama 1, 2, 3.x and relatives: pre-norm, rotary, gated MLP."""

from __future__ import annotations

from torch import Tensor

from fastdecode_rdma.models.layers import Attention, DecoderLayer, DecoderModel, GatedMLP, Loader


class LlamaLayer(DecoderLayer):
    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        config, ops = loader.config, loader.ops
        self._input_norm = loader.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self._attention = Attention(loader, f"{prefix}.self_attn", layer)
        self._mlp_norm = loader.vector(
            f"{prefix}.post_attention_layernorm.weight", config.hidden_size
        )
        self._mlp = GatedMLP(loader, f"{prefix}.mlp")
        self._eps = config.norm_eps
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        normed = self._rms_norm(x, self._input_norm, self._eps)
        self._attention.project(normed, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        update = self._attention.output(attn_out)
        normed = self._add_rms_norm(x, update, self._mlp_norm, self._eps)
        return self._mlp.add_(x, normed)


class Model(DecoderModel):
    """LlamaForCausalLM."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._norm = loader.vector("model.norm.weight", self.config.hidden_size)

    def build_layer(self, loader: Loader, layer: int) -> LlamaLayer:
        return LlamaLayer(loader, f"model.layers.{layer}", layer)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self._norm, self.config.norm_eps)
