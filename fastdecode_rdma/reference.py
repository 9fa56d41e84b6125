"""Slow, obvious torch versions of every dense op and of attention: the oracle of the tests.

Axis glossary, used in shape comments everywhere:
`T` token rows in this call · `B` sequences · `R` rows that want logits · `L` context length ·
`Hq`/`Hkv` query and KV heads · `D` head_dim · `H` hidden size · `I` MLP width · `V` vocabulary ·
`K`/`N` input and output features of a matrix · `S` block size of the KV-cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.errors import ConfigError

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""Our names. "gelu" is the exact erf form, "gelu_tanh" the tanh approximation."""

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Scores of one block are [rows, L] float64: 512 rows at 32k tokens are 134 MB.
_ATTENTION_ROWS = 512


@dataclass(frozen=True)
class RopeTable:
    """Rotary tables: rotary dimension rot_dim = 2 * cos.shape[1]; fp32, contiguous."""

    cos: Tensor  # [max_len, rot_dim / 2]
    sin: Tensor  # [max_len, rot_dim / 2]


@dataclass(frozen=True)
class ReferenceLinear:
    """A plain matrix in the compute dtype."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class ReferenceOps:
    """All ops in plain torch; models.interface.Ops is their interface.

    `dtype` is the compute dtype: fp32, or float64 to serve as oracle.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"the reference computes in float32 or float64, not in {dtype}")
        self.dtype = dtype

    def pack(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        """Returns a copy of `weight` [N, K] and `bias` [N] in the compute dtype."""
        copied = weight.to(self.dtype, copy=True).contiguous()
        return ReferenceLinear(copied, None if bias is None else bias.to(self.dtype, copy=True))

    def linear(self, x: Tensor, linear: ReferenceLinear, *, out: Tensor | None = None) -> Tensor:
        """Returns x [T, K] times the matrix, plus its bias: [T, N]."""
        return _into(out, functional.linear(x, linear.weight, linear.bias))

    def linear_add_(self, x: Tensor, linear: ReferenceLinear, residual: Tensor) -> Tensor:
        """Adds `linear` of x [T, K] to residual [T, N] in place and returns residual."""
        return residual.add_(self.linear(x, linear))

    def embedding(self, linear: ReferenceLinear, token_ids: Tensor) -> Tensor:
        """Returns the matrix rows of `token_ids` int64 [T]: [T, K], memory of its own."""
        return linear.weight[token_ids]

    def rms_norm(
        self,
        x: Tensor,  # [T, H]
        weight: Tensor,  # [H]
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with `unit_offset`."""
        return _into(out, _rms_norm(x, weight, eps, unit_offset))

    def layer_norm(
        self,
        x: Tensor,  # [T, H]
        weight: Tensor,  # [H]
        bias: Tensor,  # [H]
        eps: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns (x - mean) / sqrt(variance + eps) * weight + bias."""
        centred = x - x.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return _into(out, normed * weight.to(x.dtype) + bias.to(x.dtype))

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds y to x in place and returns x."""
        return x.add_(y)

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        """Multiplies x by a number in place and returns x."""
        return x.mul_(factor)

    def softcap_(self, x: Tensor, cap: float) -> Tensor:
        """Sets x to cap * tanh(x / cap) in place and returns x."""
        return x.div_(cap).tanh_().mul_(cap)

    def add_rms_norm(
        self,
        x: Tensor,  # [T, H]
        y: Tensor,  # [T, H]
        weight: Tensor,  # [H]
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Adds y to x in place and returns the RMS norm of the sum."""
        return self.rms_norm(x.add_(y), weight, eps, unit_offset=unit_offset, out=out)

    def qkv_rows(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hkv) D]
        positions: Tensor,  # [T] int64
        rope: RopeTable | None,
        q_norm: Tensor | None,  # [D]
        k_norm: Tensor | None,  # [D]
        eps: float,
        *,
        unit_offset: bool,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        out: Tensor,  # [T, (Hq + 2 Hkv) D], may be qkv itself
    ) -> Tensor:
        """Writes rows [q | k | v] with q and k normed per head, then rotated; returns `out`."""
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        if q_norm is not None:
            q = _rms_norm(q, q_norm, eps, unit_offset)
        if k_norm is not None:
            k = _rms_norm(k, k_norm, eps, unit_offset)
        if rope is not None:
            q, k = _rotate(q, positions, rope), _rotate(k, positions, rope)
        return out.copy_(torch.cat((q, k, v), dim=1).flatten(1))

    def act_mul(self, gate_up: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
        """Returns act(gate) * up for gate_up [T, 2 I], gate first: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return _into(out, _activate(gate, activation) * up)

    def act(self, x: Tensor, activation: str) -> Tensor:
        """Applies the activation in place and returns x."""
        return x.copy_(_activate(x, activation))


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scale = weight.to(x.dtype)
    return normed * (1.0 + scale if unit_offset else scale)


def _rotate(heads: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """Rotates the first rot_dim of every head [T, heads, D]: halves are paired (i, i + rot/2)."""
    cos = rope.cos[positions].to(heads.dtype)[:, None, :]
    sin = rope.sin[positions].to(heads.dtype)[:, None, :]
    half = cos.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "relu":
        return functional.relu(x)
    raise ConfigError(f"unknown activation {activation!r}; expected one of {ACTIVATIONS}")


def projection(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns x @ weight.T + bias, activated or gated ([gate | up]: act(gate) * up), + residual."""
    y = functional.linear(x, weight, bias)
    if gated:
        gate, y = y.chunk(2, dim=-1)
        y = (gate if activation is None else _activate(gate, activation)) * y
    elif activation is not None:
        y = _activate(y, activation)
    return y if residual is None else residual + y


def top_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest logits [T, count], their tokens and log(sum(exp)) [T] of logits [T, V].

    Of equal logits the one of the lower token comes first.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], tokens[:, :count], logits.logsumexp(-1)


def attention(
    q: Tensor,  # [T, Hq, D], the last T of L positions
    k: Tensor,  # [L, Hkv, D]
    v: Tensor,  # [L, Hkv, D]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Sequence[float] | None = None,  # [Hq]
    slopes: Sequence[float] | None = None,  # [Hq]
) -> Tensor:
    """Returns causal attention [T, Hq, D] in float64.

    Query row i sits at position p = L - T + i and sees keys max(0, p - window + 1) .. p; query head
    h reads KV head h // (Hq / Hkv). A score is scaled, then capped, then key j adds
    slopes[h] * (j - p); e^sinks[h] joins the softmax's denominator alone.
    """
    num_rows, num_q_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    k_heads = k.to(torch.float64).transpose(0, 1)  # [Hkv, L, D]
    v_heads = v.to(torch.float64).transpose(0, 1)
    out = torch.empty(q.shape, dtype=torch.float64)
    for start in range(0, num_rows, _ATTENTION_ROWS):
        rows = q[start : start + _ATTENTION_ROWS].to(torch.float64)
        query_at = num_keys - num_rows + start + torch.arange(len(rows))
        last = int(query_at[-1]) + 1
        first = 0 if window is None else max(0, int(query_at[0]) - window + 1)
        key_at = torch.arange(first, last)
        hidden = key_at[None, :] > query_at[:, None]
        if window is not None:
            hidden |= key_at[None, :] <= query_at[:, None] - window
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            scores = rows[:, head] @ k_heads[kv_head, first:last].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores + slopes[head] * (key_at[None, :] - query_at[:, None])
            scores = scores.masked_fill_(hidden, -torch.inf)
            if sinks is not None:  # one more key, whose value is zero
                scores = functional.pad(scores, (0, 1), value=sinks[head])
            weights = torch.softmax(scores, dim=-1)[:, : len(key_at)]
            out[start : start + len(rows), head] = weights @ v_heads[kv_head, first:last]
    return out


class SplitModel(Protocol):
    """What `reference_forward` needs of a model: the dense halves around attention."""

    @property
    def scale(self) -> float: ...

    @property
    def attn_softcap(self) -> float | None: ...

    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor: ...

    def pre_attention(self, layer: int, x: Tensor, positions: Tensor, rows_out: Tensor) -> None: ...

    def post_attention(self, layer: int, x: Tensor, attn_out: Tensor) -> Tensor: ...

    def logits(self, x: Tensor) -> Tensor: ...


def reference_forward(
    model: SplitModel,
    token_ids: Sequence[int] | Tensor,
    *,
    first_position: int = 0,
    kv_dtype: str = "fp32",
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Returns the logits [T, V] of one sequence, attending in float64 over its whole K/V.

    `first_position` shifts all positions. `kv_dtype` "fp16" or "bf16" rounds K/V once, as a
    KV-cache of that dtype does; "fp32" leaves them as computed. `rows` picks the rows whose logits
    are wanted; all by default.
    """
    tokens = torch.as_tensor(token_ids, dtype=torch.int64)
    positions = torch.arange(first_position, first_position + len(tokens))
    group_of = {layer: group for group in model.kv_groups() for layer in group.layers}
    x = model.embed(tokens, positions)
    for layer in range(len(group_of)):
        group = group_of[layer]
        qkv = x.new_empty(len(tokens), group.row_width)
        model.pre_attention(layer, x, positions, qkv)
        heads = qkv.view(len(tokens), -1, group.head_dim)
        q, k, v = heads.split((group.num_q_heads, group.num_kv_heads, group.num_kv_heads), dim=1)
        if kv_dtype != "fp32":
            k, v = k.to(TORCH_DTYPES[kv_dtype]), v.to(TORCH_DTYPES[kv_dtype])
        args = {
            "scale": model.scale,
            "window": group.window,
            "softcap": model.attn_softcap,
            "sinks": group.sinks and group.sinks[group.layers.index(layer)],
            "slopes": group.slopes,
        }
        if rows is not None and layer == len(group_of) - 1:
            # the last layer's other rows go nowhere: at 32k tokens that is most of the work
            places = [r % len(tokens) for r in torch.as_tensor(rows).tolist()]
            seen = [(q[r : r + 1], k[: r + 1], v[: r + 1]) for r in places]
            out = torch.cat([attention(*parts, **args) for parts in seen])
            x = x[places]
        else:
            out = attention(q, k, v, **args)
        x = model.post_attention(layer, x, out.flatten(1).to(x.dtype))
    return model.logits(x).clone()
