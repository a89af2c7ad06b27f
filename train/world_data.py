"""Prepares the small world as training data: renders its videos and stores its records.

Texts that exceed the protocol's limits are reported before anything is rendered or written.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Callable

from models.weights.folder import local_folder
from paravt_jax.data import datasets, tokenizer_file
from paravt_jax.method.conversations import render
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, Trajectory
from paravt_jax.processes import hosts
from paravt_jax.progress import Progress
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.engine.sizing import REQUEST_TOKENS, overview_tokens
from train.settings import Run

Splits = dict[str, tuple[datasets.Record, ...]]
"""Records by the name of their split: questions, heldout, conversations, captions."""


def prepare_world(run: Run, folder: pathlib.Path, check: Callable[[], None]) -> None:
    """Render the videos and write the records of the small world, unless they are already there.

    Args:
        run: The settings.
        folder: The run's folder; videos go to `videos`, records to `records`.
        check: Called for every video; may raise an exception to stop.

    Raises:
        ValueError: If a text is longer than the protocol allows.
    """
    assert run.world is not None
    # Texts come first: if one of them is too long, the run fails before it renders any video.
    splits = None if datasets.is_prepared(folder / "records") else world_records(run)
    with Progress("render videos", "video", shown=hosts.is_first()) as progress:

        def report(done: int, total: int) -> None:
            progress.update(done, total)
            check()

        world.render(run.world, folder / "videos", report)
    if splits is not None:
        datasets.write_splits(folder / "records", splits)


def world_records(run: Run) -> Splits:
    """Compose the records of the small world: questions, demonstrations and captions.

    Conversations carry their lengths in tokens. Takes some seconds for a thousand videos.

    Raises:
        ValueError: If a text is longer than the protocol allows.
    """
    assert run.world is not None and run.text is not None, f"{run.name} has no world"
    if run.model.path:
        vocabulary = tokenizer_file.load(
            local_folder(run.model.path, weights=False), run.model.dialect
        )
    else:
        vocabulary = world_vocabulary(run.protocol, run.model.dialect)
    rules = Protocol(vocabulary, run.protocol)
    videos = world.plan(run.world)
    train = world.of_split(videos, "train")
    questions = tuple(world_text.questions(train, run.text))
    heldout = tuple(world_text.questions(world.of_split(videos, "heldout"), run.text))
    conversations = []
    # Largest length so far, in tokens, by the name of the protocol's limit. `|=` on a Counter keeps
    # the larger value of each key.
    longest: collections.Counter[str] = collections.Counter()
    system = overview_tokens(rules, 0, 0, 0.0)
    for question in (*questions, *heldout):
        longest |= {"text_tokens": system + len(rules.question(question).ids)}
    for conversation in (
        *world_text.main_conversations(train, run.text),
        *world_text.window_conversations(train, run.text, run.protocol),
    ):
        trajectory = render(
            conversation,
            rules,
            lambda clip: run.crop_frame_tokens if clip.crop else run.frame_tokens,
        )
        conversations.append(dataclasses.replace(conversation, tokens=len(trajectory.ids)))
        longest |= _limited_lengths(trajectory, conversation.subagent, len(rules.pinned.ids))
    _require_room(run, rules, longest)
    return {
        "questions": questions,
        "heldout": heldout,
        "conversations": tuple(conversations),
        "captions": tuple(world_text.captions(train, run.text)),
    }


def _limited_lengths(
    trajectory: Trajectory, subagent: bool, pinned: int
) -> collections.Counter[str]:
    """Return the lengths of a demonstration, in tokens, by the name of the protocol's limit.

    `pinned` counts the tokens that start every turn. A rollout does not generate them, so they do
    not count towards the limit of a turn.
    """
    after_prompt = [s for s in trajectory.segments if s.author is not Author.PROMPT]
    response = sum(len(segment.ids) for segment in after_prompt)
    if subagent:
        return collections.Counter(summary_tokens=response)
    turns = [len(s.ids) for s in after_prompt if s.author is Author.MODEL]
    # A rollout's row also holds the prompt's last token.
    return collections.Counter(trajectory_tokens=response + 1, turn_tokens=max(turns) - pinned)


def _require_room(run: Run, rules: Protocol, longest: collections.Counter[str]) -> None:
    """Raise ValueError if a text exceeds its limit."""
    times = range(0, world.SECONDS + 1, world.STEP)
    label = max(rules.measure_label(time) for time in times)
    require_bounds(run, label, len(rules.window((), 0).ids))
    texts = {"text_tokens": "the system turn and a question"}
    if run.sft is not None:
        texts |= {
            "trajectory_tokens": "a demonstration",
            "turn_tokens": "a turn of a demonstration",
            "summary_tokens": "a sub-agent's report",
        }
    for name, text in texts.items():
        limit = getattr(run.protocol, name)
        if longest[name] > limit:
            raise ValueError(
                f"protocol.{name}: {limit}; {text} may need {longest[name]} tokens: "
                f"give at least {longest[name]}"
            )


def require_bounds(run: Run, label: int, request: int) -> None:
    """Check two texts whose lengths were fixed before the tokenizer was known.

    Args:
        run: The settings; `label_tokens` bounds the label.
        label: Length of a frame's timestamp and vision marks, in tokens.
        request: Length of a sub-agent's request, in tokens.

    Raises:
        ValueError: If one of them is longer than planned.
    """
    for text, needed, reserved in (
        ("a frame's timestamp and vision marks", label, run.label_tokens),
        ("a sub-agent's request", request, REQUEST_TOKENS),
    ):
        if needed > reserved:
            raise ValueError(
                f"model.path: {run.model.path}; its tokenizer needs {needed} tokens for {text}, "
                f"but only {reserved} are reserved: use that of a supported model"
            )
