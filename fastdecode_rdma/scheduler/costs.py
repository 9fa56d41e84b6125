"""Costs that are learned while running, where no profile was given."""

from __future__ import annotations

RECENT = 0.1
"""Weight of the newest observation."""


class LearnedCosts:
    """Seconds of a prompt token and of a decode step, averaged over the recent past.

    Until something is observed prompts cost nothing and a step `first_guess_s`.
    """

    def __init__(self, first_guess_s: float) -> None:
        self.shortest_decode_s = first_guess_s
        self._decode_s: float | None = None
        self._prompt_token_s: float | None = None

    def observe(
        self, prefill_tokens: int, prefill_s: float, num_decoded: int, decode_s: float
    ) -> None:
        """Takes a step in; what was not done is 0."""
        if prefill_tokens:
            self._prompt_token_s = _blend(self._prompt_token_s, prefill_s / prefill_tokens)
        if num_decoded:
            first = self._decode_s is None
            self._decode_s = _blend(self._decode_s, decode_s)
            self.shortest_decode_s = decode_s if first else min(self.shortest_decode_s, decode_s)

    def prefill_s(self, num_tokens: int) -> float:
        """Returns how long a prompt takes."""
        return num_tokens * (self._prompt_token_s or 0.0)

    def decode_s(self, num_seqs: int, cached_tokens: int) -> float:
        """Returns how long a step takes: as the recent ones, whatever is in it."""
        del num_seqs, cached_tokens
        return self.shortest_decode_s if self._decode_s is None else self._decode_s


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + RECENT * (new - old)
