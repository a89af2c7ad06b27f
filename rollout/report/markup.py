"""HTML as values: elements whose text is escaped because it is text, and numbers as people read them.

Owns escaping for the pages: a plain `str` can only become text or an attribute's value; only `Html`, made here, becomes
markup. Invariant: whatever a model, a file or a person wrote shows on the page as the characters it is.
"""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Iterable

VOID = frozenset({"img", "meta", "br"})


class Html(str):
    """Markup that is already safe. Concatenate with `join`."""


def el(name: str, /, *children: str | Iterable[str], **attributes: object) -> Html:
    """One element. `str` children are escaped, `Html` ones kept, lists flattened; attributes that are None or False are left out.

    A trailing underscore of an attribute is dropped (`class_`), an inner one becomes a hyphen (`stroke_width`).
    """
    pairs = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        pairs.append(f" {key}" if value is True else f' {key}="{html.escape(_attribute(value))}"')
    opening = f"<{name}{''.join(pairs)}>"
    return Html(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def join(*children: str | Iterable[str]) -> Html:
    """The children one after the other, text escaped."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(html.escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def page(title: str, *body: str | Iterable[str]) -> str:
    """A whole page, with its style in it: it needs nothing but itself."""
    style = pathlib.Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(style)),
    )
    return "<!doctype html>\n" + el("html", head, el("body", *body), lang="en")


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


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
