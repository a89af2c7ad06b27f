"""The protocol behind the paper's numbers, as settings, and how an evaluation differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAY: Mapping[str, Any] = {
    "frames": 64,
    "dispatch": "frames",
    "max_num_frames": 0,
    "tools": ["crop_video"],
    "temperature": 0.0,
    "blind": False,
    "shuffle": False,
    "max_tool_turns": 3,
    "max_calls": 5,
    "turn_tokens": 2048,
    "question_tokens": 2048,  # the release has no limit
    "pin_think": False,
    "frame_times": False,
    "native_video": False,
    "min_pixels": 100_352,
    "max_pixels": 602_112,
    "crop_min_pixels": 784,
    "crop_max_pixels": 50_176,
    "snap": 28,
    "jpeg": 85,
    "processor_min_pixels": 65_536,
}
"""How the release's evaluator plays: values of `BenchmarkSettings` by field.

Frames go through qwen_vl_utils, JPEG, and the processor of the server, whose smallest frame has
65,536 pixels.
"""

PLAY_CHARADES: Mapping[str, Any] = {"prompt": "agentic-minimal", "native_video": True}
"""What differs for Charades-STA."""

_WORDS = {
    "frames": "{0} overview frames instead of {1}",
    "native_video": "a native video: {0} instead of {1}",
    "frame_times": "times before frames",
    "snap": "sizes not snapped to {1}",
    "jpeg": "JPEG quality {0} instead of {1}",
    "processor_min_pixels": "no second enlargement of frames below {1:,} pixels",
    "dispatch": "dispatch {0} instead of {1}",
    "tools": "tools {0} instead of {1}",
    "max_num_frames": "num_frames in calls",
    "temperature": "temperature {0:g} instead of greedy",
    "turn_tokens": "{0:,} tokens per turn instead of {1:,}",
    "question_tokens": "questions of up to {0:,} tokens instead of {1:,}",
    "max_tool_turns": "{0} turns with tools instead of {1}",
    "max_calls": "{0} calls per turn instead of {1}",
    "pin_think": "responses begin with <think>",
    "blind": "no frames (blind)",
    "shuffle": "options shuffled",
}
"""Phrases for a setting with another value, {0}, than the published one, {1}."""

_WORDS_OF_0 = {"jpeg": "no JPEG instead of quality {1}"}
"""Phrases for the value 0, where it needs one of its own."""

_OF_FRAMES = ("frames", "native_video", "frame_times", "snap", "jpeg", "processor_min_pixels")
"""Settings that mean nothing in a blind run."""


def prompts(identity: Mapping[str, Any]) -> str:
    """Names the prompts of an evaluation: the pack, its digest's beginning, the system prompt."""
    digest = identity.get("protocol_digest", "")[:12]
    parts = ["prompts", identity.get("protocol", ""), digest, f"({identity['prompt']})"]
    return " ".join(part for part in parts if part)


def differences(identity: Mapping[str, Any]) -> list[str]:
    """List the differences from the published protocol other than the prompts, as phrases.

    Args:
        identity: the settings that affect answers, as config.json holds them. Settings that it
            lacks are passed over.
    """
    charades = identity["benchmark"] == "charades"
    published = {**PLAY, **(PLAY_CHARADES if charades else {})}
    blind = identity.get("blind", False)
    found = []
    for kind, prefix in () if blind else (("overview frames", ""), ("crops", "crop_")):
        own, wanted = _limits(identity, prefix), _limits(published, prefix)
        if own not in ("", wanted):
            found.append(f"{kind} of {own} instead of {wanted}")
    for field, words in _WORDS.items():
        if blind and field in _OF_FRAMES:
            continue
        value = identity.get(field, published[field])
        if value != published[field]:
            words = words if value else _WORDS_OF_0.get(field, words)
            found.append(words.format(value, published[field]))
    return found


def _limits(settings: Mapping[str, Any], prefix: str) -> str:
    """The sizes of the overview's frames, or with a prefix those of crops; "" if not stated."""
    names = ("min_pixels", "max_pixels")
    low, high = (settings.get(prefix + name) or settings.get(name) for name in names)
    return f"{low:,} to {high:,} pixels" if low and high else ""
