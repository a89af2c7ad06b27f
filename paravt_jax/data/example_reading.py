"""Reads one example of a source in a worker process: to a record, or why it is left out.

Every worker process imports this module, so its imports have to be few.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jaxtyping import Int64

from paravt_jax.data import tokenizer_file, video
from paravt_jax.data.frames import (
    PixelRules,
    VideoError,
    VideoInfo,
    join,
    overview_indices,
    window_indices,
)
from paravt_jax.data.published import (
    Reason,
    Refused,
    read_conversation,
    read_question,
    require_earnable,
)
from paravt_jax.data.workers import DeadlineError
from paravt_jax.method.conversations import Clip, Conversation, render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import CropCall, FailedCall, Question
from paravt_jax.method.tokenizer import Dialect
from paravt_jax.method.tools.crop_video import CROP_FPS, resolve_window


@dataclasses.dataclass(frozen=True)
class ExampleReading:
    """Settings of the conversion of examples to records."""

    root: str
    """Folder to which relative video paths refer."""
    tokenizer: str
    """Folder of the tokenizer."""
    dialect: Dialect
    """How the model's family writes a conversation."""
    limits: ProtocolSettings
    """Limits of the protocol, which conversations must keep."""
    frames: int = 64
    """Upper bound on the frames of a video's overview, which has one per second."""
    rules: PixelRules = PixelRules()
    """How frames of overviews and pictures are resized."""
    crop_rules: PixelRules = PixelRules()
    """How frames of crops are resized."""
    annotations: str = ""
    """Source of the examples, as the settings name it."""
    media: str = ""
    """Source of the videos and pictures, as the settings name it."""

    def tokens(self, clip: Clip) -> int:
        """Return the number of visual tokens of one frame of the clip."""
        rules = self.crop_rules if clip.crop else self.rules
        return rules.tokens(clip.height, clip.width)


@dataclasses.dataclass(frozen=True)
class Example:
    """An example to read."""

    id: str
    source: str
    content: dict[str, Any] | Question
    """The columns of a published table, or your own question."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """An example that is used for training, or the reason why it is not."""

    id: str
    source: str
    record: Question | Conversation | None = None
    """None: the example is left out."""
    longest: float = 0.0
    """Duration of its longest video, in seconds."""
    sizes: tuple[tuple[int, int], ...] = ()
    """(height, width) of its videos and pictures, in pixels."""
    reason: str = ""
    detail: str = ""


def read_example(reading: ExampleReading, example: Example) -> Outcome:
    """Read one example, and check that its videos can be decoded."""
    checker = VideoChecker(reading)
    try:
        record = _record(example, checker)
    except Refused as refused:
        return Outcome(example.id, example.source, reason=refused.reason, detail=refused.detail)
    except VideoError as error:
        reason = Reason.MISSING if error.reason == "no such file" else Reason.UNREADABLE
        return Outcome(example.id, example.source, reason=reason, detail=str(error))
    longest = max(checker.seconds.values(), default=0.0)
    return Outcome(example.id, example.source, record, longest, tuple(checker.sizes.values()))


def unread_example(example: Example, error: Exception) -> Outcome:
    """Return what becomes of an example that took too long, or crashed its process."""
    reason = Reason.SLOW if isinstance(error, DeadlineError) else Reason.UNREADABLE
    return Outcome(example.id, example.source, reason=reason, detail=str(error))


def _record(example: Example, checker: VideoChecker) -> Question | Conversation:
    if isinstance(example.content, Question):
        question = example.content
    elif "messages" in example.content:
        reading = checker.reading
        conversation = read_conversation(example.content, example.id, reading.limits, checker)
        trajectory = render(conversation, _protocol(reading), reading.tokens)
        return dataclasses.replace(conversation, tokens=len(trajectory.ids))
    else:
        question = read_question(example.content, example.id)
    require_earnable(question)
    checker(question.video, False, None)
    return question


class VideoChecker:
    """Chooses which frames of an example's files are shown, and checks that they can be decoded."""

    def __init__(self, reading: ExampleReading):
        self.reading = reading
        self.seconds: dict[str, float] = {}
        """Durations of all videos so far, by path."""
        self.sizes: dict[str, tuple[int, int]] = {}
        """(height, width) of all videos and pictures so far, by path."""

    def __call__(self, path: str, picture: bool, call: CropCall | None) -> Clip:
        """Choose the frames to show of a file.

        Args:
            path: The file, absolute or relative to the root.
            picture: Whether the example calls it a picture.
            call: The call whose window is shown; None for an overview of the whole video.

        Raises:
            VideoError: The file cannot be read.
            Refused: The window is outside the video, or the frames are too narrow to be resized.
        """
        file = str(join(self.reading.root, path))
        info = _probe(file)
        # Some examples name a picture as their video.
        still = picture or video.is_picture(path)
        if still:
            indices = np.zeros(1, np.int64)
        else:
            self.seconds[path] = info.duration
            indices = self._overview(info) if call is None else self._window(info, call)
            _require_decodable(file, int(indices[0]), int(indices[-1]))
        times = tuple(round(float(info.times[i]), 3) for i in indices)
        clip = Clip(
            path,
            tuple(indices.tolist()),
            times,
            info.height,
            info.width,
            still=still,
            crop=call is not None and not still,
        )
        try:
            self.reading.tokens(clip)
        except ValueError as error:
            raise Refused(Reason.UNREADABLE, f"{path}: {error}") from error
        self.sizes[path] = (info.height, info.width)
        return clip

    def _overview(self, info: VideoInfo) -> Int64[np.ndarray, " m"]:
        # The tolerance keeps a duration of 5.0000001 s from asking for a sixth frame.
        count = max(1, math.ceil(info.duration - 1e-6))
        return overview_indices(info.frames, min(self.reading.frames, count))

    def _window(self, info: VideoInfo, call: CropCall) -> Int64[np.ndarray, " m"]:
        resolved = resolve_window(call, info.duration)
        if isinstance(resolved, FailedCall):
            raise Refused(
                Reason.PROTOCOL, f"a call of {call.start:g} to {call.end:g} s: {resolved.reason}"
            )
        window, limits = resolved.window, self.reading.limits
        return window_indices(info, window.start, window.end, CROP_FPS, limits.crop_frames)


# One example may name a file several times, and neighbours often name the same file.
@functools.lru_cache(maxsize=8)
def _probe(file: str) -> VideoInfo:
    return video.probe(file)


@functools.lru_cache(maxsize=64)
def _require_decodable(file: str, first: int, last: int) -> None:
    """Decode two frames: a file can list frames although none can be decoded."""
    video.read(file, [first, last])


# A worker process has one tokenizer only.
@functools.lru_cache(maxsize=1)
def _protocol(reading: ExampleReading) -> Protocol:
    return Protocol(tokenizer_file.load(reading.tokenizer, reading.dialect), reading.limits)
