"""The data types of the method: questions, trajectories, tool calls and episodes.

A `Trajectory` can only be appended to. Its token ids record what the model saw and wrote. Text is
decoded from the ids and never encoded again.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Int, Int8, Int32


class QuestionKind(enum.StrEnum):
    """How a question is answered and scored."""

    MULTIPLE_CHOICE = "mcq"
    TEMPORAL_GROUNDING = "tvg"
    OPEN_ENDED = "oe"


@dataclasses.dataclass(frozen=True)
class Subtitle:
    """An entry of a video's subtitles: text of one or more lines, shown from `start` to `end` in s.

    `paravt_jax.data.foreign` reads them from files.
    """

    start: float
    end: float
    text: str

    @property
    def line(self) -> str:
        """The entry in the form that agents read: "<12.5 seconds> words"."""
        return f"<{self.start:.1f} seconds> {' '.join(self.text.split())}"


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about one video."""

    id: str
    video: str
    """Path of the video, relative to the data root."""
    text: str
    kind: QuestionKind
    answer: str
    """The right answer. For grounding it is "[start, end]" in seconds."""
    options: tuple[str, ...] = ()
    subtitles: tuple[Subtitle, ...] = ()
    """Subtitles of the video; empty if it has none."""
    evidence: tuple[float, float] | None = None
    """When the video shows the answer, from the first to the last second; None if unknown."""


@dataclasses.dataclass(frozen=True)
class Caption:
    """A description of one frame in words. `time` is in seconds."""

    video: str
    time: float
    words: tuple[str, ...]


class Author(enum.IntEnum):
    """Who wrote a token.

    PROMPT: the protocol, or a person.
    PINNED: the protocol, which opens a response for the model (`<think>`).
    MODEL: the model. Only these tokens have log-probs and contribute to the loss.
    TOOL: the tools, whose responses come back as a user turn.
    """

    PROMPT = 0
    PINNED = 1
    MODEL = 2
    TOOL = 3


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a video: its index among the decoded frames, and its timestamp in seconds."""

    video: str
    index: int
    time: float
    crop: bool = False
    """Whether a crop shows it, not an overview: crops may have size limits of their own."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a trajectory by the same author.

    Example of a short trajectory, one segment per line:

        PROMPT  system turn, frames ... What is shown? ... opening of the assistant's turn
        PINNED  <think>
        MODEL   I need a closer look </think> <tool_call> ... </tool_call> end of the turn
        TOOL    <tool_response> ... </tool_response> ... opening of the assistant's turn
    """

    ids: Int[np.ndarray, " t"]
    """Token ids."""
    author: Author
    logprobs: Float[np.ndarray, " t"] | None = None
    """The sampler's log-prob of each token; MODEL segments have them, others do not."""
    frames: tuple[Frame, ...] = ()
    """The frames of this segment, in the order of their placeholders in `ids`."""
    digest: str | None = None
    """The sampler's `digest` of all ids up to the end of this segment. The trainer compares it with
    the ids that it scores. None if the segment was not sampled."""
    versions: Int[np.ndarray, " t"] | None = None
    """Version of the weights that sampled each token; None if it was not sampled."""

    def __post_init__(self):
        if (self.logprobs is not None) != (self.author is Author.MODEL):
            given = "missing" if self.logprobs is None else "given"
            raise ValueError(
                f"Segment.logprobs: {given} for author {self.author.name}; "
                "give them for MODEL segments and for no others"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(
                f"Segment.logprobs: {len(self.logprobs)} values for {len(self.ids)} tokens; "
                "give one per token"
            )


def digest(ids: Int[np.ndarray, " t"]) -> str:
    """Fingerprint of token ids; it does not depend on their integer type."""
    data = np.ascontiguousarray(ids, np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Trajectory:
    """Everything that one agent saw and wrote: a list of segments that can only be appended to."""

    def __init__(self, segments: tuple[Segment, ...] = ()):
        self._segments = list(segments)

    def __reduce__(self):
        # For messages between processes.
        return Trajectory, (self.segments,)

    def append(self, segment: Segment) -> None:
        self._segments.append(segment)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def ids(self) -> Int32[np.ndarray, " t"]:
        """All token ids."""
        return np.concatenate([s.ids for s in self._segments]).astype(np.int32)

    @property
    def authors(self) -> Int8[np.ndarray, " t"]:
        """The `Author` of each token."""
        return np.concatenate([np.full(len(s.ids), s.author, np.int8) for s in self._segments])

    @property
    def logprobs(self) -> Float32[np.ndarray, " t"]:
        """The sampler's log-prob of each token; 0 for tokens that were not sampled."""
        return np.concatenate(
            [
                np.zeros(len(s.ids), np.float32) if s.logprobs is None else s.logprobs
                for s in self._segments
            ]
        )

    @property
    def frames(self) -> tuple[Frame, ...]:
        """All frames, in the order of their placeholders."""
        return tuple(frame for s in self._segments for frame in s.frames)

    @property
    def versions(self) -> Int32[np.ndarray, " t"]:
        """Version of the weights that sampled each token; -1 for tokens that were not sampled."""
        return np.concatenate(
            [
                np.full(len(s.ids), -1, np.int32) if s.versions is None else s.versions
                for s in self._segments
            ]
        ).astype(np.int32)


class CallStatus(enum.StrEnum):
    """The outcome of one tool call."""

    EXECUTED = "executed"
    CLAMPED = "clamped"  # executed with a smaller window or fewer frames than asked for
    MALFORMED = "malformed"  # not JSON, or arguments that the tool cannot read
    UNKNOWN_TOOL = "unknown_tool"
    BAD_WINDOW = "bad_window"  # reversed, empty, outside the video, or not finite
    TOO_MANY = "too_many"  # beyond the limit of calls per turn
    NOT_OFFERED = "not_offered"  # tools are off, or no tool turn is left
    UNREADABLE = "unreadable"  # the video cannot be decoded there, or has no subtitles
    TIMED_OUT = "timed_out"  # the sub-agent did not finish in time

    @property
    def executed(self) -> bool:
        return self in (CallStatus.EXECUTED, CallStatus.CLAMPED)


@dataclasses.dataclass(frozen=True)
class CropCall:
    """A parsed `crop_video` call. The window is in seconds."""

    start: float
    end: float
    tool: ClassVar[str] = "crop_video"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A parsed call of any other tool: the tool's name and the arguments as JSON values."""

    tool: str
    arguments: dict[str, Any]


Call = CropCall | ToolCall


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """A call that is not executed: the reason that the model reads, and the status to count."""

    reason: str
    status: CallStatus = CallStatus.MALFORMED


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """One tool call of a turn and its result."""

    call: Call | None
    """The parsed call; None if it could not be read."""
    status: CallStatus
    response: str
    """The response as the main agent saw it."""
    subagent: Trajectory | None = None
    """The trajectory of the call's sub-agent, if it had one."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One response of the main agent."""

    text: str
    """The whole text, pinned opening included."""
    calls: tuple[CallOutcome, ...] = ()
    """The outcomes of all calls in the text, in order; empty if the response was cut short."""
    truncated: bool = False
    """Whether the response ran into a limit, or left no room for the tool results after it."""

    @property
    def executed_calls(self) -> int:
        """The number of its calls that were carried out."""
        return sum(outcome.status.executed for outcome in self.calls)


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"  # a turn without a call and without an answer
    TRUNCATED = "truncated"  # a turn reached its token limit
    TURN_LIMIT = "turn_limit"  # the model calls again after its last tool turn
    TOKEN_LIMIT = "token_limit"  # the trajectory has no room for the tool results
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"  # by a person, before the answer
    UNREADABLE = "unreadable"  # the video cannot be read


@dataclasses.dataclass(frozen=True)
class Episode:
    """A finished episode: the main agent's trajectory and turns. Turns contain the sub-agents."""

    question: Question
    frames: int
    """Overview frames (K)."""
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    stop: StopReason
    answer: str | None
    """The main agent's answer; None unless `stop` is ANSWERED."""
    reason: str = ""
    """Why the video is unreadable."""

    @property
    def executed_calls(self) -> int:
        """The number of tool calls that were carried out."""
        return sum(turn.executed_calls for turn in self.turns)
