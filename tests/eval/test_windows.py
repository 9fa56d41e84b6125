"""Windows of long texts are the lm-evaluation-harness's own."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode_rdma.score_text import rolling_spans


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 19, 20, 21, 57])
def test_windows_are_those_of_the_harness(length: int) -> None:
    from lm_eval.utils import get_rolling_token_windows

    ids = list(range(1, length + 1))
    windows = get_rolling_token_windows(ids, prefix_token=0, max_seq_len=10, context_len=1)
    spans = rolling_spans(np.array([0, *ids]), 10)
    got = [(s.ids[:-1].tolist(), s.ids[s.first :].tolist()) for s in spans]
    assert got == [(list(fed), list(wanted)) for fed, wanted in windows]
    assert [token for _, wanted in got for token in wanted] == ids  # every one, once
