"""One episode of an agent: plan, dispatch, gather, answer.

    plan      the main agent sees the overview frames, thinks and writes tool calls
    dispatch  each called window goes to a sub-agent with the same weights, all at once
    gather    the reports come back to the main agent as one user turn
    answer    the main agent answers, or calls again while it has tool turns left

Failures are values: a call that cannot be carried out becomes a `CallOutcome` whose response tells
the model why. The only file an episode opens is the question's own video.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from models.features import FrameFeatures, ShownFrames
from paravt_jax.checks import require_at_least, require_choices
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
    Subtitle,
    Trajectory,
    Turn,
)
from paravt_jax.method.tools.crop_video import CROP_FPS, resolve_window
from paravt_jax.method.tools.tool import Look, Video
from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask, together

Dispatch = Literal["parallel", "sequential", "none"]

# How an episode ends when one of its turns was cut short.
_CUT_SHORT = {
    SampleStop.LENGTH: StopReason.TRUNCATED,
    SampleStop.DEADLINE: StopReason.TIME_LIMIT,
    SampleStop.UNREADABLE: StopReason.UNREADABLE,
}

# Why a sub-agent has no report: the status of its call, and the response to the main agent.
_NO_REPORT = {
    SampleStop.DEADLINE: (CallStatus.TIMED_OUT, "error: no report in time"),
    SampleStop.UNREADABLE: (CallStatus.UNREADABLE, "error: the video cannot be read there"),
}

# Turn t of the main agent uses seed + t, and its sub-agents use seed + 1000 * (t + 1) onwards, so
# that no two requests of an episode share a seed.
_SEEDS_PER_TURN = 1000


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """How an episode is played.

    Dispatch is one of:
        parallel: all calls of a turn are carried out at once.
        sequential: a turn ends at its first call.
        none: no tool is offered.
    """

    frames: int
    """Overview frames (K). 0 plays a blind episode, which needs dispatch `none`."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    dispatch: Dispatch = "parallel"
    """How tool calls are carried out."""
    seconds: float = math.inf
    """Time limit of the whole episode."""
    report_seconds: float = math.inf
    """Time limit of a sub-agent, from when its frames have been read."""

    def __post_init__(self):
        require_choices("episode", self)
        require_at_least("episode", self, 0 if self.dispatch == "none" else 1, "frames")
        require_at_least("episode", self, 0, "temperature")
        for name in ("seconds", "report_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(
                    f"episode.{name}: {value}; give seconds above 0, or nothing for no time limit"
                )


@dataclasses.dataclass(frozen=True)
class Environment:
    """What all episodes share."""

    protocol: Protocol
    features: FrameFeatures
    clock: Callable[[], float] = time.monotonic
    """Gives the seconds of the time limits."""
    tell: Callable[[dict[str, Any]], None] = lambda event: None
    """Gets events as JSON values, turns and calls counted from 1:
    overview (times, duration), turn (turn, tokens: the most that are written), call (turn, call,
    start, end): a window is looked at, report (turn, call, start, end, status, text): what comes
    back from a call."""
    hear: Callable[[int, int, Sequence[int]], None] | None = None
    """Gets what is being written: turn, call (0: the main agent) and all tokens so far."""


@dataclasses.dataclass(frozen=True)
class QuestionVideo(Video):
    """A question's video as tools see it. Reading it may raise VideoError."""

    question: Question
    features: FrameFeatures

    @property
    def duration(self) -> float:
        return self.features.info(self.question.video).duration

    @property
    def subtitles(self) -> Sequence[Subtitle]:
        return self.question.subtitles


@dataclasses.dataclass
class _EpisodeState:
    """The state of an episode in progress: its settings, and its turns so far."""

    environment: Environment
    question: Question
    settings: EpisodeSettings
    seed: int
    deadline: float
    trajectory: Trajectory
    turns: list[Turn] = dataclasses.field(default_factory=list)

    @property
    def protocol(self) -> Protocol:
        return self.environment.protocol

    @property
    def tool_turns(self) -> int:
        """Turns in which calls are carried out."""
        if self.settings.dispatch == "none":
            return 0
        return self.protocol.settings.max_tool_turns

    def seconds_left(self) -> float:
        return self.deadline - self.environment.clock()

    def finish(self, stop: StopReason, reason: str = "") -> Episode:
        answer = None
        if stop is StopReason.ANSWERED:
            answer = extract_answer(self.turns[-1].text)
        return Episode(
            self.question,
            self.settings.frames,
            self.trajectory,
            tuple(self.turns),
            stop,
            answer,
            reason,
        )


async def play(
    environment: Environment, question: Question, settings: EpisodeSettings, seed: int
) -> Episode:
    """Play one episode.

    Args:
        environment: Protocol, frames and clock.
        question: The question and the path of its video.
        settings: Overview frames, dispatch, temperature and time limits.
        seed: Determines every token that is sampled in the episode.

    Returns:
        The finished episode; `stop` says why it ended. It has no turns if the video cannot be read.
    """
    deadline = environment.clock() + settings.seconds
    try:
        # Held until the episode ends, so that the engine never reads them.
        shown = await _overview(environment, question, settings)
        prompt = _prompt(environment, question, settings, shown)
    except VideoError as error:
        return unreadable(question, settings.frames, error.reason)
    if shown.frames:
        times = [frame.time for frame in shown.frames]
        duration = environment.features.info(question.video).duration
        environment.tell({"event": "overview", "times": times, "duration": duration})
    state = _EpisodeState(environment, question, settings, seed, deadline, Trajectory(prompt))

    while True:
        seconds = state.seconds_left()
        if seconds <= 0:
            return state.finish(StopReason.TIME_LIMIT)

        # Plan; in later turns, plan again or answer.
        most = environment.protocol.settings.turn_tokens
        environment.tell({"event": "turn", "turn": len(state.turns) + 1, "tokens": most})
        text, sample = await _respond(state, seconds)
        if sample.stop in _CUT_SHORT:
            state.turns.append(Turn(text, truncated=True))
            return state.finish(_CUT_SHORT[sample.stop], sample.reason)
        answered = extract_answer(text) is not None
        calls = parse_calls(text, [*state.protocol.tools.values()], state.protocol.dialect.calls)
        if not calls:
            state.turns.append(Turn(text))
            return state.finish(StopReason.ANSWERED if answered else StopReason.NO_ANSWER)

        # Dispatch. A model that calls again after its last tool turn gets one refusal.
        offered = len(state.turns) < state.tool_turns
        outcomes = await _dispatch(state, calls) if offered else _refuse(calls)
        # As the model reads them: plain, and within their token limit.
        outcomes = [
            dataclasses.replace(outcome, response=state.protocol.cut(outcome.response))
            for outcome in outcomes
        ]
        state.turns.append(Turn(text, tuple(outcomes)))
        if answered and not offered:
            return state.finish(StopReason.ANSWERED)
        if len(state.turns) > state.tool_turns + 1:
            return state.finish(StopReason.TURN_LIMIT)

        # Gather.
        results = _gather(state, outcomes, sample)
        if not _fits(state, results):
            state.turns[-1] = dataclasses.replace(state.turns[-1], truncated=True)
            return state.finish(StopReason.TOKEN_LIMIT)
        state.trajectory.append(results)


def unreadable(question: Question, frames: int, reason: str) -> Episode:
    """Return an episode that ended because the video cannot be read, or can no longer be read."""
    return Episode(question, frames, Trajectory(), (), StopReason.UNREADABLE, None, reason)


async def _overview(
    environment: Environment, question: Question, settings: EpisodeSettings
) -> ShownFrames:
    """Return the frames of the overview. Raises VideoError if they cannot be read."""
    if not settings.frames:  # a blind episode opens no file
        return ShownFrames((), ())
    return await environment.features.request_overview(question.video, settings.frames)


def _prompt(
    environment: Environment, question: Question, settings: EpisodeSettings, shown: ShownFrames
) -> tuple[Segment, Segment]:
    """Return the opening of the main agent's prompt."""
    frames = shown.frames
    tokens = environment.features.tokens(frames[0]) if frames else 0
    return environment.protocol.prompt(question, frames, tokens, settings.dispatch != "none")


# --- plan and answer ---


async def _respond(state: _EpisodeState, seconds: float) -> tuple[str, Sample]:
    """Sample one turn of the main agent: its text, pinned opening included, and the sample."""
    protocol = state.protocol
    limits = protocol.settings
    # The pinned opening counts against the room, but is not sampled.
    if limits.pin_think:
        state.trajectory.append(protocol.pinned)

    room = limits.trajectory_tokens - suffix_length(state.trajectory)
    stop_ids = (protocol.vocabulary.eos,)
    if state.settings.dispatch == "sequential":
        stop_ids += (protocol.vocabulary["</tool_call>"],)
    sampling = Sampling(
        min(room, limits.turn_tokens),
        state.settings.temperature,
        stop_ids=stop_ids,
        deadline=seconds,
    )
    seed = state.seed + len(state.turns)
    (sample,) = await ask(_request(state, state.trajectory, sampling, seed))
    state.trajectory.append(_sampled_segment(sample))

    ids = np.concatenate([protocol.pinned.ids, sample.ids])
    return protocol.vocabulary.decode_turn(ids), sample


# --- dispatch ---


async def _dispatch(state: _EpisodeState, calls: list[Call | FailedCall]) -> list[CallOutcome]:
    """Carry out the calls of one turn side by side.

    Each sub-agent starts as soon as its own window has been read. If one times out, only its own
    report is lost.
    """
    return await together(*[_carry_out(state, call, number) for number, call in enumerate(calls)])


async def _carry_out(state: _EpisodeState, call: Call | FailedCall, number: int) -> CallOutcome:
    """Carry out one call, and tell its outcome."""
    outcome = await _outcome(state, call, number)
    event = _call_event(state, "report", number, outcome.call)
    state.environment.tell(event | {"status": outcome.status, "text": outcome.response.strip()})
    return outcome


def _call_event(state: _EpisodeState, name: str, number: int, call: Call | None) -> dict[str, Any]:
    window = call if isinstance(call, CropCall) else None
    return {
        "event": name,
        "turn": len(state.turns) + 1,
        "call": number + 1,
        "start": window and window.start,
        "end": window and window.end,
    }


async def _outcome(state: _EpisodeState, call: Call | FailedCall, number: int) -> CallOutcome:
    """Run the tool of a call, and if that names a window, look at it."""
    if isinstance(call, FailedCall):
        return CallOutcome(None, call.status, f"error: {call.reason}")
    sequential = state.settings.dispatch == "sequential"
    max_calls = 1 if sequential else state.protocol.settings.max_calls
    if number >= max_calls:
        why = (
            f"error: at most {max_calls} calls a turn are carried out; call again in the next turn"
        )
        return CallOutcome(call, CallStatus.TOO_MANY, why)
    tool = state.protocol.tools[call.tool]
    try:
        result = tool.run(call, QuestionVideo(state.question, state.environment.features))
        if isinstance(result, FailedCall):
            return CallOutcome(call, result.status, f"error: {result.reason}")
        if isinstance(result, str):
            return CallOutcome(call, CallStatus.EXECUTED, result)
        return await _look(state, call, result, number)
    except VideoError as error:
        # The model must not see paths of this machine.
        reason = error.reason.replace(error.path, VIDEO_NAME)
        response = f"error: the video cannot be read there ({reason})"
        return CallOutcome(call, CallStatus.UNREADABLE, response)


async def _look(state: _EpisodeState, call: Call, look: Look, number: int) -> CallOutcome:
    """Send a sub-agent to a window. Raises VideoError if the window cannot be read."""
    features = state.environment.features
    limits = state.protocol.settings
    video = state.question.video
    # A tool of the user's may return a window that is not in the video.
    resolved = resolve_window(look.window, features.info(video).duration)
    if isinstance(resolved, FailedCall):
        return CallOutcome(call, resolved.status, f"error: {resolved.reason}")
    window = resolved.window
    state.environment.tell(_call_event(state, "call", number, window))

    # Held until the sub-agent has reported.
    shown = await features.request(
        features.window(video, window.start, window.end, CROP_FPS, limits.crop_frames)
    )

    # The record of a crop has the window that was shown; other tools' calls stay as written.
    recorded = window if isinstance(call, CropCall) else call
    reason = look.note or resolved.note
    status = CallStatus.CLAMPED if reason else CallStatus.EXECUTED
    note = f" ({reason})" if reason else ""
    prompt = state.protocol.window(shown.frames, features.tokens(shown.frames[0]))
    subagent = Trajectory((prompt,))
    sample = await _ask_subagent(state, subagent, number)
    # The response is only the note on the window until the report is added.
    return _report(state.protocol, CallOutcome(recorded, status, note, subagent), sample)


async def _ask_subagent(state: _EpisodeState, subagent: Trajectory, number: int) -> Sample:
    """Sample the report of the turn's sub-agent with this number."""
    # Measured after the window was read, because reading takes time too. A request needs a
    # deadline above 0; `play` itself ends an episode whose time is up.
    seconds = max(min(state.seconds_left(), state.settings.report_seconds), 1e-6)
    sampling = Sampling(
        state.protocol.settings.summary_tokens,
        state.settings.temperature,
        stop_ids=(state.protocol.vocabulary.eos,),
        deadline=seconds,
    )
    seed = state.seed + _SEEDS_PER_TURN * (len(state.turns) + 1) + number
    (sample,) = await ask(_request(state, subagent, sampling, seed, number + 1))
    subagent.append(_sampled_segment(sample))
    return sample


def _report(protocol: Protocol, outcome: CallOutcome, sample: Sample) -> CallOutcome:
    """Return a call's outcome with the report of its sub-agent, or the reason why there is none."""
    if sample.stop in _NO_REPORT:
        status, response = _NO_REPORT[sample.stop]
        return dataclasses.replace(outcome, status=status, response=response)
    summary = protocol.vocabulary.decode_turn(sample.ids)
    # The note on the window comes last, because a response that is too long loses its end.
    return dataclasses.replace(outcome, response=summary + outcome.response)


def _refuse(calls: list[Call | FailedCall]) -> list[CallOutcome]:
    """Return the outcomes of calls in a turn in which no tool is offered."""
    response = "error: no call is possible now"
    return [
        CallOutcome(
            None if isinstance(call, FailedCall) else call, CallStatus.NOT_OFFERED, response
        )
        for call in calls
    ]


# --- gather ---


def _gather(state: _EpisodeState, outcomes: Sequence[CallOutcome], sample: Sample) -> Segment:
    """Return the user turn that brings the responses of all calls back to the main agent."""
    protocol = state.protocol
    return protocol.tool_results(
        [outcome.response for outcome in outcomes],
        ended=bool(sample.ids[-1] == protocol.vocabulary.eos),
        last=len(state.turns) >= state.tool_turns,
    )


def _fits(state: _EpisodeState, results: Segment) -> bool:
    """Return whether the trajectory has room for `results`, a pinned opening and at least one
    token."""
    length = suffix_length(state.trajectory) + len(results.ids) + len(state.protocol.pinned.ids)
    return length < state.protocol.settings.trajectory_tokens


# --- trajectories ---


def _request(
    state: _EpisodeState, trajectory: Trajectory, sampling: Sampling, seed: int, call: int = 0
) -> Request:
    hear = state.environment.hear
    progress = hear and functools.partial(hear, len(state.turns) + 1, call)
    return Request(trajectory.ids, trajectory.frames, sampling, seed, progress=progress)


def _sampled_segment(sample: Sample) -> Segment:
    return Segment(
        sample.ids,
        Author.MODEL,
        sample.logprobs,
        digest=sample.digest,
        versions=sample.versions,
    )


def split_prompt(
    trajectory: Trajectory,
) -> tuple[Int32[np.ndarray, " p"], Int32[np.ndarray, " r"]]:
    """Split a trajectory's ids into the prompt that a group shares and one rollout's own tokens.

    The cut is before the prompt's last token. That token belongs to the rollout, because its
    logits predict the first token after the prompt:

        prompt  p0 p1 p2 p3 | generated  g0 g1 g2
        split   p0 p1 p2  and  p3 g0 g1 g2

    Returns:
        The ids before the cut, int32[p], and from the cut on, int32[r].
    """
    ids = trajectory.ids
    after_prompt = np.flatnonzero(trajectory.authors != Author.PROMPT)
    length = int(after_prompt[0]) if after_prompt.size else len(ids)
    return ids[: length - 1], ids[length - 1 :]


def suffix_length(trajectory: Trajectory) -> int:
    """Return the number of tokens that count against `trajectory_tokens`: the rollout's own
    of `split_prompt`."""
    return len(split_prompt(trajectory)[1])


def seed_of(*identity: int | str) -> int:
    """Derive a 32-bit seed from what identifies a sample, such as run, step, question, rollout."""
    numbers = [
        value if isinstance(value, int) else int.from_bytes(value.encode(), "little")
        for value in identity
    ]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
