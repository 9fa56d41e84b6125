"""`fastdecode models` lists every row, from the rows themselves."""

from __future__ import annotations

import json

from fastdecode_rdma import cli
from fastdecode_rdma.models.families import FAMILIES
from fastdecode_rdma.models.rope import KINDS


def test_text_names_every_architecture_and_rope_type(capsys):
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    for architecture, family in FAMILIES.items():
        assert architecture in text and family.models in text
    assert all(kind in text for kind in KINDS)
    assert max(map(len, text.splitlines())) <= 100


def test_json_says_what_each_supports(capsys):
    assert cli.main(["models", "--json"]) == 0
    rows = {row["architecture"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(FAMILIES)
    qwen2, gemma2, opt = (rows[f"{name}ForCausalLM"] for name in ("Qwen2", "Gemma2", "OPT"))
    assert qwen2["biases"] == {"qkv": True, "o": False, "mlp": False}
    assert "max_window_layers" in qwen2["sliding_window"] and qwen2["rope_types"] == list(KINDS)
    assert gemma2["softcaps"] and "layer_types" in gemma2["sliding_window"]
    assert rows["Qwen3ForCausalLM"]["qk_norm"] == "head"
    assert rows["GraniteForCausalLM"]["multipliers"]
    assert rows["SmolLM3ForCausalLM"]["layers_without_rope"] and not opt["layers_without_rope"]
    assert opt["rope_types"] == [] and "relu" in opt["activations"]
