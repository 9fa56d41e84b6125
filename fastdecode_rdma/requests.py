"""From prompts and parameters to requests that the engine can run, with every mistake named."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np

from fastdecode_rdma.detokenizer import IncrementalDetokenizer
from fastdecode_rdma.engine.setup import EngineParts
from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.logit_rules import RuleCompiler
from fastdecode_rdma.logprobs import check_amount
from fastdecode_rdma.param_checks import check_int, is_integer
from fastdecode_rdma.prompts import (
    CheckedPrompt,
    Prompt,
    PromptEncoder,
    as_iterable,
    check_all,
    check_lazily,
    is_single_prompt,
    prompt_text,
)
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.stream import Deliver, Fail, MakeRequest, Submission
from fastdecode_rdma.tokenizer import Tokenizer

MAX_PRIORITY = 1 << 31
"""Priorities lie between minus this and this."""


class RequestFactory:
    """Checks prompts and parameters of one generator. Any thread may use it."""

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: Tokenizer | None,
        encoder: PromptEncoder,
        *,
        seed: int | None,
    ) -> None:
        """`seed` makes the seeds of unseeded requests reproducible."""
        self._parts = parts
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._seeds = random.Random(int(seed)) if seed is not None else random.SystemRandom()
        self._rules = RuleCompiler(
            vocab_size=encoder.vocab_size,
            eos_ids=parts.engine.options.eos_token_ids,
            encode=None
            if tokenizer is None
            else partial(tokenizer.encode, add_special_tokens=False),
        )
        self._worker_bytes = parts.engine.placement.largest_capacity()

    def several(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[Submission]:
        """Checks a list at once, an iterable as it is pulled; yields what a stream submits.
        `priority`: one for all, or one for each prompt of a list.

        Raises:
            ConfigError: names every bad prompt of a list by its index.
        """
        each = self._parts.sampling_defaults.apply() if params is None else params
        if not isinstance(each, (SamplingParams, Iterable)) or isinstance(each, (str, Mapping)):
            raise ConfigError(f"expected SamplingParams, got {type(each).__name__}")
        several = [prompts] if is_single_prompt(prompts) else as_iterable(prompts)
        priorities = _priorities(priority, several)
        if not isinstance(several, Sequence):
            return map(_prioritized, self._lazy(several, each), priorities)
        checked = check_all(several, each, self._encoder.encode, self._check_params)
        return map(_prioritized, map(self._request_maker, checked), priorities)

    def one(self, prompt: Prompt, params: SamplingParams | None, priority: int = 0) -> MakeRequest:
        """Checks one prompt.

        Raises:
            ConfigError: it or its parameters cannot be used.
        """
        mine = self._parts.sampling_defaults.apply() if params is None else params
        if not isinstance(mine, SamplingParams):
            raise ConfigError(f"expected SamplingParams, got {type(mine).__name__}")
        checked = CheckedPrompt(0, prompt_text(prompt), self._encoder.encode(prompt), mine)
        self._check_params(mine, checked.ids)
        check_int("priority", priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        maker = self._request_maker(checked)
        return partial(_make_prioritized, maker, priority)

    def _lazy(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams]
    ) -> Iterator[Submission]:
        encode, check = self._encoder.encode, self._check_params
        for item in check_lazily(prompts, params, encode, check):
            yield item if isinstance(item, tuple) else self._request_maker(item)

    def _check_params(self, params: SamplingParams, ids: np.ndarray) -> None:
        """What only this generator knows of parameters."""
        seats = self._parts.options.max_num_seqs
        if params.n > seats:
            raise ConfigError(f"n={params.n} is more than max_num_seqs={seats}")
        if params.stop and self._tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none")
        self._rules.compile(params)
        vocab_size = self._encoder.vocab_size
        check_amount("prompt_logprobs", params.prompt_logprobs, len(ids), vocab_size)
        num_tokens = params.n * self._max_tokens(params, ids)
        check_amount("logprobs", params.logprobs, num_tokens, vocab_size)
        needed = params.n * self._parts.engine.placement.bytes_for(len(ids) + 1)
        if needed > self._worker_bytes:
            raise ConfigError(
                f"n={params.n} samples of a prompt of {len(ids)} tokens need {needed} bytes of "
                f"KV-cache on one worker, and the largest has {self._worker_bytes}"
            )

    def _max_tokens(self, params: SamplingParams, ids: np.ndarray) -> int:
        """New tokens at most: never more than the room left."""
        room = self._encoder.max_model_len - len(ids)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _request_maker(self, prompt: CheckedPrompt) -> MakeRequest:
        params, tokenizer = prompt.params, self._tokenizer
        max_tokens = self._max_tokens(params, prompt.ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        rules = self._rules.compile(params)

        def make(deliver: Deliver, fail: Fail) -> Request:
            return Request(
                index=prompt.index,
                text=prompt.text,
                prompt_ids=prompt.ids,
                params=params,
                seed=seed,
                max_tokens=max_tokens,
                make_detokenizer=partial(_make_detokenizer, tokenizer, params, prompt.ids),
                deliver=deliver,
                fail=fail,
                rules=rules,
            )

        return make


def _priorities(priority: int | Sequence[int], prompts: Iterable[Prompt]) -> Iterable[int]:
    """One for each prompt, checked."""
    if is_integer(priority) or not isinstance(priority, Sequence) or isinstance(priority, str):
        check_int("priority", priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        return repeat(priority)
    if not isinstance(prompts, Sequence):
        raise ConfigError("a list of priorities needs a list of prompts; give one for all")
    if len(priority) != len(prompts):
        raise ConfigError(
            f"got {len(prompts)} prompts and {len(priority)} priorities; give one for all or one "
            "for each"
        )
    for index, each in enumerate(priority):
        check_int(f"priority {index}", each, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    return priority


def _prioritized(submission: Submission, priority: int) -> Submission:
    if not priority or isinstance(submission, tuple):
        return submission
    return partial(_make_prioritized, submission, priority)


def _make_prioritized(maker: MakeRequest, priority: int, deliver: Deliver, fail: Fail) -> Request:
    request = maker(deliver, fail)
    request.priority = priority
    return request


def _make_detokenizer(
    tokenizer: Tokenizer | None, params: SamplingParams, ids: np.ndarray
) -> IncrementalDetokenizer | None:
    if tokenizer is None or not params.detokenize:
        return None
    return tokenizer.detokenizer(params, prompt_ids=ids)
