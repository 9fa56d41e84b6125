"""Pairs and texts that are to be scored -> token sequences and what of them counts.

The rules are the lm-evaluation-harness's; every mistake is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.tokenizer import Tokenizer

Text = str | Sequence[int]
"""Text, or token ids (a list or an array)."""


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence that the model sees at once; its tokens from `first` on are scored."""

    ids: np.ndarray  # int64 [L]
    first: int
    num_truncated: int = 0


def rolling_spans(ids: np.ndarray, max_length: int) -> list[Span]:
    """Cuts ids (the prefix token first) so that each token after it is scored once, with as many
    tokens before it as max_length inputs allow: the last window reaches back, the others follow
    each other with one token of context.
    """
    spans: list[Span] = []
    done, end = 1, len(ids)
    while done < end:
        stop = min(end, done + max_length)
        start = max(0, stop - max_length - 1)
        spans.append(Span(ids[start:stop], done - start))
        done = stop
    return spans


class ScoreEncoder:
    """Text -> token ids, with one prefix token where there is no context."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_length: int,
        prefix_token_id: int | None,
        add_special_tokens: bool | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._prefix = prefix_token_id
        self._adds_special = add_special_tokens is not False

    def pair(self, pair: object) -> list[Span]:
        """Returns the one span of a (context, continuation)."""
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            what = f"{len(pair)} values" if isinstance(pair, (list, tuple)) else type(pair).__name__
            raise ConfigError(f"expected (context, continuation), got {what}")
        context, continuation = pair
        if isinstance(context, str) and isinstance(continuation, str):
            before, after = self._encode_pair(context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise ConfigError("give context and continuation both as text or both as token ids")
        else:
            before, after = self._ids(context), self._ids(continuation)
        if not len(before) and len(after):
            before, after = self._with_prefix(after)
        if not len(after):
            raise ConfigError("the continuation is empty: there is no token to score")
        if len(after) > self._max_length:
            raise ConfigError(
                f"the continuation has {len(after)} tokens, and at most {self._max_length} can be "
                "scored at once (max_model_len, or max_length if that is given); score longer text "
                "with loglikelihood_rolling"
            )
        ids = np.concatenate([before, after])
        cut = max(0, len(ids) - self._max_length - 1)
        return [Span(ids[cut:], len(before) - cut, cut)]

    def text(self, text: Text) -> list[Span]:
        """Returns the windows of a text; none for an empty one."""
        ids = self._encode(text, False) if isinstance(text, str) else self._ids(text)
        if not len(ids):
            return []
        before, after = self._with_prefix(ids)
        return rolling_spans(np.concatenate([before, after]), self._max_length)

    def _encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
        """The context as it is alone, then what the whole text has behind as many tokens: the
        harness's rule. Where a token of the whole text spans the border, the two differ there."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation  # spaces belong to the next word
        if not bare:
            return self._encode("", False), self._encode(continuation, False)
        whole = self._encode(bare + continuation, self._adds_special)
        before = self._encode(bare, self._adds_special)
        return before, whole[len(before) :]

    def _with_prefix(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits ids after the token that nothing comes before: the prefix token, once."""
        prefix = self._prefix_id()
        if ids[0] == prefix:
            return ids[:1], ids[1:]
        return np.array([prefix], np.int64), ids

    def _prefix_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        raise ConfigError(
            "without a context the first token needs a prefix token, and the tokenizer has neither "
            "BOS nor EOS; give prefix_token_id"
        )

    def _encode(self, text: str, add_special_tokens: bool) -> np.ndarray:
        if self._tokenizer is None:
            raise ConfigError("text needs a tokenizer, and this model has none; give token ids")
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
        return self._ids(ids)

    def _ids(self, ids: Any) -> np.ndarray:
        if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__len__"):
            raise ConfigError(f"expected text or token ids, got {type(ids).__name__}")
        values = np.asarray(ids)
        if not values.size:
            return np.zeros(0, np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ConfigError("token ids must be a list of integers")
        bad = np.flatnonzero((values < 0) | (values >= self._vocab_size))
        if len(bad):
            raise ConfigError(
                f"token id {values[bad[0]]} at place {bad[0]} is outside the vocabulary of "
                f"{self._vocab_size}"
            )
        return values.astype(np.int64)
