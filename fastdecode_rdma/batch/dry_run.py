"""`--dry-run`: checks the lines of a job without loading the model's weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_rdma.batch.files import LineSource
from fastdecode_rdma.batch.intake import FormatFor, Intake
from fastdecode_rdma.batch.job import DoneLines, Job, scan_input
from fastdecode_rdma.batch.records import PromptLines, Record, message_of
from fastdecode_rdma.batch.tables import TableSource
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.models.config import ModelConfig
from fastdecode_rdma.prompts import PromptEncoder
from fastdecode_rdma.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastdecode_rdma.chat import Chat

MAX_SHOWN = 20
"""Wrong lines that are shown one by one; the rest are counted."""

RETRY_S = 0.02
_NO_LIMIT = 1 << 62
EXIT_FAILED_LINES = 3


@dataclass(slots=True)
class Findings:
    """What the lines are like, in tokens."""

    lines: int = 0
    wrong: int = 0
    too_long: int = 0
    tokens: int = 0
    longest: int = 0
    longest_line: int = 0
    shown: list[str] = field(default_factory=list)

    def complain(self, number: int, message: str) -> None:
        """Takes a wrong line."""
        self.wrong += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"line {number}: {message}")


def dry_run(
    args: argparse.Namespace,
    source: LineSource | TableSource | PromptLines,
    directory: Path,
    formats: Callable[[Job, Tokenizer | None], FormatFor],
) -> int:
    """Prints what is wrong with the lines and how long they are; returns the exit code.

    The bound is the model's own length or --max-model-len; workers with little memory may have a
    lower one.
    """
    config = ModelConfig.from_hf(directory)
    tokenizer = Tokenizer.from_directory(directory, required=False)
    bound = args.max_model_len or config.max_model_len
    encoder = PromptEncoder(tokenizer, vocab_size=config.vocab_size, max_model_len=_NO_LIMIT)
    job = Job(facts={}, seed=0, created=0)
    first = None
    if not isinstance(source, PromptLines) and source.path is not None:
        first = scan_input(source.lines()).first
    intake = Intake(source, formats(job, tokenizer), DoneLines(), limit=args.limit, first=first)
    found = Findings()
    try:
        while not intake.ended:
            record = intake.next_record()
            if record is not None:
                _look_at(record, encoder, bound, found)
            elif not intake.ended:
                time.sleep(RETRY_S)  # a pipe whose writer thinks
    finally:
        intake.close()
    for line in found.shown:
        print(line)
    if found.wrong > len(found.shown):
        print(f"and {found.wrong - len(found.shown)} more")
    print(f"{found.lines} lines, {found.wrong} of them wrong")
    if found.longest:
        print(
            f"{found.tokens} tokens in prompts; the longest has {found.longest}, on line "
            f"{found.longest_line}; {found.too_long} cannot fit max_model_len {bound}"
        )
    return EXIT_FAILED_LINES if found.wrong else 0


def _look_at(record: Record, encoder: PromptEncoder, bound: int, found: Findings) -> None:
    found.lines += 1
    if record.error is not None:
        found.complain(record.number, message_of(record.error))
        return
    for prompt in record.prompts:
        try:
            count = _length(prompt, encoder)
        except ConfigError as error:
            found.complain(record.number, message_of(error))
            return
        found.tokens += count
        if count > found.longest:
            found.longest, found.longest_line = count, record.number
        if count >= bound:
            found.too_long += 1
            found.complain(
                record.number,
                f"the prompt has {count} tokens and can never fit: max_model_len is {bound}",
            )
            return


def _length(prompt: str | list[int] | Chat, encoder: PromptEncoder) -> int:
    return len(encoder.encode(prompt))
