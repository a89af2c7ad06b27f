"""`crop_video`: a sub-agent looks at one window of the video and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from paravt_jax.method.records import CallStatus, CropCall, FailedCall
from paravt_jax.method.tools.tool import Look, Tool, Video

_PLAIN_NUMBER = re.compile(
    r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)\s*(?:s|secs?|seconds?)?", re.IGNORECASE
)
_CLOCK = re.compile(r"(?:([0-9]+):)?([0-9]+):([0-5]?[0-9](?:\.[0-9]+)?)")

CROP_FPS = 1.0
"""Frames per second that a sub-agent sees of its window."""


class CropVideo(Tool):
    """The tool `crop_video`."""

    name = "crop_video"
    description = (
        "Look closer at one window of the video. "
        "Several calls in one turn are looked at side by side."
    )
    parameters = {
        "video_path": {"type": "string", "description": "Name of the video."},
        "start_time": {"type": "number", "description": "Start of the window in seconds."},
        "end_time": {"type": "number", "description": "End of the window in seconds."},
    }
    required = ("video_path", "start_time", "end_time")
    example = {"start_time": 12, "end_time": 28}
    hint = (
        "Where they do not show enough, call crop_video on every window that matters; "
        "each window comes back as a short report."
    )

    def parse(self, arguments: Mapping[str, Any]) -> CropCall | FailedCall:
        """Parse the window. `video_path` is ignored: an agent sees only the question's video."""
        times = []
        for field in ("start_time", "end_time"):
            if field not in arguments:
                return FailedCall(f"{field} is missing. Give start_time and end_time in seconds.")
            seconds = read_seconds(arguments[field])
            if seconds is None:
                return FailedCall(
                    f"{field} is not a time. Give start_time and end_time in seconds."
                )
            if not math.isfinite(seconds):
                return FailedCall(
                    f"{field} is not a finite number. Give start_time and end_time in seconds.",
                    CallStatus.BAD_WINDOW,
                )
            times.append(seconds)
        return CropCall(*times)

    def run(self, call: CropCall, video: Video) -> Look | FailedCall:
        """Limit the window to the video."""
        return resolve_window(call, video.duration)


def resolve_window(call: CropCall, duration: float) -> Look | FailedCall:
    """Limit a call's window to a video of `duration` seconds.

    Returns:
        The window, with a note if it was cut; or a FailedCall (BAD_WINDOW) if it is reversed,
        empty, outside the video or not finite.
    """
    if not (math.isfinite(call.start) and math.isfinite(call.end)):
        why = "The window is not finite."
    elif call.start > call.end:
        why = "The window is reversed: start_time is after end_time."
    elif call.start == call.end:
        why = "The window is empty: start_time equals end_time."
    elif call.start >= duration or call.end <= 0:
        why = "The window is outside the video."
    else:
        window = CropCall(max(call.start, 0.0), min(call.end, duration))
        cut = (
            f"The window was cut to {window.start:.1f} to {window.end:.1f} seconds, "
            "where the video is."
        )
        return Look(window, "" if window == call else cut)
    reason = f"{why} The video runs from 0 to {duration:.1f} seconds."
    return FailedCall(reason, CallStatus.BAD_WINDOW)


def read_seconds(value: object) -> float | None:
    """Read a time: a number, or text like "16", "16.5s", "16 seconds", "1:00:05".

    Returns:
        Seconds (infinite if the number is too large for a float); None if it is not a time.
    """
    if isinstance(value, bool):  # a bool is an int in Python
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if not isinstance(value, str):
        return None
    text = value.strip()
    number = _PLAIN_NUMBER.fullmatch(text)
    if number:
        return float(number.group(1))
    clock = _CLOCK.fullmatch(text)
    if clock:
        hours, minutes, seconds = clock.groups()
        return float(hours or 0) * 3600 + float(minutes) * 60 + float(seconds)
    return None
