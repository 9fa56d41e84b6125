"""What a job says of itself while it runs: a line that changes on a terminal, one a minute
elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TERMINAL_S = 0.5
LOG_S = 60.0


@dataclass(slots=True)
class Counts:
    """What has been done so far; `tokens` are those of lines that were written.

    resumed: lines that an earlier run had finished; they are no part of `requests`. total: lines
    of the job, None if nobody knows.
    """

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    resumed: int = 0
    resumed_failed: int = 0
    total: int | None = None
    started: float = field(default_factory=time.monotonic)

    def summary(self, tokens_under_way: int = 0) -> str:
        """One line for people."""
        tokens = self.tokens + tokens_under_way
        failed = f" ({self.failed} failed)" if self.failed else ""
        before = f", {self.resumed} of an earlier run" if self.resumed else ""
        return (
            f"{self.requests} requests{failed}, {tokens} tokens in {self.elapsed_s:.1f} s, "
            f"{tokens / self.elapsed_s:.1f} tokens/s{before}"
        )

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def any_failed(self) -> bool:
        """Whether the output holds error records, those of earlier runs included."""
        return bool(self.failed or self.resumed_failed)

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the speed so far; None if it cannot be told."""
        if self.total is None or not self.requests:
            return None
        left = max(0, self.total - self.resumed - self.requests)
        return self.elapsed_s / self.requests * left


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What is being worked on: `tokens` so far, sequences that run and those that wait."""

    tokens: int = 0
    running: int = 0
    waiting: int = 0


class Progress:
    """Shows counts on stderr now and then."""

    def __init__(self, counts: Counts, *, output_is_terminal: bool) -> None:
        self._counts = counts
        self._is_live = sys.stderr.isatty()
        self._is_off = self._is_live and output_is_terminal  # results and progress would mix
        self._period_s = TERMINAL_S if self._is_live else LOG_S
        self._next = time.monotonic() + (0.0 if self._is_live else LOG_S)

    def show(self, look: Callable[[], UnderWay]) -> None:
        """Shows the counts if it is time; only then `look` is called."""
        if self._is_off or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._period_s
        text = describe(self._counts, look())
        if self._is_live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clears the line of a terminal."""
        if self._is_live and not self._is_off:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def describe(counts: Counts, now: UnderWay) -> str:
    """Returns the line of a job that runs."""
    done = counts.requests + counts.resumed
    of = "" if counts.total is None else f"/{counts.total}"
    failed = counts.failed + counts.resumed_failed
    tokens = counts.tokens + now.tokens
    parts = [
        f"{done}{of} lines" + (f" ({failed} failed)" if failed else ""),
        f"{tokens} tokens",
        f"{tokens / counts.elapsed_s:.1f} tokens/s",
        f"running {now.running}, waiting {now.waiting}",
    ]
    if counts.eta_s is not None:
        parts.append(f"ETA {_duration(counts.eta_s)}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
