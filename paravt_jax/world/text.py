"""Writes texts about the small world: questions, conversations, captions, vocabulary pieces.

A demonstration states only what its own frames show. If they do not answer the question, it says
so and answers at random: a right answer would teach the model to make up what it cannot see. Every
digit word and colour has one leading space, so that a word is the same token everywhere.

The demonstrations are meant to be improved by reinforcement learning. By default they are naive:
most guess where crops would help, and most crops cover one half of the scene only. They also have
mistakes of format (`leak`, `unclosed`, `untagged`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64

from paravt_jax.checks import require_at_least, require_share
from paravt_jax.data.frames import VideoInfo, overview_indices, window_indices
from paravt_jax.method import protocol
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import PINNED, ProtocolSettings
from paravt_jax.method.records import Caption, CropCall, Question, QuestionKind
from paravt_jax.method.tools.crop_video import CROP_FPS
from paravt_jax.world.videos import (
    COLOURS,
    DIGITS,
    FRAMES,
    SCENE,
    SECONDS,
    SPLITS,
    STEP,
    WINDOW,
    Scene,
    WorldVideo,
)

_QUESTIONS = {
    QuestionKind.MULTIPLE_CHOICE: "Which digit appears in the scene that starts at {} seconds?",
    QuestionKind.TEMPORAL_GROUNDING: (
        "When does the digit appear in the scene that starts at {} seconds?"
    ),
}
_ANSWER_TAGS = ("<answer>", "</answer>")

# A frame's label: number, "<", ".0 seconds>" and two vision marks are one token each.
LABEL_TOKENS = 5

# Questions per video, each about a different scene. At least two scenes have a digit.
_QUESTIONS_PER_VIDEO = 2
# Conversations of main agents per video and frame budget, each about a different question. There
# are two kinds of questions about each of two scenes.
_DEMONSTRATIONS = 4
# Conversations of sub-agents per video.
_WINDOWS = 16
# Probability that a sub-agent's window shows a digit; the others show nothing to report.
_TELLING = 0.75
# Probability that a sub-agent's window starts anywhere instead of at half a scene.
_UNALIGNED = 0.1
# Captioned frames per video; half of them show a digit.
_CAPTIONS = 16

# Texts that recur in this module, one token each. The protocol adds its own.
PIECES = (
    *(str(n) for n in range(SECONDS + 1)),
    *(f" {word}" for word in (*DIGITS, *COLOURS, "-", "nothing")),
    *(part for text in _QUESTIONS.values() for part in text.split("{}")),
    *("\n" + text.split("{}")[0] for text in _QUESTIONS.values()),
    *("\nA.", "\nB.", "\nC.", "\nD.", "\n", ",", ", ", "[", "]"),
    *("<", ".0 seconds>", *_ANSWER_TAGS),
    *(" from ", " to ", "\ntarget ", "\nlook closer\n", "\nI see", "the crops show"),
    *("<tool_code>print(crop_video(start_time=", ", end_time=", "))</tool_code>"),
)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """What the demonstrations show, and the mistakes in them."""

    seed: int = 0
    """Seed of questions and conversations."""
    multiple_choice: float = 0.6
    """Fraction of multiple-choice questions; the others are temporal grounding."""
    groups: int = 2
    """Frame budgets per training video. Each gets its own conversations of main agents."""
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Frame budgets to choose from: numbers of overview frames in a conversation."""
    look: float = 0.4
    """Probability of asking for crops if the overview does not answer the question."""
    look_when_shown: float = 0.15
    """Probability of asking for crops although the overview answers the question."""
    both: float = 0.4
    """Of those with crops, the share that crops both halves of the scene; the others crop one."""
    one_by_one: float = 0.0
    """Probability of one crop per turn until a report shows the digit; else all in one turn."""
    toolless: float = 0.15
    """Probability that a conversation's prompt offers no tools."""
    ground_by_overview: bool = False
    """Answer "when?" from overview frames too; otherwise from crops only."""
    leak: float = 0.1
    """Probability that calls are written as <tool_code>."""
    unclosed: float = 0.1
    """Probability that the <think> of a turn is not closed."""
    untagged: float = 0.1
    """Probability that the answer has no tags."""

    def __post_init__(self):
        probabilities = (
            *("multiple_choice", "look", "look_when_shown", "both", "one_by_one", "toolless"),
            *("leak", "unclosed", "untagged"),
        )
        require_share("text", self, *probabilities)
        require_at_least("text", self, 1, "groups")
        if self.groups > len(self.budgets):
            raise ValueError(
                f"text.groups: {self.groups}; each group has a budget of its own: give at most "
                f"{len(self.budgets)}, or more text.budgets"
            )


def questions(videos: Sequence[WorldVideo], settings: TextSettings) -> Iterator[Question]:
    """Yield the questions to answer."""
    for video, rng in _with_generators(videos, settings, stream=0):
        for scene in rng.permutation(_digit_scenes(video))[:_QUESTIONS_PER_VIDEO]:
            kind = QuestionKind.TEMPORAL_GROUNDING
            if rng.random() < settings.multiple_choice:
                kind = QuestionKind.MULTIPLE_CHOICE
            yield _question(video, int(scene), kind, rng)


def main_conversations(
    videos: Sequence[WorldVideo], settings: TextSettings
) -> Iterator[Conversation]:
    """Yield conversations of main agents: overview and question, calls, reports, answer."""
    generators = _with_generators(videos, settings, stream=1)
    of_habits = _with_generators(videos, settings, stream=4)
    for (video, rng), (_, habits) in zip(generators, of_habits, strict=True):
        pairs = [(scene, kind) for scene in _digit_scenes(video) for kind in _QUESTIONS]
        for budget in rng.permutation(settings.budgets)[: settings.groups]:
            chosen = [pairs[n] for n in rng.permutation(len(pairs))[:_DEMONSTRATIONS]]
            # Draw all questions before any conversation. Settings such as `leak` change the draws
            # of a conversation, but must not change the questions.
            asked = [_question(video, scene, kind, rng) for scene, kind in chosen]
            for question, (scene, _) in zip(asked, chosen, strict=True):
                about = video.scenes[scene]
                demonstration = _Demonstration(video, question, about, settings, rng, habits)
                yield demonstration.write(int(budget))


def window_conversations(
    videos: Sequence[WorldVideo], settings: TextSettings, limits: ProtocolSettings
) -> Iterator[Conversation]:
    """Yield conversations of sub-agents: the frames of a window, and a report about them.

    Frames are chosen as in an episode, with the limits of the protocol.
    """
    for video, rng in _with_generators(videos, settings, stream=2):
        with_digit = {video.scenes[n].first // WINDOW * WINDOW for n in _digit_scenes(video)}
        without_digit = set(range(0, SECONDS, WINDOW)) - with_digit
        times = np.arange(0.0, SECONDS, STEP)
        info = VideoInfo(FRAMES, float(SECONDS), times, video.size, video.size)
        for n in range(_WINDOWS):
            starts = with_digit if rng.random() < _TELLING else without_digit
            start = int(rng.choice(sorted(starts)))
            if rng.random() < _UNALIGNED:
                start = STEP * int(rng.integers((SECONDS - WINDOW) // STEP + 1))
            indices = window_indices(info, start, start + WINDOW, CROP_FPS, limits.crop_frames)
            turns = (
                ChatTurn("user", (_clip(video, indices, crop=True),)),
                ChatTurn("assistant", (_report(video, start),)),
            )
            yield Conversation(f"{video.id}/{n}:{start}", False, turns, subagent=True)


def captions(videos: Sequence[WorldVideo], settings: TextSettings) -> Iterator[Caption]:
    """Yield single frames with words: the colour of the scene and the digit, if there is one."""
    for video, rng in _with_generators(videos, settings, stream=3):
        for n in range(_CAPTIONS):
            time = STEP * int(rng.integers(FRAMES))
            # Every second caption is about a frame with a digit.
            if n % 2:
                scene = video.scenes[rng.choice(_digit_scenes(video))]
                time = int(rng.choice(range(scene.first, scene.last + 1, STEP)))
            scene = video.scenes[time // SCENE]
            words = (scene.colour,)
            if scene.shows(time):
                words = (scene.colour, _digit(scene))
            yield Caption(video.path, float(time), words)


def _with_generators(
    videos: Sequence[WorldVideo], settings: TextSettings, stream: int
) -> Iterator[tuple[WorldVideo, np.random.Generator]]:
    """Pair every video with its own random generator."""
    for video in videos:
        # The video's number is in the seed so that records do not depend on the number of videos.
        # The kind of record (`stream`) is in it so that more questions do not change conversations.
        number = int(video.id.split("/")[1])
        seed = [settings.seed, stream, SPLITS.index(video.split), number]
        yield video, np.random.default_rng(seed)


def _digit_scenes(video: WorldVideo) -> list[int]:
    """Return the numbers of the scenes with a digit."""
    return [n for n, scene in enumerate(video.scenes) if scene.digit is not None]


def _question(
    video: WorldVideo, scene_number: int, kind: QuestionKind, rng: np.random.Generator
) -> Question:
    scene = video.scenes[scene_number]
    assert scene.digit is not None
    text = _QUESTIONS[kind].format(scene.start)
    id = f"{video.id}:{scene.start}:{kind}"
    evidence = (float(scene.first), float(scene.last))
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        answer = _span(scene.first, scene.last)
        return Question(id, video.path, text, kind, answer, evidence=evidence)
    others = [
        other.digit
        for n, other in enumerate(video.scenes)
        if n != scene_number and other.digit is not None
    ]
    absent = sorted(set(range(len(DIGITS))) - {scene.digit, *others})
    # Two wrong options occur elsewhere in the video, the others nowhere. If none occurred, a glance
    # at the rest of the video would rule all of them out.
    wrong = [int(digit) for digit in rng.permutation(others)[:2]]
    wrong += [int(digit) for digit in rng.permutation(absent)[: 3 - len(wrong)]]
    options = tuple(DIGITS[digit] for digit in rng.permutation([scene.digit, *wrong]))
    return Question(id, video.path, text, kind, DIGITS[scene.digit], options, evidence=evidence)


@dataclasses.dataclass(frozen=True)
class _Sighting:
    """The digit of a scene, as read from some frames."""

    digit: str
    span: tuple[int, int] | None
    """First and last second at which it was seen; None: not to be read from these frames."""

    def answers(self, question: Question) -> bool:
        """Return whether this is enough to answer."""
        return question.kind is QuestionKind.MULTIPLE_CHOICE or self.span is not None


@dataclasses.dataclass(frozen=True)
class _Demonstration:
    """A conversation about a scene: what it is about, and what draws it.

    `habits` draws whether tools are offered, which halves are cropped, and guesses. It is separate
    from `rng`, so that these settings do not shift the other draws.
    """

    video: WorldVideo
    question: Question
    scene: Scene
    settings: TextSettings
    rng: np.random.Generator
    habits: np.random.Generator

    def write(self, budget: int) -> Conversation:
        """Write the conversation of an agent that sees `budget` overview frames."""
        video, question, settings = self.video, self.question, self.settings
        indices = overview_indices(FRAMES, budget)
        times = (STEP * indices).tolist()
        seen = _seen_in_overview(question, self.scene, times, settings)
        look = settings.look
        if seen is not None and seen.answers(question):
            look = settings.look_when_shown
        looks = self.rng.random() < look
        tools = self.habits.random() >= settings.toolless
        overview = _describe_overview(video, times, self.scene)
        if looks and tools:
            turns = self._answer_by_crops(overview, seen)
        else:
            turns = (self._conclude(f"{overview}\nI see", seen),)
        text = protocol.question_text(question).removeprefix("\n")
        asked = ChatTurn("user", (_clip(video, indices), text))
        return Conversation(f"{question.id}/{budget}", tools, (asked, *turns))

    def _answer_by_crops(self, overview: str, seen: _Sighting | None) -> tuple[ChatTurn, ...]:
        """Write calls for one half of the scene or both, their reports, and the answer.

        A leaked call gets no report, so the conversation ends there. Calls for both halves are in
        one turn, or one follows the other until a report shows the digit. If no report shows it,
        the answer is what the overview showed (`seen`), or a guess.
        """
        starts = list(range(self.scene.start, self.scene.end, WINDOW))
        if self.habits.random() >= self.settings.both:
            starts = [int(self.habits.choice(starts))]
        if self.rng.random() < self.settings.leak:
            # No parser accepts this syntax, so the conversation ends without a report.
            calls = "\n".join(
                f"<tool_code>print(crop_video(start_time={start}, end_time={start + WINDOW}))"
                "</tool_code>"
                for start in starts
            )
            return (_main_turn(f"{overview}\nlook closer\n{self._close_think()}{calls}"),)
        crops_by_turn = [starts]
        if self.rng.random() < self.settings.one_by_one:
            crops_by_turn = [[start] for start in starts]
        turns: list[ChatTurn] = []
        found = None
        for crops in crops_by_turn:
            calls = "\n".join(protocol.render_call(CropCall(s, s + WINDOW)) for s in crops)
            prefix = overview if not turns else ""
            think = f"{prefix}\nlook closer\n{self._close_think()}"
            turns.append(_main_turn(think + calls))
            turns += [ChatTurn("tool", (_report(self.video, start),)) for start in crops]
            # A digit stays within one window, so a crop shows all of it or nothing.
            if crops[0] <= self.scene.first < crops[-1] + WINDOW:
                found = _Sighting(_digit(self.scene), (self.scene.first, self.scene.last))
                break
        opening = "the crops show"
        if found is None and seen is not None and seen.answers(self.question):
            opening, found = "\nI see", seen
        turns.append(self._conclude(opening, found))
        return tuple(turns)

    def _conclude(self, opening: str, seen: _Sighting | None) -> ChatTurn:
        """Write the last turn: what was seen, then the answer, or a guess if that is not enough."""
        finding = " nothing"
        if seen is not None:
            finding = f" {seen.digit}"
            if seen.span is not None:
                finding += f" from {seen.span[0]} to {seen.span[1]}"
        if seen is None or not seen.answers(self.question):
            answer = self._guess()
        elif self.question.kind is QuestionKind.MULTIPLE_CHOICE:
            answer = f" {seen.digit}"
        else:
            assert seen.span is not None
            answer = _span(*seen.span)
        think = f"{opening}{finding}\n{self._close_think()}"
        if self.rng.random() >= self.settings.untagged:
            answer = answer.join(_ANSWER_TAGS)
        return _main_turn(think + answer)

    def _guess(self) -> str:
        """Draw any of the options, or a span of 4 seconds in the scene."""
        if self.question.kind is QuestionKind.MULTIPLE_CHOICE:
            return f" {self.habits.choice(self.question.options)}"
        length = 4
        first = int(self.habits.choice(range(self.scene.start, self.scene.end - length, STEP)))
        return _span(first, first + length)

    def _close_think(self) -> str:
        return "" if self.rng.random() < self.settings.unclosed else "</think>\n"


def _seen_in_overview(
    question: Question, scene: Scene, times: Sequence[int], settings: TextSettings
) -> _Sighting | None:
    """Return what the overview's frames show of the digit; None if they do not show it."""
    seen = [time for time in times if scene.shows(time)]
    if not seen:
        return None
    # For grounding, one frame is not enough: it does not tell how long the digit stays.
    grounded = settings.ground_by_overview and len(seen) > 1
    if question.kind is QuestionKind.TEMPORAL_GROUNDING and not grounded:
        return _Sighting(_digit(scene), None)
    return _Sighting(_digit(scene), (seen[0], seen[-1]))


def _clip(video: WorldVideo, indices: Int64[np.ndarray, " frames"], crop: bool = False) -> Clip:
    times = tuple((float(STEP) * indices).tolist())
    return Clip(video.path, tuple(indices.tolist()), times, video.size, video.size, crop=crop)


def _main_turn(text: str) -> ChatTurn:
    return ChatTurn("assistant", (PINNED + text,))


def _describe_overview(video: WorldVideo, times: Sequence[int], target: Scene) -> str:
    """Describe every scene by start, colour and visible digit, and repeat that of the target."""
    lines = []
    for scene in video.scenes:
        visible = any(scene.shows(time) for time in times)
        lines.append(f"{scene.start} {scene.colour} {_digit(scene) if visible else '-'}")
    return ", ".join(lines) + "\ntarget " + lines[video.scenes.index(target)]


def _report(video: WorldVideo, start: int) -> str:
    """Write a sub-agent's report about the window of WINDOW seconds from `start`."""
    reports = []
    for scene in video.scenes:
        seen = [time for time in range(start, start + WINDOW, STEP) if scene.shows(time)]
        if seen:
            reports.append(f" {_digit(scene)} from {seen[0]} to {seen[-1]}")
    return ",".join(reports) or " nothing"


def _digit(scene: Scene) -> str:
    assert scene.digit is not None
    return DIGITS[scene.digit]


def _span(first: int, last: int) -> str:
    return f"[{first}, {last}]"
