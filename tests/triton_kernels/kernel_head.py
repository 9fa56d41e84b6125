"""The fused LM head in Triton's interpreter against float64; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.reference import top_logits
from fastdecode_rdma.triton_kernels import configs
from fastdecode_rdma.triton_kernels.head import NO_TOKEN, head_statistics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype)


def check(num_rows, width, vocab, count, *, dtype=torch.float32, scale=1.0, softcap=None) -> None:
    x, weight = random(num_rows, width, dtype=dtype), random(vocab, width, dtype=dtype)
    targets = torch.arange(num_rows) * 7 % vocab
    targets[-1] = NO_TOKEN
    got = head_statistics(x, weight, count=count, targets=targets, scale=scale, softcap=softcap)
    logits = x.double() @ weight.double().T * scale
    sizes = (x.double().abs() @ weight.double().abs().T).amax(-1) * scale
    error = (width + 4) * 2.0**-24 * sizes  # of a sum in fp32, inputs are exact
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
        error += softcap * 2.0**-20
    values, tokens, log_sum = top_logits(logits, count)
    assert ((got.logits - values).abs() <= error[:, None]).all()
    apart = (values - logits.gather(1, got.tokens)).abs() <= 2 * error[:, None]
    assert ((got.tokens == tokens) | apart).all()
    assert all(len(set(row)) == count for row in got.tokens.tolist())
    # exponentials of errors, and sums of V of them in fp32
    assert ((got.log_sum - log_sum).abs() <= error + (vocab + 8) * 2.0**-24 + 2.0**-20).all()
    wanted = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    assert ((got.target - wanted).abs() <= error)[:-1].all()
    assert got.target[-1] == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype) -> None:
    check(3, 48, 150, 1, dtype=dtype)
    check(2, 33, 130, 5, dtype=dtype, scale=0.5, softcap=3.0)


def test_parts_of_several_tiles(monkeypatch) -> None:
    monkeypatch.setattr("fastdecode_rdma.triton_kernels.head.HEAD_SPLITS", 3)
    check(17, 16, 64 * 7 + 5, 2)


def test_as_many_candidates_as_tokens() -> None:
    check(2, 8, 6, 6)


def test_of_equal_logits_the_lower_token_comes_first() -> None:
    x, weight = torch.ones(1, 4), torch.ones(100, 4)
    weight[[7, 70, 71]] = 2.0
    got = head_statistics(x, weight, count=4)
    assert got.tokens.tolist() == [[7, 70, 71, 0]]
    assert got.logits.tolist() == [[8.0, 8.0, 8.0, 4.0]]


def test_negative_and_infinite_logits() -> None:
    weight = torch.tensor([[-1.0], [-3.0], [-2.0], [-torch.inf]])
    got = head_statistics(torch.ones(1, 1), weight, count=4)
    assert got.tokens.tolist() == [[0, 2, 1, 3]]
    assert got.logits.tolist() == [[-1.0, -2.0, -3.0, -torch.inf]]


def test_a_nan_shows_in_the_sum() -> None:
    weight = torch.ones(70, 2)
    weight[66, 1] = torch.nan
    assert head_statistics(torch.ones(1, 2), weight, count=1).log_sum.isnan().all()


def test_what_does_not_fit() -> None:
    x, weight = random(2, 8), random(100, 8)
    assert head_statistics(x[:0], weight, count=3).tokens.shape == (0, 3)
    for options, message in (
        ({"count": 0}, "finds 1 to 64 candidates, not 0"),
        ({"count": configs.MAX_CANDIDATES + 1}, "finds 1 to 64 candidates, not 65"),
        ({"weight": weight.half()}, "the head must be a contiguous"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must be int64 \[2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            head_statistics(**({"x": x, "weight": weight, "count": 1} | options))
