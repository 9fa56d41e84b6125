"""FastDecodeLM beside the harness's own model, and what its arguments do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from fastdecode_rdma import ConfigError, Generator
from fastdecode_rdma.eval import FastDecodeLM

SAME = 1e-4
"""Of metrics, relative; the log-probabilities behind them differ by some 1e-5 per token."""
Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def few_threads(one_thread: None) -> None:
    """One thread of torch's: the harness's model and ours take turns."""


@pytest.fixture(scope="module")
def both(smollm2_dir: Path) -> Iterator[tuple[FastDecodeLM, Any]]:
    """SmolLM2 as our model and as the harness's."""
    given = {"pretrained": str(smollm2_dir), "max_length": 96}
    ours = get_model("fastdecode").create_from_arg_obj(given, {"batch_size": 4, "device": "cpu"})
    theirs = get_model("hf").create_from_arg_obj(
        {**given, "dtype": "float32", "attn_implementation": "eager"},
        {"batch_size": 4, "device": "cpu"},
    )
    assert isinstance(ours, FastDecodeLM)
    yield ours, theirs
    ours.close()


def metrics(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}:{name}": float(value)
        for task, values in results["results"].items()
        for name, value in values.items()
        if name.endswith(",none") and "stderr" not in name
    }


def test_metrics_are_those_of_the_harness(
    both: tuple[FastDecodeLM, Any], evaluate: Evaluate
) -> None:
    tasks = ["fd_choice", "fd_rolling", "fd_answer"]
    mine, other = (evaluate(lm, tasks, log_samples=True) for lm in both)
    assert metrics(mine) == pytest.approx(metrics(other), rel=SAME) and len(metrics(mine)) == 5
    assert mine["samples"].keys() == set(tasks)
    for task in tasks:
        for one, two in zip(mine["samples"][task], other["samples"][task], strict=True):
            assert one["arguments"] == two["arguments"]
            for got, expected in zip(one["filtered_resps"], two["filtered_resps"], strict=True):
                if task == "fd_answer":
                    assert got == expected
                else:
                    np.testing.assert_allclose(got, expected, rtol=SAME)
    assert any(answer["filtered_resps"][0] for answer in mine["samples"]["fd_answer"])


def test_chats_are_those_of_the_harness(both: tuple[FastDecodeLM, Any], evaluate: Evaluate) -> None:
    options = {"apply_chat_template": True, "num_fewshot": 1, "system_instruction": "Be brief."}
    mine, other = (
        evaluate(lm, ["fd_choice"], fewshot_as_multiturn=True, limit=1, **options) for lm in both
    )
    (one,), (two,) = mine["samples"]["fd_choice"], other["samples"]["fd_choice"]
    assert one["arguments"] == two["arguments"] and "Be brief." in str(one["arguments"])
    np.testing.assert_allclose(one["filtered_resps"], two["filtered_resps"], rtol=SAME)
    assert both[0].chat_template(True) == both[1].chat_template(True)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    open_ended = [lm.apply_chat_template(history, add_generation_prompt=False) for lm in both]
    assert open_ended[0] == open_ended[1] and open_ended[0].endswith("b")
    assert both[0].tokenizer_name == both[1].tokenizer_name.replace("/", "__")
    with pytest.raises(ConfigError, match="no chat template 'tools'; it has 'default'"):
        both[0].chat_template("tools")


# -- a tiny model: what arguments do


@pytest.fixture(scope="module")
def tiny(tiny_models: Callable[..., Path]) -> Iterator[FastDecodeLM]:
    lm = FastDecodeLM(tiny_models("llama"), max_length=64, max_gen_toks=20, deterministic=True)
    yield lm
    lm.close()


def requests(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(args)]


def test_edge_cases_of_text(tiny: FastDecodeLM) -> None:
    pairs = [("", "b"), ("  ", "b"), ("a ", "b"), ("a", " b"), ("x" * 90, "b")]
    got = tiny.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    expected = tiny.generator.loglikelihood(pairs)
    assert got == [(each.logprob, each.is_greedy) for each in expected]
    assert got[2] == got[3] and expected[4].num_truncated == 26
    rolling = tiny.loglikelihood_rolling(requests("loglikelihood_rolling", ("",), ("ab",)))
    assert rolling == [0.0, tiny.generator.loglikelihood([("", "ab")])[0].logprob]


def test_bos_and_the_prefix_token(tiny: FastDecodeLM, tmp_path: Path) -> None:
    assert tiny.prefix_token_id == tiny.eot_token_id == 257
    custom = FastDecodeLM(tiny.generator, prefix_token_id=256, max_length=64)
    pair = requests("loglikelihood", ("", "b"))
    assert custom.loglikelihood(pair) != tiny.loglikelihood(pair)
    # a tokenizer with a BOS that it does not put by itself
    path = tmp_path / "tokens"
    path.mkdir()
    shutil.copy(Path(tiny._name) / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    lm = FastDecodeLM(tiny._name, tokenizer=str(path), add_bos_token=True, max_length=64)
    try:
        assert lm.tok_encode("b") == lm.tok_encode("<s>b") == [256, 65]
        assert lm.tok_encode("b", add_special_tokens=False) == [65] == tiny.tok_encode("b")
        before, after = lm._encode_pair("a", "b")
        assert (before, after) == ([256, 64], [65])
        assert lm.tok_decode(before) == "a"
    finally:
        lm.close()


def test_generation_stops_and_is_cut(tiny: FastDecodeLM) -> None:
    plain = tiny.generate_until(requests("generate_until", ("ab", {"max_gen_toks": 12})))[0]
    assert len(plain) >= 4
    stop = plain[2:4]
    wanted = [("ab", {"max_gen_toks": 12, "until": [stop]}), ("", {}), ("x" * 90, {"until": "q"})]
    got = tiny.generate_until(requests("generate_until", *wanted), disable_tqdm=True)
    assert got[0] == plain.split(stop)[0]
    # 90 tokens and 20 new ones in 64: the last 44 remain, or the first
    last = tiny.generate_until(requests("generate_until", ("x" * 44, {"until": "q"})))[0]
    assert got[2] == last
    left = FastDecodeLM(tiny.generator, max_length=64, max_gen_toks=20, truncation_side="right")
    text = "y" * 44 + "x" * 46
    assert left.generate_until(requests("generate_until", (text, {}))) == tiny.generate_until(
        requests("generate_until", ("y" * 44, {}))
    )
    for kwargs, message in (
        ({"beams": 3}, "generation_kwargs has 'beams'"),
        ({"max_gen_toks": 64}, "leaves no room for a prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny.generate_until(requests("generate_until", ("a", kwargs)))


def test_thoughts_are_cut_off_before_the_stop_strings(tiny: FastDecodeLM) -> None:
    plain = tiny.generate_until(requests("generate_until", ("ab", {"max_gen_toks": 12})))[0]
    end = plain[3]
    lm = FastDecodeLM(
        tiny.generator, max_length=64, enable_thinking=True, think_end_token=end,
        chat_template_args='{"style": "short"}',
    )  # fmt: skip
    asked = requests("generate_until", ("ab", {"max_gen_toks": 12, "until": plain[1]}))
    expected = plain.split(end)[-1].lstrip().split(plain[1])[0]
    assert lm.generate_until(asked) == [expected]
    assert lm._settings.template_args == {"style": "short", "enable_thinking": True}
    with pytest.raises(ConfigError, match="enable_thinking is for tasks that generate"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b")))


def test_what_was_answered_is_cached(
    tiny_models: Callable[..., Path], evaluate: Evaluate, tmp_path: Path
) -> None:
    tasks = ["fd_choice", "fd_answer"]
    lm = FastDecodeLM(tiny_models("llama"), max_length=256)
    first = evaluate(lm, tasks, use_cache=str(tmp_path / "cache"))
    lm.close()  # no answer can come from it any more
    again = evaluate(lm, tasks, use_cache=str(tmp_path / "cache"))
    assert metrics(again) == metrics(first)


def test_a_generator_that_is_open_already(tiny: FastDecodeLM) -> None:
    assert FastDecodeLM(tiny.generator).max_length == tiny.generator.max_model_len
    with pytest.raises(ConfigError, match="a Generator is open already: leave out dtypo, workers"):
        FastDecodeLM(tiny.generator, dtypo=1, workers="a:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"truncation_side": "top"}, "truncation_side must be one of"),
        ({"max_length": 8, "max_model_len": 9}, "give one of them"),
        ({"enable_thinking": True}, "enable_thinking needs think_end_token"),
        ({"kv_cache_type": "int8"}, "unknown argument 'kv_cache_type'.*kv_cache_dtype"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"host2:18815": ""}, "looks like a worker's address"),
    ],
)
def test_bad_arguments(
    tiny_models: Callable[..., Path], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FastDecodeLM(tiny_models("llama"), **arguments)


def test_the_generator_that_the_harness_opens_can_be_used(tiny: FastDecodeLM) -> None:
    assert isinstance(tiny.generator, Generator) and tiny.max_gen_toks == 20
    info = tiny.get_model_info()
    assert info["model_dtype"] == "float32" and info["kv_cache_dtype"] == "fp32"
    assert info["quantization"] is None and info["isa"] == tiny.generator.stats().isa


def test_a_missing_model_is_told_in_a_line() -> None:
    with pytest.raises(ConfigError, match="pass pretrained=DIR"):
        FastDecodeLM()
