"""`Generator`: load a model, connect to attention workers, stream text."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from fastdecode_rdma.detokenizer import IncrementalDetokenizer
from fastdecode_rdma.engine.loop import EngineLoop
from fastdecode_rdma.engine.setup import (
    EngineParts,
    GeneratorOptions,
    as_path,
    build_engine,
    is_integer,
    resolve_model_dir,
)
from fastdecode_rdma.engine.state import Request
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.logit_rules import RuleCompiler
from fastdecode_rdma.prompts import (
    CheckedPrompt,
    Prompt,
    PromptEncoder,
    as_iterable,
    check_all,
    check_lazily,
    is_single_prompt,
)
from fastdecode_rdma.results import ResultCollector
from fastdecode_rdma.sequence import RequestOutput, SamplingParams, TokenEvent
from fastdecode_rdma.stream import Deliver, EventStream, Fail, MakeRequest, Submission
from fastdecode_rdma.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_INTERRUPTS = 3
"""So many Ctrl-C are put off while a generator closes, which takes a step at most."""
ON_ERROR = ("raise", "event")


class Generator:
    """A model whose dense layers run here and whose attention runs in workers.

    Made by `from_pretrained`; a context manager. Several threads may use it: they share the batch.
    """

    def __init__(
        self, parts: EngineParts, tokenizer: Tokenizer | None, *, seed: int | None
    ) -> None:
        """Takes over the parts; use `from_pretrained`."""
        self._parts = parts
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._encoder = PromptEncoder(
            tokenizer,
            vocab_size=parts.model.config.vocab_size,
            max_model_len=parts.engine.options.max_model_len,
        )
        self._rules = RuleCompiler(
            vocab_size=parts.model.config.vocab_size,
            eos_ids=parts.engine.options.eos_token_ids,
            encode=None
            if tokenizer is None
            else partial(tokenizer.encode, add_special_tokens=False),
        )
        self._worker_bytes = parts.engine.placement.largest_capacity()
        self._started = time.monotonic()
        self._loop = EngineLoop(
            parts.engine, reconnect=parts.reconnect, worker_wait_s=parts.worker_wait_s
        )
        # A generator that is dropped without close() gives back its thread and its memory, too.
        self._close = weakref.finalize(self, _shut_down, self._loop, parts)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        workers: Sequence[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        timeout_s: float = 30.0,
        **unknown: object,
    ) -> Generator:
        """Loads a model and connects to its attention workers.

        path: a model directory, or a name in the local Hugging Face cache.
        workers: addresses ("tcp://host:18815", "host"); None embeds one worker in this process.
        token_file: the shared token for workers on other machines.
        dtype: compute dtype; "auto" or "float32" on a CPU.
        kv_cache_dtype: "auto" (the checkpoint's), "fp32", "fp16" or "bf16".
        device: None or "cpu".
        max_model_len: tokens of prompt and answer; default: what model and workers can hold.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: prompt tokens prefilled between two decode steps.
        tokenizer: another directory with a tokenizer; chat_template: another template (Jinja text).
        seed: makes the seeds of unseeded requests reproducible.
        deterministic: bit-identical results whatever the batch, the workers, preemption and losses.
        timeout_s: bound on every wait for a worker.

        Raises:
            ConfigError: an argument or the model cannot be used; of unknown names, the nearest
                match is named.
            TransportError: a worker cannot be reached.
        """
        options = GeneratorOptions.checked(
            unknown,
            workers=None if workers is None else _as_addresses(workers),
            token_file=token_file,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            deterministic=deterministic,
            timeout_s=timeout_s,
        )
        if seed is not None and not is_integer(seed):
            raise ConfigError(f"seed must be an integer, got {seed!r}")
        if chat_template is not None and not isinstance(chat_template, str):
            raise ConfigError(f"chat_template must be text, got {type(chat_template).__name__}")
        directory = resolve_model_dir(path)
        text_dir = directory if tokenizer is None else as_path("tokenizer", tokenizer)
        loaded = Tokenizer.from_directory(
            text_dir, chat_template=chat_template, required=tokenizer is not None
        )
        return cls(build_engine(directory, options, loaded), loaded, seed=seed)

    # -- generation

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_error: str = "raise",
    ) -> EventStream:
        """Checks all prompts now, then returns an iterator over TokenEvents as they happen.

        prompts: text, token ids or chat messages; one, a list, or any iterable, which is pulled as
            the batch has room (a bad prompt in it fails alone).
        params: one for all, or one per prompt.
        on_error: what a failure of one request does. "raise": the other requests run to their end,
            then the error is raised; "event": it is an event with finish_reason "error".

        Raises:
            ConfigError: names every bad prompt by its index; nothing was started.
        """
        source = self._submissions(prompts, params, on_error)
        return EventStream(
            self._loop, source, lookahead=self._lookahead, raise_errors=on_error == "raise"
        )

    def complete(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_error: str = "raise",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end; returns their results in order.

        Arguments and errors are those of `generate`; with on_error="event" a failed request's
        result has its `error` set.
        """
        source = self._submissions(prompts, params, on_error)
        total = None
        if is_single_prompt(prompts):
            total = 1
        elif isinstance(prompts, Sequence):
            total = len(prompts)
        collector = ResultCollector(total, use_tqdm=use_tqdm)
        with (
            collector,
            EventStream(
                self._loop,
                collector.watch(source),
                lookahead=self._lookahead,
                raise_errors=on_error == "raise",
            ) as stream,
        ):
            for event in stream:
                collector.add(event)
        return collector.results()

    def _submissions(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        on_error: str,
    ) -> Iterator[Submission]:
        """Checks a list at once, an iterable as it is pulled; yields what a stream submits."""
        self._loop.check()
        if on_error not in ON_ERROR:
            raise ConfigError(f"on_error must be one of {ON_ERROR}, got {on_error!r}")
        each = SamplingParams() if params is None else params
        if not isinstance(each, (SamplingParams, Iterable)) or isinstance(each, (str, Mapping)):
            raise ConfigError(f"expected SamplingParams, got {type(each).__name__}")
        several = [prompts] if is_single_prompt(prompts) else as_iterable(prompts)
        if not isinstance(several, Sequence):
            return self._lazy(several, each)
        checked = check_all(several, each, self._encoder.encode, self._check_params)
        return map(self._request_maker, checked)

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
        needed = params.n * self._parts.engine.placement.bytes_for(len(ids) + 1)
        if needed > self._worker_bytes:
            raise ConfigError(
                f"n={params.n} samples of a prompt of {len(ids)} tokens need {needed} bytes of "
                f"KV-cache on one worker, and the largest has {self._worker_bytes}"
            )

    def _request_maker(self, prompt: CheckedPrompt) -> MakeRequest:
        params, tokenizer = prompt.params, self._tokenizer
        room = self._encoder.max_model_len - len(prompt.ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        rules = self._rules.compile(params)

        def make(deliver: Deliver, fail: Fail) -> Request:
            return Request(
                index=prompt.index,
                text=prompt.text,
                prompt_ids=prompt.ids,
                params=params,
                seed=seed,
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                make_detokenizer=partial(_make_detokenizer, tokenizer, params, prompt.ids),
                deliver=deliver,
                fail=fail,
                rules=rules,
            )

        return make

    # -- the rest

    @property
    def _lookahead(self) -> int:
        """Sequences a stream keeps submitted: a full batch, and some that wait for its seats."""
        seats = self._parts.options.max_num_seqs
        return seats + seats // 4 + 1

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its directory has none."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may hold, prompt and answer."""
        return self._encoder.max_model_len

    def stats(self) -> dict[str, Any]:
        """Where the time went so far, and what the workers say of themselves.

        `dense_s`, `attention_s`, `transport_s`, `python_s`: seconds of the engine thread in the
        model's layers, in the attention kernel (as the workers report it), in the rest of the
        exchange, and in scheduling, sampling and bookkeeping; `prefill_s` of prompts, whatever in.
        """
        elapsed = time.monotonic() - self._started
        return {"elapsed_s": elapsed, **self._parts.stats()}

    def close(self) -> None:
        """Ends running requests, closes connections and frees memory. Idempotent and bounded."""
        self._close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _make_detokenizer(
    tokenizer: Tokenizer | None, params: SamplingParams, ids: np.ndarray
) -> IncrementalDetokenizer | None:
    if tokenizer is None:
        return None
    return tokenizer.detokenizer(params, prompt_ids=ids.tolist())


def _shut_down(loop: EngineLoop, parts: EngineParts) -> None:
    """Runs at the interpreter's end, too: a Ctrl-C there must not leave the thread in a kernel."""
    interrupted: KeyboardInterrupt | None = None
    for _ in range(MAX_INTERRUPTS):
        try:
            loop.close()
            break
        except KeyboardInterrupt as again:
            interrupted = again
    parts.close()
    if interrupted is not None and not sys.is_finalizing():
        raise interrupted


def _as_addresses(workers: Sequence[str]) -> tuple[str, ...]:
    if isinstance(workers, (str, bytes, Mapping)) or not isinstance(workers, Iterable):
        raise ConfigError(f"workers must be a list of addresses, got {workers!r}")
    addresses = tuple(workers)
    if not addresses:
        raise ConfigError("workers is an empty list; give addresses, or None to embed a worker")
    for address in addresses:
        if not isinstance(address, str):
            raise ConfigError(f"workers must hold addresses as text, got {address!r}")
    return addresses


__all__ = ["Generator", "RequestOutput", "SamplingParams", "TokenEvent"]
