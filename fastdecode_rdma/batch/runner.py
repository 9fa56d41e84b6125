"""Runs the requests of a file through a generator, as many together as it has room for.

Lines are read as the batch has room, so a file of any length starts at once and needs little
memory. Results are written as they finish, each with its id and line. A pipe is served like a
file: whatever is under way, a line that comes is taken up at once if there is room.
"""

from __future__ import annotations

import queue
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError, FastDecodeError, QueueFullError
from fastdecode_rdma.sequence import SamplingParams

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.handles import RequestHandle
    from fastdecode_rdma.prompts import Prompt

PROGRESS_S = 0.5
RETRY_S = 0.02
"""Between attempts while the generator's queue is full, which nobody tells the end of."""


@dataclass(slots=True)
class Counts:
    """What has been done so far; `tokens` are those of answers that were written."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def summary(self, tokens_under_way: int = 0) -> str:
        """One line for people."""
        tokens = self.tokens + tokens_under_way
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        return (
            f"{self.requests} requests{failed}, {tokens} tokens in {elapsed_s:.1f} s, "
            f"{tokens / elapsed_s:.1f} tokens/s"
        )


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
        self._open: dict[int, tuple[Record, RequestHandle]] = {}  # by the line's number
        self._num_open = 0  # their samples
        self._held: Record | None = None  # read, and refused for now
        # Numbers of lines whose requests are over, as they end; None: a pipe has something.
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._shows_progress = sys.stderr.isatty() and not writer.is_terminal
        self._next_progress = 0.0

    def run(self) -> None:
        """Answers all lines.

        Raises:
            OSError: input or output broke. FastDecodeError: the generator is no longer usable.
        """
        self._source.on_news = partial(self._news.put, None)
        try:
            while not self._source.ended or self._held is not None or self._open:
                # One line, then a look at what has finished: neither waits for the other.
                self._hear(0.0 if self._take_line() else self._patience_s)
                self._show_progress()
        finally:
            for _, handle in self._open.values():
                handle.cancel()
            self._show_progress(last=True)

    @property
    def _patience_s(self) -> float:
        return RETRY_S if self._held is not None else PROGRESS_S

    def _take_line(self) -> bool:
        """Takes up the next line; False if there is none, or no room for it, just now."""
        record = self._held if self._held is not None else self._next_record()
        if record is None:
            return False
        self._held = None
        error = record.error
        if error is None:
            try:
                self._submit(record)
            except QueueFullError:
                self._held = record
                return False
            except ConfigError as exc:
                error = exc
        if error is not None:
            self._fail(record, error)
        return True

    def _next_record(self) -> Record | None:
        if self._num_open >= self._generator.lookahead:
            return None
        line = self._source.next_line()
        if line is None:
            return None
        record = parse(line, self._defaults)
        if record.has_own_id:
            first = self._seen.setdefault((type(record.id), record.id), record.number)
            if first != record.number and record.error is None:
                record.error = ConfigError(f"id {record.id!r} was on line {first} already")
        return record

    def _submit(self, record: Record) -> None:
        assert record.params is not None
        prompt = prompt_for(record, is_chat=self._is_chat)
        handle = self._generator.submit(prompt, record.params)
        self._open[record.number] = record, handle
        self._num_open += record.params.n
        handle.add_done_callback(partial(self._news.put, record.number))

    def _hear(self, timeout_s: float) -> None:
        """Writes the answers that are there; if there is no news at all, waits for some."""
        with suppress(queue.Empty):
            while True:
                number = self._news.get(timeout=timeout_s)
                if number is not None:
                    self._finish(*self._open.pop(number))
                timeout_s = 0.0

    def _finish(self, record: Record, handle: RequestHandle) -> None:
        assert record.params is not None
        self._num_open -= record.params.n
        try:
            result = handle.result()
        except FastDecodeError as error:
            self._fail(record, error)
            return
        line = result_line(
            record,
            result.outputs,
            num_prompt_tokens=len(result.prompt_token_ids),
            prompt_logprobs=result.prompt_logprobs,
            with_token_ids=self._with_token_ids,
        )
        self._writer.write(line)
        self.counts.requests += 1
        self.counts.tokens += handle.num_tokens

    def _fail(self, record: Record, error: Exception) -> None:
        self._writer.write(failure_line(record, error))
        self.counts.requests += 1
        self.counts.failed += 1

    def _show_progress(self, *, last: bool = False) -> None:
        if not self._shows_progress or (time.monotonic() < self._next_progress and not last):
            return
        self._next_progress = time.monotonic() + PROGRESS_S
        under_way = sum(handle.num_tokens for _, handle in self._open.values())
        text = "\r\033[K" if last else f"\r\033[K{self.counts.summary(under_way)}"
        print(text, end="", file=sys.stderr, flush=True)


def prompt_for(record: Record, *, is_chat: bool) -> Prompt:
    """Returns a record's prompt as the generator takes it.

    Raises:
        ConfigError: token ids where text was to be a chat's message.
    """
    assert record.prompt is not None
    if not is_chat or isinstance(record.prompt, Chat):
        return record.prompt
    if isinstance(record.prompt, list):
        raise ConfigError("prompt holds token ids, which have no chat template (--chat)")
    return Chat([{"role": "user", "content": record.prompt}])
