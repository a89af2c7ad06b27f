"""The records that travel between the rooms: questions, trajectories, episodes.

Owns the shape of the data and nothing else. Invariant: a `Trajectory` only grows, and its token ids are the one truth of
what the model saw and wrote; text is decoded from them, never the other way round.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any, ClassVar

import numpy as np

from paravt_jax.method.subtitles import Subtitle


class QuestionKind(enum.StrEnum):
    """How a question is answered and scored (REFERENCE 3)."""

    MULTIPLE_CHOICE = "mcq"
    TEMPORAL_GROUNDING = "tvg"
    OPEN_ENDED = "oe"


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about one video.

    `video` is a path relative to the data root; `answer` is text, "[a, b]" in seconds for
    grounding; `subtitles` are those of the video, none where there are none.
    """

    id: str
    video: str
    text: str
    kind: QuestionKind
    answer: str
    options: tuple[str, ...] = ()
    subtitles: tuple[Subtitle, ...] = ()


@dataclasses.dataclass(frozen=True)
class Caption:
    """What one frame shows, in words: the video, the time in seconds and the words."""

    video: str
    time: float
    words: tuple[str, ...]


class Author(enum.IntEnum):
    """Who wrote a token. Only MODEL tokens carry log-probs and loss; PINNED ones open a response for the model."""

    PROMPT = 0
    PINNED = 1
    MODEL = 2
    TOOL = 3


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a video: what was asked for and shown. `index` counts decoded frames, `time` is its timestamp in seconds."""

    video: str
    index: int
    time: float


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of tokens by one author. `logprobs` (float32, one a token) where the author is MODEL; `frames` as their placeholders stand.

    `digest` is the sampler's own `digest` of all it had been fed when it had written this segment; the trainer compares it with what
    it scores, and `version` that of the weights that wrote it; both are None where nobody sampled.
    """

    ids: np.ndarray
    author: Author
    logprobs: np.ndarray | None = None
    frames: tuple[Frame, ...] = ()
    digest: str | None = None
    version: int | None = None

    def __post_init__(self):
        if (self.logprobs is not None) != (self.author is Author.MODEL):
            raise ValueError(
                f"Segment.logprobs: given for {self.author.name}; sampled (MODEL) segments have them, others do not"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(
                f"Segment.logprobs: {len(self.logprobs)} values for {len(self.ids)} tokens; one a token is needed"
            )


def digest(ids: np.ndarray) -> str:
    """A fingerprint of token ids, the same for the same ids whatever their integer type."""
    return hashlib.blake2b(
        np.ascontiguousarray(ids, np.int64).tobytes(), digest_size=16
    ).hexdigest()


class Trajectory:
    """An append-only list of segments: everything one agent saw and wrote, in order."""

    def __init__(self, segments: tuple[Segment, ...] = ()):
        self._segments = list(segments)

    def append(self, segment: Segment) -> None:
        self._segments.append(segment)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def ids(self) -> np.ndarray:
        """Every token id, int32[t]."""
        return np.concatenate([s.ids for s in self._segments]).astype(np.int32)

    @property
    def authors(self) -> np.ndarray:
        """The author of every token, int8[t]."""
        return np.concatenate([np.full(len(s.ids), s.author, np.int8) for s in self._segments])

    @property
    def logprobs(self) -> np.ndarray:
        """The sampler's log-prob of every token, float32[t]; 0 where it was not sampled."""
        return np.concatenate(
            [
                np.zeros(len(s.ids), np.float32) if s.logprobs is None else s.logprobs
                for s in self._segments
            ]
        )

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(frame for s in self._segments for frame in s.frames)

    @property
    def version(self) -> int | None:
        """Of the oldest weights that wrote in it; None where nobody sampled."""
        return min((s.version for s in self._segments if s.version is not None), default=None)


class CallStatus(enum.StrEnum):
    """What became of one tool call."""

    EXECUTED = "executed"
    CLAMPED = "clamped"  # executed, with its window or its number of frames cut to what there is
    MALFORMED = "malformed"  # not JSON, or not of the tool's shape
    UNKNOWN_TOOL = "unknown_tool"
    BAD_WINDOW = "bad_window"  # reversed, empty, outside the video, not finite
    TOO_MANY = "too_many"  # beyond the turn's limit of calls
    NOT_OFFERED = "not_offered"  # tools are off, or no turn with tools is left
    UNREADABLE = "unreadable"  # the video cannot be decoded there, or has no subtitles
    TIMED_OUT = "timed_out"  # the sub-agent had not ended in time
    REFUSED = "refused"  # a server would not answer the sub-agent's request

    @property
    def executed(self) -> bool:
        return self in (CallStatus.EXECUTED, CallStatus.CLAMPED)


@dataclasses.dataclass(frozen=True)
class CropCall:
    """A parsed `crop_video` call, window in seconds. `frames`: how many it asks for, if it does."""

    start: float
    end: float
    frames: int | None = None
    tool: ClassVar[str] = "crop_video"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A parsed call of any other tool: its name, and its arguments as JSON values."""

    tool: str
    arguments: dict[str, Any]


Call = CropCall | ToolCall


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """A call that is not carried out: why, as a sentence for the model, and how it is counted."""

    reason: str
    status: CallStatus = CallStatus.MALFORMED


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """One tool call of a turn: what was asked (None where it could not be read), what became of it, and the response the model saw.

    `frames`: those that the main agent itself was shown, where no sub-agent looks for it.
    """

    call: Call | None
    status: CallStatus
    response: str
    subagent: Trajectory | None = None
    frames: tuple[Frame, ...] = ()


@dataclasses.dataclass(frozen=True)
class Turn:
    """One response of the main agent: its whole text (pinned opening included), and whether it ran
    into the token limit.

    `calls`: the outcome of each call in the text, in order; empty where the text was cut off.
    """

    text: str
    calls: tuple[CallOutcome, ...] = ()
    truncated: bool = False


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"  # neither a call nor an answer
    TRUNCATED = "truncated"  # a turn hit its token limit
    TURN_LIMIT = "turn_limit"  # still calling in the last turn
    TOKEN_LIMIT = "token_limit"  # the trajectory is full
    TIME_LIMIT = "time_limit"  # the episode's time was up
    UNREADABLE = "unreadable"  # the video could not be read
    REFUSED = "refused"  # a server would not answer a request of the main agent


@dataclasses.dataclass(frozen=True)
class Episode:
    """One main agent's whole course, its sub-agents included. `frames` is the overview budget K that was drawn.

    `reason` says in words why a request was refused.
    """

    question: Question
    frames: int
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    stop: StopReason
    answer: str | None
    reason: str = ""
