"""The protocol behind the paper's numbers, as settings, and how an evaluation differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PUBLISHED: Mapping[str, Any] = {
    "k": 64,
    "dispatch": "frames",
    "temperature": 0.0,
    "protocol.tools": ["crop_video"],
    "protocol.max_tool_turns": 3,
    "protocol.max_calls": 5,
    "protocol.turn_tokens": 2048,
    "protocol.pin_think": False,
    "pixels": [602_112, 50_176],
}
"""How the release's evaluator plays: values of `BenchmarkSettings` as config.json holds them.

What its client and server do to frames is theirs: no times, JPEG, multiples of 28, native videos.
"""

PUBLISHED_CHARADES: Mapping[str, Any] = {"protocol.prompt": "agentic-minimal"}
"""What differs for Charades-STA."""


def differences(identity: Mapping[str, Any]) -> list[str]:
    """List the differences from the published protocol other than the wording, as phrases.

    Args:
        identity: the settings that affect answers, as config.json holds them.
    """
    published = dict(PUBLISHED)
    if identity["benchmark"] == "charades":
        published |= PUBLISHED_CHARADES
    return [
        f"{name} {identity[name]} instead of {wanted}"
        for name, wanted in published.items()
        if identity[name] != wanted
    ]
