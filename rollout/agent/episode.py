"""One episode, as the paper tells it: plan, dispatch, gather, answer.

Failures are values: a call that cannot be carried out becomes a typed `CallOutcome` whose response
the model reads. Nothing is opened but the question's own video.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from models.features import FrameFeatures
from paravt_jax.data.frames import VideoError
from paravt_jax.method.parsing import extract_answer, parse_calls
from paravt_jax.method.protocol import VIDEO_NAME, Protocol
from paravt_jax.method.records import (
    Author,
    Call,
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    FailedCall,
    Question,
    Segment,
    StopReason,
    Trajectory,
    Turn,
)
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.method.tools.crop_video import resolve_window
from paravt_jax.method.tools.tool import Look
from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask

Dispatch = Literal["parallel", "sequential", "none", "frames"]

# What it means for an episode that a turn was cut short.
_CUT = {
    SampleStop.LENGTH: StopReason.TRUNCATED,
    SampleStop.DEADLINE: StopReason.TIME_LIMIT,
    SampleStop.UNREADABLE: StopReason.UNREADABLE,
    SampleStop.REFUSED: StopReason.REFUSED,
}

# Why a sub-agent has no report: the status of its call, and the response to the main agent.
_NO_REPORT = {
    SampleStop.DEADLINE: (CallStatus.TIMED_OUT, "error: no report in time"),
    SampleStop.UNREADABLE: (CallStatus.UNREADABLE, "error: the video cannot be read there"),
    SampleStop.REFUSED: (CallStatus.REFUSED, "error: the request for a report was refused"),
}


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """How an episode is played: `frames` is the overview budget K, 0 for an episode that is blind; `dispatch` how calls are carried out.

    `parallel`: all calls of a turn at once; `sequential`: a turn ends at its first call; `none`: no tool is offered; `frames`: the main
    agent is shown the frames of each window itself, as the release evaluates (REFERENCE 4, point 9).
    `seconds` is the time for the whole episode, `report_seconds` that for a turn's sub-agents.
    """

    frames: int
    temperature: float
    dispatch: Dispatch = "parallel"
    seconds: float = math.inf
    report_seconds: float = math.inf

    def __post_init__(self):
        if not isinstance(self.frames, int) or self.frames < (self.dispatch != "none"):
            raise ValueError(
                f"frames = {self.frames}: the overview has a whole number of frames, at least one; 64 shows most "
                "(0 is a blind run, with dispatch 'none')"
            )
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature = {self.temperature}: a number, 0 or above; use 0 for the likeliest tokens"
            )
        for name in ("seconds", "report_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: a time in seconds, above 0; leave it out for no limit"
                )
        if self.dispatch not in get_args(Dispatch):
            raise ValueError(
                f"dispatch = {self.dispatch!r}: one of {', '.join(get_args(Dispatch))}; choose one of them"
            )


@dataclasses.dataclass(frozen=True)
class Environment:
    """What every episode shares: the protocol, the frames, and the clock that its limits go by (seconds)."""

    protocol: Protocol
    features: FrameFeatures
    clock: Callable[[], float] = time.monotonic


@dataclasses.dataclass(frozen=True)
class QuestionVideo:
    """The video of `question`, as tools see it. VideoError where a file cannot be read."""

    question: Question
    features: FrameFeatures

    @property
    def duration(self) -> float:
        return self.features.info(self.question.video).duration

    @property
    def subtitles(self) -> Sequence[Subtitle]:
        return self.question.subtitles


async def play(
    environment: Environment, question: Question, setting: EpisodeSettings, seed: int
) -> Episode:
    """Play one episode on `question`; `seed` decides every token in it."""
    protocol, limits = environment.protocol, environment.protocol.settings
    tools = setting.dispatch != "none"
    until = environment.clock() + setting.seconds
    try:
        overview, tokens = (), 0
        if setting.frames:  # a blind episode opens no file
            overview, tokens = (
                environment.features.overview(question.video, setting.frames),
                environment.features.tokens(question.video),
            )
            environment.features(
                overview
            )  # unreadable now is better than unreadable in the middle of a batch
        prompt = protocol.overview(overview, tokens, tools)
    except VideoError:
        return Episode(question, setting.frames, Trajectory(), (), StopReason.UNREADABLE, None)
    trajectory = Trajectory((prompt, protocol.question(question)))
    tool_turns = limits.max_tool_turns if tools else 0
    turns: list[Turn] = []

    while True:
        left = until - environment.clock()
        if left <= 0:
            return _episode(question, setting, trajectory, turns, StopReason.TIME_LIMIT)
        if limits.pin_think:
            trajectory.append(protocol.pinned)
        room = min(limits.trajectory_tokens - _suffix_length(trajectory), limits.turn_tokens)
        sample = await _respond(
            environment, trajectory, setting, seed + len(turns), room, left
        )  # plan, or gather and answer
        trajectory.append(
            Segment(
                sample.ids,
                Author.MODEL,
                sample.logprobs,
                digest=sample.digest,
                version=sample.version,
            )
        )
        text = protocol.vocabulary.decode(
            np.concatenate([protocol.pinned.ids, sample.ids])
        ).removesuffix("<|im_end|>")
        if (cut := _CUT.get(sample.stop)) is not None:
            turns.append(Turn(text, truncated=True))
            return _episode(question, setting, trajectory, turns, cut, sample.reason)
        calls = parse_calls(text, [*protocol.tools.values()])
        if not calls:
            turns.append(Turn(text))
            stop = StopReason.NO_ANSWER if extract_answer(text) is None else StopReason.ANSWERED
            return _episode(question, setting, trajectory, turns, stop)

        offered = len(turns) < tool_turns and not (
            setting.dispatch == "frames" and _forges_frames(environment, trajectory)
        )
        outcomes = (
            await _dispatch(
                environment, question, calls, setting, seed + 1000 * (len(turns) + 1), until
            )
            if offered
            else _refuse(calls)
        )
        outcomes = [dataclasses.replace(o, response=protocol.cut(o.response)) for o in outcomes]
        turns.append(Turn(text, tuple(outcomes)))
        if len(turns) > tool_turns + 1 or (not offered and extract_answer(text) is not None):
            stop = StopReason.TURN_LIMIT if extract_answer(text) is None else StopReason.ANSWERED
            return _episode(question, setting, trajectory, turns, stop)
        ended = sample.ids[-1] == protocol.vocabulary.eos
        shown = [o.frames for o in outcomes]
        results = protocol.tool_results(
            [o.response for o in outcomes], bool(ended), len(turns) >= tool_turns, shown, tokens
        )
        if (
            _suffix_length(trajectory) + len(results.ids) + len(protocol.pinned.ids)
            >= limits.trajectory_tokens
        ):
            turns[-1] = dataclasses.replace(turns[-1], truncated=True)
            return _episode(question, setting, trajectory, turns, StopReason.TOKEN_LIMIT)
        trajectory.append(results)


async def _respond(
    environment: Environment,
    trajectory: Trajectory,
    setting: EpisodeSettings,
    seed: int,
    tokens: int,
    seconds: float,
) -> Sample:
    vocabulary = environment.protocol.vocabulary
    stops = (
        (vocabulary.eos, vocabulary["</tool_call>"])
        if setting.dispatch == "sequential"
        else (vocabulary.eos,)
    )
    ((sample,),) = await ask(
        _request(
            trajectory,
            Sampling(tokens, setting.temperature, stop_ids=stops, deadline=seconds),
            seed,
        )
    )
    return sample


async def _dispatch(
    environment: Environment,
    question: Question,
    calls: list[Call | FailedCall],
    setting: EpisodeSettings,
    seed: int,
    until: float,
) -> list[CallOutcome]:
    """Carry out a turn's calls: every window to look at goes to its own sub-agent, all of them side
    by side, `until` the episode's time is up.

    One that fails, is refused or takes too long costs its own report only.
    """
    limit = 1 if setting.dispatch == "sequential" else environment.protocol.settings.max_calls
    outcomes = [
        _open(environment, question, call, number, limit, setting.dispatch)
        for number, call in enumerate(calls)
    ]
    ready = [
        (number, outcome) for number, outcome in enumerate(outcomes) if outcome.subagent is not None
    ]
    tokens, vocabulary = (
        environment.protocol.settings.summary_tokens,
        environment.protocol.vocabulary,
    )
    # A request has some time at least; that the episode has none left is for its next turn to see.
    seconds = max(min(until - environment.clock(), setting.report_seconds), 1e-6)
    sampling = Sampling(tokens, setting.temperature, stop_ids=(vocabulary.eos,), deadline=seconds)
    requests = [
        _request(o.subagent, sampling, seed + n) for n, o in ready if o.subagent is not None
    ]
    for (number, outcome), (sample,) in zip(ready, await ask(*requests), strict=True):
        assert outcome.subagent is not None
        outcome.subagent.append(
            Segment(
                sample.ids,
                Author.MODEL,
                sample.logprobs,
                digest=sample.digest,
                version=sample.version,
            )
        )
        if sample.stop in _NO_REPORT:
            status, response = _NO_REPORT[sample.stop]
            outcome = dataclasses.replace(outcome, status=status, response=response)
        else:  # the report before the note on its window: where the whole is too long, the end is cut
            summary = vocabulary.decode(sample.ids).removesuffix("<|im_end|>")
            outcome = dataclasses.replace(outcome, response=summary + outcome.response)
        outcomes[number] = outcome
    return outcomes


def _open(
    environment: Environment,
    question: Question,
    call: Call | FailedCall,
    number: int,
    limit: int,
    dispatch: Dispatch,
) -> CallOutcome:
    """One call: what its tool answers at once, its sub-agent's prompt (or the frames themselves),
    or why there is neither."""
    if isinstance(call, FailedCall):
        return CallOutcome(None, call.status, f"error: {call.reason}")
    if number >= limit:
        return CallOutcome(
            call,
            CallStatus.TOO_MANY,
            f"error: at most {limit} calls a turn are carried out; call again in the next turn",
        )
    try:
        result = environment.protocol.tools[call.tool].run(
            call, QuestionVideo(question, environment.features)
        )
        if isinstance(result, FailedCall):
            return CallOutcome(call, result.status, f"error: {result.reason}")
        if isinstance(result, str):
            return CallOutcome(call, CallStatus.EXECUTED, result)
        return _show(environment, question, call, result, dispatch)
    except VideoError as error:
        reason = error.reason.replace(
            error.path, VIDEO_NAME
        )  # where files lie is nothing that a model should read
        return CallOutcome(
            call, CallStatus.UNREADABLE, f"error: the video cannot be read there ({reason})"
        )


def _show(
    environment: Environment, question: Question, call: Call, look: Look, dispatch: Dispatch
) -> CallOutcome:
    """The prompt of the sub-agent that looks; with dispatch `frames`, the frames themselves."""
    features, settings = environment.features, environment.protocol.settings
    found = resolve_window(look.window, features.info(question.video).duration)
    if isinstance(found, FailedCall):  # a tool's window, which need not be in the video
        return CallOutcome(call, found.status, f"error: {found.reason}")
    window = found.window
    # What was looked at stands in the place of a crop; a call of another tool stays as it is.
    shown = window if isinstance(call, CropCall) else call
    fps, most = settings.crop_fps, settings.crop_frames
    if window.frames is not None:  # as many, evenly spread
        most = min(window.frames, settings.most_crop_frames)
        fps = most / (window.end - window.start)
    frames = features.window(question.video, window.start, window.end, fps, most)
    features(frames)
    reason = look.note or found.note
    status = CallStatus.CLAMPED if reason else CallStatus.EXECUTED
    note = f" ({reason})" if reason else ""
    if dispatch == "frames":
        return CallOutcome(shown, status, f"{len(frames)} frames.{note}", frames=frames)
    prompt = environment.protocol.window(frames, features.tokens(question.video))
    return CallOutcome(shown, status, note, Trajectory((prompt,)))


def _forges_frames(environment: Environment, trajectory: Trajectory) -> bool:
    """Whether the model wrote a frame's placeholder, which a sampler could not tell from those of the frames that come after it."""
    placeholder = environment.protocol.vocabulary["<|image_pad|>"]
    return any(
        placeholder in segment.ids
        for segment in trajectory.segments
        if segment.author is Author.MODEL
    )


def _refuse(calls: list[Call | FailedCall]) -> list[CallOutcome]:
    reason = "error: no call is possible now"
    return [
        CallOutcome(None if isinstance(call, FailedCall) else call, CallStatus.NOT_OFFERED, reason)
        for call in calls
    ]


def _request(trajectory: Trajectory, sampling: Sampling, seed: int) -> Request:
    return Request(trajectory.ids, trajectory.frames, sampling, (seed,))


def split_prompt(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """A trajectory's ids, cut before its prompt's last token: what is shared by a group, and what is one rollout's own.

    The last token of the prompt stands with what follows it, because it is what predicts the first token after the prompt.
    """
    ids, authors = trajectory.ids, trajectory.authors
    own = np.flatnonzero(authors != Author.PROMPT)
    length = int(own[0]) if own.size else len(ids)
    return ids[: length - 1], ids[length - 1 :]


def _suffix_length(trajectory: Trajectory) -> int:
    return len(split_prompt(trajectory)[1])


def _episode(
    question: Question,
    setting: EpisodeSettings,
    trajectory: Trajectory,
    turns: list[Turn],
    stop: StopReason,
    reason: str = "",
) -> Episode:
    answer = extract_answer(turns[-1].text) if turns and stop is StopReason.ANSWERED else None
    return Episode(question, setting.frames, trajectory, tuple(turns), stop, answer, reason)
