"""`Generator`: load a model, connect to attention workers, stream text."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from fastdecode_rdma.engine.loop import EngineLoop
from fastdecode_rdma.engine.options import GeneratorOptions, as_path, resolve_model_dir
from fastdecode_rdma.engine.report import model_info, take_stats
from fastdecode_rdma.engine.setup import EngineParts, build_engine
from fastdecode_rdma.engine.trace import Recorder, Trace
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.handles import AsyncEventStream, RequestHandle
from fastdecode_rdma.param_checks import is_integer
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.prompts import Prompt, PromptEncoder, is_single_prompt
from fastdecode_rdma.requests import RequestFactory
from fastdecode_rdma.results import ResultCollector
from fastdecode_rdma.score_text import Text
from fastdecode_rdma.scoring import Loglikelihood, Scorer
from fastdecode_rdma.sequence import RequestOutput, SamplingParams
from fastdecode_rdma.stats import GeneratorStats
from fastdecode_rdma.stream import EventStream, MakeRequest, Submission
from fastdecode_rdma.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_INTERRUPTS = 3
"""So many Ctrl-C are put off while a generator closes, which takes a step at most."""
ON_ERROR = ("raise", "event")


class Generator:
    """A model whose dense layers run here and whose attention runs in workers.

    Made by `from_pretrained`; a context manager. Several threads may use it: they share the batch.
    One thread of its own runs the engine, and never waits for who reads events. A process that
    forks from this one cannot use it.
    """

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: Tokenizer | None,
        *,
        seed: int | None,
        model_name: str = "",
    ) -> None:
        """Takes over the parts; use `from_pretrained`."""
        self._parts = parts
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(
            tokenizer,
            vocab_size=parts.model.config.vocab_size,
            max_model_len=parts.engine.options.max_model_len,
        )
        self._requests = RequestFactory(parts, tokenizer, self._encoder, seed=seed)
        self._started = time.monotonic()
        self._loop = EngineLoop(
            parts.engine,
            reconnect=parts.reconnect,
            worker_wait_s=parts.worker_wait_s,
            max_num_seqs=parts.options.max_num_seqs,
            max_waiting=parts.options.max_waiting,
        )
        self._scorer = Scorer(self._loop, parts, tokenizer, self._encoder)
        # A generator that is dropped without close() gives back its thread and its memory, too.
        self._close = weakref.finalize(self, _shut_down, self._loop, parts)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        workers: Sequence[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        require: str | None = None,
        profile: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        device: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_waiting: int = 1024,
        scheduler: str = "fcfs",
        scheduler_options: Mapping[str, object] | None = None,
        max_load_tokens: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
        num_mini_batches: int | str = "auto",
        deterministic: bool = False,
        timeout_s: float = 30.0,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_to: str | None = None,
        **unknown: object,
    ) -> Generator:
        """Loads a model and connects to its attention workers.

        path: a model directory, or a name in the local Hugging Face cache.
        workers: addresses; None embeds one worker in this process. "host:18815" is reached by the
            best way that works, "shm://host" by shared memory or not at all, "tcp://host" by TCP.
        token_file: the file that holds the token shared with `workers`.
        require: None, or "shm", "rdma" or "tcp": every worker is reached that way, or it is an
            error.
        profile: a file of `fastdecode bench tune`: options of the workers' addresses, as measured.
        dtype: compute dtype; "auto" or "float32" on a CPU.
        kv_cache_dtype: "auto" (the checkpoint's), "fp32", "fp16", "bf16", "int8" or "int4".
        quantization: None, or "int8": weights are rounded as they are loaded, symmetric, with a
            scale for each output and 256 inputs: half the bytes of bf16 to hold and to read.
        device: None or "cpu".
        max_model_len: tokens of prompt and answer; default: what model and workers can hold.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: prompt tokens prefilled between two decode steps.
        max_waiting: sequences of `submit` and `stream` that may wait for a seat before both refuse
            more; a request has `n` of them. Prompts of `generate` and `complete`, which submit
            as many as the batch has room for, do not count.
        scheduler: who runs when. "fcfs": by arrival; "load_stabilizing": starts are spread so that
            the attention load stays level; "skip_join_mlfq": short answers first, those
            that make room are paused with their KV in place; "srpt": the least left to do, as far
            as max_tokens tells, first.
        scheduler_options: the policy's own, e.g. {"alpha_s": 0.3}.
        max_load_tokens: cached tokens that one step may attend over; None: any number.
        tokenizer: another directory with a tokenizer; chat_template: another template (Jinja text).
        eos_token_id: one or more ids that end a sequence, besides those of the model's files.
        seed: makes the seeds of unseeded requests reproducible.
        num_mini_batches: parts of a decode step that are under way at once: with 2, workers attend
            for one while the dense layers run for the other. "auto" compares 1 and 2 by measured
            times every now and then and keeps the faster; `stats().mini_batch_reason` tells.
        deterministic: bit-identical results whatever the batch, the workers, preemption and losses.
        timeout_s: bound on every wait for a worker.
        spill_dir: a directory on a fast disk: sequences are copied there before the workers' memory
            runs out, and taken back where that is quicker than computing again. One file each,
            readable by this user alone, removed when the sequence ends.
        spill_to: "workers": the same, into whatever memory other workers have left.

        Raises:
            ConfigError: an argument or the model cannot be used; of unknown names, the nearest
                match is named.
            TransportError: a worker cannot be reached.
        """
        options = GeneratorOptions.checked(
            unknown,
            workers=None if workers is None else _as_addresses(workers),
            token_file=token_file,
            require=require,
            profile=profile,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            scheduler=scheduler,
            scheduler_options=scheduler_options,
            max_load_tokens=max_load_tokens,
            num_mini_batches=num_mini_batches,
            deterministic=deterministic,
            timeout_s=timeout_s,
            eos_token_id=eos_token_id,
            spill_dir=spill_dir,
            spill_to=spill_to,
        )
        if seed is not None and not is_integer(seed):
            raise ConfigError(f"seed must be an integer, got {seed!r}")
        if chat_template is not None and not isinstance(chat_template, str):
            raise ConfigError(f"chat_template must be text, got {type(chat_template).__name__}")
        directory = resolve_model_dir(path)
        text_dir = directory if tokenizer is None else as_path("tokenizer", tokenizer)
        loaded = Tokenizer.from_directory(
            text_dir,
            chat_template=chat_template,
            eos_token_id=options.eos_token_id,
            required=tokenizer is not None,
        )
        parts = build_engine(directory, options, loaded)
        return cls(parts, loaded, seed=seed, model_name=os.fspath(path))

    # -- generation

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_error: str = "raise",
        priority: int | Sequence[int] = 0,
    ) -> EventStream:
        """Checks all prompts now, then returns an iterator over TokenEvents as they happen.

        What is left of them is cancelled by its `close()`, by leaving a `with` block, and when
        nobody refers to it any more; leaving a loop over one that has a name ends nothing.

        prompts: text, token ids or chat messages; one, a list, or any iterable, which is pulled as
            the batch has room (a bad prompt in it fails alone).
        params: one for all, or one per prompt; None takes `get_default_sampling_params()`.
        on_error: what a failure of one request does. "raise": the other requests run to their end,
            then the error is raised; "event": it is an event with finish_reason "error".
        priority: one for all, or one for each prompt of a list; those with a lower one run earlier.

        Raises:
            ConfigError: names every bad prompt by its index; nothing was started.
        """
        source = self._submissions(prompts, params, on_error, priority)
        return EventStream(
            self._loop, source, lookahead=self.lookahead, raise_errors=on_error == "raise"
        )

    def complete(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_error: str = "raise",
        use_tqdm: bool = False,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end; returns their results in order.

        Arguments and errors are those of `generate`; with on_error="event" a failed request's
        result has its `error` set.
        """
        source = self._submissions(prompts, params, on_error, priority)
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
                lookahead=self.lookahead,
                raise_errors=on_error == "raise",
            ) as stream,
        ):
            for event in stream:
                collector.add(event)
        return collector.results()

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestHandle:
        """Submits one request, from any thread, and returns its handle: iterate it, wait for its
        `result`, or `cancel` it. Dropping the handle cancels, too.

        prompt, params, priority: as in `generate`, one of each.

        Raises:
            ConfigError: the prompt or its parameters cannot be used.
            QueueFullError: `max_waiting` sequences wait for a seat already.
        """
        return RequestHandle(self._loop, self._single(prompt, params, priority))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncEventStream:
        """Submits one request and returns its events for `async for`. The request is cancelled when
        the task that waits for an event is, and when nobody refers to the stream any more. To be
        sure of it as soon as the loop is left, use a block:
        `async with gen.stream(...) as events: async for event in events: ...`.

        Arguments and errors are those of `submit`; they are raised here, before the first `await`.
        The text of a long prompt takes the tokenizer some milliseconds: a server that must not
        pause calls this in a thread (`await asyncio.to_thread(gen.stream, prompt)`).
        """
        return AsyncEventStream(self._loop, self._single(prompt, params, priority))

    # -- scoring

    def loglikelihood(
        self,
        pairs: Iterable[tuple[Text, Text]],
        *,
        prefix_token_id: int | None = None,
        add_special_tokens: bool | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
        use_tqdm: bool = False,
    ) -> list[Loglikelihood]:
        """Returns how probable each continuation is after its context, in order, as the
        lm-evaluation-harness defines it. No worker takes part; generation goes on meanwhile.

        pairs: (context, continuation), both text or both token ids. Spaces at the end of a context
            count as the continuation's. After an empty context comes the prefix token. What is too
            long for the model is cut off at the left (`num_truncated`).
        prefix_token_id: by default the tokenizer's BOS, or EOS where it has none.
        add_special_tokens: whether text with a context gets the tokenizer's special tokens (BOS);
            None is the tokenizer's habit.
        max_length: tokens that the model sees at once; default `max_model_len`.
        on_error: "raise", or "event": a pair that fails has its `error` set, as in `complete`.

        Raises:
            ConfigError: names every bad pair by its index; nothing was run.
        """
        return self._scorer.pairs(
            pairs,
            prefix_token_id=prefix_token_id,
            add_special_tokens=add_special_tokens,
            max_length=max_length,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def loglikelihood_rolling(
        self,
        texts: Iterable[Text],
        *,
        prefix_token_id: int | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
        use_tqdm: bool = False,
    ) -> list[Loglikelihood]:
        """Returns how probable each whole text is: every token is scored once, the first after the
        prefix token, in windows of `max_length`. Arguments and errors: `loglikelihood`."""
        return self._scorer.texts(
            texts,
            prefix_token_id=prefix_token_id,
            max_length=max_length,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def prompt_logprobs(
        self, prompts: Prompt | Iterable[Prompt], k: int = 0, *, use_tqdm: bool = False
    ) -> list[PromptLogprobs]:
        """Returns the log-probabilities of each prompt's tokens and, at each place, of the `k` most
        probable ones (-1: all): what SamplingParams(prompt_logprobs=k) gives, without generating.

        Raises:
            ConfigError: names every bad prompt by its index; nothing was run.
        """
        return self._scorer.prompts(prompts, k, use_tqdm=use_tqdm)

    def _single(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> MakeRequest:
        self._loop.check()
        self._loop.check_room()  # refused before the work of tokenizing
        return self._requests.one(prompt, params, priority)

    def _submissions(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        on_error: str,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[Submission]:
        self._loop.check()
        if on_error not in ON_ERROR:
            raise ConfigError(f"on_error must be one of {ON_ERROR}, got {on_error!r}")
        return self._requests.several(prompts, params, priority)

    # -- the rest

    @property
    def lookahead(self) -> int:
        """Sequences worth keeping submitted: a full batch, and some that wait for its seats. More
        only take memory."""
        seats = self._parts.options.max_num_seqs
        return seats + seats // 4 + 1

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its directory has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what requests without parameters use: the sampling values of the model's
        generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty,
        max_new_tokens; do_sample false is greedy), the usual defaults where it has none.

        Raises:
            ConfigError: a value there is wrong; names file and key.
        """
        return self._parts.sampling_defaults.params()

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may hold, prompt and answer."""
        return self._encoder.max_model_len

    @property
    def model_info(self) -> dict[str, object]:
        """What the numbers of a result depend on, beside the model: `model_dtype` of the dense
        layers, `kv_cache_dtype`, `quantization`, `deterministic` and the instruction set `isa`."""
        return model_info(self._parts)

    def stats(self) -> GeneratorStats:
        """Returns counters, latencies, where the time went and how full the workers are; they stay
        readable after `close`. `stats().to_prometheus()` is what a scraper wants."""
        return take_stats(
            self._parts,
            model_name=self._model_name,
            num_waiting=self._loop.num_waiting,
            elapsed_s=time.monotonic() - self._started,
        )

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Returns a trace to be taken of what the engine does inside a `with` block, or between its
        `start()` and `stop()`: `with gen.trace("out.json"): gen.complete(...)`. The file is in the
        Chrome trace format (`chrome://tracing`, https://ui.perfetto.dev): the engine's phases,
        dense layers, exchange with workers, each mini-batch and each worker's kernel, by layer.
        While it is taken, every layer costs some microseconds more.

        Raises:
            ConfigError: at the start: the file cannot be written, or another trace is under way.
        """
        runner, backend = self._parts.engine.runner, self._parts.backend

        def attach(recorder: Recorder | None) -> None:
            if recorder is not None and runner.recorder is not None:
                raise ConfigError("a trace of this generator is under way already")
            runner.recorder = recorder

        return Trace(path, attach, lambda: [info.name for info in backend.infos()])

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


def _shut_down(loop: EngineLoop, parts: EngineParts) -> None:
    """Runs at the interpreter's end, too: a Ctrl-C there must not leave the thread in a kernel."""
    if not loop.is_ours():
        return  # after a fork: thread, sockets and memory are the parent's
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
