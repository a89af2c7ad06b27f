"""What is asked and said about the small world: questions, conversations, captions, and the vocabulary's pieces for them.

Owns the wording and its imperfections; what is in the videos is `videos`'s, and how a conversation is rendered `conversations`'s.
Invariant: a conversation states only what its own frames show (unless `guess` says otherwise), with one leading space before
every digit word and colour, so that a word is the same token wherever it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from paravt_jax.data.frames import VideoInfo, overview_indices, window_indices
from paravt_jax.method import protocol
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import PINNED, ProtocolSettings
from paravt_jax.method.records import Caption, CropCall, Question, QuestionKind
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

_ASK = {
    QuestionKind.MULTIPLE_CHOICE: "Which digit appears in the scene that starts at {} seconds?",
    QuestionKind.TEMPORAL_GROUNDING: "When does the digit appear in the scene that starts at {} seconds?",
}
_TAGS = ("<answer>", "</answer>")

# What recurs in the texts of this module and round them, one token each; the protocol's own lines are its to give.
PIECES = (
    *(str(n) for n in range(SECONDS + 1)),
    *(f" {word}" for word in (*DIGITS, *COLOURS, "-", "nothing")),
    *(part for ask in _ASK.values() for part in ask.split("{}")),
    *("\n" + ask.split("{}")[0] for ask in _ASK.values()),
    *("\nA.", "\nB.", "\nC.", "\nD.", "\n", ",", ", ", "[", "]", "<", ".0 seconds>", *_TAGS),
    *(" from ", " to ", "\ntarget ", "\nlook closer\n", "\nI see", "the crops show"),
    *("<tool_code>print(crop_video(start_time=", ", end_time=", "))</tool_code>"),
)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How much is asked and shown, and how spoilt the demonstrations are."""

    seed: int = 0
    """Decides questions and conversations."""
    questions: int = 2
    """Questions per video, about different scenes."""
    multiple_choice: float = 0.6
    """Share of multiple choice; the rest is temporal grounding."""
    groups: int = 2
    """Frame budgets per training video, each for its own main agents' conversations."""
    demonstrations: int = 4
    """Main agents' conversations per video and frame budget, about different questions."""
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of overview frames in conversations."""
    windows: int = 16
    """Sub-agents' conversations per training video."""
    telling: float = 0.75
    """Probability that a sub-agent's window shows a digit; in the others there is nothing to report."""
    unaligned: float = 0.1
    """Probability that a sub-agent's window starts anywhere, not at half a scene."""
    captions: int = 16
    """Captioned frames per training video, half of them with a digit."""
    crop_when_seen: float = 0.5
    """Probability to look closer though the overview shows the answer."""
    one_by_one: float = 0.15
    """Probability that crops get turns of their own, the next only where the last shows nothing."""
    guess: float = 0.0
    """Probability to answer from hindsight where the overview does not show the answer."""
    leak: float = 0.4
    """Probability that calls are written as <tool_code>."""
    unclosed: float = 0.4
    """Probability that a turn's <think> is not closed."""
    untagged: float = 0.25
    """Probability that the answer lacks its tags."""

    def __post_init__(self):
        for name in (
            "multiple_choice",
            "telling",
            "unaligned",
            "crop_when_seen",
            "one_by_one",
            "guess",
            "leak",
            "unclosed",
            "untagged",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"world_text.{name} is {getattr(self, name)}; it is a probability, give one from 0 to 1"
                )
        for name in ("groups", "windows", "captions"):
            if getattr(self, name) < 1:
                raise ValueError(f"text.{name}: {getattr(self, name)}; give 1 or more")
        if (
            not 1 <= self.questions <= 2
            or self.groups > len(self.budgets)
            or not 1 <= self.demonstrations <= 4
        ):
            raise ValueError(
                f"world_text: questions {self.questions}, groups {self.groups}, demonstrations {self.demonstrations}; a video is sure of 2 "
                f"scenes and so of 4 different questions, and groups differ in their budget ({len(self.budgets)} given)"
            )


def questions(videos: Sequence[WorldVideo], settings: TextSettings) -> Iterator[Question]:
    """The questions to answer, `settings.questions` a video."""
    for video_, rng in _each(videos, settings, stream=0):
        for scene in rng.permutation(_asked(video_))[: settings.questions]:
            kind = (
                QuestionKind.MULTIPLE_CHOICE
                if rng.random() < settings.multiple_choice
                else QuestionKind.TEMPORAL_GROUNDING
            )
            yield _question(video_, int(scene), kind, rng)


def main_conversations(
    videos: Sequence[WorldVideo], settings: TextSettings
) -> Iterator[Conversation]:
    """Main agents' conversations: overview and question, calls, reports, answer."""
    for video_, rng in _each(videos, settings, stream=1):
        pairs = [(scene, kind) for scene in _asked(video_) for kind in _ASK]
        for frames in rng.permutation(settings.budgets)[: settings.groups]:
            chosen = rng.permutation(len(pairs))[: settings.demonstrations]
            asked = [_question(video_, pairs[n][0], pairs[n][1], rng) for n in chosen]
            for question, n in zip(asked, chosen, strict=True):
                yield _main(video_, question, pairs[n][0], int(frames), settings, rng)


def window_conversations(
    videos: Sequence[WorldVideo], settings: TextSettings, limits: ProtocolSettings
) -> Iterator[Conversation]:
    """Sub-agents' conversations: a window's frames, chosen as in an episode, and what they show."""
    for video_, rng in _each(videos, settings, stream=2):
        telling = {video_.scenes[n].first // WINDOW * WINDOW for n in _asked(video_)}
        empty = sorted(set(range(0, SECONDS, WINDOW)) - telling)
        times = np.arange(0.0, SECONDS, STEP)
        info = VideoInfo(video_.path, FRAMES, float(SECONDS), times, video_.size, video_.size)
        for n in range(settings.windows):
            start = int(rng.choice(sorted(telling) if rng.random() < settings.telling else empty))
            if rng.random() < settings.unaligned:
                start = STEP * int(rng.integers((SECONDS - WINDOW) // STEP + 1))
            indices = window_indices(
                info, start, start + WINDOW, limits.crop_fps, limits.crop_frames
            )
            turns = (
                ChatTurn("user", (_clip(video_, indices),)),
                ChatTurn("assistant", (_summary(video_, start),)),
            )
            yield Conversation(
                f"{video_.id}/{n}:{start}", video_.split, False, turns, subagent=True
            )


def captions(videos: Sequence[WorldVideo], settings: TextSettings) -> Iterator[Caption]:
    """Single frames and the words for what is on them: the scene's colour and the digit, where there is one."""
    for video_, rng in _each(videos, settings, stream=3):
        for n in range(settings.captions):
            time = STEP * int(rng.integers(FRAMES))
            if n % 2:
                scene = video_.scenes[rng.choice(_asked(video_))]
                time = int(rng.choice(range(scene.first, scene.last + 1, STEP)))
            scene = video_.scenes[time // SCENE]
            words = (
                (scene.colour, DIGITS[scene.digit])
                if scene.digit is not None and scene.shows(time)
                else (scene.colour,)
            )
            yield Caption(video_.path, float(time), words)


def _each(
    videos: Sequence[WorldVideo], settings: TextSettings, stream: int
) -> Iterator[tuple[WorldVideo, np.random.Generator]]:
    """Every video with a generator of its own, so that no record depends on how many others there are."""
    for video_ in videos:
        yield (
            video_,
            np.random.default_rng(
                [settings.seed, stream, SPLITS.index(video_.split), int(video_.id.split("/")[1])]
            ),
        )


def _asked(video_: WorldVideo) -> list[int]:
    return [n for n, scene in enumerate(video_.scenes) if scene.digit is not None]


def _question(
    video_: WorldVideo, scene: int, kind: QuestionKind, rng: np.random.Generator
) -> Question:
    there = video_.scenes[scene]
    assert there.digit is not None
    text, id = _ASK[kind].format(there.start), f"{video_.id}:{there.start}:{kind}"
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        return Question(id, video_.path, text, kind, _span(there.first, there.last))
    others = [s.digit for n, s in enumerate(video_.scenes) if n != scene and s.digit is not None]
    absent = sorted(set(range(len(DIGITS))) - {there.digit, *others})
    # Two wrong options occur elsewhere in the video and the rest nowhere, so that what else is seen does not rule all of them out.
    wrong = [int(d) for d in rng.permutation(others)[:2]]
    wrong += [int(d) for d in rng.permutation(absent)[: 3 - len(wrong)]]
    options = tuple(DIGITS[d] for d in rng.permutation([there.digit, *wrong]))
    return Question(id, video_.path, text, kind, DIGITS[there.digit], options)


def _main(
    video_: WorldVideo,
    question: Question,
    scene: int,
    frames: int,
    settings: TextSettings,
    rng: np.random.Generator,
) -> Conversation:
    there = video_.scenes[scene]
    indices = overview_indices(FRAMES, frames)
    shown = STEP * indices
    seen = [int(t) for t in shown if there.shows(t)]
    # One frame is enough to name a digit, but not to say how long it stays.
    answerable = len(seen) >= (2 if question.kind is QuestionKind.TEMPORAL_GROUNDING else 1)
    crops = rng.random() < (settings.crop_when_seen if answerable else 1 - settings.guess)
    opening = _timeline(video_, shown, there)
    if crops:
        turns = _by_crops(video_, question, there, opening, settings, rng)
    else:
        first, last = (seen[0], seen[-1]) if answerable else (there.first, there.last)
        turns = (_conclusion(question, there, f"{opening}\nI see", first, last, settings, rng),)
    text = protocol.question_text(question).removeprefix("\n")
    asked = ChatTurn("user", (_clip(video_, indices), text))
    return Conversation(f"{question.id}/{frames}", video_.split, True, (asked, *turns))


def _clip(video_: WorldVideo, indices: np.ndarray) -> Clip:
    times = tuple((float(STEP) * indices).tolist())
    return Clip(video_.path, tuple(indices.tolist()), times, video_.size, video_.size)


def _says(text: str) -> ChatTurn:
    """A main agent's turn."""
    return ChatTurn("assistant", (PINNED + text,))


def _timeline(video_: WorldVideo, shown: np.ndarray, target: Scene) -> str:
    """What the overview shows of every scene, and again of the one asked about."""
    lines = [
        f"{s.start} {s.colour} {_digit(s) if any(s.shows(t) for t in shown) else '-'}"
        for s in video_.scenes
    ]
    return ", ".join(lines) + "\ntarget " + lines[video_.scenes.index(target)]


def _by_crops(
    video_: WorldVideo,
    question: Question,
    there: Scene,
    opening: str,
    settings: TextSettings,
    rng: np.random.Generator,
) -> tuple[ChatTurn, ...]:
    """Calls for both halves of the scene in one turn, or one after the other until a report tells; the reports, and the answer.

    A leaked call is in nobody's syntax, so it ends the conversation.
    """
    starts = range(there.start, there.end, WINDOW)
    if rng.random() < settings.leak:
        calls = "\n".join(
            f"<tool_code>print(crop_video(start_time={s}, end_time={s + WINDOW}))</tool_code>"
            for s in starts
        )
        return (_says(f"{opening}\nlook closer\n{_close(settings, rng)}{calls}"),)
    crops = [[s] for s in starts] if rng.random() < settings.one_by_one else [list(starts)]
    turns: list[ChatTurn] = []
    for crop in crops:
        calls = "\n".join(protocol.render_call(CropCall(s, s + WINDOW)) for s in crop)
        think = f"{opening if not turns else ''}\nlook closer\n{_close(settings, rng)}"
        turns.append(_says(think + calls))
        turns += [ChatTurn("tool", (_summary(video_, s),)) for s in crop]
        if there.first in range(crop[0], crop[-1] + WINDOW):
            break
    return (
        *turns,
        _conclusion(question, there, "the crops show", there.first, there.last, settings, rng),
    )


def _conclusion(
    question: Question,
    there: Scene,
    opening: str,
    first: int,
    last: int,
    settings: TextSettings,
    rng: np.random.Generator,
) -> ChatTurn:
    answer = (
        f" {_digit(there)}" if question.kind is QuestionKind.MULTIPLE_CHOICE else _span(first, last)
    )
    think = f"{opening} {_digit(there)} from {first} to {last}\n{_close(settings, rng)}"
    return _says(think + (answer if rng.random() < settings.untagged else answer.join(_TAGS)))


def _close(settings: TextSettings, rng: np.random.Generator) -> str:
    return "" if rng.random() < settings.unclosed else "</think>\n"


def _summary(video_: WorldVideo, start: int) -> str:
    """What a sub-agent reports of the window of WINDOW seconds from `start`."""
    seen = [
        (s, [t for t in range(start, start + WINDOW, STEP) if s.shows(t)]) for s in video_.scenes
    ]
    return (
        ",".join(f" {_digit(s)} from {times[0]} to {times[-1]}" for s, times in seen if times)
        or " nothing"
    )


def _digit(scene: Scene) -> str:
    assert scene.digit is not None
    return DIGITS[scene.digit]


def _span(first: int, last: int) -> str:
    return f"[{first}, {last}]"
