"""Every policy in a live engine: the same tokens as first come, first served; priorities; pauses
that move no KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastdecode_rdma import ConfigError, Generator, SamplingParams
from fastdecode_rdma.scheduler import POLICIES

PROMPTS = [[1 + i, 2, 3 + i % 5] * (1 + i % 4) for i in range(12)]
PARAMS = [
    SamplingParams(max_tokens=3 + 7 * (i % 4), temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
    for i in range(12)
]


def tokens(path: Path, scheduler: str, **options: object) -> list[list[int]]:
    """Runs all prompts, three at once; returns their tokens."""
    with Generator.from_pretrained(
        path, deterministic=True, scheduler=scheduler, max_num_seqs=3, **options
    ) as gen:
        results = gen.complete(PROMPTS, PARAMS)
        engine = gen._parts.engine
        assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
        assert engine.placement.used_bytes(0) == 0 and gen.stats().num_preemptions_total == 0
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("max_load_tokens", [None, 40])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fcfs"])
def test_results_do_not_depend_on_the_policy(
    name: str, max_load_tokens: int | None, tiny_models: Callable[..., Path]
) -> None:
    path = tiny_models("llama")
    assert tokens(path, name, max_load_tokens=max_load_tokens) == tokens(path, "fcfs")


def test_paused_sequences_keep_their_cache(tiny_models: Callable[..., Path]) -> None:
    """A long answer makes room for short ones, and nothing is prefilled twice."""
    own = {"quantum_s": 1e-6, "alpha_s": 100.0}
    with Generator.from_pretrained(
        tiny_models("llama"), scheduler="skip_join_mlfq", scheduler_options=own, max_num_seqs=1
    ) as gen:
        long = gen.submit([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
        next(iter(long))
        ended = []
        for _ in range(3):
            short = gen.submit([4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
            ended.append(len(short.result().outputs[0].token_ids))
        assert len(long.result().outputs[0].token_ids) == 60 and ended == [2, 2, 2]
        stats = gen.stats()
        assert gen._parts.engine.scheduler.num_paused_total > 0
        assert stats.num_preemptions_total == 0 and stats.prompt_tokens_total == 3 + 3 * 2


def test_a_lower_priority_runs_earlier(tiny_models: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Generator.from_pretrained(tiny_models("llama"), max_num_seqs=1) as gen:
        first = gen.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
        order = [
            event.request_index
            for event in gen.generate([[3], [4]], params, priority=[1, -1])
            if event.finish_reason
        ]
        assert order == [1, 0] and first.result().finished
        assert gen.complete([[5]], params, priority=3)[0].finished
        assert gen.submit([5], params, priority=3).result().finished
        with pytest.raises(ConfigError, match="got 2 prompts and 1 priorities"):
            gen.generate([[3], [4]], params, priority=[1])
        with pytest.raises(ConfigError, match="give one for all"):
            gen.generate(iter([[3]]), params, priority=[1])
        for wrong in ("1", 1.5, None, True):
            with pytest.raises(ConfigError, match="priority must be an integer"):
                gen.submit([5], params, priority=wrong)
            with pytest.raises(ConfigError, match="priority must be an integer"):
                gen.generate([[5]], params, priority=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "fcsf"}, "unknown scheduling policy 'fcsf': did you mean 'fcfs'"),
        ({"scheduler": None}, "unknown scheduling policy"),
        ({"scheduler_options": {"alpha_s": 1}}, "'fcfs' has no options"),
        ({"scheduler_options": "alpha"}, "scheduler_options must be a mapping"),
        ({"max_load_tokens": 0}, "max_load_tokens must be an integer from 1"),
    ],
)
def test_wrong_options_are_told_before_the_model_is_loaded(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Generator.from_pretrained(tmp_path / "none", **options)
