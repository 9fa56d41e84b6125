"""The oracle itself, against torch's own operators and loops too plain to be wrong."""

from __future__ import annotations

import math

import pytest
import torch

from fastdecode_rdma.config import KVGroup
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import ReferenceOps, RopeTable, attention, reference_forward

ATOL = 1e-12  # float64, sums of at most some hundred terms of order 1


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def attention_by_loops(q, k, v, scale, window, softcap, sinks=None, slopes=None):
    """One score at a time."""
    (num_rows, num_q_heads, _), (num_keys, num_kv_heads, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    for row in range(num_rows):
        at = num_keys - num_rows + row
        for head in range(num_q_heads):
            kv_head = head * num_kv_heads // num_q_heads
            seen = [j for j in range(at + 1) if window is None or at - j < window]
            scores = [scale * float(q[row, head] @ k[j, kv_head]) for j in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            if slopes is not None:
                scores = [s + slopes[head] * (j - at) for s, j in zip(scores, seen, strict=True)]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = sum(weights)
            if sinks is not None:
                total += math.exp(sinks[head] - max(scores))
            for j, weight in zip(seen, weights, strict=True):
                out[row, head] += weight / total * v[j, kv_head]
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("num_rows", [1, 4, 9])
def test_attention_matches_loops(num_rows, num_q_heads, num_kv_heads, window, softcap):
    q = random(num_rows, num_q_heads, 8)
    k, v = random(9, num_kv_heads, 8, seed=1), random(9, num_kv_heads, 8, seed=2)
    got = attention(q, k, v, scale=0.4, window=window, softcap=softcap)
    expected = attention_by_loops(q, k, v, 0.4, window, softcap)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("sinks", [None, (0.5, -4.0, 9.0, 0.0)])
@pytest.mark.parametrize("slopes", [None, (0.5, 0.25, 0.0, -0.125)])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_and_alibi_match_loops(sinks, slopes, window):
    q, k, v = random(5, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    got = attention(q, k, v, scale=0.4, window=window, softcap=2.0, sinks=sinks, slopes=slopes)
    expected = attention_by_loops(q, k, v, 0.4, window, 2.0, sinks, slopes)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


def test_sinks_are_those_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = random(9, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.tensor([1.0, -2.0, 30.0, 0.0])
    hidden = torch.full((9, 9), -torch.inf).triu(1)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected, _ = eager_attention_forward(module, *heads, hidden, 0.4)
    got = attention(q, k, v, scale=0.4, sinks=module.sinks.tolist())
    torch.testing.assert_close(got, expected[0], atol=ATOL, rtol=0)


def test_slopes_are_those_of_mpt():
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    q, k, v = (random(9, 6, 8, seed=seed) for seed in range(3))
    alibi = build_mpt_alibi_tensor(6, 9).double()  # [6, 1, 9], of the last row
    hidden = torch.full((9, 9), -torch.inf).triu(1)
    scores = torch.einsum("thd,jhd->htj", q, k) * 0.4 + alibi + hidden
    expected = torch.einsum("htj,jhd->thd", scores.softmax(-1), v)
    got = attention(q, k, v, scale=0.4, slopes=(alibi[:, 0, 1] - alibi[:, 0, 0]).tolist())
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("window", [None, 700])
def test_attention_over_several_row_blocks(window):
    """1300 rows are computed in blocks; torch's own operator takes them at once."""
    q, k, v = random(1300, 4, 8), random(1400, 2, 8, seed=1), random(1400, 2, 8, seed=2)
    at, keys = torch.arange(100, 1400)[:, None], torch.arange(1400)[None, :]
    visible = keys <= at
    if window is not None:
        visible &= at - keys < window
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible, scale=0.3, enable_gqa=True
    )
    got = attention(q, k, v, scale=0.3, window=window)
    torch.testing.assert_close(got, expected.transpose(0, 1), atol=ATOL, rtol=0)


def test_linear_and_embedding():
    ops = ReferenceOps(torch.float64)
    weight, bias, x = random(5, 3), random(5), random(4, 3)
    packed = ops.pack(weight, bias)
    assert (packed.in_features, packed.out_features) == (3, 5)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(ops.linear(x, packed), expected)
    assert torch.equal(ops.linear(x, ops.pack(weight, None)), x @ weight.T)
    out = torch.empty(4, 5, dtype=torch.float64)
    assert ops.linear(x, packed, out=out) is out and torch.equal(out, expected)
    residual = random(4, 5, seed=3)
    before = residual.clone()
    assert ops.linear_add_(x, packed, residual) is residual
    assert torch.equal(residual, before + expected)
    rows = ops.embedding(packed, torch.tensor([4, 0, 4]))
    assert torch.equal(rows, weight[[4, 0, 4]])
    rows.zero_()
    weight.zero_()  # packing copies: the file behind a tensor may go
    assert torch.equal(ops.linear(x, packed), expected)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(unit_offset):
    ops = ReferenceOps(torch.float64)
    x, y, weight = random(4, 6), random(4, 6, seed=1), random(6)
    scale = weight + 1 if unit_offset else weight
    expected = torch.nn.functional.rms_norm(x, (6,), scale, eps=0.1)
    got = ops.rms_norm(x, weight, 0.1, unit_offset=unit_offset)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)
    total = x + y
    expected = torch.nn.functional.rms_norm(total, (6,), scale, eps=0.1)
    got = ops.add_rms_norm(x, y, weight, 0.1, unit_offset=unit_offset)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)
    assert torch.equal(x, total)  # in place
    assert ops.rms_norm(x, weight, 0.1, unit_offset=unit_offset, out=x) is x
    torch.testing.assert_close(x, expected, atol=ATOL, rtol=0)


def test_layer_norm_and_add():
    ops = ReferenceOps(torch.float64)
    x, weight, bias = random(4, 6), random(6), random(6, seed=1)
    expected = torch.nn.functional.layer_norm(x, (6,), weight, bias, eps=0.1)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 0.1), expected, atol=ATOL, rtol=0)
    assert ops.layer_norm(x, weight, bias, 0.1, out=x) is x
    torch.testing.assert_close(x, expected, atol=ATOL, rtol=0)
    assert torch.equal(ops.add_(x.clone(), x), 2 * x)


@pytest.mark.parametrize("rot_dim", [8, 4])
def test_qkv_rows_rotate_pairs_by_their_angle(rot_dim):
    """Dimension pair (i, i + rot/2) turns as a complex number; the rest and v stay."""
    ops = ReferenceOps(torch.float64)
    angles = random(20, rot_dim // 2)
    rope = RopeTable(angles.cos().float(), angles.sin().float())
    positions = torch.tensor([3, 19, 0])
    qkv, half = random(3, (2 + 2 * 1) * 8), rot_dim // 2
    expected = qkv.clone().view(3, 4, 8)
    for row, position in enumerate(positions):
        turn = torch.complex(rope.cos[position].double(), rope.sin[position].double())
        for head in range(3):  # two of q, one of k
            pair = torch.complex(
                qkv.view(3, 4, 8)[row, head, :half], qkv.view(3, 4, 8)[row, head, half:rot_dim]
            )
            expected[row, head, :half] = (pair * turn).real
            expected[row, head, half:rot_dim] = (pair * turn).imag
    shape = {"unit_offset": False, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    got = ops.qkv_rows(qkv, positions, rope, None, None, 1e-6, out=torch.empty_like(qkv), **shape)
    torch.testing.assert_close(got, expected.view(3, -1), atol=ATOL, rtol=0)
    assert ops.qkv_rows(qkv, positions, rope, None, None, 1e-6, out=qkv, **shape) is qkv
    assert torch.equal(qkv, got)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_qkv_rows_norm_q_and_k_per_head_before_rotation(unit_offset):
    ops = ReferenceOps(torch.float64)
    qkv, q_norm, k_norm = random(3, 5 * 8), random(8), random(8, seed=1)
    heads = qkv.view(3, 5, 8)
    angles = random(4, 4)
    rope = RopeTable(angles.cos().float(), angles.sin().float())
    shape = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 8}
    normed = torch.cat(
        [
            ops.rms_norm(heads[:, :3], q_norm, 0.1, unit_offset=unit_offset),
            ops.rms_norm(heads[:, 3:4], k_norm, 0.1, unit_offset=unit_offset),
            heads[:, 4:],
        ],
        dim=1,
    ).flatten(1)
    for table in (None, rope):
        positions, out = torch.tensor([2, 0, 1]), torch.empty_like(qkv)
        got = ops.qkv_rows(
            qkv, positions, table, q_norm, k_norm, 0.1, unit_offset=unit_offset, out=out, **shape
        )
        expected = ops.qkv_rows(
            normed,
            positions,
            table,
            None,
            None,
            0.1,
            unit_offset=False,
            out=torch.empty_like(qkv),
            **shape,
        )
        torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name):
    ops = ReferenceOps(torch.float64)
    x = random(3, 8)
    expected = torch.tensor(
        [[FORMULAS[name](float(v)) for v in row] for row in x], dtype=torch.float64
    )
    got = ops.act_mul(x, name)
    torch.testing.assert_close(got, expected[:, :4] * x[:, 4:], atol=ATOL, rtol=0)
    assert ops.act(x, name) is x
    torch.testing.assert_close(x, expected, atol=ATOL, rtol=0)


def test_what_it_cannot_do_raises():
    with pytest.raises(ConfigError, match="float16"):
        ReferenceOps(torch.float16)
    with pytest.raises(ConfigError, match="unknown activation 'tanh'"):
        ReferenceOps().act(torch.ones(1, 2), "tanh")


class AttentionOnly:
    """A model whose hidden state is its attention row: two layers, one of them windowed."""

    scale, attn_softcap = 0.5, 3.0

    def __init__(self) -> None:
        self.table = random(10, 3 * 8)
        self.seen: list[torch.Tensor] = []

    def kv_groups(self):
        return (KVGroup((1,), 1, 1, 8, 2, ((0.5,),)), KVGroup((0,), 1, 1, 8, slopes=(0.25,)))

    def embed(self, token_ids, positions):
        self.seen.append(positions)
        return self.table[token_ids]

    def pre_attention(self, layer, x, positions, rows_out):
        rows_out.copy_(x)

    def post_attention(self, layer, x, attn_out):
        return x + attn_out.repeat(1, 3)

    def logits(self, x):
        return x[:, :8]


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_reference_forward_drives_any_split_model(kv_dtype):
    model, ids = AttentionOnly(), [1, 5, 5, 2]
    got = reference_forward(model, ids, first_position=7, kv_dtype=kv_dtype)
    x = model.table[ids]
    for window, sinks, slopes in ((None, None, (0.25,)), (2, (0.5,), None)):
        q, k, v = x.view(4, 3, 1, 8).unbind(1)
        if kv_dtype == "bf16":
            k, v = k.bfloat16().double(), v.bfloat16().double()
        out = attention_by_loops(q, k, v, 0.5, window, 3.0, sinks, slopes)
        x = x + out.flatten(1).repeat(1, 3)
    torch.testing.assert_close(got, x[:, :8], atol=ATOL, rtol=0)
    assert model.seen[0].tolist() == [7, 8, 9, 10]
    last = reference_forward(model, ids, first_position=7, kv_dtype=kv_dtype, rows=[-1])
    torch.testing.assert_close(last, got[-1:], atol=ATOL, rtol=0)
