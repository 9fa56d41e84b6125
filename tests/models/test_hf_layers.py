"""Windows and rotary positions by layer, in every way that config files say them."""

from __future__ import annotations

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.hf_keys import Keys
from fastdecode_rdma.models.hf_layers import (
    LayerKind,
    TypedLayers,
    full_layers,
    nope_layers,
    one_window,
    upper_layers,
)

FULL, SLIDING = "full_attention", "sliding_attention"
EVERY_SECOND = TypedLayers(period=2, full_at=1, period_key="pattern")
QWEN = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
SMOLLM3 = {"no_rope_layer_interval": 2, "use_sliding_window": False}


def kinds(rule, **raw):
    return rule(Keys({"num_hidden_layers": 4} | raw, {}))


def windows(rule, **raw):
    return [kind.window for kind in kinds(rule, **raw)]


def test_families_without_windows_ignore_sliding_window():
    assert kinds(full_layers, sliding_window=8) == [LayerKind(None, FULL)] * 4
    assert windows(full_layers, layer_types=[FULL] * 4) == [None] * 4


def test_one_window_for_all():
    assert windows(one_window, sliding_window=8) == [8] * 4
    assert windows(one_window, sliding_window=8, layer_types=[SLIDING] * 4) == [8] * 4
    assert windows(one_window, sliding_window=None) == [None] * 4


def test_windows_by_type():
    assert windows(EVERY_SECOND, sliding_window=8) == [8, None, 8, None]
    assert windows(EVERY_SECOND, sliding_window=8, pattern=3) == [8, 8, None, 8]
    types = [FULL, SLIDING, SLIDING, FULL]
    assert windows(EVERY_SECOND, sliding_window=8, layer_types=types) == [None, 8, 8, None]
    assert windows(EVERY_SECOND, sliding_window=None) == [None] * 4
    assert [kind.rope for kind in kinds(EVERY_SECOND, sliding_window=8)] == [SLIDING, FULL] * 2


def test_full_layers_without_positions_only_beside_windows():
    rule = TypedLayers(period=2, full_at=1, nope_when_full=True)
    assert [kind.rope for kind in kinds(rule, sliding_window=8)] == [SLIDING, None] * 2
    assert [kind.rope for kind in kinds(rule, sliding_window=None)] == [FULL] * 4


def test_upper_layers():
    assert windows(upper_layers, **QWEN) == [None, None, 8, 8]
    assert windows(upper_layers, **QWEN | {"use_sliding_window": False}) == [None] * 4
    assert windows(upper_layers, **QWEN | {"sliding_window": None}) == [None] * 4
    types = [SLIDING, FULL, FULL, FULL]
    assert windows(upper_layers, **QWEN, layer_types=types) == [8, None, None, None]


def test_nope_layers():
    assert [kind.rope for kind in kinds(nope_layers, **SMOLLM3)] == [FULL, None, FULL, None]
    listed = kinds(nope_layers, **SMOLLM3, no_rope_layers=[0, 1, 1, 0, 1, 1])
    assert [kind.rope for kind in listed] == [None, FULL, FULL, None]
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    assert (
        kinds(nope_layers, **SMOLLM3 | windowed)
        == [
            LayerKind(None, FULL),
            LayerKind(8, None),
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("rule", "raw", "message"),
    [
        (full_layers, {"layer_types": [SLIDING] * 4}, "one kind of layer, here full_attention"),
        (one_window, {"layer_types": [FULL] * 4, "sliding_window": 8}, "here sliding_attention"),
        (one_window, {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 8}, "one kind"),
        (EVERY_SECOND, {"layer_types": [SLIDING] * 4}, "sliding_window is missing"),
        (EVERY_SECOND, {"layer_types": "full_attention"}, "layer_types must be a list"),
        (EVERY_SECOND, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (EVERY_SECOND, {"layer_types": [FULL] * 3}, "3 entries for 4 layers"),
        (EVERY_SECOND, {"sliding_window": 8, "pattern": 0}, "pattern must be at least 1"),
        (EVERY_SECOND, {"sliding_window": 8, "pattern": "LLLG"}, "pattern must be an integer"),
        (
            upper_layers,
            {"use_sliding_window": False, "layer_types": [SLIDING] * 4},
            "use_sliding_window or sliding_window gives none",
        ),
        (nope_layers, SMOLLM3 | {"no_rope_layers": [1, 0]}, "2 entries for 4 layers"),
        (nope_layers, SMOLLM3 | {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers holds"),
        (nope_layers, SMOLLM3 | {"no_rope_layer_interval": 0}, "must be at least 1"),
    ],
)
def test_contradictions_are_refused(rule, raw, message):
    with pytest.raises(ConfigError, match=message):
        kinds(rule, **raw)
