"""Scores the lines of a file, some hundred together: as many as fill the model's batches well, and
few enough that an interrupt loses little."""

from __future__ import annotations

import queue
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from fastdecode_rdma.batch.files import LineSource
from fastdecode_rdma.batch.intake import Intake
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.progress import Counts, Progress, UnderWay
from fastdecode_rdma.batch.records import PromptLines, Record
from fastdecode_rdma.batch.runner import STOPPING, WAIT_S
from fastdecode_rdma.batch.score_lines import Scored, ScoreLines
from fastdecode_rdma.batch.tables import TableSource
from fastdecode_rdma.errors import FastDecodeError

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.scoring import Loglikelihood

MAX_LINES = 512
MAX_LENGTH = 1 << 20
"""Characters or token ids of the lines that are scored together."""


class ScoreRun:
    """One pass over the lines of `source`; `counts` may be read at any time."""

    def __init__(
        self,
        generator: Generator,
        source: LineSource | TableSource | PromptLines,
        intake: Intake,
        output: Output,
        counts: Counts,
        progress: Progress,
        *,
        prefix_token_id: int | None = None,
    ) -> None:
        self.counts = counts
        self._generator = generator
        self._source = source
        self._intake = intake
        self._output = output
        self._progress = progress
        self._prefix_token_id = prefix_token_id
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Scores all lines.

        Raises:
            OSError: input or output broke. FastDecodeError: the generator is no longer usable.
        """
        self._source.on_news = partial(self._news.put, None)
        try:
            while not self._intake.ended:
                records = self._take()
                if records:
                    self._score(records)
                elif not self._intake.ended:
                    with suppress(queue.Empty):
                        self._news.get(timeout=WAIT_S)
                self._progress.show(UnderWay)
        finally:
            self._progress.end()

    def _take(self) -> list[Record]:
        """Reads lines that are scored together; fewer when a pipe has no more just now."""
        records: list[Record] = []
        length = 0
        while len(records) < MAX_LINES and length < MAX_LENGTH:
            record = self._intake.next_record()
            if record is None:
                break
            self._output.expect(record.number)
            if record.error is not None:
                self._fail(record, record.error)
                continue
            scored: Scored = record.body
            length += len(scored.context or "") + len(scored.text)
            records.append(record)
        return records

    def _score(self, records: list[Record]) -> None:
        pairs = [record for record in records if record.body.context is not None]
        texts = [record for record in records if record.body.context is None]
        if pairs:
            found = self._generator.loglikelihood(
                [(record.body.context, record.body.text) for record in pairs],
                prefix_token_id=self._prefix_token_id,
                on_error="event",
            )
            self._finish(pairs, found)
        if texts:
            found = self._generator.loglikelihood_rolling(
                [record.body.text for record in texts],
                prefix_token_id=self._prefix_token_id,
                on_error="event",
            )
            self._finish(texts, found)

    def _finish(self, records: list[Record], scores: list[Loglikelihood]) -> None:
        lines = cast(ScoreLines, self._intake.format)
        for record, score in zip(records, scores, strict=True):
            if isinstance(score.error, STOPPING):
                raise score.error
            if score.error is not None:
                self._fail(record, score.error)
                continue
            self._output.write(record.number, lines.result(record, score))
            self.counts.requests += 1
            self.counts.tokens += len(score.token_ids)

    def _fail(self, record: Record, error: FastDecodeError | Exception) -> None:
        self._output.write(record.number, self._intake.format.failure(record, error))
        self.counts.requests += 1
        self.counts.failed += 1
