"""Requests and results: what a user asks for and what comes back."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from fastdecode_rdma.errors import ConfigError

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy, as in vLLM."""

_MAX_SAMPLES = 1024
_HINTS = {
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens (it counts new tokens only)",
    "max_completion_tokens": "use max_tokens",
    "do_sample": "use temperature=0.0 for greedy decoding",
    "num_return_sequences": "use n",
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids",
    "best_of": "use n and choose among the outputs",
    "num_beams": "beam search is not supported",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "early_stopping": "beam search is not supported",
}
_UNSUPPORTED = frozenset(
    {
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "prompt_logprobs",
        "detokenize",
        "bad_words",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "logits_processors",
        "truncate_prompt_tokens",
        "output_kind",
        "structured_outputs",
        "guided_decoding",
        "extra_args",
        "no_repeat_ngram_size",
        "typical_p",
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and defaults are vLLM's, except `max_tokens`.

    n: samples per prompt; the prompt is prefilled once.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: in (0, 1]. min_p: relative to the most
        probable token. Applied in the order temperature, min_p, top_k, top_p.
    seed: noise depends on (seed, sample index, output position) only; None draws one.
    stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
    stop_token_ids: tokens that end a sequence besides the model's end-of-sequence ones.
    max_tokens: new tokens at most; None means as many as fit in the model.
    min_tokens: nothing stops a sequence that is shorter.
    logprobs: None, or how many top log-probabilities to return per token (0: the chosen one only;
        -1: the whole vocabulary).

    Raises:
        ConfigError: a value is out of range, or a keyword is unknown (the nearest one is named).
    """

    n: int = 1
    _: KW_ONLY
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        # Runs before the generated __init__, whose own complaint is a bare TypeError.
        known = [f.name for f in fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise ConfigError("; ".join(_explain_unknown(name, known) for name in unknown))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_int("n", self.n, low=1, high=_MAX_SAMPLES)
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, exclude_low=True)
        _check_int("top_k", self.top_k, low=-1)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("seed", self.seed, low=-(1 << 63), high=(1 << 64) - 1, optional=True)
        _check_int("max_tokens", self.max_tokens, low=1, optional=True)
        _check_int("min_tokens", self.min_tokens, low=0)
        _check_int("logprobs", self.logprobs, low=-1, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token before temperature and filters. `rank` 1 is the most probable."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class TokenEvent:
    """One step of one sample, in the order of decoding.

    `text` is what became certain with this token, possibly nothing: the texts of a sample
    concatenate to its whole text. `logprob` and `top_logprobs` are None unless asked for.
    `finish_reason` is None, "stop", "length", "abort" or "error"; `stop_reason` is the stop string
    or stop token id that ended it (None for end of sequence). `error` is set with "error".
    """

    request_index: int
    sample_index: int
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    @classmethod
    def failure(cls, request_index: int, error: Exception) -> TokenEvent:
        """Returns the event that ends a request which failed."""
        return cls(request_index, 0, None, "", finish_reason="error", error=error)


@dataclass(slots=True)
class CompletionOutput:
    """One finished sample. `logprobs` has one dict per token when they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Tells whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt, in the order of the prompts.

    `seed` is the request's own or the one that was drawn for it; `error` is why it failed.
    """

    index: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    seed: int | None = None
    error: Exception | None = None

    @property
    def request_id(self) -> str:
        """The index as text, under vLLM's name."""
        return str(self.index)


def _explain_unknown(name: str, known: list[str]) -> str:
    if name in _HINTS:
        return f"SamplingParams has no {name!r}: {_HINTS[name]}"
    if name in _UNSUPPORTED:
        return f"SamplingParams: {name!r} is not supported"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    nearest = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
    return f"SamplingParams has no {name!r}: {nearest}"


def _is_int(value: Any) -> bool:
    # bool is an int to Python, numpy's integers are not: accept what indexes, refuse True.
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check_int(
    name: str, value: Any, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    if value is None and optional:
        return
    if not _is_int(value):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def _check_number(
    name: str, value: Any, *, low: float, high: float = math.inf, exclude_low: bool = False
) -> None:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):  # arrays have __float__, too
        raise ConfigError(f"{name} must be one number, got {value!r}") from None
    if not math.isfinite(number) or not low <= number <= high or (exclude_low and number == low):
        bound = f"above {low}" if exclude_low else f"at least {low}"
        allowed = bound if high == math.inf else f"{bound} and at most {high}"
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if not isinstance(stop, Iterable):
        raise ConfigError(f"stop must be a string or strings, got {stop!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop must hold strings that are not empty, got {string!r}")
    return strings


def _token_ids(token_ids: Iterable[Any] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str):
        raise ConfigError(f"stop_token_ids must be a list of token ids, got {token_ids!r}")
    ids = tuple(token_ids)
    for token_id in ids:
        if not _is_int(token_id) or token_id < 0:
            raise ConfigError(f"stop_token_ids must hold token ids, got {token_id!r}")
    return tuple(int(token_id) for token_id in ids)
