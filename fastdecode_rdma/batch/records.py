"""Lines of JSON <-> requests and results.

In:  {"id": …, "prompt": text or token ids | "messages": […], "sampling_params": {…}, …}
Out: {"id": …, "text": …, "finish_reason": …, "stop_reason": …, "usage": {…}, …}
     {"id": …, "line": …, "error": {"type": …, "message": …}, …}

Without an id the line's number is it. All other keys of the input are carried to the output. With
n > 1 the samples are in "outputs", each with its "index". null is as good as absent.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastdecode_rdma.batch.files import MAX_LINE_BYTES, RawLine
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import CompletionOutput, Logprob, SamplingParams

INPUT_KEYS = ("id", "prompt", "messages", "sampling_params")
OUTPUT_KEYS = (
    "id",
    "line",
    "text",
    "finish_reason",
    "stop_reason",
    "outputs",
    "usage",
    "token_ids",
    "logprobs",
    "prompt_logprobs",
    "error",
)
MAX_DEPTH = 200
"""Levels of a carried value: what can be read can then be written, too."""

LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; vLLM's server writes this number, too."""

LineId = str | int


@dataclass(slots=True)
class Record:
    """One line of the input. `carried` are the keys that are the user's own."""

    number: int
    id: LineId
    carried: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[Any] | None = None
    messages: list[Any] | None = None
    params: SamplingParams | None = None
    error: Exception | None = None


class PromptLines:
    """Prompts of the command line as lines of a file."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.ended = False
        self._lines = iter(
            [
                RawLine(number, json.dumps({"prompt": prompt}).encode())
                for number, prompt in enumerate(prompts, 1)
            ]
        )

    def next_line(self, *, wait: bool) -> RawLine | None:
        """Returns the next line, None at the end."""
        line = next(self._lines, None)
        self.ended = line is None
        return line


def parse(line: RawLine, defaults: SamplingParams) -> Record:
    """Returns the record of a line; what is wrong with it is its `error`.

    `defaults` hold where the line's sampling_params say nothing.
    """
    record = Record(line.number, line.number)
    try:
        _fill(record, _load(line), defaults)
    except ConfigError as error:
        record.error = error
    return record


def _fill(record: Record, values: dict[str, Any], defaults: SamplingParams) -> None:
    """Takes over the values, those first that even a bad line's error record shows."""
    record.carried = {
        key: value
        for key, value in values.items()
        if key not in INPUT_KEYS and key not in OUTPUT_KEYS
    }
    given = values.get("id")
    if given is not None:
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            raise ConfigError(f"id must be text or an integer, got {_shown(given)}")
        record.id = given
    taken = [key for key in values if key in OUTPUT_KEYS and key not in INPUT_KEYS]
    if taken:
        raise ConfigError(f"{taken[0]!r} is a key of the output; rename it in the input")
    record.prompt, record.messages = values.get("prompt"), values.get("messages")
    if (record.prompt is None) == (record.messages is None):
        both = "both are given" if record.prompt is not None else "neither is given"
        raise ConfigError(f"one of 'prompt' and 'messages' is needed; {both}{_near(values)}")
    if record.prompt is not None and not isinstance(record.prompt, (str, list)):
        raise ConfigError(f"prompt must be text or token ids, got {_shown(record.prompt)}")
    if isinstance(record.prompt, list) and any(isinstance(each, dict) for each in record.prompt):
        raise ConfigError("prompt holds chat messages; give them as 'messages'")
    if record.messages is not None and not (isinstance(record.messages, list) and record.messages):
        raise ConfigError(f"messages must be a list of objects, got {_shown(record.messages)}")
    record.params = override(defaults, values.get("sampling_params"))


def override(defaults: SamplingParams, values: Mapping[str, Any] | None) -> SamplingParams:
    """Returns `defaults` with other values for the parameters that a mapping names.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    if values is None:
        return defaults
    if not isinstance(values, Mapping):
        raise ConfigError(f"sampling_params must be an object, got {_shown(values)}")
    SamplingParams.from_dict(values)  # names and values by themselves
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(defaults, **given)


def _near(values: dict[str, Any]) -> str:
    known = {"text": "prompt", "content": "prompt", "input": "prompt", "message": "messages"}
    return next((f" (did you mean {known[k]!r} by {k!r}?)" for k in values if k in known), "")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- JSON, strictly


def _load(line: RawLine) -> dict[str, Any]:
    if line.data is None:
        raise ConfigError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the line is not UTF-8: byte {error.start + 1} is wrong") from None
    try:
        values = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"the line is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ConfigError("the line is no JSON that can be read: it nests too deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"the line is no JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"a line must hold a JSON object, got {type(values).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(values):
        raise ConfigError(f"the line nests deeper than {MAX_DEPTH} levels")
    return values


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in inner for item in each if isinstance(item, (dict, list))]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"the line is no JSON: {name} is no number there")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ConfigError(f"the line holds a number that is too large: {digits[:40]}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the line has the key {twice!r} twice")
    return values


# -- results


def failure_line(record: Record, error: Exception) -> bytes:
    """Returns the output line of a record that failed."""
    said = {"type": type(error).__name__, "message": str(error)}
    return _dump({"id": record.id, "line": record.number, "error": said, **record.carried})


def result_line(
    record: Record,
    outputs: Sequence[CompletionOutput],
    *,
    num_prompt_tokens: int,
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None,
    with_token_ids: bool = False,
) -> bytes:
    """Returns the output line of a record that was answered."""
    samples = [_sample(output, with_token_ids=with_token_ids) for output in outputs]
    if len(samples) == 1:
        (body,) = samples
    else:
        body = {"outputs": [{"index": i, **sample} for i, sample in enumerate(samples)]}
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": sum(len(output.token_ids) for output in outputs),
    }
    values: dict[str, Any] = {"id": record.id, **body, "usage": usage}
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = [
            None if entry is None else _position(next(iter(entry)), entry)
            for entry in prompt_logprobs
        ]
    return _dump({**values, **record.carried})


def _sample(output: CompletionOutput, *, with_token_ids: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if with_token_ids:
        values["token_ids"] = output.token_ids
    if output.logprobs is not None:
        values["logprobs"] = [
            _position(token_id, entry)
            for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return values


def _position(token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
    """The log-probability of a token, and those of the other candidates that were asked for."""
    chosen = _candidate(token_id, entry[token_id])
    if len(entry) > 1:
        chosen["top_logprobs"] = [_candidate(i, logprob) for i, logprob in entry.items()]
    return chosen


def _candidate(token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": token_id,
        "token": logprob.decoded_token,
        "logprob": max(logprob.logprob, LOWEST_LOGPROB),
        "rank": logprob.rank,
    }


def _dump(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; lone surrogates, which UTF-8 has not, stay escaped."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(values, allow_nan=False).encode() + b"\n"
