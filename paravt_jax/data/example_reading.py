"""Reads one example of a source in a worker process: to a record, or why it is left out.

Every worker process imports this module, so its imports have to be few.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import numpy as np

from paravt_jax.data import tokenizer_file, video
from paravt_jax.data.frames import (
    PixelRules,
    VideoError,
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
    clips: tuple[Clip, ...] = ()
    """What it shows: the overview of a question, or all clips of a conversation."""
    reason: str = ""
    detail: str = ""


def read_example(reading: ExampleReading, example: Example) -> Outcome:
    """Read one example, and check that its videos can be decoded."""
    try:
        record, clips = _record(reading, example)
    except (Refused, VideoError) as error:
        return left_out(example, error)
    return Outcome(example.id, example.source, record, clips)


def left_out(example: Example, error: Exception) -> Outcome:
    """Return what becomes of an example that cannot be read, took too long or crashed its
    process."""
    detail = str(error)
    if isinstance(error, Refused):
        reason, detail = error.reason, error.detail
    elif isinstance(error, DeadlineError):
        reason = Reason.SLOW
    elif isinstance(error, VideoError) and error.reason == "no such file":
        reason = Reason.MISSING
    else:
        reason = Reason.UNREADABLE
    return Outcome(example.id, example.source, reason=reason, detail=detail)


def _record(
    reading: ExampleReading, example: Example
) -> tuple[Question | Conversation, tuple[Clip, ...]]:
    if isinstance(example.content, Question):
        question = example.content
    elif "messages" in example.content:
        look = functools.partial(_choose_frames, reading)
        conversation = read_conversation(example.content, example.id, reading.limits, look)
        trajectory = render(conversation, _protocol(reading), reading.tokens)
        conversation = dataclasses.replace(conversation, tokens=len(trajectory.ids))
        return conversation, conversation.clips
    else:
        question = read_question(example.content, example.id)
    require_earnable(question)
    clip = _choose_frames(reading, question.video, False, None)
    return dataclasses.replace(question, video=clip.path), (clip,)


def _choose_frames(
    reading: ExampleReading, path: str, picture: bool, call: CropCall | None
) -> Clip:
    """Choose the frames to show of a file, and check that they can be decoded.

    The clip's path is relative to the root, so that a video has one name, however it is spelled.

    Args:
        reading: The settings.
        path: The file, absolute or relative to the root.
        picture: Whether the example calls it a picture.
        call: The call whose window is shown; None for an overview of the whole video.

    Raises:
        VideoError: The file cannot be read.
        Refused: The window is outside the video, or the frames are too narrow to be resized.
    """
    file = str(join(reading.root, path))
    path = os.path.relpath(file, reading.root)
    info = video.probe(file)
    # Some examples name a picture as their video.
    still = picture or video.is_picture(path)
    if still:
        indices = np.zeros(1, np.int64)
    elif call is None:
        # The tolerance keeps a duration of 5.0000001 s from asking for a sixth frame.
        count = max(1, math.ceil(info.duration - 1e-6))
        indices = overview_indices(info.frames, min(reading.frames, count))
    else:
        resolved = resolve_window(call, info.duration)
        if isinstance(resolved, FailedCall):
            raise Refused(
                Reason.PROTOCOL, f"a call of {call.start:g} to {call.end:g} s: {resolved.reason}"
            )
        window = resolved.window
        indices = window_indices(
            info, window.start, window.end, CROP_FPS, reading.limits.crop_frames
        )
    if not still:
        _require_decodable(file, int(indices[0]), int(indices[-1]))
    clip = Clip(
        path,
        indices=tuple(indices.tolist()),
        times=tuple(round(float(info.times[i]), 3) for i in indices),
        height=info.height,
        width=info.width,
        still=still,
        crop=call is not None and not still,
    )
    try:
        reading.tokens(clip)
    except ValueError as error:
        raise Refused(Reason.UNREADABLE, f"{path}: {error}") from error
    return clip


# One example may show a file several times, and neighbours often show the same file.
@functools.lru_cache(maxsize=64)
def _require_decodable(file: str, first: int, last: int) -> None:
    """Decode two frames: a file can list frames although none can be decoded."""
    video.read(file, [first, last])


# A worker process has one tokenizer only.
@functools.lru_cache(maxsize=1)
def _protocol(reading: ExampleReading) -> Protocol:
    return Protocol(tokenizer_file.load(reading.tokenizer, reading.dialect), reading.limits)
