"""Engines as Ray Data has them: a class whose objects take batches. Each holds a generator, and
answers several batches at once, so that its own batch stays full."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastdecode_rdma.batch.files import RawLine, read_lines
from fastdecode_rdma.batch.intake import FormatFor
from fastdecode_rdma.batch.records import Record, message_of, override
from fastdecode_rdma.batch.runner import RETRY_S, STOPPING
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
            self._folder = tempfile.TemporaryDirectory(prefix="fastdecode-")
            options["workers"] = list(spec.addresses)
            options["token_file"] = _write_token(Path(self._folder.name), spec.token)
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


def _write_token(folder: Path, token: bytes) -> Path:
    path = folder / "token"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(token.hex() + "\n")
    return path


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
    """Answers ranges of lines of a file, which it reads itself."""

    def __init__(
        self, spec: EngineSpec, *, formats: Callable[[Tokenizer | None], FormatFor], first: RawLine
    ) -> None:
        """formats, first: how lines are read and written, chosen by the file's first line."""
        super().__init__(spec)
        self._format = formats(self._generator.tokenizer)(first)

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yields line, record, failed, tokens of each line of the ranges."""
        for text in table.column("range").to_pylist():
            lines = _read_range(json.loads(text))
            found = await asyncio.gather(*(self._line(*line) for line in lines))
            yield pa.table(
                {
                    "line": pa.array([each[0] for each in found], pa.int64()),
                    "record": pa.array([each[1] for each in found], pa.large_binary()),
                    "failed": pa.array([each[2] for each in found], pa.bool_()),
                    "tokens": pa.array([each[3] for each in found], pa.int64()),
                }
            )

    async def _line(self, line: RawLine, first: int) -> tuple[int, bytes, bool, int]:
        record = self._format.parse(line)
        if first != line.number and record.error is None:
            record.error = ConfigError(f"id {record.id!r} was on line {first} already")
        error = record.error
        if error is None:
            try:
                return await self._answered(record)
            except STOPPING:
                raise
            except FastDecodeError as exc:
                error = exc
        return record.number, self._format.failure(record, error), True, 0

    async def _answered(self, record: Record) -> tuple[int, bytes, bool, int]:
        assert record.params is not None
        params = record.params
        results = await asyncio.gather(*(self._answer(p, params) for p in record.prompts))
        tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        return record.number, self._format.result(record, results), False, tokens


def _read_range(values: Mapping[str, Any]) -> list[tuple[RawLine, int]]:
    """Returns the lines of a range, each with the line that had its id first."""
    wanted: dict[int, int] = dict(values["lines"])
    found: list[tuple[RawLine, int]] = []
    fd = os.open(values["path"], os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(fd, values["offset"], os.SEEK_SET)
        for line in read_lines(fd, first_number=values["number"]):
            if line.number in wanted:
                found.append((line, wanted[line.number]))
                if len(found) == len(wanted):
                    break
    finally:
        os.close(fd)
    if len(found) < len(wanted):
        raise ConfigError(f"{values['path']} has changed since the job began")
    return found
