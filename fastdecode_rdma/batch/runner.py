"""Runs the requests of a file through a generator, as many together as it has room for.

Lines are read as the batch has room, so a file of any length starts at once and needs little
memory. Results are written as they finish, each with its id.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode_rdma.batch.files import LineSource, LineWriter
from fastdecode_rdma.batch.records import (
    LineId,
    PromptLines,
    Record,
    failure_line,
    parse,
    result_line,
)
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import CompletionOutput, Logprob, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.tokenizer import Tokenizer

PROGRESS_S = 0.5


@dataclass(slots=True)
class Counts:
    """What has been done so far."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def summary(self) -> str:
        """One line for people."""
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        return (
            f"{self.requests} requests{failed}, {self.tokens} tokens in {elapsed_s:.1f} s, "
            f"{self.tokens / elapsed_s:.1f} tokens/s"
        )


@dataclass(slots=True)
class _Open:
    """A request under way."""

    record: Record
    num_prompt_tokens: int
    outputs: list[CompletionOutput]
    texts: list[list[str]]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    @classmethod
    def of(cls, record: Record, num_prompt_tokens: int, num_samples: int) -> _Open:
        outputs = [CompletionOutput(index, "", []) for index in range(num_samples)]
        return cls(record, num_prompt_tokens, outputs, [[] for _ in outputs])

    def add(self, event: TokenEvent) -> bool:
        """Takes an event of a sample; True when that was the last of all samples."""
        output = self.outputs[event.sample_index]
        self.texts[event.sample_index].append(event.text)
        if event.token_id is not None:
            output.token_ids.append(event.token_id)
        if event.top_logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs.append(event.top_logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is None:
            return False
        output.text = "".join(self.texts[event.sample_index])
        output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        return all(each.finished() for each in self.outputs)


class BatchRun:
    """One pass over the lines of `source`; `counts` may be read at any time.

    is_chat: text prompts go through the chat template as a user's message.
    """

    def __init__(
        self,
        generator: Generator,
        source: LineSource | PromptLines,
        writer: LineWriter,
        defaults: SamplingParams,
        *,
        is_chat: bool = False,
        with_token_ids: bool = False,
    ) -> None:
        self.counts = Counts()
        self._generator = generator
        self._source = source
        self._writer = writer
        self._defaults = defaults
        self._is_chat = is_chat
        self._with_token_ids = with_token_ids
        self._seen: dict[tuple[type, LineId], int] = {}  # id -> the line that had it first
        self._open: dict[int, _Open] = {}
        self._params: deque[SamplingParams] = deque()
        self._shows_progress = sys.stderr.isatty() and not writer.is_terminal
        self._next_progress = 0.0

    def run(self) -> None:
        """Answers all lines.

        Raises:
            OSError: input or output broke. FastDecodeError: the generator is no longer usable.
        """
        while not self._source.ended:
            # One stream for a whole file. Where lines come through a pipe, a stream ends when no
            # more have come for a moment, and the next begins with the next line.
            params = iter(self._params.popleft, None)
            stream = self._generator.generate(self._prompts(), params, on_error="event")
            with stream:
                for event in stream:
                    self._take(event)
            self._open.clear()
        self._show_progress(last=True)

    def _prompts(self) -> Iterator[list[int]]:
        """Yields the ids of prompts as the batch has room; the bad ones fail right here."""
        index = 0
        while (line := self._source.next_line(wait=not self._open)) is not None:
            record = parse(line, self._defaults)
            if record.error is None:
                ids = self._encode(record)
            self._check_unique(record)
            if record.error is not None:
                self._fail(record, record.error)
                continue
            assert record.params is not None
            self._open[index] = _Open.of(record, len(ids), record.params.n)
            self._params.append(record.params)
            index += 1
            yield ids

    def _check_unique(self, record: Record) -> None:
        first = self._seen.setdefault((type(record.id), record.id), record.number)
        if first != record.number and record.error is None:
            record.error = ConfigError(f"id {record.id!r} was on line {first} already")

    def _encode(self, record: Record) -> list[int]:
        """Returns the ids of a record's prompt; sets its error when there are none."""
        try:
            return encode(self._generator.tokenizer, record, is_chat=self._is_chat)
        except ConfigError as error:
            record.error = error
            return []

    def _take(self, event: TokenEvent) -> None:
        request = self._open.get(event.request_index)
        if request is None:
            return  # a sample of a request that has failed
        if event.error is not None:
            del self._open[event.request_index]
            self._fail(request.record, _without_index(event.error))
            return
        self.counts.tokens += event.token_id is not None
        if request.add(event):
            del self._open[event.request_index]
            line = result_line(
                request.record,
                request.outputs,
                num_prompt_tokens=request.num_prompt_tokens,
                prompt_logprobs=request.prompt_logprobs,
                with_token_ids=self._with_token_ids,
            )
            self._writer.write(line)
            self.counts.requests += 1
        self._show_progress()

    def _fail(self, record: Record, error: Exception) -> None:
        self._writer.write(failure_line(record, error))
        self.counts.requests += 1
        self.counts.failed += 1

    def _show_progress(self, *, last: bool = False) -> None:
        if not self._shows_progress or (time.monotonic() < self._next_progress and not last):
            return
        self._next_progress = time.monotonic() + PROGRESS_S
        text = "\r\033[K" if last else f"\r\033[K{self.counts.summary()}"
        print(text, end="", file=sys.stderr, flush=True)


def encode(tokenizer: Tokenizer | None, record: Record, *, is_chat: bool) -> list[int]:
    """Returns the token ids of a record's prompt.

    Raises:
        ConfigError: it cannot be encoded.
    """
    if isinstance(record.prompt, list):
        if is_chat:
            raise ConfigError("prompt holds token ids, which have no chat template (--chat)")
        return record.prompt
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer; give token ids as the prompt")
    if record.messages is not None:
        return tokenizer.encode_chat(record.messages)
    assert record.prompt is not None
    if is_chat:
        return tokenizer.encode_chat([{"role": "user", "content": record.prompt}])
    return tokenizer.encode(record.prompt)


def _without_index(error: Exception) -> Exception:
    """Errors of bad prompts name the prompt by its number in the stream: here the line has one."""
    if type(error) is ConfigError:
        return ConfigError(re.sub(r"^prompt \d+: ", "", str(error)))
    return error
