"""Prompts as users write them -> token ids, with every mistake named at the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""

MAX_NAMED = 10
"""Bad prompts named one by one in an error; the rest are counted."""


def is_single_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt rather than several: text, a list of ids or of messages."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype.kind in "iu"
    if isinstance(prompts, (list, tuple)) and prompts:
        return all(_is_int(p) for p in prompts) or all(isinstance(p, Mapping) for p in prompts)
    return False


def as_iterable(prompts: object) -> Iterable[Any]:
    """Returns several prompts as what they are to be read from: a Sequence is checked at once,
    anything else is pulled lazily.

    Raises:
        ConfigError: it is no collection of prompts, or one without an order.
    """
    if isinstance(prompts, np.ndarray) and prompts.ndim:
        return list(prompts)
    if isinstance(prompts, (Mapping, Set, bytes, bytearray, memoryview, np.ndarray)) or not (
        isinstance(prompts, Iterable)
    ):
        raise ConfigError(
            f"{type(prompts).__name__} is no prompt; expected text, token ids, chat messages or "
            "an iterable of them, in order"
        )
    return prompts


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class PromptEncoder:
    """Turns prompts into ids and checks them against the model's vocabulary and length."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids of one prompt, int64 [L].

        Raises:
            ConfigError: no prompt, empty, an id outside the vocabulary, or no room for an answer.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer("text").encode(prompt)
        elif isinstance(prompt, Mapping):
            raise ConfigError("a dict is no prompt; a chat is a list of messages")
        elif isinstance(prompt, (list, tuple, np.ndarray)):
            ids = self._encode_list(prompt)
        else:
            raise ConfigError(
                f"{type(prompt).__name__} is no prompt; expected text, token ids or chat messages"
            )
        return self._check(ids)

    def _encode_list(self, prompt: Sequence[Any]) -> Sequence[int]:
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or (len(prompt) and prompt.dtype.kind not in "iu"):
                raise ConfigError(
                    "token ids must be a list of integers, got an array of "
                    f"{prompt.ndim} dimensions and dtype {prompt.dtype}"
                )
            return prompt.tolist()
        if len(prompt) and isinstance(prompt[0], Mapping):
            if not all(isinstance(m, Mapping) for m in prompt):
                raise ConfigError("a chat is a list of messages, all of them dicts")
            return self._tokenizer("chat messages").encode_chat(prompt)
        for place, value in enumerate(prompt):
            if not _is_int(value):
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
        for place, token_id in enumerate(ids):  # as Python numbers: any of them may be huge
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"token id {token_id} at place {place} is outside the vocabulary of "
                    f"{self.vocab_size}"
                )
        return np.asarray(ids, np.int64)


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
    text = prompt if isinstance(prompt, str) else None
    return CheckedPrompt(index, text, encode(prompt), params)


def _next_params(each: Iterator[SamplingParams]) -> SamplingParams:
    try:
        return _as_params(next(each))
    except StopIteration:
        raise ConfigError("there are fewer sampling params than prompts") from None


def _as_params(value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise ConfigError(f"expected SamplingParams for each prompt, got {type(value).__name__}")
    return value
