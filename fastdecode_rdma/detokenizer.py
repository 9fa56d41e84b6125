"""Token ids -> text as it becomes certain: deltas that concatenate to exactly the full decode.

Text is held back while it may still change: bytes of an unfinished character, and an end that may
be the start of a stop string. Work per token does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from fastdecode_rdma.sequence import SamplingParams

_REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Turns tokens into text. `tentative` is text that is complete but that the next token could
    still change; a decoder that never has any leaves it empty."""

    tentative: str

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes certain."""
        ...

    def flush(self) -> str:
        """Returns what is left at the end of the sequence."""
        ...


class ByteLevelDecoder:
    """Byte-level BPE: tokens are byte strings, text is their UTF-8 with U+FFFD for what is none."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self.tentative = ""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SentencePieceDecoder:
    """SentencePiece with byte fallback: tokens are text or single bytes.

    A run of byte tokens is text when the whole run is valid UTF-8; otherwise each byte is U+FFFD.
    So a run is certain only when it has ended; until then it is `tentative`.
    `num_stripped` leading spaces of the whole text are dropped (Llama 2 adds one when encoding).
    """

    def __init__(self, token_piece: Callable[[int], str | int | None], num_stripped: int) -> None:
        self._token_piece = token_piece
        self._num_stripped = num_stripped
        self._start_run()

    def push(self, token_id: int) -> str:
        piece = self._token_piece(token_id)
        if piece is None:  # a special token that is skipped does not end a run
            return ""
        if isinstance(piece, int):
            self._run_length += 1
            if self._run_is_valid:
                try:
                    self.tentative += self._utf8.decode(bytes((piece,)))
                except UnicodeDecodeError:
                    self._run_is_valid = False
                    self.tentative = ""
            return ""
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _start_run(self) -> None:
        self.tentative = ""
        self._run_length = 0
        self._run_is_valid = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def _end_run(self) -> str:
        if not self._run_length:
            return ""
        is_whole = self._run_is_valid and not self._utf8.getstate()[0]
        text = self.tentative if is_whole else _REPLACEMENT * self._run_length
        self._start_run()
        return text

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if text[0] != " ":
                self._num_stripped = 0
            else:
                self._num_stripped -= 1
                text = text[1:]
        return text


class WindowDecoder:
    """Any other decoder: decodes a short window of tokens with and without the newest one."""

    _WINDOW = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.tentative = ""
        self._decode = decode
        self._window: list[int] = []
        self._known = ""  # the part of the window's text that was given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):  # perhaps an unfinished character
            return ""
        delta = text[len(self._known) :]
        self._known = text
        if len(self._window) > 4 * self._WINDOW:
            self._window = self._window[-self._WINDOW :]
            self._known = self._decode(self._window)
        return delta

    def flush(self) -> str:
        return self._decode(self._window)[len(self._known) :]


class StopMatcher:
    """Finds stop strings in a stream of text and holds back what may become one.

    The match that is complete first counts, the longest of those that end together: the result
    does not depend on how the text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tables = tuple(_failure_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""

    def copy(self) -> StopMatcher:
        """Returns a matcher in the same state."""
        other = StopMatcher(self._stops)
        other._matched = list(self._matched)
        other._held = self._held
        return other

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is released, and the stop string if one was completed.

        With a stop string, the released text ends right before it.
        """
        for position, char in enumerate(text):
            found = None
            for number, stop in enumerate(self._stops):
                length = self._matched[number]
                while length and stop[length] != char:
                    length = self._tables[number][length - 1]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    found = stop if found is None or length > len(found) else found
                    length = self._tables[number][length - 1]
                self._matched[number] = length
            if found is not None:
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[: -len(found)], found
        whole = self._held + text
        cut = len(whole) - max(self._matched, default=0)
        self._held = whole[cut:]
        return whole[:cut], None

    def drain(self) -> str:
        """Returns what was held back: the text has ended."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=1024)
def _failure_table(pattern: str) -> tuple[int, ...]:
    """Knuth, Morris, Pratt: length of the longest proper border of each prefix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return tuple(table)


class IncrementalDetokenizer:
    """The text of one sequence, token by token, up to its stop string.

    `stop_string` is the stop string that was found; after it, no text comes.
    """

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self.stop_string: str | None = None
        self._decoder = decoder
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._trial: StopMatcher | None = None  # has seen the tentative text, too
        self._trial_length = 0

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str:
        """Returns the text that became certain with this token.

        The text of a stop token is left out, as vLLM does, unless `include_stop_str_in_output`.
        """
        self._num_tokens += 1
        if self.stop_string is not None or (is_stop_token and not self._include_stop):
            return ""
        text = self._decoder.push(token_id)
        if self._matcher is None or self._num_tokens < self._min_tokens:
            return text
        if text:
            self._trial = None
            text = self._through(self._matcher, text)
            if self.stop_string is not None:
                return text
        return text + self._try_tentative()

    def flush(self) -> str:
        """Returns the rest of the text at the end of the sequence."""
        if self.stop_string is not None:
            return ""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        text = self._through(self._matcher, text)
        return text if self.stop_string is not None else text + self._matcher.drain()

    def _through(self, matcher: StopMatcher, text: str) -> str:
        released, self.stop_string = matcher.feed(text)
        if self.stop_string is not None and self._include_stop:
            released += self.stop_string
        return released

    def _try_tentative(self) -> str:
        """Stops on text that only a further token could change: there will be no further one."""
        tentative = self._decoder.tentative
        if not tentative or self._matcher is None:
            self._trial = None
            return ""
        if self._trial is None:
            self._trial, self._trial_length = self._matcher.copy(), 0
            self._trial_text = ""
        new = tentative[self._trial_length :]
        self._trial_length = len(tentative)
        released = self._through(self._trial, new)
        if self.stop_string is not None:
            return self._trial_text + released
        self._trial_text += released
        return ""
