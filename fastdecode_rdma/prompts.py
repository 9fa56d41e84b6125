"""Prompts as users write them -> token ids, with every mistake named at the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np

from fastdecode_rdma.chat import Chat, shortened
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import is_integer
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Chat | Mapping[str, Any]
"""Text, token ids (a list, an array or a tensor), chat messages ({"role": …, "content": …}), a
Chat, or a dict: {"prompt": text}, {"prompt_token_ids": ids} or {"messages": …, what a Chat has}.
"""

MAX_NAMED = 10
"""Bad prompts named one by one in an error; the rest are counted."""

_DICT_KEYS = ("prompt_token_ids", "prompt", "messages")
_CHAT_KEYS = frozenset(field.name for field in fields(Chat))
_EXPECTED = "expected text, token ids, chat messages"


def is_single_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt rather than several: text, a list of ids or of messages."""
    if isinstance(prompts, (str, Chat)):
        return True
    if isinstance(prompts, Mapping):
        return any(key in prompts for key in _DICT_KEYS)
    if _is_array(prompts):
        return prompts.ndim == 1 and _as_numpy(prompts).dtype.kind in "iu"
    if isinstance(prompts, (list, tuple)) and prompts:
        if all(isinstance(p, Mapping) for p in prompts):
            return not all(is_single_prompt(p) and "role" not in p for p in prompts)
        return all(is_integer(p) for p in prompts)
    return False


def prompt_text(prompt: Prompt) -> str | None:
    """Returns the text that a prompt was given as, None for ids and chats."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def as_iterable(prompts: object) -> Iterable[Any]:
    """Returns several prompts as what they are to be read from: a Sequence is checked at once,
    anything else is pulled lazily.

    Raises:
        ConfigError: it is no collection of prompts, or one without an order.
    """
    if _is_array(prompts) and prompts.ndim:
        return list(_as_numpy(prompts))
    if isinstance(prompts, Mapping):
        raise ConfigError(_explain_dict(prompts))
    is_scalar = _is_array(prompts) or not isinstance(prompts, Iterable)
    if is_scalar or isinstance(prompts, (Set, bytes, bytearray, memoryview)):
        raise ConfigError(
            f"{type(prompts).__name__} is no prompt; {_EXPECTED} or an iterable of them, in order"
            + _bytes_hint(prompts)
        )
    return prompts


def _is_array(value: object) -> bool:
    """numpy's arrays and what can become one (tensors of torch), but no scalars of numpy."""
    return hasattr(value, "__array__") and hasattr(value, "ndim") and hasattr(value, "dtype")


def _as_numpy(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as exc:  # on a device, bfloat16, …
        raise ConfigError(f"{type(value).__name__} cannot be read as token ids: {exc}") from exc


def _bytes_hint(value: object) -> str:
    is_bytes = isinstance(value, (bytes, bytearray, memoryview))
    return "; decode bytes to text first" if is_bytes else ""


def _explain_dict(prompt: Mapping[str, Any]) -> str:
    if "input_ids" in prompt:
        return "a dict with 'input_ids' is no prompt; give prompt['input_ids'] itself"
    if "role" in prompt:
        return "one message is no prompt; a chat is a list of messages"
    keys = " or ".join(repr(key) for key in _DICT_KEYS)
    return f"a dict is a prompt if it has {keys}; got {', '.join(map(repr, prompt)) or 'none'}"


class PromptEncoder:
    """Turns prompts into ids and checks them against the model's vocabulary and length."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids of one prompt, int64 [L].

        An empty text is the tokenizer's BOS, if it adds one.

        Raises:
            ConfigError: no prompt, empty, an id outside the vocabulary, or no room for an answer.
        """
        if isinstance(prompt, Mapping):
            prompt = _open_dict(prompt)
        if isinstance(prompt, str):
            ids = self._tokenizer("text").encode(prompt)
            if not ids:
                raise ConfigError(
                    "the prompt is empty and the tokenizer adds no BOS token; at least one token "
                    "is needed"
                )
        elif isinstance(prompt, Chat):
            ids = self._encode_chat(prompt)
        elif isinstance(prompt, (list, tuple)) or _is_array(prompt):
            ids = self._encode_list(prompt)
        else:
            raise ConfigError(
                f"{type(prompt).__name__} is no prompt; {_EXPECTED}{_bytes_hint(prompt)}"
            )
        return self._check(ids)

    def _encode_chat(self, chat: Chat) -> Sequence[int]:
        ids = self._tokenizer("chat messages").encode_chat(chat)
        if not ids:
            raise ConfigError("the chat template made an empty prompt of the messages")
        return ids

    def _encode_list(self, prompt: Any) -> Sequence[int]:
        if _is_array(prompt):
            array = _as_numpy(prompt)
            if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
                raise ConfigError(
                    "token ids must be a list of integers, got an array of "
                    f"{array.ndim} dimensions and dtype {array.dtype}"
                )
            return array.tolist()
        if len(prompt) and isinstance(prompt[0], Mapping):
            if not all(isinstance(m, Mapping) for m in prompt):
                raise ConfigError("a chat is a list of messages, all of them dicts")
            return self._encode_chat(Chat(prompt))
        for place, value in enumerate(prompt):
            if not is_integer(value):
                raise ConfigError(
                    f"token ids must be integers, got {type(value).__name__} at place {place}"
                )
        return prompt

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"{what} needs a tokenizer, and this model has none; give token ids")
        return self.tokenizer

    def _check(self, ids: Sequence[int]) -> np.ndarray:
        if not len(ids):
            raise ConfigError("the prompt is empty; at least one token is needed")
        if len(ids) >= self.max_model_len:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens and max_model_len is {self.max_model_len}: "
                f"at most {self.max_model_len - 1} leave room for an answer"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:  # as Python numbers: they may be huge
            place = next(i for i, value in enumerate(ids) if not 0 <= value < self.vocab_size)
            raise ConfigError(
                f"token id {ids[place]} at place {place} is outside the vocabulary of "
                f"{self.vocab_size}"
            )
        return np.asarray(ids, np.int64)


def _open_dict(prompt: Mapping[str, Any]) -> Any:
    """Returns what a dict holds: text, ids or a Chat.

    Raises:
        ConfigError: it has none of them, or something besides.
    """
    kind = next((key for key in _DICT_KEYS if key in prompt), None)
    if kind is None:
        raise ConfigError(_explain_dict(prompt))
    allowed = _CHAT_KEYS if kind == "messages" else ("prompt_token_ids", "prompt")
    unknown = [key for key in prompt if key not in allowed]
    if unknown:
        raise ConfigError(
            f"a prompt with {kind!r} cannot have {unknown[0]!r}, only {', '.join(sorted(allowed))}"
        )
    if kind == "messages":
        return Chat(**prompt)
    value = prompt[kind]
    is_list = isinstance(value, (list, tuple)) or _is_array(value)
    if is_list and not (isinstance(value, (list, tuple)) and any(map(_is_message, value))):
        return value
    if kind == "prompt" and isinstance(value, str):
        return value
    expected = "text or token ids" if kind == "prompt" else "a list of token ids"
    raise ConfigError(f"{kind!r} must be {expected}, got {shortened(value)}")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping)


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt ready to run. `text` is None when ids or messages were given."""

    index: int
    text: str | None
    ids: np.ndarray  # int64 [L]
    params: SamplingParams


def check_all(
    prompts: Sequence[Prompt],
    params: SamplingParams | Iterable[SamplingParams],
    encode: Callable[[Prompt], np.ndarray],
    check_params: Callable[[SamplingParams, np.ndarray], None],
) -> list[CheckedPrompt]:
    """Checks a whole list of prompts.

    Raises:
        ConfigError: names every bad prompt by its index.
    """
    if not isinstance(params, SamplingParams):
        params = list(islice(params, len(prompts) + 1))  # the source may be endless
        if len(params) != len(prompts):
            count = "more" if len(params) > len(prompts) else f"only {len(params)}"
            raise ConfigError(
                f"got {len(prompts)} prompts and {count} sampling params; give one for all or one "
                "for each"
            )
    checked: list[CheckedPrompt] = []
    bad: list[str] = []
    for index, prompt in enumerate(prompts):
        try:
            mine = params if isinstance(params, SamplingParams) else _as_params(params[index])
            checked.append(_checked(index, prompt, encode, mine))
            check_params(mine, checked[-1].ids)
        except ConfigError as error:
            bad.append(f"prompt {index}: {error}")
    if bad:
        more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ConfigError("; ".join(bad[:MAX_NAMED]) + more)
    return checked


def check_lazily(
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams],
    encode: Callable[[Prompt], np.ndarray],
    check_params: Callable[[SamplingParams, np.ndarray], None],
) -> Iterator[CheckedPrompt | tuple[int, ConfigError]]:
    """Like check_all for a source that is pulled as the batch has room.

    A bad prompt ends nothing: its index comes with the ConfigError.
    """
    each = None if isinstance(params, SamplingParams) else iter(params)
    for index, prompt in enumerate(prompts):
        try:
            mine = params if each is None else _next_params(each)
            checked = _checked(index, prompt, encode, mine)
            check_params(mine, checked.ids)
        except ConfigError as error:
            yield index, ConfigError(f"prompt {index}: {error}")
        else:
            yield checked


def _checked(
    index: int, prompt: Prompt, encode: Callable[[Prompt], np.ndarray], params: SamplingParams
) -> CheckedPrompt:
    return CheckedPrompt(index, prompt_text(prompt), encode(prompt), params)


def _next_params(each: Iterator[SamplingParams]) -> SamplingParams:
    try:
        return _as_params(next(each))
    except StopIteration:
        raise ConfigError("there are fewer sampling params than prompts") from None


def _as_params(value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise ConfigError(f"expected SamplingParams for each prompt, got {type(value).__name__}")
    return value
