"""Reads one row of the published files in a worker process: its record, and facts for the summary.

A row becomes a record with its `Kept`, or a `LeftOutRow`, however broken it or its files are. Every
worker process imports this module, so its imports have to be few.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle

import numpy as np
from jaxtyping import Int64

from paravt_jax.data import video
from paravt_jax.data.earnable import require_earnable, require_in_video
from paravt_jax.data.frames import (
    VideoError,
    VideoInfo,
    join,
    overview_indices,
    window_indices,
)
from paravt_jax.data.published import (
    Reason,
    Refused,
    ends_with_answer,
    ignored_frame_numbers,
    read_conversation,
    read_question,
)
from paravt_jax.data.sizes import PixelRules
from paravt_jax.data.workers import DeadlineError
from paravt_jax.method import tokenizer
from paravt_jax.method.conversations import Clip, Conversation, render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import CropCall, FailedCall, Question
from paravt_jax.method.tools.crop_video import resolve_window


@dataclasses.dataclass(frozen=True)
class Reading:
    """Settings of the conversion of rows to records."""

    root: str
    """Folder to which relative video paths refer."""
    tokenizer: str
    """Folder of the tokenizer."""
    limits: ProtocolSettings
    """Limits of the protocol, which conversations must keep."""
    frames: int = 64
    """Upper bound on the frames of a video's overview."""
    fps: float = 1.0
    """Frames per second of a video's overview."""
    rules: PixelRules = PixelRules()
    """How frames of overviews and pictures are resized."""
    crop_rules: PixelRules = PixelRules()
    """How frames of crops are resized."""

    def tokens(self, clip: Clip) -> int:
        """Return the number of visual tokens of one frame of the clip."""
        rules = self.crop_rules if clip.crop else self.rules
        return rules.tokens(clip.height, clip.width)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Facts about a row that is used for training.

    Attributes:
        id: The row's id: the file's name and the row's number.
        source: The split that the row comes from.
        kind: `conversation`, or the kind of the question.
        seconds: Durations of its videos.
        sizes: (height, width) of its videos and pictures, in pixels.
        tokens: Length of the conversation in tokens.
        frames: Frames that the conversation shows.
        calls: Tool responses in the conversation.
        thinks: Whether all its responses start with <think>.
        answers: Whether its last response contains answer tags.
        ignored_frame_numbers: Calls whose number of frames is left out, because the protocol does
            not offer it.
    """

    id: str
    source: str
    kind: str
    seconds: tuple[float, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    frames: int = 0
    calls: int = 0
    thinks: bool = True
    answers: bool = True
    ignored_frame_numbers: int = 0


@dataclasses.dataclass(frozen=True)
class LeftOutRow:
    """A row that is not used for training, and why."""

    id: str
    source: str
    reason: str
    detail: str

    @classmethod
    def by_worker(cls, id: str, source: str, error: Exception) -> LeftOutRow:
        """A row that no worker could finish.

        Its deadline passed, its file crashed a decoder, or it holds a value that is not JSON.
        """
        if isinstance(error, pickle.PicklingError):
            return cls(id, source, Reason.BROKEN, str(error))
        reason = Reason.SLOW if isinstance(error, DeadlineError) else Reason.UNREADABLE
        return cls(id, source, reason, str(error))


def read_row(
    reading: Reading,
    task: tuple[bool, str, str, dict | Refused],
) -> tuple[Kept, Question | Conversation] | LeftOutRow:
    """Read one row of a published file, and check that its videos can be decoded.

    Args:
        reading: Settings of the conversion.
        task: Whether the row is from an rl file, its id, its source, and its columns.

    Returns:
        Facts about the record and the record itself, or the reason why the row is left out.
    """
    rl, id, source, row = task
    checker = VideoChecker(reading)
    try:
        if isinstance(row, Refused):
            raise row
        if rl:
            return _question(row, id, source, checker)
        return _conversation(row, id, source, checker)
    except Refused as refused:
        return LeftOutRow(id, source, refused.reason, refused.detail)
    except VideoError as error:
        missing = error.reason == "no such file"
        return LeftOutRow(id, source, Reason.MISSING if missing else Reason.UNREADABLE, str(error))


def _question(row: dict, id: str, source: str, checker: VideoChecker) -> tuple[Kept, Question]:
    question = read_question(row, id)
    require_earnable(question)
    checker(question.video, False, None)
    # A picture has no duration.
    require_in_video(question, max(checker.seconds, default=0.0))
    kind = question.kind.value
    return Kept(id, source, kind, tuple(checker.seconds), tuple(checker.sizes)), question


def _conversation(
    row: dict, id: str, source: str, checker: VideoChecker
) -> tuple[Kept, Conversation]:
    reading = checker.reading
    conversation = read_conversation(row, id, source, reading.limits, checker)
    trajectory = render(conversation, _protocol(reading), reading.tokens)
    tokens = len(trajectory.ids)
    responses = [str(turn.content[0]) for turn in conversation.turns if turn.role == "assistant"]
    kept = Kept(
        id,
        source,
        "conversation",
        tuple(checker.seconds),
        tuple(checker.sizes),
        tokens,
        frames=len(trajectory.frames),
        calls=sum(turn.role == "tool" for turn in conversation.turns),
        thinks=all(text.startswith("<think>") for text in responses),
        answers=ends_with_answer(conversation),
        ignored_frame_numbers=ignored_frame_numbers(row, reading.limits),
    )
    return kept, dataclasses.replace(conversation, tokens=tokens)


class VideoChecker:
    """Chooses which frames of a row's files are shown, and checks that they can be decoded."""

    def __init__(self, reading: Reading):
        self.reading = reading
        self._durations: dict[str, float] = {}
        self._sizes: dict[str, tuple[int, int]] = {}

    @property
    def seconds(self) -> list[float]:
        """Durations of all videos so far, without repetitions."""
        return list(self._durations.values())

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(height, width) of all videos and pictures so far, without repetitions."""
        return list(self._sizes.values())

    def __call__(self, path: str, picture: bool, call: CropCall | None) -> Clip:
        """Choose the frames to show of a file.

        Args:
            path: The file, absolute or relative to the root.
            picture: Whether the row calls it a picture.
            call: The call whose window is shown; None for an overview of the whole video.

        Raises:
            VideoError: The file cannot be read.
            Refused: The window is outside the video, or the frames are too narrow to be resized.
        """
        file = str(join(self.reading.root, path))
        info = _probe(file)
        # Some rows name a picture as their video.
        still = picture or video.is_picture(path)
        if still:
            indices = np.zeros(1, np.int64)
        else:
            self._durations[path] = info.duration
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
        self._sizes[path] = (info.height, info.width)
        return clip

    def _overview(self, info: VideoInfo) -> Int64[np.ndarray, " m"]:
        # The tolerance keeps a duration of 5.0000001 s from asking for a sixth frame.
        count = max(1, math.ceil(info.duration * self.reading.fps - 1e-6))
        return overview_indices(info.frames, min(self.reading.frames, count))

    def _window(self, info: VideoInfo, call: CropCall) -> Int64[np.ndarray, " m"]:
        found = resolve_window(call, info.duration)
        if isinstance(found, FailedCall):
            raise Refused(
                Reason.PROTOCOL, f"a call of {call.start:g} to {call.end:g} s: {found.reason}"
            )
        window, limits = found.window, self.reading.limits
        if window.frames is None:
            fps, most = limits.crop_fps, limits.crop_frames
        else:  # the call asks for a number of frames, evenly spread
            most = min(window.frames, limits.max_num_frames)
            fps = most / (window.end - window.start)
        return window_indices(info, window.start, window.end, fps, most)


# One row may name a file several times, and neighbouring rows often name the same file.
@functools.lru_cache(maxsize=8)
def _probe(file: str) -> VideoInfo:
    return video.probe(file)


@functools.lru_cache(maxsize=64)
def _require_decodable(file: str, first: int, last: int) -> None:
    """Decode two frames: a file can list frames although none can be decoded."""
    video.read(file, [first, last])


# A worker process reads rows with one tokenizer only.
@functools.lru_cache(maxsize=1)
def _protocol(reading: Reading) -> Protocol:
    return Protocol(tokenizer.load(reading.tokenizer), reading.limits)
