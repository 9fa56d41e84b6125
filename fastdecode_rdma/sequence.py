"""Requests and results: what a user asks for and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from fastdecode_rdma import param_checks as check
from fastdecode_rdma.errors import ConfigError

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy, as in vLLM."""

_MAX_SAMPLES = 1024
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and defaults are vLLM's, except `max_tokens`.

    Parameters act in this order, vLLM's: allowed_token_ids, bad_words, min_tokens, logit_bias,
    logits_processors, repetition_penalty, frequency_penalty, presence_penalty; then greedy choice,
    or temperature, min_p, top_k, top_p and the draw.

    n: samples per prompt; the prompt is prefilled once.
    presence_penalty, frequency_penalty: from -2 to 2; taken from the logit of a token that the
        output holds, once, and once for each time. repetition_penalty: above 0; divides positive
        logits (multiplies negative ones) of tokens in prompt or output.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: in (0, 1]. min_p: relative to the most
        probable token.
    seed: noise depends on (seed, sample index, output position) only; None draws one.
    stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
    stop_token_ids: tokens that end a sequence besides the model's end-of-sequence ones, which
        `ignore_eos` makes ordinary tokens.
    bad_words: strings, or lists of token ids. The last token of one is forbidden where it would
        complete it in the output; a string counts with and without a space before it.
    logit_bias: {token id: from -100 to 100}, added to logits. allowed_token_ids: no others.
    logits_processors: callables (output_token_ids, logits) or (prompt_token_ids, output_token_ids,
        logits), called for every token in the engine's thread. `logits` is a fp32 tensor [V] to
        change in place, or another is returned. The lists of ids grow from call to call and must
        not be changed. An error ends this request alone. Calls repeat for no token, also after a
        lost worker; one that keeps state of its own serves one sequence.
    max_tokens: new tokens at most; None means as many as fit in the model.
    min_tokens: nothing stops a sequence that is shorter.
    logprobs: None, or how many top log-probabilities to return per token (0: the chosen one only;
        -1: the whole vocabulary). They are the model's own, before everything above. More than 20
        are given for as many tokens as memory allows: 16,777,216 values in all.
    prompt_logprobs: the same for the prompt's tokens.
    detokenize: False leaves all texts empty.
    skip_special_tokens, spaces_between_special_tokens: whether texts leave special tokens out, and
        how they are joined if not.

    Raises:
        ConfigError: a value is out of range, or a keyword is unknown (the nearest one is named).
    """

    n: int = 1
    _: KW_ONLY
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        # Runs before the generated __init__, whose own complaint is a bare TypeError.
        known = [f.name for f in fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise ConfigError(check.explain_unknown_params(unknown, known))
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Returns the parameters that a mapping (a JSON object) spells out; null is the default.

        Raises:
            ConfigError: as the constructor.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"sampling parameters must be an object of names and values, got {values!r}"
            )
        known = [f.name for f in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ConfigError(check.explain_unknown_params(unknown, known))
        return cls(**{name: value for name, value in values.items() if value is not None})

    def __post_init__(self) -> None:
        check.check_int("n", self.n, low=1, high=_MAX_SAMPLES)
        check.check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check.check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check.check_number("repetition_penalty", self.repetition_penalty, low=0.0, exclude_low=True)
        check.check_number("temperature", self.temperature, low=0.0)
        check.check_number("top_p", self.top_p, low=0.0, high=1.0, exclude_low=True)
        check.check_int("top_k", self.top_k, low=-1)
        check.check_number("min_p", self.min_p, low=0.0, high=1.0)
        check.check_int("seed", self.seed, low=-(1 << 63), high=(1 << 64) - 1, optional=True)
        check.check_int("max_tokens", self.max_tokens, low=1, optional=True)
        check.check_int("min_tokens", self.min_tokens, low=0)
        check.check_int("logprobs", self.logprobs, low=-1, optional=True)
        check.check_int("prompt_logprobs", self.prompt_logprobs, low=-1, optional=True)
        for name in _FLAGS:
            check.check_bool(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})"
            )
        checked = {
            "stop": check.stop_strings(self.stop),
            "stop_token_ids": check.token_ids("stop_token_ids", self.stop_token_ids),
            "bad_words": check.bad_words(self.bad_words),
            "logit_bias": check.logit_bias(self.logit_bias),
            "allowed_token_ids": check.allowed_token_ids(self.allowed_token_ids),
            "logits_processors": check.logits_processors(self.logits_processors),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.stop and not self.detokenize:
            raise ConfigError("stop strings need detokenize=True; or use stop_token_ids")

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
    concatenate to its whole text. `logprob` and `top_logprobs` (token id -> Logprob, the token's
    own first, then by rank; made when it is looked at) are None unless asked for.
    `finish_reason` is None, "stop", "length", "abort" or "error"; `stop_reason` is the stop string
    or stop token id that ended it (None for end of sequence). `error` is set with "error".
    `prompt_logprobs` comes with the first event of a request that asked for them: a
    prompt_logprobs.PromptLogprobs, whose dicts are built as they are looked at.
    """

    request_index: int
    sample_index: int
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: Mapping[int, Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    @classmethod
    def failure(cls, request_index: int, error: Exception) -> TokenEvent:
        """Returns the event that ends a request which failed."""
        return cls(request_index, 0, None, "", finish_reason="error", error=error)


@dataclass(slots=True)
class CompletionOutput:
    """One finished sample. `logprobs`, when asked for, has token id -> Logprob for each token: a
    mapping that is filled when it is looked at; `dict()` makes a plain one."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Tells whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt, in the order of the prompts.

    `seed` is the request's own or the one that was drawn for it; `error` is why it failed.
    `prompt_logprobs`, when asked for, has an entry per prompt token: None for the first, then token
    id -> Logprob, the prompt's own token first.
    """

    index: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    seed: int | None = None
    error: Exception | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def request_id(self) -> str:
        """The index as text, under vLLM's name."""
        return str(self.index)
