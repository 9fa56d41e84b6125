"""Log-likelihoods of given text, as the lm-evaluation-harness defines them.

score_text.py makes token sequences of pairs and texts, engine/scoring.py does the work; here one
is asked after the other, and results are made of the numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from fastdecode_rdma.engine.loop import EngineLoop
from fastdecode_rdma.engine.scoring import ScoreItem, ScoringTask
from fastdecode_rdma.engine.setup import EngineParts
from fastdecode_rdma.errors import ConfigError, FastDecodeError
from fastdecode_rdma.logprobs import check_amount
from fastdecode_rdma.param_checks import is_integer
from fastdecode_rdma.prompt_logprobs import PromptLogprobs
from fastdecode_rdma.prompts import (
    MAX_NAMED,
    Prompt,
    PromptEncoder,
    as_iterable,
    is_single_prompt,
)
from fastdecode_rdma.score_text import ScoreEncoder, Span, Text
from fastdecode_rdma.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "event")
POLL_S = 0.5
"""How often who waits looks whether the engine is still alive."""


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """How probable a continuation is after its context, or a text by itself.

    logprob: the sum of token_logprobs, natural logarithms of the probabilities of token_ids, each
        given all tokens before it (of rolling windows: all that the model can see).
    is_greedy: greedy decoding of the context would give these tokens.
    num_truncated: tokens cut off at the left of context and continuation together, because the
        model cannot see more.
    error: why there is no result; logprob is then NaN and the lists are empty.
    """

    logprob: float
    token_logprobs: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_greedy: bool = False
    num_truncated: int = 0
    error: FastDecodeError | None = None


class Scorer:
    """Scores for one generator. Any thread may use it."""

    def __init__(
        self,
        loop: EngineLoop,
        parts: EngineParts,
        tokenizer: Tokenizer | None,
        prompts: PromptEncoder,
    ) -> None:
        self._loop = loop
        self._parts = parts
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._has_told = False

    def pairs(
        self,
        pairs: Iterable[tuple[Text, Text]],
        *,
        prefix_token_id: int | None,
        add_special_tokens: bool | None,
        max_length: int | None,
        on_error: str,
        use_tqdm: bool,
    ) -> list[Loglikelihood]:
        """What `Generator.loglikelihood` returns."""
        encoder = self._encoder(prefix_token_id, add_special_tokens, max_length)
        several = _as_several(pairs, "(context, continuation) pairs")
        return self._score("pair", several, encoder.pair, on_error, use_tqdm)

    def texts(
        self,
        texts: Iterable[Text],
        *,
        prefix_token_id: int | None,
        max_length: int | None,
        on_error: str,
        use_tqdm: bool,
    ) -> list[Loglikelihood]:
        """What `Generator.loglikelihood_rolling` returns."""
        encoder = self._encoder(prefix_token_id, None, max_length)
        several = _as_several(texts, "texts")
        return self._score("text", several, encoder.text, on_error, use_tqdm)

    def prompts(
        self, prompts: Prompt | Iterable[Prompt], num_top: int, *, use_tqdm: bool
    ) -> list[PromptLogprobs]:
        """What `Generator.prompt_logprobs` returns."""
        self._loop.check()
        if not is_integer(num_top) or num_top < -1:
            raise ConfigError(f"k must be -1 (the whole vocabulary) or more, got {num_top!r}")
        vocab_size = self._prompts.vocab_size
        decode_token = None if self._tokenizer is None else self._tokenizer.token_text

        def begin(prompt: Prompt) -> PromptLogprobs:
            ids = self._prompts.encode(prompt)
            check_amount("k", num_top, len(ids), vocab_size)
            return PromptLogprobs(ids, num_top, vocab_size, decode_token)

        several = [prompts] if is_single_prompt(prompts) else as_iterable(prompts)
        made = list(_each("prompt", several, begin, "raise"))
        items = [ScoreItem(each, 1) for each in made if len(each) > 1]
        self._run(items, use_tqdm)
        for index, each in enumerate(made):
            if not each.is_finite:
                raise _non_finite(f"prompt {index}")
        return made

    def _encoder(
        self,
        prefix_token_id: int | None,
        add_special_tokens: bool | None,
        max_length: int | None,
    ) -> ScoreEncoder:
        self._loop.check()
        vocab_size, longest = self._prompts.vocab_size, self._prompts.max_model_len
        if max_length is not None and not (is_integer(max_length) and 1 <= max_length <= longest):
            raise ConfigError(
                f"max_length must be 1 .. {longest} (max_model_len), got {max_length!r}"
            )
        if prefix_token_id is None:
            prefix_token_id = self._default_prefix()
        elif not is_integer(prefix_token_id) or not 0 <= prefix_token_id < vocab_size:
            raise ConfigError(
                f"prefix_token_id must be a token id below {vocab_size}, got {prefix_token_id!r}"
            )
        return ScoreEncoder(
            self._tokenizer,
            vocab_size=vocab_size,
            max_length=longest if max_length is None else int(max_length),
            prefix_token_id=prefix_token_id,
            add_special_tokens=add_special_tokens,
        )

    def _default_prefix(self) -> int | None:
        """BOS, or EOS where there is none; what the tokenizer does by itself is told once."""
        if self._tokenizer is None:
            return None
        tokenizer = self._tokenizer
        prefix = tokenizer.bos_token_id
        if prefix is None:
            prefix = tokenizer.eos_token_id
        if not self._has_told:
            self._has_told = True
            added = "adds" if tokenizer.encode("a")[0] == prefix else "does not add"
            logger.info(
                "scoring: without a context the prefix token is %s; before a context the tokenizer "
                "%s it",
                "none" if prefix is None else f"{prefix} ({tokenizer.token_text(prefix)})",
                added,
            )
        return prefix

    def _score(
        self,
        noun: str,
        several: Iterable[Any],
        encode: Callable[[Any], list[Span]],
        on_error: str,
        use_tqdm: bool,
    ) -> list[Loglikelihood]:
        if on_error not in ON_ERROR:
            raise ConfigError(f"on_error must be one of {ON_ERROR}, got {on_error!r}")
        vocab_size = self._prompts.vocab_size
        entries: list[tuple[list[ScoreItem], int] | ConfigError] = []
        for spans in _each(noun, several, encode, on_error):
            if isinstance(spans, ConfigError):
                entries.append(spans)
                continue
            items = [ScoreItem(PromptLogprobs(s.ids, 1, vocab_size, None), s.first) for s in spans]
            entries.append((items, sum(span.num_truncated for span in spans)))
        self._run([i for e in entries if isinstance(e, tuple) for i in e[0]], use_tqdm)
        results = []
        for index, entry in enumerate(entries):
            result = _result(f"{noun} {index}", entry)
            if result.error is not None and on_error == "raise":
                raise result.error
            results.append(result)
        return results

    def _run(self, items: list[ScoreItem], use_tqdm: bool) -> None:
        """Waits until the engine has scored the items; Ctrl-C takes them back."""
        task = ScoringTask(
            self._parts.model,
            items,
            max_num_batched_tokens=self._parts.options.max_num_batched_tokens,
        )
        self._loop.run_beside(task)
        bar = tqdm(total=len(items), unit="seq", dynamic_ncols=True) if use_tqdm else None
        try:
            while not task.future.done():
                wait([task.future], POLL_S)
                if bar is not None:
                    bar.update(task.num_done - bar.n)
                if not self._loop.is_alive() and not task.future.done():
                    self._loop.check()
            task.future.result()
        finally:
            task.is_cancelled = True
            if bar is not None:
                bar.close()


def _as_several(values: object, what: str) -> Iterable[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"expected a list of {what}, got {type(values).__name__}")
    return values


def _each(
    noun: str, several: Iterable[Any], make: Callable[[Any], Any], on_error: str
) -> Iterator[Any]:
    """Yields what `make` makes of each; of bad ones the ConfigError, or all of them at the end.

    Raises:
        ConfigError: names every bad one by its index, unless on_error is "event".
    """
    bad: list[str] = []
    for index, value in enumerate(several):
        try:
            made = make(value)
        except ConfigError as error:
            named = ConfigError(f"{noun} {index}: {error}")
            if on_error == "event":
                yield named
            else:
                bad.append(str(named))
        else:
            yield made
    if bad:
        more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ConfigError("; ".join(bad[:MAX_NAMED]) + more)


def _non_finite(what: str) -> FastDecodeError:
    return FastDecodeError(
        f"{what}: the model's logits are not finite; try another dtype, or check the weights"
    )


def _result(what: str, entry: tuple[list[ScoreItem], int] | ConfigError) -> Loglikelihood:
    if isinstance(entry, ConfigError):
        return Loglikelihood(math.nan, error=entry)
    items, num_truncated = entry
    if not all(item.is_finite for item in items):
        return Loglikelihood(math.nan, error=_non_finite(what))
    token_logprobs: list[float] = []
    token_ids: list[int] = []
    is_greedy = True
    for item in items:
        places = slice(item.first, None)
        token_logprobs += item.logprobs.logprobs[places].tolist()
        token_ids += item.logprobs.token_ids[places].tolist()
        is_greedy = is_greedy and bool(item.logprobs.is_greedy[places].all())
    return Loglikelihood(
        sum(token_logprobs, 0.0), token_logprobs, token_ids, is_greedy, num_truncated
    )
