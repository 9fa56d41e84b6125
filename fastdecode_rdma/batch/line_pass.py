"""What every kind of work over lines is given, and how it hands back what became of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdecode_rdma.batch.files import LineSource
from fastdecode_rdma.batch.intake import Intake
from fastdecode_rdma.batch.output import Output
from fastdecode_rdma.batch.progress import Counts, Progress
from fastdecode_rdma.batch.records import PromptLines, Record
from fastdecode_rdma.batch.tables import TableSource

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator

Source = LineSource | TableSource | PromptLines


@dataclass(frozen=True)
class LinePass:
    """One pass over the lines of `source`."""

    generator: Generator
    source: Source
    intake: Intake
    output: Output
    counts: Counts
    progress: Progress

    def finish(self, record: Record, line: bytes, num_tokens: int) -> None:
        """Writes the line of a record that was answered.

        Raises:
            OSError: it could not be written.
        """
        self.output.write(record.number, line)
        self.counts.requests += 1
        self.counts.tokens += num_tokens

    def fail(self, record: Record, error: Exception) -> None:
        """Writes the line of a record that failed.

        Raises:
            OSError: it could not be written.
        """
        self.output.write(record.number, self.intake.format.failure(record, error))
        self.counts.requests += 1
        self.counts.failed += 1
