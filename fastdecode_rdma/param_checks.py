"""Checks of sampling parameters: each mistake is one line that says what would be right."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from fastdecode_rdma.errors import ConfigError

MAX_LOGIT_BIAS = 100.0
"""As vLLM's server and OpenAI: -100 all but forbids a token, 100 all but forces it."""

_LIMITS = "it is not supported (see the limits in README.md)"
_BEAMS = "beam search is not supported (see the limits in README.md)"
_PROCESSOR = f"{_LIMITS}; a callable in logits_processors can do it"
_NOT_SAMPLING = "nothing depends on it here; leave it out"
_DRAFTS = "speculative decoding is not supported (see the limits in README.md)"
_CACHE = "the KV-cache is the workers': see kv_cache_dtype and max_model_len of the Generator"
_STATES = "hidden states and attention weights are not returned"
HINTS = {
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens (it counts new tokens only)",
    "max_completion_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens (it counts new tokens only)",
    "do_sample": "use temperature=0.0 for greedy decoding",
    "num_return_sequences": "use n",
    "stop_strings": "use stop",
    "stop_sequences": "use stop",
    "eos_token_id": "use stop_token_ids",
    "repeat_penalty": "use repetition_penalty",
    "bad_words_ids": "use bad_words, which takes lists of token ids, too",
    "suppress_tokens": "use bad_words=[[id], …]",
    "begin_suppress_tokens": _PROCESSOR,
    "sequence_bias": "use logit_bias (single tokens)",
    "logits_processor": "use logits_processors",
    "top_logprobs": "use logprobs",
    "output_scores": "use logprobs",
    "output_logits": "use logprobs",
    "max_time": "call cancel() or close(), or leave the loop, when the time is up",
    "pad_token_id": "nothing is padded; leave it out",
    "bos_token_id": "the tokenizer puts it before the prompt; leave it out",
    "decoder_start_token_id": "only decoder-only models are supported; leave it out",
    "return_dict_in_generate": "generate() streams events, complete() returns RequestOutput",
    "prefill_chunk_size": "see max_num_batched_tokens of the Generator",
    "token_healing": "cut the prompt's last token before the call",
    "renormalize_logits": "log-probabilities are normalised always; leave it out",
    "best_of": "use n and choose among the outputs",
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "beam_width": _BEAMS,
    "diversity_penalty": _BEAMS,
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "truncation_side": "cut the prompt's token ids before the call",
    "output_kind": "generate() streams deltas, complete() returns whole outputs",
    "logprob_token_ids": "use logprobs=-1 and pick the tokens",
    "prompt_logprob_token_ids": "use prompt_logprobs=-1 and pick the tokens",
    **dict.fromkeys(
        (
            "structured_outputs", "guided_decoding", "guided_json", "guided_regex",
            "guided_choice", "guided_grammar", "response_format", "no_repeat_ngram_size",
            "encoder_repetition_penalty", "exponential_decay_length_penalty", "typical_p",
            "epsilon_cutoff", "eta_cutoff", "top_h", "top_n_sigma", "penalty_alpha",
            "guidance_scale", "thinking_token_budget", "forced_bos_token_id",
            "forced_eos_token_id", "watermarking_config", "encoder_no_repeat_ngram_size",
            "remove_invalid_values", "xtc_probability", "dry_multiplier", "mirostat",
        ),
        _PROCESSOR,
    ),
    **dict.fromkeys(
        (
            "assistant_model", "assistant_confidence_threshold", "assistant_early_exit",
            "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind",
            "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
            "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp",
        ),
        _DRAFTS,
    ),
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "cache_config", "max_cache_len"), _CACHE
    ),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "extra_output_flags"), _STATES),
    **dict.fromkeys(
        (
            "compile_config", "disable_compile", "continuous_batching_config", "low_memory",
            "transformers_version", "request_id", "priority", "arrival_time",
        ),
        _NOT_SAMPLING,
    ),
    **dict.fromkeys(
        (
            "extra_args", "flat_logprobs", "stream_interval", "skip_clone",
            "skip_reading_prefix_cache", "repetition_detection", "trace_decode_token_ids",
            "routed_experts_prompt_start", "prompt_logprob_start", "output_text_buffer_length",
            "force_words_ids", "constraints", "dola_layers",
        ),
        _LIMITS,
    ),
}  # fmt: skip
"""Names of vLLM, transformers and others that we lack -> what to do."""


def explain_unknown(what: str, name: object, known: Sequence[str], hints: Mapping[str, str]) -> str:
    """Returns what to say of a name that is none of `known`; `what` introduces it, and `hints` has
    names of other libraries."""
    if name in hints:
        return f"{what} {name!r}: {hints[name]}"
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    nearest = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
    return f"{what} {name!r}: {nearest}"


def explain_unknown_params(names: Iterable[object], known: Sequence[str]) -> str:
    """Returns what to say of keywords that SamplingParams has not."""
    return "; ".join(explain_unknown("SamplingParams has no", name, known, HINTS) for name in names)


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or numpy. No bool, and no array or tensor of one
    element: that is a list."""
    is_plain = type(value) is int  # by far the most, and token ids come by the million
    return is_plain or (isinstance(value, Integral) and not isinstance(value, bool))


def check_bool(name: str, value: Any) -> None:
    """Raises ConfigError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def check_int(
    name: str, value: Any, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raises ConfigError unless the value is an integer from low to high, both included."""
    if value is None and optional:
        return
    if not is_integer(value):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def check_number(
    name: str, value: Any, *, low: float, high: float = math.inf, exclude_low: bool = False
) -> None:
    """Raises ConfigError unless the value is a finite number from low to high."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):  # arrays have __float__, too
        raise ConfigError(f"{name} must be one number, got {value!r}") from None
    except OverflowError:
        raise ConfigError(f"{name} must be a finite number, got an integer beyond it") from None
    if not math.isfinite(number) or not low <= number <= high or (exclude_low and number == low):
        bound = f"above {low}" if exclude_low else f"at least {low}"
        allowed = bound if high == math.inf else f"{bound} and at most {high}"
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Returns one stop string or several as a tuple."""
    if stop is None:
        return ()
    if not isinstance(stop, Iterable):
        raise ConfigError(f"stop must be a string or strings, got {stop!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop must hold strings that are not empty, got {string!r}")
    return strings


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Returns token ids without repetition, in order."""
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ConfigError(f"{name} must be a list of token ids, got {values!r}")
    ids = tuple(values)
    for token_id in ids:
        if not is_integer(token_id) or token_id < 0:
            raise ConfigError(f"{name} must hold token ids, got {token_id!r}")
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def allowed_token_ids(values: Any) -> tuple[int, ...] | None:
    """Returns the only tokens that may be chosen, or None for all."""
    ids = token_ids("allowed_token_ids", values)
    if values is not None and not ids:
        raise ConfigError("allowed_token_ids is empty: no token is left; None allows all")
    return None if values is None else ids


def eos_ids(value: object) -> tuple[int, ...]:
    """Returns what configs and callers say of eos_token_id (nothing, an id, several) as a tuple.

    Raises:
        ConfigError: it is none of these.
    """
    ids = () if value is None else (value,) if is_integer(value) else value
    if not isinstance(ids, (Sequence, Set)) or isinstance(ids, (str, bytes)):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    for token_id in ids:
        if not is_integer(token_id):
            raise ConfigError(f"eos_token_id must hold token ids, got {token_id!r}")
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def bad_words(values: Any) -> tuple[str | tuple[int, ...], ...]:
    """Returns words as they are and lists of token ids as tuples, without repetition."""
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ConfigError(
            f"bad_words must be a list of strings or of lists of token ids, got {values!r}"
        )
    words: list[str | tuple[int, ...]] = []
    for word in values:
        if isinstance(word, str):
            if not word.strip():
                raise ConfigError(f"bad_words must hold words that are not empty, got {word!r}")
            words.append(word)
        elif isinstance(word, Iterable) and not isinstance(word, (bytes, Mapping)):
            ids = tuple(word)
            if not ids or not all(is_integer(token_id) and token_id >= 0 for token_id in ids):
                raise ConfigError(
                    f"bad_words: a list must hold token ids and not be empty, got {word!r}"
                )
            words.append(tuple(int(token_id) for token_id in ids))
        else:
            raise ConfigError(f"bad_words must hold strings or lists of token ids, got {word!r}")
    return tuple(dict.fromkeys(words))


def logit_bias(values: Any) -> dict[int, float] | None:
    """Returns {token id: bias}; ids may be spelled as text, as JSON does."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"logit_bias must be a dict of token id -> bias, got {values!r}")
    biases: dict[int, float] = {}
    for key, bias in values.items():
        is_text_id = isinstance(key, str) and key.isascii() and key.isdigit()
        if not is_text_id and (not is_integer(key) or key < 0):
            raise ConfigError(f"logit_bias must have token ids as keys, got {key!r}")
        check_number(f"logit_bias[{key}]", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
        if int(key) in biases:
            raise ConfigError(f"logit_bias names token {int(key)} twice")
        biases[int(key)] = float(bias)
    return biases or None


def logits_processors(values: Any) -> tuple[Callable[..., Any], ...]:
    """Returns callables whose arguments are known."""
    if values is None:
        return ()
    if callable(values) or not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ConfigError(f"logits_processors must be a list of callables, got {values!r}")
    processors = tuple(values)
    for processor in processors:
        takes_prompt(processor)
    return processors


def takes_prompt(processor: Any) -> bool:
    """Whether a logits processor takes (prompt_token_ids, output_token_ids, logits); else it takes
    (output_token_ids, logits). Only arguments without a default count.

    Raises:
        ConfigError: it takes neither, or is not callable.
    """
    name = processor_name(processor)
    if not callable(processor):
        raise ConfigError(f"logits_processors must hold callables, got {name}")
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        signature = None
    for count, answer in ((2, False), (3, True)):
        try:
            if signature is not None:
                signature.bind(*range(count))
                return answer
        except TypeError:
            continue
    raise ConfigError(
        f"logits_processors: {name} must take (output_token_ids, logits) or "
        "(prompt_token_ids, output_token_ids, logits)"
    )


def processor_name(processor: Any) -> str:
    """How messages name a logits processor."""
    return getattr(processor, "__qualname__", None) or repr(processor)
