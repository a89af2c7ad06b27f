"""Excuses: why some records differ from the reference, and what is true of them instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Excuse:
    """A reason why some records differ, with the property that holds for them instead."""

    applies: Callable[[dict], bool]
    """Whether a record is excused; it sees the record alone, not our result."""
    holds: Callable[[dict, Any], bool]
    """Whether our result for an excused record is as it should be."""


def judge(
    record: dict, result: Any, agrees: Callable[[dict, Any], bool], excuses: Mapping[str, Excuse]
) -> tuple[str | None, bool]:
    """Judge our result for a record.

    Returns:
        The name of the first excuse that applies, or None if the record has to agree with the
        reference; and whether the result passes.
    """
    for name, excuse in excuses.items():
        if excuse.applies(record):
            return name, bool(excuse.holds(record, result))
    return None, bool(agrees(record, result))


def falls_under(excuses: Mapping[str, Excuse], record: dict) -> bool:
    return any(excuse.applies(record) for excuse in excuses.values())
