"""Choices of OpenAI's answers: texts, messages and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastdecode_rdma.batch.json_lines import finite_logprob
from fastdecode_rdma.sequence import CompletionOutput, Logprob, RequestOutput


class Wish(Protocol):
    """What a completion is to show."""

    echo: bool
    wants_new: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class Echoed:
    """A prompt that is shown: its text, and that of its first token, which has no entry."""

    text: str
    first_token: str | None


def completion_choice(
    index: int,
    wish: Wish,
    result: RequestOutput,
    output: CompletionOutput,
    echoed: Echoed | None,
) -> dict[str, Any]:
    """Returns a choice of /v1/completions. With `echoed` text and log-probabilities begin with the
    prompt's."""
    entries: list[tuple[int, Mapping[int, Logprob] | None]] = []
    if echoed is not None and wish.logprobs is not None:
        assert result.prompt_logprobs is not None
        entries += zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
    if wish.wants_new and output.logprobs is not None:
        entries += zip(output.token_ids, output.logprobs, strict=True)
    text = output.text if wish.wants_new else ""
    if echoed is not None:
        text = echoed.text + text
    first = "" if echoed is None else echoed.first_token or ""
    return {
        "index": index,
        "text": text,
        "logprobs": None if wish.logprobs is None else _legacy_logprobs(entries, first),
        "finish_reason": output.finish_reason if wish.wants_new else "length",
        "stop_reason": output.stop_reason if wish.wants_new else None,
    }


def _legacy_logprobs(
    entries: Iterable[tuple[int, Mapping[int, Logprob] | None]], first: str
) -> dict[str, Any]:
    """Four lists with an item per token. The first token of a prompt, whose text is `first`, has no
    log-probability. `top_logprobs` holds the token's own beside the most probable ones; of tokens
    with the same text it has the more probable one.
    """
    texts: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    place = 0
    for token_id, entry in entries:
        text = first if entry is None else entry[token_id].decoded_token or ""
        texts.append(text)
        offsets.append(place)
        place += len(text)
        logprobs.append(None if entry is None else finite_logprob(entry[token_id].logprob))
        tops.append(None if entry is None else _by_text(entry.values()))
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _by_text(candidates: Iterable[Logprob]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in sorted(candidates, key=lambda each: -each.logprob):
        found.setdefault(each.decoded_token or "", finite_logprob(each.logprob))
    return found


def chat_choice(index: int, output: CompletionOutput, *, top: int | None) -> dict[str, Any]:
    """Returns a choice of /v1/chat/completions."""
    content = None
    if top is not None:
        assert output.logprobs is not None
        content = [
            _chat_position(entry, token_id, top)
            for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _chat_position(entry: Mapping[int, Logprob], token_id: int, top: int) -> dict[str, Any]:
    ranked: Sequence[Logprob] = sorted(entry.values(), key=lambda each: -each.logprob)[:top]
    return {**_chat_token(entry[token_id]), "top_logprobs": [_chat_token(e) for e in ranked]}


def _chat_token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {
        "token": text,
        "logprob": finite_logprob(logprob.logprob),
        "bytes": list(text.encode("utf-8", "surrogatepass")),
    }
