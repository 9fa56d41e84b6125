"""What counts as an integer, wherever one is expected; and names that are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastdecode_rdma.param_checks import explain_unknown, is_integer


@pytest.mark.parametrize("value", [0, -1, 1 << 80, np.int64(3), np.uint8(3)])
def test_integers(value: object) -> None:
    assert is_integer(value)


@pytest.mark.parametrize(
    "value",
    [True, np.True_, 1.0, np.float32(1), "1", None, np.array(1), np.array([1]), torch.tensor(1)],
)
def test_others(value: object) -> None:
    assert not is_integer(value)


def test_an_unknown_name_is_explained() -> None:
    for name, words in (
        ("old", "argument 'old': use new"),
        ("lenght", "argument 'lenght': did you mean 'length'?"),
        ("zzz", "argument 'zzz': expected one of length, width"),
        (7, "argument 7: expected one of length, width"),
    ):
        assert explain_unknown("argument", name, ["length", "width"], {"old": "use new"}) == words
