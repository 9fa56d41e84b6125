"""Decoders with RMS norms, rotary positions and gated MLPs: Llama, Mistral, Qwen, Gemma, Phi, …

What their config says of biases, q/k norms, windows and positions is the business of the blocks in
layers.py; here are the orders in which norms and blocks follow each other (config.norm_order).
"""

from __future__ import annotations

from torch import Tensor

from fastdecode_rdma.models.layers import Attention, DecoderLayer, DecoderModel, GatedMLP, Loader


class _Layer(DecoderLayer):
    """What the orders share: the two blocks, and the ops around them."""

    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        config, ops = loader.config, loader.ops
        self._attention = Attention(loader, f"{prefix}.self_attn", layer)
        self._mlp = GatedMLP(loader, f"{prefix}.mlp")
        self._eps, self._unit_offset = config.norm_eps, config.unit_offset
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self._add, self._scale = ops.add_, ops.scale_

    def _weight(self, loader: Loader, name: str) -> Tensor:
        return loader.vector(f"{name}.weight", loader.config.hidden_size)


class NormBefore(_Layer):
    """x += attention(norm(x)); x += mlp(norm(x)). What is added may be scaled."""

    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        super().__init__(loader, prefix, layer)
        self._attention_norm = self._weight(loader, f"{prefix}.input_layernorm")
        self._mlp_norm = self._weight(loader, f"{prefix}.post_attention_layernorm")
        self._residual_scale = loader.config.residual_scale

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        offset = self._unit_offset
        normed = self._rms_norm(x, self._attention_norm, self._eps, unit_offset=offset)
        self._attention.project(normed, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        scale, offset = self._residual_scale, self._unit_offset
        update = self._attention.output(attn_out)
        if scale != 1.0:
            self._scale(update, scale)
        normed = self._add_rms_norm(x, update, self._mlp_norm, self._eps, unit_offset=offset)
        if scale == 1.0:
            return self._mlp.add_(x, normed)
        return self._add(x, self._scale(self._mlp(normed), scale))


class NormAround(_Layer):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        super().__init__(loader, prefix, layer)
        self._attention_norm = self._weight(loader, f"{prefix}.input_layernorm")
        self._attention_out_norm = self._weight(loader, f"{prefix}.post_attention_layernorm")
        self._mlp_norm = self._weight(loader, f"{prefix}.pre_feedforward_layernorm")
        self._mlp_out_norm = self._weight(loader, f"{prefix}.post_feedforward_layernorm")

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        offset = self._unit_offset
        normed = self._rms_norm(x, self._attention_norm, self._eps, unit_offset=offset)
        self._attention.project(normed, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        eps, offset, norm = self._eps, self._unit_offset, self._rms_norm
        update = self._attention.output(attn_out)
        norm(update, self._attention_out_norm, eps, unit_offset=offset, out=update)
        normed = self._add_rms_norm(x, update, self._mlp_norm, eps, unit_offset=offset)
        update = self._mlp(normed)
        norm(update, self._mlp_out_norm, eps, unit_offset=offset, out=update)
        return self._add(x, update)


class NormAfter(_Layer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, loader: Loader, prefix: str, layer: int) -> None:
        super().__init__(loader, prefix, layer)
        self._attention_out_norm = self._weight(loader, f"{prefix}.post_attention_layernorm")
        self._mlp_out_norm = self._weight(loader, f"{prefix}.post_feedforward_layernorm")

    def pre_attention(self, x: Tensor, positions: Tensor, rows_out: Tensor) -> None:
        self._attention.project(x, positions, rows_out)

    def post_attention(self, x: Tensor, attn_out: Tensor) -> Tensor:
        eps, offset, norm = self._eps, self._unit_offset, self._rms_norm
        update = self._attention.output(attn_out)
        norm(update, self._attention_out_norm, eps, unit_offset=offset, out=update)
        update = self._mlp(self._add(x, update))
        norm(update, self._mlp_out_norm, eps, unit_offset=offset, out=update)
        return self._add(x, update)


ORDERS: dict[str, type[_Layer]] = {
    "before": NormBefore,
    "around": NormAround,
    "after": NormAfter,
}
"""Layers by the config's norm_order."""


class Model(DecoderModel):
    """Every family whose row in families.py names this file."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._norm = loader.vector("model.norm.weight", self.config.hidden_size)

    def build_layer(self, loader: Loader, layer: int) -> DecoderLayer:
        order = ORDERS[self.config.norm_order]
        return order(loader, f"model.layers.{layer}", layer)

    def final_norm(self, x: Tensor) -> Tensor:
        config = self.config
        normed = self.ops.rms_norm(x, self._norm, config.norm_eps, unit_offset=config.unit_offset)
        # Scaling what the head reads scales the logits: far fewer numbers, exact for powers of two.
        scale = config.logits_scale
        return normed if scale == 1.0 else self.ops.scale_(normed, scale)
