"""How an evaluation differs from the protocol with which the paper's numbers were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Aspect(NamedTuple):
    """A setting, its published value, and words for another value."""

    field: str
    published: Any
    words: str
    """{0} stands for the value of the run."""


_ASPECTS = (
    _Aspect("frames", 64, "{0} overview frames instead of 64"),
    _Aspect("max_pixels", 602_112, "overview frames of at most {0:,} pixels instead of 602,112"),
    _Aspect("snap", 28, "sizes not snapped to 28"),
    _Aspect("jpeg", 85, "JPEG quality {0} instead of 85"),
    _Aspect("frame_times", False, "times before frames"),
    _Aspect("dispatch", "frames", "dispatch {0} instead of frames"),
    _Aspect("temperature", 0.0, "temperature {0:g} instead of greedy"),
    _Aspect("turn_tokens", 2048, "{0:,} tokens per turn instead of 2,048"),
    _Aspect("max_tool_turns", 3, "{0} turns with tools instead of 3"),
    _Aspect("max_calls", 5, "{0} calls per turn instead of 5"),
    _Aspect("blind", False, "no frames (blind)"),
    _Aspect("shuffle", False, "options shuffled"),
)
_CROP_PIXELS = 50_176


def prompts(identity: Mapping[str, Any]) -> str:
    """Names the prompts of an evaluation: the pack, the beginning of its digest, our prompt."""
    pack = identity.get("protocol", "own")
    named = ["ours"] if pack == "own" else [pack, identity.get("protocol_digest", "")[:12]]
    return " ".join(part for part in ("prompts", *named, f"({identity['prompt']})") if part)


def differences(identity: Mapping[str, Any]) -> list[str]:
    """List the differences from the published protocol other than the prompts, as phrases.

    Args:
        identity: the settings that affect answers, as config.json holds them. Settings that it
            lacks are passed over.
    """
    found = []
    for field, published, words in _ASPECTS:
        value = identity.get(field, published)
        if value != published:
            found.append("no JPEG" if field == "jpeg" and not value else words.format(value))
    crops = identity.get("crop_max_pixels") or identity.get("max_pixels", _CROP_PIXELS)
    if crops != _CROP_PIXELS:
        found.append(f"crops of at most {crops:,} pixels instead of 50,176")
    return found
