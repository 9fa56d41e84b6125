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
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.json_lines import dump_line, finite_logprob, load_line, shown
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import HINTS
from fastdecode_rdma.sequence import CompletionOutput, Logprob, RequestOutput, SamplingParams

CHAT_KEYS = tuple(each.name for each in dataclasses.fields(Chat) if each.name != "messages")
INPUT_KEYS = ("id", "prompt", "messages", *CHAT_KEYS, "sampling_params")
SCORED_KEYS = ("text", "context", "continuation")
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
_PARAMS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
_SYNONYMS = {name: hint for name, hint in HINTS.items() if hint.startswith("use ")}
_INDEX = re.compile(r"^(?:prompt|request|pair|text) \d+[:,] ")

LineId = str | int


@dataclass(slots=True)
class Record:
    """One line of the input. `carried` are the keys that are the user's own; `body` is what its
    kind of line needs to write the answer."""

    number: int
    id: LineId | None
    has_own_id: bool = False
    carried: dict[str, Any] = field(default_factory=dict)
    prompts: list[str | list[Any] | Chat] = field(default_factory=list)
    params: SamplingParams | None = None
    body: Any = None
    error: Exception | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that it has run."""
        return 0 if self.params is None else len(self.prompts) * self.params.n


class LineFormat(Protocol):
    """A kind of lines: what they say, and what is written for them."""

    def parse(self, line: RawLine) -> Record:
        """Returns the record of a line; what is wrong with it is its `error`."""

    def result(self, record: Record, results: Sequence[RequestOutput]) -> bytes:
        """Returns the line of a record whose prompts were answered."""

    def failure(self, record: Record, error: Exception) -> bytes:
        """Returns the line of a record that failed."""


class PromptLines:
    """Prompts of the command line as lines of a file."""

    name = "the command line"

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


@dataclass(frozen=True)
class OwnLines:
    """Our own lines of `fastdecode generate`.

    defaults: what holds where a line's sampling_params say nothing. seed: makes the seeds of lines
    that give none. is_chat: text prompts go through the chat template as a user's message.
    """

    defaults: SamplingParams
    seed: int
    is_chat: bool = False
    with_token_ids: bool = False

    def parse(self, line: RawLine) -> Record:
        """Returns the record of a line; what is wrong with it is its `error`."""
        record = Record(line.number, line.number)
        try:
            _fill(record, load_line(line), self.defaults)
            assert record.params is not None
            record.params = seeded(record.params, self.seed, record)
            if self.is_chat:
                record.prompts = [as_chat(prompt) for prompt in record.prompts]
        except ConfigError as error:
            record.error = error
        return record

    def result(self, record: Record, results: Sequence[RequestOutput]) -> bytes:
        """Returns the line of an answered record."""
        (result,) = results
        return result_line(
            record,
            result.outputs,
            num_prompt_tokens=len(result.prompt_token_ids),
            prompt_logprobs=result.prompt_logprobs,
            with_token_ids=self.with_token_ids,
        )

    def failure(self, record: Record, error: Exception) -> bytes:
        """Returns the line of a record that failed."""
        return failure_line(record, error)


def seeded(params: SamplingParams, seed: int, record: Record) -> SamplingParams:
    """Returns `params` with a seed made of the job's and the line's id if they have none: the same
    whatever came before, so that a resumed job draws what it would have drawn."""
    if params.seed is not None:
        return params
    own = [record.id] if record.has_own_id else [None, record.number]
    name = json.dumps([seed, *own])
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return dataclasses.replace(params, seed=int.from_bytes(digest, "little"))


def as_chat(prompt: str | list[Any] | Chat) -> Chat:
    """Returns a text prompt as a user's message.

    Raises:
        ConfigError: it holds token ids.
    """
    if isinstance(prompt, Chat):
        return prompt
    if isinstance(prompt, list):
        raise ConfigError("prompt holds token ids, which have no chat template (--chat)")
    return Chat([{"role": "user", "content": prompt}])


def _fill(record: Record, values: dict[str, Any], defaults: SamplingParams) -> None:
    """Takes over the values, those first that even a bad line's error record shows."""
    record.carried = {
        key: value
        for key, value in values.items()
        if key not in INPUT_KEYS and key not in OUTPUT_KEYS and key not in _PARAMS
    }
    take_id(record, values)
    _refuse_parameters(values)
    record.prompts = [_prompt_of(values)]
    taken = [key for key in values if key in OUTPUT_KEYS and key not in INPUT_KEYS]
    if taken:
        raise ConfigError(f"{taken[0]!r} is a key of the output; rename it in the input")
    record.params = override(defaults, values.get("sampling_params"))


def take_id(record: Record, values: Mapping[str, Any]) -> None:
    """Takes the line's id if it has one.

    Raises:
        ConfigError: it is neither text nor an integer.
    """
    given = values.get("id")
    if given is not None:
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            raise ConfigError(f"id must be text or an integer, got {shown(given)}")
        record.id, record.has_own_id = given, True


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
    scored = next((key for key in SCORED_KEYS if values.get(key) is not None), None)
    if scored is not None and prompt is None and messages is None:
        raise ConfigError(f"{scored!r} is for `fastdecode score`; give 'prompt' or 'messages' here")
    if (prompt is None) == (messages is None):
        both = "both are given" if prompt is not None else "neither is given"
        raise ConfigError(f"one of 'prompt' and 'messages' is needed; {both}{_near(values)}")
    chat = {key: values[key] for key in CHAT_KEYS if values.get(key) is not None}
    if prompt is None:
        return Chat(messages, **chat)
    if chat:
        raise ConfigError(f"{next(iter(chat))!r} goes with 'messages', not with 'prompt'")
    if not isinstance(prompt, (str, list)):
        raise ConfigError(f"prompt must be text or token ids, got {shown(prompt)}")
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
        raise ConfigError(f"sampling_params must be an object, got {shown(values)}")
    SamplingParams.from_dict(values)  # names and values by themselves
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(defaults, **given)


def _near(values: dict[str, Any]) -> str:
    known = {"content": "prompt", "input": "prompt", "message": "messages"}
    return next((f" (did you mean {known[k]!r} by {k!r}?)" for k in values if k in known), "")


# -- results


def failure_line(record: Record, error: Exception) -> bytes:
    """Returns the output line of a record that failed."""
    said = {"type": type(error).__name__, "message": message_of(error)}
    return dump_line({"id": record.id, "line": record.number, "error": said, **record.carried})


def message_of(error: Exception) -> str:
    """Returns an error's words without the number that the generator counted the request by."""
    return _INDEX.sub("", str(error))


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
    return dump_line({**values, **record.carried})


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
        "logprob": finite_logprob(logprob.logprob),
        "rank": logprob.rank,
    }
