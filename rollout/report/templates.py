"""Jinja templates of the pages, and the filters that format numbers in them.

Templates escape HTML, so text from models, files and people appears on the page literally.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import pathlib

import jinja2
import markupsafe


@functools.cache
def environment(*folders: pathlib.Path) -> jinja2.Environment:
    """Make the environment of the templates in `folders` and in this package's folder.

    It is made once, so that templates are compiled once. A template that uses an undefined name
    raises an error.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, pathlib.Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (pathlib.Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    templates.globals.update(style=markupsafe.Markup(style), style_hash=f"sha256-{digest}")
    templates.filters.update(number=number, seconds=seconds, plural=plural)
    return templates


def number(value: float | None) -> str:
    """Format a figure in about three digits: 0.813, 12.5, 1,240, 3.1e−6; a dash for none."""
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


def seconds(value: float | None) -> str:
    """Format a time in a video. Models may ask for any time, so large numbers are shortened."""
    if value is None:
        return "?"
    if abs(value) >= 1e6:
        return f"{value:.0e}"
    return f"{value:.1f}".removesuffix(".0")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 call", "2 calls"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
