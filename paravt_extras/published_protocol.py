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
    "frames.max_pixels": 602_112,
    "frames.crop_max_pixels": 50_176,
}
"""How the release's evaluator plays: values of `BenchmarkSettings` by dotted field.

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
    phrases = []
    for name, wanted in published.items():
        value = identity[name]
        if ".crop_" in name:  # 0 stands for the limit of overview frames
            value = value or identity[name.replace("crop_", "")]
        if value != wanted:
            phrases.append(f"{name} {value} instead of {wanted}")
    return phrases
