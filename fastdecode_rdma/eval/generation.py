"""The generation arguments of a task (`generation_kwargs`) -> SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import explain_unknown
from fastdecode_rdma.sequence import SamplingParams

SAMPLING = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in ("n", "stop", "max_tokens", "detokenize", "logprobs", "prompt_logprobs")
    and field.name not in ("include_stop_str_in_output", "logits_processors")
)
"""Parameters that a task may set by our names."""
ALIASES = {"min_new_tokens": "min_tokens", "stop": "until"}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}
"""Parameters of transformers that change nothing here with these values."""
HINTS = {
    "max_length": "it counts the prompt, too; give max_gen_toks",
    "num_beams": "there is no beam search; leave it out or give 1",
    "num_return_sequences": "one answer is made of each request; the task's `repeats` asks again",
    "use_cache": "the KV-cache is always used; leave it out",
    "n": "one answer is made of each request; the task's `repeats` asks again",
}


@dataclass(frozen=True)
class Generation:
    """How one request is answered. `until` are the strings that end its text, `params` without
    them."""

    params: SamplingParams
    until: tuple[str, ...]
    max_gen_toks: int


def read_generation(kwargs: object, *, default_max_gen_toks: int) -> Generation:
    """Reads a request's generation arguments.

    Raises:
        ConfigError: one is unknown, or its value cannot be used.
    """
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"generation_kwargs must be a dict, got {type(kwargs).__name__}")
    given = {}
    for name, value in kwargs.items():
        if name in NEUTRAL and value in NEUTRAL[name]:
            continue
        given[ALIASES.get(name, name)] = value
    try:
        read: dict[str, Any] = dict(normalize_gen_kwargs(given, default_max_gen_toks))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation_kwargs: {error}") from error
    until = _stop_strings(read.pop("until"))
    max_gen_toks, do_sample = read.pop("max_gen_toks"), read.pop("do_sample")
    unknown = [name for name in read if name not in SAMPLING]
    if unknown:
        known = ("until", "max_gen_toks", "do_sample", *SAMPLING)
        raise ConfigError(
            "; ".join(explain_unknown("generation_kwargs has", n, known, HINTS) for n in unknown)
        )
    if not do_sample:
        read["temperature"] = 0.0
    if max_gen_toks < 1:
        raise ConfigError(f"max_gen_toks must be at least 1, got {max_gen_toks}")
    return Generation(SamplingParams(max_tokens=max_gen_toks, **read), until, max_gen_toks)


def _stop_strings(until: object) -> tuple[str, ...]:
    strings = until if isinstance(until, (list, tuple)) else [until]
    for text in strings:
        if not isinstance(text, str):
            raise ConfigError(f"until must be text or a list of texts, got {until!r}")
    return tuple(text for text in strings if text)  # an empty one ends nothing
