"""Scores the lines of a file, some hundred together: as many as fill the model's batches well, and
few enough that an interrupt loses little."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from fastdecode_rdma.batch.line_pass import LinePass
from fastdecode_rdma.batch.progress import UnderWay
from fastdecode_rdma.batch.records import Record
from fastdecode_rdma.batch.runner import STOPPING, WAIT_S
from fastdecode_rdma.batch.score_lines import Scored, ScoreLines

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.scoring import Loglikelihood

MAX_LINES = 512
MAX_LENGTH = 1 << 17
"""Characters or token ids of the lines that are scored together: several of the engine's jobs."""


class ScoreRun:
    """Scores the lines; `counts` may be read at any time."""

    def __init__(self, lines: LinePass, *, prefix_token_id: int | None = None) -> None:
        self.counts = lines.counts
        self._lines = lines
        self._intake = lines.intake
        self._prefix_token_id = prefix_token_id
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Scores all lines.

        Raises:
            OSError: input or output broke. FastDecodeError: the generator is no longer usable.
        """
        self._lines.source.on_news = partial(self._news.put, None)
        try:
            while not self._intake.ended:
                records = self._take()
                if records:
                    self._score(records)
                elif not self._intake.ended:
                    with suppress(queue.Empty):
                        self._news.get(timeout=WAIT_S)
                self._lines.progress.show(UnderWay)
        finally:
            self._lines.progress.end()

    def _take(self) -> list[Record]:
        """Reads lines that are scored together; fewer when a pipe has no more just now."""
        records: list[Record] = []
        length = 0
        while len(records) < MAX_LINES and length < MAX_LENGTH:
            record = self._intake.next_record()
            if record is None:
                break
            self._lines.output.expect(record.number)
            if record.error is not None:
                self._lines.fail(record, record.error)
                continue
            scored: Scored = record.body
            length += len(scored.context or "") + len(scored.text)
            records.append(record)
        return records

    def _score(self, records: list[Record]) -> None:
        lines = cast(ScoreLines, self._intake.format)
        generator = self._lines.generator
        for record, score in score_records(generator, records, self._prefix_token_id):
            if score.error is not None:
                self._lines.fail(record, score.error)
            else:
                self._lines.finish(record, lines.result(record, score), len(score.token_ids))


def score_records(
    generator: Generator, records: Sequence[Record], prefix_token_id: int | None
) -> Iterator[tuple[Record, Loglikelihood]]:
    """Yields good records with their scores, or what is wrong with them: pairs, then texts.

    Raises:
        FastDecodeError: the generator is no longer usable.
    """
    pairs = [record for record in records if record.body.context is not None]
    texts = [record for record in records if record.body.context is None]
    if pairs:
        scores = generator.loglikelihood(
            [(record.body.context, record.body.text) for record in pairs],
            prefix_token_id=prefix_token_id,
            on_error="event",
        )
        yield from _unless_stopping(pairs, scores)
    if texts:
        scores = generator.loglikelihood_rolling(
            [record.body.text for record in texts],
            prefix_token_id=prefix_token_id,
            on_error="event",
        )
        yield from _unless_stopping(texts, scores)


def _unless_stopping(
    records: Sequence[Record], scores: Sequence[Loglikelihood]
) -> Iterator[tuple[Record, Loglikelihood]]:
    for record, score in zip(records, scores, strict=True):
        if isinstance(score.error, STOPPING):
            raise score.error
        yield record, score
