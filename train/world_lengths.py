"""How long the texts of a small world are, known before anything is drawn or written."""

from __future__ import annotations

import functools
from typing import NamedTuple

from models.weights.folder import local_folder
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol, ProtocolSettings, recurring_texts
from paravt_jax.method.records import Author, Trajectory
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from paravt_jax.world.vocabulary import build_tokenizer
from train.learn.batch import shared_prompt


class WorldLengths(NamedTuple):
    """The longest texts of a world, in tokens."""

    question: int
    """The rest of a prompt, behind the overview."""
    answer: int
    """What a demonstration has after its prompt, the prompt's last token included."""
    turn: int
    """What one turn of a demonstration has for the model to write."""
    row: int
    """What a demonstration has after the prompt that its group shares, the last token of which included."""
    report: int
    """A sub-agent's report."""
    label: int
    """A frame's timestamp and vision marks."""
    request: int
    """A sub-agent's prompt without its frames."""


def world_pieces(limits: ProtocolSettings) -> tuple[str, ...]:
    """What is one token in the vocabulary that a world is given."""
    return (*world_text.PIECES, *recurring_texts(limits.make_tools()))


def world_vocabulary(limits: ProtocolSettings, model_path: str = "") -> Vocabulary:
    """The vocabulary of published weights, or the one that is made for a world."""
    if model_path:
        return tokenizer.load(local_folder(model_path, weights=False))
    return Vocabulary(build_tokenizer(world_pieces(limits)))


@functools.cache
def world_lengths(
    settings: WorldSettings, text: TextSettings, limits: ProtocolSettings, model_path: str = ""
) -> WorldLengths:
    """Lengths over all questions and demonstrations, in the vocabulary of `model_path` or the world's own.

    Takes some seconds for a thousand videos. Frames stand in the prompt, so nothing is rendered with them.
    """
    rules = Protocol(world_vocabulary(limits, model_path), limits)
    videos = world.plan(settings)
    train = world.of_split(videos, "train")
    answer = turn = row = report = 0
    pinned = len(rules.pinned.ids)
    for group in world_text.main_demonstrations(train, text):
        rendered = [rules.demonstration(demonstration, (), 0) for demonstration in group]
        shared = len(shared_prompt(rendered))
        for trajectory in rendered:
            answer = max(answer, _own(trajectory))
            turns = [
                len(segment.ids) - pinned
                for segment in trajectory.segments
                if segment.author is Author.MODEL
            ]
            turn = max(turn, *turns)
            row = max(row, len(trajectory.ids) - shared)
    for demonstration in world_text.window_demonstrations(train, text):
        report = max(report, _own(rules.demonstration(demonstration, (), 0)) - 1)
    times = range(0, world.SECONDS + 1, world.STEP)
    return WorldLengths(
        question=max(
            len(rules.question(question).ids) for question in world_text.questions(videos, text)
        ),
        answer=answer,
        turn=turn,
        row=row,
        report=report,
        label=max(rules.label_tokens(time) for time in times),
        request=len(rules.window((), 0).ids),
    )


def _own(trajectory: Trajectory) -> int:
    """Tokens after the prompt, and its last one."""
    return int((trajectory.authors != Author.PROMPT).sum()) + 1
