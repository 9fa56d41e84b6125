"""What changes a sequence's logits before a token is chosen, in one order, vLLM's:

    allowed_token_ids       -inf for all others
    bad_words               -inf for a last token that would complete one in the output
    min_tokens              -inf for whatever would end the sequence too early
    logit_bias              is added
    logits_processors       one after another
    repetition_penalty      of tokens in prompt or output: x / penalty if x > 0, else x * penalty
    frequency_penalty       of tokens in the output: x - penalty * (how many times)
    presence_penalty        of tokens in the output: x - penalty

Then `sampling.sample` chooses: greedily, or by temperature, min_p, top_k, top_p and a draw. The
log-probabilities that are reported are the model's own, before all this.

Rules are compiled once per SamplingParams and shared; a state belongs to one sequence. What it does
is a function of the ids alone, so batch neighbours, preemption and replay cannot change it. Tokens
are counted as they come: a step costs O(distinct tokens), not O(vocabulary) or O(length).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdecode_rdma.errors import ConfigError, SamplingError
from fastdecode_rdma.param_checks import processor_name, takes_prompt
from fastdecode_rdma.sequence import SamplingParams

MAX_COMPILED = 64
"""Compiled rules kept at hand: programs mostly use one SamplingParams, or one per prompt."""


@dataclass(slots=True, eq=False)
class LogitRules:
    """The rules of one SamplingParams, ready to apply; ids are int64 arrays."""

    params: SamplingParams
    allowed: np.ndarray | None
    forbidden: np.ndarray  # bad words of one token
    endings: dict[int, list[tuple[list[int], int]]]  # token before the last -> (all before, last)
    stops: np.ndarray  # what min_tokens forbids
    bias_ids: np.ndarray
    biases: np.ndarray  # fp32
    processors: list[tuple[Callable[..., Any], bool]]  # and whether it takes the prompt
    has_penalties: bool
    is_lasting: bool  # beyond min_tokens

    def start(self, prompt_ids: np.ndarray, output_ids: list[int]) -> LogitState:
        """Returns the state of a sequence, which follows `output_ids` as they grow."""
        return LogitState(self, prompt_ids, output_ids)


class LogitState:
    """One sequence under its rules."""

    __slots__ = ("_counts", "_output_ids", "_prompt_ids", "_prompt_list", "_rules", "_shown_ids")

    def __init__(self, rules: LogitRules, prompt_ids: np.ndarray, output_ids: list[int]) -> None:
        self._rules = rules
        self._prompt_ids = prompt_ids
        self._output_ids = output_ids
        self._prompt_list: list[int] | None = None
        self._shown_ids: list[int] = []  # what logits processors are given
        self._counts: _TokenCounts | None = None

    @property
    def is_active(self) -> bool:
        """Whether the rules say anything of the next token."""
        return self._rules.is_lasting or self._is_short

    @property
    def _is_short(self) -> bool:
        return len(self._output_ids) < self._rules.params.min_tokens

    def apply_(self, logits: np.ndarray) -> int:
        """Changes logits (fp32 [V]) in place; returns the lowest id of the largest one.

        Raises:
            SamplingError: no token is left, or a logits processor failed.
        """
        rules = self._rules
        if rules.allowed is not None:
            kept = logits[rules.allowed]
            logits.fill(-np.inf)
            logits[rules.allowed] = kept
        logits[rules.forbidden] = -np.inf
        if rules.endings and self._output_ids:
            for before, last in rules.endings.get(self._output_ids[-1], ()):
                if self._output_ids[-len(before) :] == before:
                    logits[last] = -np.inf
        if self._is_short:
            logits[rules.stops] = -np.inf
        logits[rules.bias_ids] += rules.biases
        for processor, wants_prompt in rules.processors:
            self._run(processor, wants_prompt, logits)
        if rules.has_penalties:
            self._penalise_(logits)
        best = int(logits.argmax())  # a NaN anywhere is the "largest"
        if not np.isfinite(logits[best]):
            raise SamplingError(self._explain(float(logits[best])))
        return best

    def _penalise_(self, logits: np.ndarray) -> None:
        params = self._rules.params
        if self._counts is None:
            counted = self._prompt_ids if params.repetition_penalty != 1.0 else ()
            self._counts = _TokenCounts(counted)
        ids, counts = self._counts.up_to(self._output_ids)
        values = logits[ids]
        with np.errstate(over="ignore", divide="ignore"):
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            if params.frequency_penalty:
                values -= np.float32(params.frequency_penalty) * counts
            if params.presence_penalty:
                values[counts > 0] -= np.float32(params.presence_penalty)
        logits[ids] = values

    def _run(self, processor: Callable[..., Any], wants_prompt: bool, logits: np.ndarray) -> None:
        """Runs one logits processor; its result replaces the logits."""
        name = processor_name(processor)
        row = torch.from_numpy(logits)
        # a copy that grows: the sequence's own ids must stay as they are, whatever a processor does
        self._shown_ids.extend(self._output_ids[len(self._shown_ids) :])
        ids = [self._shown_ids]
        if wants_prompt:
            if self._prompt_list is None:
                self._prompt_list = self._prompt_ids.tolist()
            ids.insert(0, self._prompt_list)
        try:
            with torch.no_grad():
                result = processor(*ids, row)
        # Whatever it is (SystemExit, too): it must not end the engine's thread.
        except BaseException as error:
            raise SamplingError(f"logits processor {name} raised {_told(error)}") from error
        if len(self._shown_ids) != len(self._output_ids):
            self._shown_ids = []  # against the rules: start again
        if result is not None and result is not row:
            logits[...] = _as_row(name, result, len(logits))
        highest = logits.max()
        if np.isnan(highest) or highest == np.inf:
            raise SamplingError(f"logits processor {name} left a logit of {highest}")

    def _explain(self, highest: float) -> str:
        """Says why nothing can be chosen."""
        rules, params = self._rules, self._rules.params
        if highest != -np.inf:
            return f"repetition_penalty={params.repetition_penalty} makes a logit of {highest}"
        causes = {
            "allowed_token_ids": rules.allowed is not None,
            "bad_words": len(rules.forbidden) > 0 or bool(rules.endings),
            f"min_tokens={params.min_tokens} (which forbids every stop)": self._is_short,
            "logits_processors": bool(rules.processors),
        }
        named = [name for name, is_cause in causes.items() if is_cause]
        return f"no token is left to choose: relax {' or '.join(named)}"


def _told(error: BaseException) -> str:
    """An exception's type and text on one line, whatever its __str__ does."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # the user's own code again
        text = f"(its text cannot be had: {type(broken).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _as_row(name: str, result: object, vocab_size: int) -> np.ndarray:
    """Returns what a processor returned as an array [V]."""
    if not isinstance(result, Tensor):
        raise SamplingError(
            f"logits processor {name} returned {type(result).__name__}; expected a tensor or None"
        )
    if tuple(result.shape) != (vocab_size,):
        raise SamplingError(
            f"logits processor {name} returned a tensor of shape {list(result.shape)}; "
            f"expected [{vocab_size}]"
        )
    if result.dtype.is_complex:
        raise SamplingError(f"logits processor {name} returned a tensor of {result.dtype}")
    try:
        return result.detach().to_dense().to("cpu", torch.float32).numpy()
    except Exception as error:  # a meta tensor, a subclass of somebody's
        raise SamplingError(
            f"logits processor {name} returned a tensor that cannot be read: {_told(error)}"
        ) from error


class _TokenCounts:
    """Distinct tokens of prompt and output, and how often the output holds each."""

    __slots__ = ("_booked", "_counts", "_ids", "_slots", "_used")

    def __init__(self, prompt_ids: np.ndarray | Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, np.int64))
        self._used = len(distinct)
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct.tolist())}
        self._ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._booked = 0

    def up_to(self, output_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Books the new output tokens; returns ids (int64 [N]) and counts (fp32 [N])."""
        for token_id in output_ids[self._booked :]:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._slots[token_id] = self._used
                if slot == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[slot] = token_id
                self._used += 1
            self._counts[slot] += 1
        self._booked = len(output_ids)
        return self._ids[: self._used], self._counts[: self._used]


class RuleCompiler:
    """Compiles SamplingParams for one model, each object once."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        """`encode` turns a bad word into ids, without special tokens; None: no tokenizer."""
        self._vocab_size = vocab_size
        # a tokenizer's end token may lie beyond the model's vocabulary: it cannot be chosen then
        self._eos_ids = sorted(i for i in eos_ids if 0 <= i < vocab_size)
        self._encode = encode
        self._compiled: dict[int, tuple[SamplingParams, LogitRules | None]] = {}

    def compile(self, params: SamplingParams) -> LogitRules | None:
        """Returns the rules, or None where the parameters leave all logits as they are.

        Raises:
            ConfigError: a token id is outside the vocabulary, a bad word has no tokens, or the
                parameters leave no token to choose.
        """
        known = self._compiled.get(id(params))
        if known is not None and known[0] is params:
            return known[1]
        rules = self._compile(params)
        if len(self._compiled) >= MAX_COMPILED:
            self._compiled.clear()
        self._compiled[id(params)] = (params, rules)
        return rules

    def _compile(self, params: SamplingParams) -> LogitRules | None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        words = self._bad_words(params)
        stops = [*(() if params.ignore_eos else self._eos_ids), *params.stop_token_ids]
        has_penalties = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        is_lasting = bool(
            has_penalties
            or words
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.logits_processors
        )
        if not is_lasting and not (params.min_tokens and stops):
            return None
        endings: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                endings.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        bias = params.logit_bias or {}
        allowed = params.allowed_token_ids
        rules = LogitRules(
            params,
            allowed=None if allowed is None else np.array(allowed, np.int64),
            forbidden=np.array([word[0] for word in words if len(word) == 1], np.int64),
            endings=endings,
            stops=np.array(stops, np.int64),
            bias_ids=np.array(list(bias), np.int64),
            biases=np.array(list(bias.values()), np.float32),
            processors=[(p, takes_prompt(p)) for p in params.logits_processors],
            has_penalties=has_penalties,
            is_lasting=is_lasting,
        )
        self._check_that_some_are_left(rules)
        return rules

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            raise ConfigError(
                f"{name} holds {max(token_ids)}, which is outside the vocabulary of "
                f"{self._vocab_size}"
            )

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The token sequences that must not come: strings with and without a space before."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if not isinstance(word, str):
                self._check_ids("bad_words", word)
                found[word] = None
                continue
            plain, spaced = (self._word_ids(word, prefix) for prefix in ("", " "))
            found[plain] = None
            if spaced[-len(plain) :] != plain:  # else the plain one forbids it already
                found[spaced] = None
        # a token that the model has no logit for cannot come
        return [word for word in found if max(word) < self._vocab_size]

    def _word_ids(self, word: str, prefix: str) -> tuple[int, ...]:
        if self._encode is None:
            raise ConfigError(
                "bad_words as text need a tokenizer, and this model has none; give token ids"
            )
        try:
            ids = tuple(self._encode(prefix + word.lstrip()))
        except ConfigError:
            raise ConfigError(f"bad_words holds {word!r}, which is no valid text") from None
        if not ids:
            raise ConfigError(f"bad_words holds {word!r}, which has no tokens")
        return ids

    def _check_that_some_are_left(self, rules: LogitRules) -> None:
        """Refuses at once what could never give a first token."""
        is_left = np.full(self._vocab_size, rules.allowed is None)
        if rules.allowed is not None:
            is_left[rules.allowed] = True
        is_left[rules.forbidden] = False
        if not is_left.any():
            raise ConfigError("no token is left to choose: bad_words forbid all allowed ones")
        if rules.params.min_tokens:
            is_left[rules.stops] = False
            if not is_left.any():
                raise ConfigError(
                    f"no token is left to choose: min_tokens={rules.params.min_tokens} forbids "
                    "every stop, and all tokens that are allowed are stops"
                )
