"""One row of the published files as a worker process reads it: the record, and what the summary wants to know of it.

Owns which frames of a file a demonstration shows and the check that files can be decoded. Light to import, for many processes do.
Invariant: a row comes back as `Kept` or as `LeftOutRow`, whatever is in it and in its files.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import numpy as np

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError, VideoInfo, overview_indices, window_indices
from paravt_jax.data.published import (
    Reason,
    Refused,
    ends_with_answer,
    read_conversation,
    read_question,
)
from paravt_jax.data.sizes import smart_resize
from paravt_jax.method import tokenizer
from paravt_jax.method.conversations import Clip, Conversation, render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import CropCall, FailedCall, Question
from paravt_jax.method.tools.crop_video import resolve_window


@dataclasses.dataclass(frozen=True)
class Reading:
    """How rows are read, all that decides what comes out: the root of relative paths, the folder of the tokenizer, the frames of a video
    (at most `frames`, `fps` a second), a frame's limits in pixels and its merged patch.
    """

    root: str
    tokenizer: str
    limits: ProtocolSettings
    frames: int = 64
    fps: float = 1.0
    min_pixels: int = 784
    max_pixels: int = 50_176
    factor: int = 32

    def tokens(self, clip: Clip) -> int:
        """Visual tokens of one of the clip's frames."""
        height, width = smart_resize(
            clip.height, clip.width, self.min_pixels, self.max_pixels, self.factor
        )
        return height * width // self.factor**2


@dataclasses.dataclass(frozen=True)
class Kept:
    """A row that is learned from. `kind` is a question's, or `conversation`; `seconds` the durations of its videos.

    The rest is a conversation's: its length in tokens, its frames and calls, whether its responses think and its last one answers in tags.
    """

    id: str
    source: str
    kind: str
    seconds: tuple[float, ...] = ()
    tokens: int = 0
    frames: int = 0
    calls: int = 0
    thinks: bool = True
    answers: bool = True


@dataclasses.dataclass(frozen=True)
class LeftOutRow:
    """A row that is left out, and why."""

    id: str
    source: str
    reason: str
    detail: str

    @classmethod
    def by_worker(cls, id: str, source: str, error: Exception) -> LeftOutRow:
        """A row that no worker could finish."""
        return cls(
            id, source, Reason.SLOW if "longer" in str(error) else Reason.UNREADABLE, str(error)
        )


def read_row(
    reading: Reading,
    task: tuple[bool, str, str, dict | Refused],
) -> tuple[Kept, Question | Conversation] | LeftOutRow:
    """What becomes of a row: (whether of an rl file, its id, its source, its columns).

    A row that is kept comes with its record.
    """
    rl, id, source, row = task
    checker = VideoChecker(reading)
    try:
        if isinstance(row, Refused):
            raise row
        return (
            _question(row, id, source, checker) if rl else _conversation(row, id, source, checker)
        )
    except Refused as refused:
        return LeftOutRow(id, source, refused.reason, refused.detail)
    except VideoError as error:
        missing = error.reason == "no such file"
        return LeftOutRow(id, source, Reason.MISSING if missing else Reason.UNREADABLE, str(error))


def _question(row: dict, id: str, source: str, checker: VideoChecker) -> tuple[Kept, Question]:
    question = read_question(row, id)
    checker(question.video, False, None)
    return Kept(id, source, question.kind.value, tuple(checker.seconds)), question


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
        tokens,
        frames=len(trajectory.frames),
        calls=sum(turn.role == "tool" for turn in conversation.turns),
        thinks=all(text.startswith("<think>") for text in responses),
        answers=ends_with_answer(conversation),
    )
    return kept, dataclasses.replace(conversation, tokens=tokens)


class VideoChecker:
    """Opens the files of one row. `seconds`: the durations of the videos it was shown, each once."""

    def __init__(self, reading: Reading):
        self.reading = reading
        self._durations: dict[str, float] = {}

    @property
    def seconds(self) -> list[float]:
        return list(self._durations.values())

    def __call__(self, path: str, picture: bool, call: CropCall | None) -> Clip:
        """What is shown of a file. Raises VideoError, and Refused for a window outside the video and for a picture that cannot be shown."""
        reading, file = self.reading, pathlib.Path(self.reading.root) / path
        info = _probe(str(file))
        if picture or video.is_picture(path):
            indices = np.zeros(1, np.int64)
        else:
            self._durations[path] = info.duration
            indices = self._window(info, call) if call is not None else self._overview(info)
            _require_decodable(str(file), int(indices[0]), int(indices[-1]))
        clip = Clip(
            path,
            tuple(indices.tolist()),
            tuple(round(float(info.times[i]), 3) for i in indices),
            info.height,
            info.width,
            still=picture or video.is_picture(path),
        )
        try:
            reading.tokens(clip)
        except ValueError as error:
            raise Refused(Reason.UNREADABLE, f"{path}: {error}") from error
        return clip

    def _overview(self, info: VideoInfo) -> np.ndarray:
        wanted = max(1, math.ceil(info.duration * self.reading.fps - 1e-6))
        return overview_indices(info.frames, min(self.reading.frames, wanted))

    def _window(self, info: VideoInfo, call: CropCall) -> np.ndarray:
        found = resolve_window(call, info.duration)
        if isinstance(found, FailedCall):
            raise Refused(
                Reason.PROTOCOL, f"a call of {call.start:g} to {call.end:g} s: {found.reason}"
            )
        window, limits = found.window, self.reading.limits
        return window_indices(info, window.start, window.end, limits.crop_fps, limits.crop_frames)


@functools.lru_cache(
    maxsize=8
)  # one row may name a file several times, and neighbouring rows the same one
def _probe(file: str) -> VideoInfo:
    return video.probe(file)


@functools.lru_cache(maxsize=64)
def _require_decodable(file: str, first: int, last: int) -> None:
    """A file can open and list its frames, and still have none that decodes."""
    video.read(file, [first, last])


@functools.lru_cache(maxsize=1)
def _protocol(reading: Reading) -> Protocol:
    return Protocol(tokenizer.load(reading.tokenizer), reading.limits)
