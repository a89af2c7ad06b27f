"""Checks of settings. Each error names a field, its value, the rule and the remedy.

`section` is what the name of a field begins with in errors, such as `rl.grpo`. A number that is
None is not checked: it is an optional one. NaN passes no check.
"""

from __future__ import annotations

import functools
import math
import typing
from typing import Any, Literal


def require_at_least(section: str, settings: Any, minimum: float, *fields: str) -> None:
    """Raise ValueError unless these fields are finite numbers, `minimum` or more."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None and not minimum <= value < math.inf:
            raise ValueError(f"{section}.{field}: {value}; give a finite number, {minimum} or more")


def require_above(section: str, settings: Any, bound: float, *fields: str) -> None:
    """Raise ValueError unless these fields are finite numbers above `bound`."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None and not bound < value < math.inf:
            raise ValueError(f"{section}.{field}: {value}; give a finite number above {bound}")


def require_share(section: str, settings: Any, *fields: str) -> None:
    """Raise ValueError unless these fields are shares or probabilities, from 0 to 1."""
    for field in fields:
        value = getattr(settings, field)
        if not 0 <= value <= 1:
            raise ValueError(f"{section}.{field}: {value}; it is a share, give 0 to 1")


def require_choices(section: str, settings: Any) -> None:
    """Raise ValueError for a field whose value is none that its annotation, a Literal, lists."""
    for field, annotation in _annotations(type(settings)).items():
        choices = typing.get_args(annotation)
        value = getattr(settings, field)
        if typing.get_origin(annotation) is Literal and value not in choices:
            known = ", ".join(map(str, choices))
            raise ValueError(f"{section}.{field}: {value!r} is unknown; choose one of {known}")


# Evaluated once per class, because some settings are made for every episode.
_annotations = functools.cache(typing.get_type_hints)
