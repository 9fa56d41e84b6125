"""Collects events into results in the order of the prompts, with a progress bar when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import FastDecodeError
from fastdecode_rdma.sequence import CompletionOutput, Logprob, RequestOutput, TokenEvent
from fastdecode_rdma.stream import Deliver, Fail, MakeRequest, Submission


@dataclass(slots=True)
class _Sample:
    """What has come of one sample."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        self.token_ids.append(event.token_id)
        if event.logprob is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + event.logprob
        if event.top_logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(event.top_logprobs)
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def output(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True)
class _Entry:
    prompt: str | None
    prompt_token_ids: list[int]
    seed: int | None
    samples: list[_Sample]
    error: FastDecodeError | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    def output(self, index: int) -> RequestOutput:
        return RequestOutput(
            index=index,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sample.output(i) for i, sample in enumerate(self.samples)],
            finished=self.error is None,
            seed=self.seed,
            error=self.error,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )


class ResultCollector:
    """`watch` the submissions of a stream, `add` its events, take the `results`."""

    def __init__(self, total: int | None, *, use_tqdm: bool) -> None:
        self._entries: dict[int, _Entry] = {}
        # not even a disabled one unless asked: tqdm starts a thread for it
        self._bar = tqdm(total=total, unit="req", dynamic_ncols=True) if use_tqdm else None
        self._tokens = 0

    def __enter__(self) -> ResultCollector:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def watch(self, source: Iterator[Submission]) -> Iterator[Submission]:
        """Passes submissions on, and opens a result for each."""
        for submission in source:
            if isinstance(submission, tuple):
                self._entries[submission[0]] = _Entry(None, [], None, [], submission[1])
                yield submission
            else:
                yield self._opening(submission)

    def _opening(self, make_request: MakeRequest) -> MakeRequest:
        def make(deliver: Deliver, fail: Fail) -> Request:
            request = make_request(deliver, fail)
            samples = [_Sample() for _ in range(request.params.n)]
            self._entries[request.index] = _Entry(
                request.text, request.prompt_ids.tolist(), request.seed, samples
            )
            return request

        return make

    def add(self, event: TokenEvent) -> None:
        """Takes one event."""
        entry = self._entries[event.request_index]
        if event.error is not None:
            entry.error = event.error
            self._advance()
            return
        if event.prompt_logprobs is not None:
            entry.prompt_logprobs = event.prompt_logprobs
        entry.samples[event.sample_index].add(event)
        self._tokens += 1
        if event.finish_reason is not None and all(s.finish_reason for s in entry.samples):
            self._advance()

    def _advance(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix(tokens=self._tokens, refresh=False)
            self._bar.update(1)

    def results(self) -> list[RequestOutput]:
        """The results in order of the prompts."""
        return [self._entries[index].output(index) for index in sorted(self._entries)]
