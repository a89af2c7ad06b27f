"""What the check found, one record per item, and the table that shows it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Literal

Problem = Literal["", "warning", "error"]

# Widths of the columns, in characters. A line of the table has at most 100.
_ITEM, _STATE, _FOUND, _NEEDED = 14, 7, 41, 32


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the table."""

    item: str
    """What was looked at, such as "weights"."""
    found: str
    needed: str = ""
    remedy: str = ""
    """What to do about a problem: commands, one per line, or a sentence."""
    problem: Problem = ""
    """error: the run would stop. warning: the run gets it itself, or goes on without it."""
    must_agree: bool = False
    """Whether it is an error if the hosts of a run differ in what was found."""


def table(findings: Sequence[Finding]) -> str:
    """All findings as columns of plain text, and below them what to do about each problem."""
    rule = "  ".join("-" * width for width in (_ITEM, _STATE, _FOUND, _NEEDED))
    lines = [*_row("item", "", "found", "needed"), rule]
    for finding in findings:
        state = finding.problem or "ok"
        lines += _row(finding.item, state, finding.found, finding.needed)
    # Hosts with the same problem share its remedy.
    remedies = dict.fromkeys(
        (finding.item, finding.problem, finding.remedy)
        for finding in findings
        if finding.problem and finding.remedy
    )
    for item, problem, remedy in remedies:
        lines += ["", f"{item} ({problem}):", textwrap.indent(remedy, "  ")]
    return "\n".join(lines)


def in_one_line(errors: Sequence[Finding]) -> str:
    """The first of some errors, and how many others there are."""
    first = errors[0]
    remedy = " ".join(first.remedy.split())
    text = "; ".join(filter(None, (f"{first.item}: {first.found}", remedy)))
    others = len(errors) - 1
    return f"{text} (and {others} more in the table)" if others else text


def _row(item: str, state: str, found: str, needed: str) -> list[str]:
    """The lines of one row; long cells continue on the next line."""
    cells = [
        textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        for text, width in ((item, _ITEM), (state, _STATE), (found, _FOUND), (needed, _NEEDED))
    ]
    lines = []
    for n in range(max(map(len, cells))):
        part = [cell[n] if n < len(cell) else "" for cell in cells]
        line = f"{part[0]:<{_ITEM}}  {part[1]:<{_STATE}}  {part[2]:<{_FOUND}}  {part[3]}"
        lines.append(line.rstrip())
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """The findings in one line, and one line per warning."""
    short = [finding.found for finding in findings if finding.item in _SHORT]
    lines = [f"checked: {'; '.join(short)}"]
    for finding in findings:
        if finding.problem:
            needed = f"; needed: {finding.needed}" if finding.needed else ""
            lines.append(f"{finding.problem}: {finding.item}: {finding.found}{needed}")
    return "\n".join(lines)


_SHORT = ("devices", "weights", "data", "disk")  # items of the summary


def failed(item: str, error: Exception) -> Finding:
    """A finding for an error that says itself what is wrong. Further lines become the remedy."""
    first, _, rest = str(error).partition("\n")
    return Finding(item, first or type(error).__name__, remedy=rest, problem="error")
