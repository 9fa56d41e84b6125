"""Token ids -> text as it becomes certain: deltas that concatenate to exactly the full decode.

Text is held back while it may still change: bytes of an unfinished character, and an end that may
be the start of a stop string. Work per token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.text_decoders import TextDecoder


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

    def feed(self, text: str, *, num_exempt: int = 0) -> tuple[str, str | None]:
        """Returns the text that is released, and the stop string if one was completed.

        With a stop string, the released text ends right before it. A stop string that is complete
        within the first `num_exempt` characters does not count.
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
            if found is not None and position >= num_exempt:
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

    `stop_string` is the stop string that was found; after it, no text comes. As in vLLM, one that
    is complete within the first `min_tokens` tokens does not count.
    """

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self.stop_string: str | None = None
        self._decoder = decoder
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._num_exempt = 0  # characters of the tentative text in which no stop string counts
        self._trial: StopMatcher | None = None  # has seen the tentative text, too
        self._trial_length = 0
        self._trial_text = ""

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str:
        """Returns the text that became certain with this token.

        The text of a stop token is left out, as vLLM does, unless `include_stop_str_in_output`.
        """
        self._num_tokens += 1
        if self.stop_string is not None or (is_stop_token and not self._include_stop):
            return ""
        text = self._decoder.push(token_id)
        if self._matcher is None:
            return text
        if text:
            text = self._certain(text)
            if self.stop_string is not None:
                return text
        if self._num_tokens <= self._min_tokens:
            self._num_exempt = len(self._decoder.tentative)
            return text
        return text + self._try_tentative()

    def flush(self) -> str:
        """Returns the rest of the text at the end of the sequence."""
        if self.stop_string is not None:
            return ""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        text = self._certain(text)
        return text if self.stop_string is not None else text + self._matcher.drain()

    def _certain(self, text: str) -> str:
        """Takes text that no token can change any more."""
        self._trial = None
        num_exempt, self._num_exempt = self._num_exempt, 0
        if self._num_tokens <= self._min_tokens:
            num_exempt = len(text)
        return self._through(self._matcher, text, num_exempt)

    def _through(self, matcher: StopMatcher, text: str, num_exempt: int) -> str:
        released, self.stop_string = matcher.feed(text, num_exempt=num_exempt)
        if self.stop_string is not None and self._include_stop:
            released += self.stop_string
        return released

    def _try_tentative(self) -> str:
        """Stops on text that only a further token could change: there will be no further one."""
        tentative = self._decoder.tentative
        if not tentative:
            self._trial = None
            return ""
        if self._trial is None:
            self._trial, self._trial_length = self._matcher.copy(), 0
            self._trial_text = ""
        new = tentative[self._trial_length :]
        num_exempt = self._num_exempt - self._trial_length
        self._trial_length = len(tentative)
        released = self._through(self._trial, new, num_exempt)
        if self.stop_string is not None:
            return self._trial_text + released
        self._trial_text += released
        return ""
