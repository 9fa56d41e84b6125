"""Lines of `fastdecode score`.

In:  {"id": …, "context": text or token ids, "continuation": text or token ids, …}
     {"id": …, "text": text or token ids, …}          scored from its first token, in windows
Out: {"id": …, "line": N, "logprob": …, "num_tokens": N, "is_greedy": …, …}
     "token_logprobs" when asked for; "num_truncated" where something was cut off at the left
     {"id": …, "line": N, "error": {"type": …, "message": …}, …}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.json_lines import dump_line, finite_logprob, load_line, shown
from fastdecode_rdma.batch.records import Record, failure_line, take_id
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import is_integer

if TYPE_CHECKING:
    from fastdecode_rdma.scoring import Loglikelihood

INPUT_KEYS = ("id", "context", "continuation", "text")
OUTPUT_KEYS = (
    "line",
    "logprob",
    "num_tokens",
    "is_greedy",
    "token_logprobs",
    "num_truncated",
    "error",
)
GENERATED_KEYS = ("prompt", "messages", "sampling_params")

Text = str | list[int]


@dataclass(frozen=True, slots=True)
class Scored:
    """What is to be scored: a continuation after a context, or a whole text (context None)."""

    context: Text | None
    text: Text


@dataclass(frozen=True)
class ScoreLines:
    """Lines that are scored."""

    with_token_logprobs: bool = False

    def parse(self, line: RawLine) -> Record:
        """Returns the record of a line; what is wrong with it is its `error`."""
        record = Record(line.number, line.number)
        try:
            values = load_line(line)
            record.carried = {
                key: value
                for key, value in values.items()
                if key not in INPUT_KEYS and key not in OUTPUT_KEYS
            }
            take_id(record, values)
            taken = [key for key in values if key in OUTPUT_KEYS]
            if taken:
                raise ConfigError(f"{taken[0]!r} is a key of the output; rename it in the input")
            record.body = _scored(values)
            record.prompts = [_whole(record.body)]
        except ConfigError as error:
            record.error = error
        return record

    def result(self, record: Record, score: Loglikelihood) -> bytes:
        """Returns the line of a record that was scored."""
        values: dict[str, Any] = {
            "id": record.id,
            "line": record.number,
            "logprob": finite_logprob(score.logprob),
            "num_tokens": len(score.token_ids),
            "is_greedy": score.is_greedy,
        }
        if score.num_truncated:
            values["num_truncated"] = score.num_truncated
        if self.with_token_logprobs:
            values["token_logprobs"] = [finite_logprob(each) for each in score.token_logprobs]
        return dump_line({**values, **record.carried})

    def failure(self, record: Record, error: Exception) -> bytes:
        """Returns the line of a record that failed."""
        return failure_line(record, error)


def _scored(values: Mapping[str, Any]) -> Scored:
    given = {key: values[key] for key in INPUT_KEYS[1:] if values.get(key) is not None}
    other = next((key for key in GENERATED_KEYS if values.get(key) is not None), None)
    if other is not None and not given:
        raise ConfigError(
            f"{other!r} is for `fastdecode generate`; give 'context' and 'continuation', or 'text'"
        )
    if given.keys() not in ({"context", "continuation"}, {"text"}):
        names = " and ".join(map(repr, given)) or "none"
        raise ConfigError(
            f"'context' and 'continuation' are needed, or 'text' alone; given: {names}"
        )
    if "sampling_params" in values:
        raise ConfigError("'sampling_params' change no score; leave them out")
    for key, value in given.items():
        is_ids = isinstance(value, list) and all(map(is_integer, value))
        if not isinstance(value, str) and not is_ids:
            raise ConfigError(f"{key} must be text or token ids, got {shown(value)}")
    if "text" in given:
        return Scored(None, given["text"])
    return Scored(given["context"], given["continuation"])


def _whole(scored: Scored) -> Text:
    """What a dry run measures."""
    if scored.context is None:
        return scored.text
    if isinstance(scored.context, str) and isinstance(scored.text, str):
        return scored.context + scored.text
    if isinstance(scored.context, list) and isinstance(scored.text, list):
        return scored.context + scored.text
    raise ConfigError("context and continuation must both be text or both token ids")
