"""Pages from Jinja templates, and numbers as people read them.

Templates escape: whatever a model, a file or a person wrote shows on the page as the characters it is.
"""

from __future__ import annotations

import math
import pathlib

import jinja2


def environment(*folders: pathlib.Path) -> jinja2.Environment:
    """The templates in `folders` and in this one. Using a name that has no value is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, pathlib.Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=number, decimals=decimals, seconds=seconds, plural=plural)
    return made


def number(value: float | None) -> str:
    """A figure in about three digits: 0.813, 12.5, 1,240, 3.1e−6; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def decimals(value: float | None) -> str:
    """A share or a count with two decimals; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}".replace("-", "−")


def seconds(value: float | None) -> str:
    """A time in a video. A call may name any number, so large ones are shortened."""
    if value is None:
        return "?"
    return f"{value:.1f}".removesuffix(".0") if abs(value) < 1e6 else f"{value:.0e}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
