"""One layer of some rows on the dense side, with attention over keys and values that lie here.

What prefill and scoring share: rows are tokens of several sequences one after another, `hidden`
holds all of a job's, and a cell is as many of them as one pass takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.models import DecoderModel

CHUNK_TOKENS = 512
"""Rows of one dense pass: enough for full GEMM speed, few enough to keep activations small."""


def embed_rows(model: DecoderModel, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Returns the hidden states [T, H] of token_ids int64 [T], T > 0, a chunk at a time."""
    num_tokens = len(token_ids)
    hidden: Tensor | None = None
    for start in range(0, num_tokens, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, num_tokens))
        part = model.embed(token_ids[rows], positions[rows])
        if hidden is None:
            hidden = torch.empty(num_tokens, part.shape[1], dtype=part.dtype)
        hidden.numpy()[rows] = part.numpy()
    assert hidden is not None
    return hidden


def run_rows(
    model: DecoderModel,
    group: KVGroup,
    layer: int,
    hidden: Tensor,
    positions: Tensor,
    rows: slice,
    attend: Callable[[Tensor, Tensor], None],
) -> None:
    """Runs one layer, of the group, over rows of `hidden`, in place.

    `attend(qkv, out)` fills out [R, Hq * D] from the rows [q | k | v] of them.
    """
    x = hidden[rows]
    qkv = torch.empty(len(x), group.row_width, dtype=x.dtype)
    model.pre_attention(layer, x, positions[rows], qkv)
    out = torch.empty(len(x), group.out_width, dtype=x.dtype)
    attend(qkv, out)
    done = model.post_attention(layer, x, out)
    if done.data_ptr() != x.data_ptr():
        hidden.numpy()[rows] = done.numpy()


def keep_kv(qkv: Tensor, group: KVGroup, keys: Tensor, values: Tensor) -> None:
    """Copies k and v of rows [q | k | v] to keys and values [R, Hkv * D]."""
    # numpy copies: torch would wake threads of its own, which then spin beside ours
    q_width, kv_width = group.out_width, group.num_kv_heads * group.head_dim
    keys.numpy()[:] = qkv.numpy()[:, q_width : q_width + kv_width]
    values.numpy()[:] = qkv.numpy()[:, q_width + kv_width :]


def attend_rows(
    model: DecoderModel,
    group: KVGroup,
    layer: int,
    qkv: Tensor,  # [R, (Hq + 2 Hkv) * D], the last R tokens of the context
    keys: Tensor,  # [L, Hkv * D]
    values: Tensor,  # [L, Hkv * D]
    out: Tensor,  # [R, Hq * D]
) -> None:
    """Causal attention of one sequence's rows over its own context."""
    model.ops.attend(
        qkv[:, : group.out_width],
        keys,
        values,
        group,
        layer=layer,
        scale=model.config.scale,
        softcap=model.config.attn_softcap,
        out=out,
    )
