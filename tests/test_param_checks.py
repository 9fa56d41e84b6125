"""What counts as an integer, wherever one is expected; and names that are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import eos_ids, explain_unknown, is_integer


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


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (None, ()),
        (0, (0,)),
        (np.int64(3), (3,)),
        ([7, 2, 7], (7, 2)),
        ((2, -1), (2, -1)),
        ({5}, (5,)),
        ([], ()),
    ],
)
def test_ends_of_sequence(value: object, ids: tuple[int, ...]) -> None:
    assert eos_ids(value) == ids
    assert all(type(token_id) is int for token_id in eos_ids(value))


@pytest.mark.parametrize("value", ["2", b"2", True, 2.0, {"a": 1}])
def test_what_is_neither_an_end_of_sequence_nor_a_list(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^eos_token_id must be a token id or a list of them"):
        eos_ids(value)


@pytest.mark.parametrize("value", [[2, "3"], [None], [True], [[2]]])
def test_lists_of_what_is_no_end_of_sequence(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^eos_token_id must hold token ids, got"):
        eos_ids(value)
