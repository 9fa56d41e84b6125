"""Lines of OpenAI's batch files: requests as its server takes them, answers as it and
`vllm run-batch` give them.

In:  {"custom_id": …, "method": "POST", "url": "/v1/completions" or "/v1/chat/completions",
      "body": {…}}
Out: {"id": …, "custom_id": …, "response": {"status_code": 200, "request_id": …, "body": {…}},
      "error": null}
     {"id": …, "custom_id": …, "response": {"status_code": 400, "request_id": …,
      "body": {"error": {"message": …, "type": …, "param": …, "code": …}}},
      "error": {"code": …, "message": …}}                                     a request that failed

A body may hold what the API has and what vLLM adds to it (the names of SamplingParams, and those of
a Chat). What cannot be done (`stream`, `tools`, `response_format`, …) and what is unknown is that
line's error, which names the field in "param"; fields that change no answer (`user`, `metadata`, …)
are passed over. Ids are made of the job and the line, so that a job that is resumed gives what it
would have given; "created" is the time at which the job was begun first.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.batch.json_lines import dump_line, load_line, shown
from fastdecode_rdma.batch.openai_answers import Echoed, chat_choice, completion_choice
from fastdecode_rdma.batch.output import record_id
from fastdecode_rdma.batch.records import CHAT_KEYS, Record, message_of, override, seeded
from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import explain_unknown, is_integer
from fastdecode_rdma.sequence import RequestOutput, SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
COMPLETION_TOKENS = 16
"""OpenAI's max_tokens of completions that give none."""

MAX_TOP_LOGPROBS = 20
_LINE_KEYS = ("custom_id", "method", "url", "body")
_PARAMS = frozenset(each.name for each in dataclasses.fields(SamplingParams)) - {
    "logprobs",
    "prompt_logprobs",
    "logits_processors",
}
_PASSED_OVER = frozenset(
    ("model", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
}
"""Fields that are not supported, and the values that ask for nothing."""

_UNSUPPORTED = (
    "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "prompt_logprobs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "logits_processors", "use_beam_search", "truncate_prompt_tokens", "priority",
)  # fmt: skip
_COMPLETION_KEYS = ("prompt", "max_tokens", "echo", "logprobs")
_CHAT_OWN = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs")
_CHAT_KEYS = tuple(key for key in CHAT_KEYS if key != "tools")


class FieldError(ConfigError):
    """A field of a request that cannot be used; `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants to see. wants_new: False for max_tokens 0."""

    is_chat: bool
    model: str
    echo: bool = False
    wants_new: bool = True
    logprobs: int | None = None


@dataclass(frozen=True)
class OpenAILines:
    """Lines of one batch file.

    defaults, seed: as for our own lines. job: the digest of the job. created: Unix time.
    model_name: what answers say where a request names no model. tokenizer: for texts of prompts
    that are echoed.
    """

    defaults: SamplingParams
    seed: int
    job: str
    created: int
    model_name: str
    tokenizer: Tokenizer | None

    def parse(self, line: RawLine) -> Record:
        """Returns the record of a line; what is wrong with it is its `error`."""
        record = Record(line.number, None)
        try:
            values = load_line(line)
            _take_custom_id(record, values)
            body = _body_of(values)
            if values["url"] == CHAT:
                self._fill_chat(record, body)
            else:
                self._fill_completion(record, body)
            assert record.params is not None
            record.params = seeded(record.params, self.seed, record)
        except ConfigError as error:
            record.error = error
        return record

    def _fill_completion(self, record: Record, body: dict[str, Any]) -> None:
        _check_fields(body, (*_COMPLETION_KEYS, *_PARAMS))
        record.prompts = _prompts_of(body.get("prompt"))
        limit = body.get("max_tokens")
        if limit is None:
            limit = self.defaults.max_tokens or COMPLETION_TOKENS
        wants_new = not (is_integer(limit) and limit == 0)
        echo = _flag(body, "echo")
        count = _count(body, "logprobs")
        prompt_count = count if echo else None
        record.params = _params(
            self.defaults,
            body,
            max_tokens=limit if wants_new else 1,  # one is drawn and dropped
            logprobs=count if wants_new else None,
            prompt_logprobs=prompt_count,
            **({} if wants_new else {"n": 1, "min_tokens": 0}),
        )
        record.body = Asked(False, self._model(body), echo, wants_new, count)

    def _fill_chat(self, record: Record, body: dict[str, Any]) -> None:
        _check_fields(body, (*_CHAT_OWN, *_CHAT_KEYS, *_PARAMS))
        limits = _limits(body)
        if body.get("messages") is None:
            raise FieldError("messages", "messages is missing")
        wants, top = _flag(body, "logprobs"), _count(body, "top_logprobs")
        if top is not None and not wants:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        chat = {key: body[key] for key in _CHAT_KEYS if body.get(key) is not None}
        record.prompts = [Chat(body["messages"], **chat)]
        count = (top or 0) if wants else None
        more = {"max_tokens": limits[0]} if limits else {}
        record.params = _params(self.defaults, body, logprobs=count, **more)
        record.body = Asked(True, self._model(body), logprobs=count)

    def _model(self, body: Mapping[str, Any]) -> str:
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise FieldError("model", f"model must be text, got {shown(model)}")
        return model or self.model_name

    def result(self, record: Record, results: Sequence[RequestOutput]) -> bytes:
        """Returns the line of an answered record."""
        asked: Asked = record.body
        choices: list[dict[str, Any]] = []
        num_prompt = num_new = 0
        for prompt, result in zip(record.prompts, results, strict=True):
            num_prompt += len(result.prompt_token_ids)
            for output in result.outputs:
                place = len(choices)
                if asked.is_chat:
                    choices.append(chat_choice(place, output, top=asked.logprobs))
                else:
                    echoed = self._echoed(asked, prompt, result.prompt_token_ids)
                    choices.append(completion_choice(place, asked, result, output, echoed))
                num_new += len(output.token_ids) if asked.wants_new else 0
        name = "chatcmpl" if asked.is_chat else "cmpl"
        body = {
            "id": f"{name}-{self._digest(record, 'answer')}",
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": self.created,
            "model": asked.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_new,
                "total_tokens": num_prompt + num_new,
            },
        }
        return self._line(record, 200, body, None)

    def _echoed(
        self, asked: Asked, prompt: str | list[Any] | Chat, ids: Sequence[int]
    ) -> Echoed | None:
        if not asked.echo:
            return None
        decode = self.tokenizer
        if isinstance(prompt, str):
            text = prompt
        else:
            text = "" if decode is None else decode.decode(ids, skip_special_tokens=False)
        return Echoed(text, None if decode is None else decode.token_text(ids[0]))

    def failure(self, record: Record, error: Exception) -> bytes:
        """Returns the line of a record that failed."""
        is_ours = not isinstance(error, ConfigError)
        field = error.field if isinstance(error, FieldError) else None
        kind = "server_error" if is_ours else "invalid_request_error"
        code = type(error).__name__ if is_ours else "invalid_request"
        said = {"message": message_of(error), "type": kind, "param": field, "code": code}
        brief = {"type": kind, "code": code, "message": said["message"], "param": field}
        return self._line(record, 500 if is_ours else 400, {"error": said}, brief)

    def _line(self, record: Record, status: int, body: Any, error: Any) -> bytes:
        return dump_line(
            {
                "id": record_id(self._digest(record, "line"), record.number),
                "custom_id": record.id,
                "response": {
                    "status_code": status,
                    "request_id": f"req_{self._digest(record, 'request')}",
                    "body": body,
                },
                "error": error,
            }
        )

    def _digest(self, record: Record, what: str) -> str:
        """32 hexadecimal digits of the job, the custom_id and the line."""
        text = json.dumps([self.job, what, record.id, record.number])
        return blake2b(text.encode(), digest_size=16).hexdigest()


def is_openai(line: RawLine) -> bool:
    """Whether a file that begins with this line is one of OpenAI's. One that cannot be read tells
    it by the key alone: a pipe has to be answered before another line comes."""
    try:
        values = load_line(line)
    except ConfigError:
        return b'"custom_id"' in (line.data or b"")
    return "custom_id" in values or ("url" in values and "body" in values)


def _take_custom_id(record: Record, values: dict[str, Any]) -> None:
    given = values.get("custom_id")
    if not isinstance(given, str) or not given:
        raise FieldError("custom_id", f"custom_id must be text that is not empty, got {given!r}")
    record.id, record.has_own_id = given, True


def _body_of(values: dict[str, Any]) -> dict[str, Any]:
    for key in values:
        if key not in _LINE_KEYS:
            raise FieldError(key, explain_unknown("unknown key", key, _LINE_KEYS, {}))
    if values.get("method") != "POST":
        raise FieldError("method", f"method must be POST, got {shown(values.get('method'))}")
    if values.get("url") not in (COMPLETIONS, CHAT):
        raise FieldError(
            "url", f"url must be {COMPLETIONS} or {CHAT}, got {shown(values.get('url'))}"
        )
    body = values.get("body")
    if not isinstance(body, dict):
        raise FieldError("body", f"body must be an object, got {shown(body)}")
    return body


def _check_fields(body: dict[str, Any], known: Sequence[str]) -> None:
    for key, value in body.items():
        if value is None or key in known or key in _PASSED_OVER:
            continue
        if key in _NEUTRAL or key in _UNSUPPORTED:
            if value in _NEUTRAL.get(key, ()):
                continue
            raise FieldError(key, f"{key} is not supported here, got {shown(value)}")
        names = [*known, *_NEUTRAL, *_PASSED_OVER]
        raise FieldError(key, explain_unknown("unknown field", key, names, {}))


def _limits(body: Mapping[str, Any]) -> list[int]:
    """What a chat says of max_tokens, under its old and its new name."""
    names = ("max_completion_tokens", "max_tokens")
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in found.items():
        if not is_integer(value) or value < 1:
            raise FieldError(name, f"{name} must be an integer of at least 1, got {shown(value)}")
    if len(set(found.values())) > 1:
        raise FieldError(
            "max_tokens", "max_tokens and max_completion_tokens are the same thing and differ"
        )
    return list(found.values())


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise FieldError(key, f"{key} must be true or false, got {shown(value)}")
    return bool(value)


def _count(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and not (is_integer(value) and 0 <= value <= MAX_TOP_LOGPROBS):
        raise FieldError(
            key, f"{key} must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {shown(value)}"
        )
    return value


def _params(defaults: SamplingParams, body: Mapping[str, Any], **own: Any) -> SamplingParams:
    """The parameters of a body; a wrong one is found by trying them one by one."""
    given = {key: body[key] for key in body if key in _PARAMS and body[key] is not None} | own
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        try:
            SamplingParams.from_dict({key: value})
        except ConfigError as error:
            raise FieldError(key, str(error)) from None
    return override(dataclasses.replace(defaults, logprobs=None, prompt_logprobs=None), given)


def _prompts_of(prompt: Any) -> list[str | list[Any] | Chat]:
    """One prompt or several, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(is_integer(each) for each in prompt):
            return [prompt]
        if all(isinstance(each, str) or _is_ids(each) for each in prompt):
            return list(prompt)
    raise FieldError(
        "prompt", f"prompt must be text, token ids, or a list of either, got {shown(prompt)}"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(is_integer(each) for each in value)
