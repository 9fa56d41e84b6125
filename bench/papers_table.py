"""One published figure beside ours, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """tolerance: of the relative error, or of the difference if `absolute`. at_least: more is fine,
    too. note: why it is off where it is, from what is known; such a row is listed, not hidden."""

    paper: str
    what: str
    theirs: float
    ours: float
    tolerance: float
    unit: str = ""
    absolute: bool = False
    at_least: bool = False
    note: str = ""

    @property
    def error(self) -> float:
        """Signed; relative unless `absolute`."""
        difference = self.ours - self.theirs
        return difference if self.absolute else difference / self.theirs

    @property
    def is_within(self) -> bool:
        if self.at_least and self.error > 0:
            return True
        return abs(self.error) <= self.tolerance * (1 + 1e-9)

    @property
    def holds(self) -> bool:
        return self.is_within or bool(self.note)

    @property
    def verdict(self) -> str:
        if self.is_within:
            return "holds"
        return "explained" if self.note else "FAILS"


def render(claims: Sequence[Claim]) -> str:
    """Returns the table, and the explanations below it."""
    lines = [f"{'':<58}{'theirs':>9}{'ours':>9}{'error':>9}{'allowed':>9}"]
    paper = ""
    notes: list[str] = []
    for claim in claims:
        if claim.paper != paper:
            paper = claim.paper
            lines.append(paper)
        error = f"{claim.error:+.3g}" if claim.absolute else f"{claim.error:+.1%}"
        allowed = f"{claim.tolerance:.3g}" if claim.absolute else f"{claim.tolerance:.0%}"
        mark = ""
        if claim.verdict == "explained":
            notes.append(claim.note)
            mark = f" [{len(notes)}]"
        name = f"{claim.what}{', ' if claim.unit else ''}{claim.unit}"
        lines.append(
            f"  {name:<56}{claim.theirs:>9.4g}{claim.ours:>9.4g}{error:>9}{allowed:>9}  "
            f"{claim.verdict}{mark}"
        )
    lines += [f"[{number}] {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines)
