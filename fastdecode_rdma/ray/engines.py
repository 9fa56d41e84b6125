"""Engines as Ray Data has them: a class whose objects take batches. Each holds a generator, and
answers several batches at once, so that its own batch stays full."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.intake import FormatFor, repeated_id
from fastdecode_rdma.batch.records import LineFormat, Record, message_of, override
from fastdecode_rdma.batch.runner import RETRY_S, STOPPING
from fastdecode_rdma.batch.score_lines import ScoreLines
from fastdecode_rdma.batch.score_runner import score_records
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError, FastDecodeError, QueueFullError
from fastdecode_rdma.generator import Generator
from fastdecode_rdma.prompts import Prompt
from fastdecode_rdma.sequence import RequestOutput, SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

ERROR_COLUMN = "__inference_error__"
OUTPUT_COLUMNS: dict[str, pa.DataType] = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int64()),
    "num_input_tokens": pa.int64(),
    "num_generated_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    ERROR_COLUMN: pa.string(),
}
"""Columns that an engine adds, under ray.data.llm's names where it has them."""

Answer = tuple[int, bytes, bool, int]
"""Of a line: its number, its record, whether it failed, its tokens."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. token: the workers'; options: of `Generator.from_pretrained`."""

    model: str
    addresses: Sequence[str] = ()
    token: bytes = field(default=b"", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)


class _Engine:
    """A generator in an actor."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        if spec.addresses:
            self._token = _TokenFile(spec.token)
            options["workers"] = list(spec.addresses)
            options["token_file"] = self._token.path
        self._generator = Generator.from_pretrained(spec.model, **options)

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Runs one request, on the event loop, which goes on with others meanwhile."""
        while True:
            try:
                handle = self._generator.submit(prompt, params)
                break
            except QueueFullError:
                await asyncio.sleep(RETRY_S)
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()
        handle.add_done_callback(lambda: loop.call_soon_threadsafe(is_over.set))
        await is_over.wait()
        return handle.result()


class _TokenFile:
    """The workers' token as a file, which is read again for every connection. Ray ends actors
    without a goodbye: where it can be, the file is in memory and ends with the process."""

    def __init__(self, token: bytes) -> None:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("fastdecode token")
            self.path = Path(f"/proc/self/fd/{fd}")
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="fastdecode-")
            self.path = Path(self._folder.name) / "token"
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, 0o600)
        self._file = open(fd, "w", encoding="ascii")  # noqa: SIM115 (it stays open)
        self._file.write(token.hex() + "\n")
        self._file.flush()


class TableEngine(_Engine):
    """Answers tables: a row's prompt or messages, and its sampling_params if it has some. Columns
    are carried, those of OUTPUT_COLUMNS added."""

    def __init__(
        self, spec: EngineSpec, *, sampling_params: Mapping[str, Any], raise_errors: bool
    ) -> None:
        """sampling_params: what holds where a row says nothing, over the model's own."""
        super().__init__(spec)
        defaults = self._generator.get_default_sampling_params()
        self._defaults = override(defaults, sampling_params)
        self._raise_errors = raise_errors

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yields the table with its answers."""
        taken = [name for name in OUTPUT_COLUMNS if name in table.column_names]
        if taken:
            raise ConfigError(f"{taken[0]!r} is a column of the output; rename it in the input")
        rows = await asyncio.gather(*(self._row(row) for row in table.to_pylist()))
        for name, kind in OUTPUT_COLUMNS.items():
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
        yield table

    async def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys(OUTPUT_COLUMNS)
        try:
            params = override(self._defaults, _without_nulls(row.get("sampling_params")))
            result = await self._answer(_prompt_of(row), params)
        except STOPPING:
            raise
        except FastDecodeError as error:
            if self._raise_errors:
                raise
            return {**values, ERROR_COLUMN: f"{type(error).__name__}: {message_of(error)}"}
        output = result.outputs[0]
        reason = output.stop_reason
        return {
            "generated_text": output.text,
            "generated_tokens": output.token_ids,
            "num_input_tokens": len(result.prompt_token_ids),
            "num_generated_tokens": len(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": None if reason is None else str(reason),
            ERROR_COLUMN: "",
        }


def _prompt_of(row: Mapping[str, Any]) -> Prompt:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError("a row needs one of the columns 'prompt' and 'messages'")
    if messages is None:
        return prompt
    return Chat([_without_nulls(message) for message in messages])


def _without_nulls(values: Any) -> Any:
    """A struct of Arrow has all keys that any row has: those of others are null."""
    if not isinstance(values, Mapping):
        return values
    return {key: value for key, value in values.items() if value is not None}


class LineEngine(_Engine):
    """Answers lines of a file: a table of line, first and data becomes one of line, record, failed
    and tokens."""

    def __init__(
        self, spec: EngineSpec, *, formats: Callable[[Tokenizer | None], FormatFor], first: RawLine
    ) -> None:
        """formats, first: how lines are read and written, chosen by the file's first line."""
        super().__init__(spec)
        self._format = formats(self._generator.tokenizer)(first)

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yields a row for each line."""
        records = _records(table, self._format)
        yield _answers(await asyncio.gather(*map(self._line, records)))

    async def _line(self, record: Record) -> Answer:
        error = record.error
        if error is None:
            try:
                return await self._answered(record)
            except STOPPING:
                raise
            except FastDecodeError as exc:
                error = exc
        return record.number, self._format.failure(record, error), True, 0

    async def _answered(self, record: Record) -> Answer:
        assert record.params is not None
        params = record.params
        results = await asyncio.gather(*(self._answer(p, params) for p in record.prompts))
        tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        return record.number, self._format.result(record, results), False, tokens


class ScoreEngine(_Engine):
    """Scores lines of a file; tables as those of LineEngine."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        formats: Callable[[Tokenizer | None], FormatFor],
        first: RawLine,
        prefix_token_id: int | None,
    ) -> None:
        """prefix_token_id: what comes before text without context, None is the tokenizer's."""
        super().__init__(spec)
        self._format = cast(ScoreLines, formats(self._generator.tokenizer)(first))
        self._prefix_token_id = prefix_token_id

    def __call__(self, table: pa.Table) -> pa.Table:
        """Returns a row for each line."""
        records = _records(table, self._format)
        good = [record for record in records if record.error is None]
        answers: list[Answer] = [
            (record.number, self._format.failure(record, record.error), True, 0)
            for record in records
            if record.error is not None
        ]
        for record, score in score_records(self._generator, good, self._prefix_token_id):
            if score.error is not None:
                line = self._format.failure(record, score.error)
                answers.append((record.number, line, True, 0))
            else:
                line = self._format.result(record, score)
                answers.append((record.number, line, False, len(score.token_ids)))
        return _answers(sorted(answers))


def _records(table: pa.Table, lines: LineFormat) -> list[Record]:
    """The records of a table's lines; an id that came before is an error of its line."""
    found = []
    for row in table.to_pylist():
        record = lines.parse(RawLine(row["line"], row["data"]))
        if row["first"] != record.number and record.error is None:
            record.error = repeated_id(record, row["first"])
        found.append(record)
    return found


def _answers(answers: Sequence[Answer]) -> pa.Table:
    numbers, records, failed, tokens = zip(*answers, strict=True)
    return pa.table(
        {
            "line": pa.array(numbers, pa.int64()),
            "record": pa.array(records, pa.large_binary()),
            "failed": pa.array(failed, pa.bool_()),
            "tokens": pa.array(tokens, pa.int64()),
        }
    )
