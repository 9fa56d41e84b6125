"""ResultCollector: events in any order become results in the order of the prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fastdecode_rdma import ConfigError, FastDecodeError, Logprob, SamplingParams, TokenEvent
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.results import ResultCollector


def collector_of(*samples: int | FastDecodeError) -> ResultCollector:
    """A collector that has seen a submission per argument: a count of samples, or a failure."""

    def submission(index: int, n: int) -> object:
        return lambda deliver, fail: SimpleNamespace(
            index=index, text=f"p{index}", prompt_ids=np.array([1, 2 + index]), seed=9,
            params=SamplingParams(n=n),
        )  # fmt: skip

    source = (
        (index, n) if isinstance(n, FastDecodeError) else submission(index, n)
        for index, n in enumerate(samples)
    )
    collector = ResultCollector(len(samples), use_tqdm=False)
    for item in collector.watch(source):
        if not isinstance(item, tuple):
            item(None, None)
    return collector


def event(index: int, sample: int, token: int, text: str, **rest: object) -> TokenEvent:
    return TokenEvent(index, sample, token, text, **rest)


def test_samples_are_kept_apart_and_prompts_in_order() -> None:
    collector = collector_of(2, 1)
    top = {7: Logprob(-0.5, 1, "x")}
    for each in (
        event(1, 0, 5, "five", finish_reason="length"),
        event(0, 1, 6, "six"),
        event(0, 0, 7, "se", logprob=-0.5, top_logprobs=top),
        event(0, 1, 8, " eight", finish_reason="stop", stop_reason=8),
        event(0, 0, 9, "ven", logprob=-0.25, top_logprobs=top, finish_reason="stop"),
    ):
        collector.add(each)
    first, second = collector.results()
    assert (first.index, first.request_id, first.prompt, first.seed) == (0, "0", "p0", 9)
    assert first.prompt_token_ids == [1, 2] and first.finished and first.error is None
    seven, six = first.outputs
    assert (seven.index, seven.text, seven.token_ids) == (0, "seven", [7, 9])
    assert seven.cumulative_logprob == -0.75 and seven.logprobs == [top, top]
    assert (six.text, six.finish_reason, six.stop_reason) == ("six eight", "stop", 8)
    assert six.cumulative_logprob is None and six.logprobs is None and six.finished()
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("five", "length")
    assert first.prompt_logprobs is None and second.prompt_logprobs is None


def test_prompt_logprobs_are_a_plain_list_of_the_request() -> None:
    collector = collector_of(2, 1)
    scores = PromptLogprobs(np.array([1, 2]), 1, 3, None)
    scores.fill_(0, np.array([[0.0, 1.0, 2.0]], np.float32))
    collector.add(event(0, 1, 5, "a", prompt_logprobs=scores))
    collector.add(event(0, 0, 5, "a", finish_reason="length"))
    collector.add(event(0, 1, 5, "a", finish_reason="length"))
    result = collector.results()[0]
    assert type(result.prompt_logprobs) is list and result.prompt_logprobs == list(scores)
    assert result.prompt_logprobs[0] is None and list(result.prompt_logprobs[1]) == [2]


def test_failures_keep_what_there_is() -> None:
    refused = ConfigError("bad prompt")
    collector = collector_of(1, refused, 1)
    collector.add(event(0, 0, 5, "some"))
    failure = FastDecodeError("broke")
    collector.add(TokenEvent.failure(1, refused))
    collector.add(TokenEvent.failure(0, failure))
    collector.add(event(2, 0, 5, "fine", finish_reason="stop"))
    broken, bad, fine = collector.results()
    assert broken.error is failure and not broken.finished and broken.outputs[0].text == "some"
    assert not broken.outputs[0].finished()
    assert bad.error is refused and bad.outputs == [] and bad.prompt_token_ids == []
    assert fine.finished and fine.error is None


def test_the_bar_counts_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with ResultCollector(3, use_tqdm=True) as collector:
        list(collector.watch(iter([(0, ConfigError("x"))])))
        collector.add(TokenEvent.failure(0, ConfigError("x")))
    assert "1/3" in capsys.readouterr().err
    with ResultCollector(3, use_tqdm=False):
        pass
    assert capsys.readouterr().err == ""
