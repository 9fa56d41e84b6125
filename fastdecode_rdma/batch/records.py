"""Lines of JSON <-> requests and results.

In:  {"id": …, "prompt": text or token ids, "sampling_params": {…}, …}
     {"id": …, "messages": […], "tools": […], … what else a Chat has, "sampling_params": {…}, …}
Out: {"id": …, "line": …, "text": …, "finish_reason": …, "stop_reason": …, "usage": {…}, …}
     {"id": …, "line": …, "error": {"type": …, "message": …}, …}

Without an id the line's number is shown as it; ids that are given must differ from one another.
All keys that mean nothing here are carried to the output; a sampling parameter outside
sampling_params is an error, as it would be ignored. With n > 1 the samples are in "outputs", each
with its "index". null is as good as absent.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastdecode_rdma.batch.files import MAX_LINE_BYTES, RawLine
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import HINTS
from fastdecode_rdma.sequence import CompletionOutput, Logprob, SamplingParams

CHAT_KEYS = tuple(each.name for each in dataclasses.fields(Chat) if each.name != "messages")
INPUT_KEYS = ("id", "prompt", "messages", *CHAT_KEYS, "sampling_params")
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

_PARAMS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
_SYNONYMS = {name: hint for name, hint in HINTS.items() if hint.startswith("use ")}
_INDEX = re.compile(r"^(?:prompt|request) \d+[:,] ")

LineId = str | int


@dataclass(slots=True)
class Record:
    """One line of the input. `carried` are the keys that are the user's own."""

    number: int
    id: LineId
    has_own_id: bool = False
    carried: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[Any] | Chat | None = None
    params: SamplingParams | None = None
    error: Exception | None = None


class PromptLines:
    """Prompts of the command line as lines of a file."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.ended = False
        self.on_news: Callable[[], object] | None = None  # there never is any
        self._lines = iter(
            [
                RawLine(number, json.dumps({"prompt": prompt}).encode())
                for number, prompt in enumerate(prompts, 1)
            ]
        )

    def next_line(self) -> RawLine | None:
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
        if key not in INPUT_KEYS and key not in OUTPUT_KEYS and key not in _PARAMS
    }
    given = values.get("id")
    if given is not None:
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            raise ConfigError(f"id must be text or an integer, got {_shown(given)}")
        record.id, record.has_own_id = given, True
    _refuse_parameters(values)
    taken = [key for key in values if key in OUTPUT_KEYS and key not in INPUT_KEYS]
    if taken:
        raise ConfigError(f"{taken[0]!r} is a key of the output; rename it in the input")
    record.prompt = _prompt_of(values)
    record.params = override(defaults, values.get("sampling_params"))


def _refuse_parameters(values: dict[str, Any]) -> None:
    """What would change the answer anywhere else must not be ignored here."""
    for key, value in values.items():
        if value is not None and key in _PARAMS:
            raise ConfigError(f"{key!r} is a sampling parameter; put it into 'sampling_params'")
        if value is not None and key in _SYNONYMS:
            raise ConfigError(
                f"{key!r} is no sampling parameter here; in 'sampling_params', {_SYNONYMS[key]}"
            )


def _prompt_of(values: dict[str, Any]) -> str | list[Any] | Chat:
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        both = "both are given" if prompt is not None else "neither is given"
        raise ConfigError(f"one of 'prompt' and 'messages' is needed; {both}{_near(values)}")
    chat = {key: values[key] for key in CHAT_KEYS if values.get(key) is not None}
    if prompt is None:
        return Chat(messages, **chat)
    if chat:
        raise ConfigError(f"{next(iter(chat))!r} goes with 'messages', not with 'prompt'")
    if not isinstance(prompt, (str, list)):
        raise ConfigError(f"prompt must be text or token ids, got {_shown(prompt)}")
    if isinstance(prompt, list) and any(isinstance(each, dict) for each in prompt):
        raise ConfigError("prompt holds chat messages; give them as 'messages'")
    return prompt


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
    """Returns the output line of a record that failed. Its place is the line's number; the one that
    the error may begin with is the generator's own count."""
    message = _INDEX.sub("", str(error))
    said = {"type": type(error).__name__, "message": message}
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
    values: dict[str, Any] = {"id": record.id, "line": record.number, **body, "usage": usage}
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


def _position(token_id: int, entry: Mapping[int, Logprob]) -> dict[str, Any]:
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
