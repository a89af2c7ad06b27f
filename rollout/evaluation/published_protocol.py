"""The protocol behind the paper's numbers, as settings, and how an evaluation differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAY: Mapping[str, Any] = {
    "frames": 64,
    "dispatch": "frames",
    "tools": ["crop_video"],
    "temperature": 0.0,
    "blind": False,
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

_OF_FRAMES = (
    "frames",
    "native_video",
    "frame_times",
    "min_pixels",
    "max_pixels",
    "crop_min_pixels",
    "crop_max_pixels",
    "snap",
    "jpeg",
    "processor_min_pixels",
)
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
    # The table names the prompt anyway.
    published = {**PLAY, **(PLAY_CHARADES if charades else {})}
    published.pop("prompt", None)
    if identity.get("blind", False):
        published = {name: value for name, value in published.items() if name not in _OF_FRAMES}
    found = []
    for name, wanted in published.items():
        value = identity.get(name, wanted)
        if name.startswith("crop_"):  # 0 stands for the limit of overview frames
            value = value or identity.get(name.removeprefix("crop_"), wanted)
        if value != wanted:
            found.append(f"{name} {value} instead of {wanted}")
    return found
