"""The small world as data to learn from: its records, counted in tokens and stored, and its videos.

What is too long for the protocol's limits is found before anything is drawn or written.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Callable

from models.weights.folder import local_folder
from paravt_jax.data import datasets
from paravt_jax.method import tokenizer
from paravt_jax.method.conversations import render
from paravt_jax.method.protocol import Protocol, ProtocolSettings, recurring_texts
from paravt_jax.method.records import Author
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.progress import Progress
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.vocabulary import build_tokenizer
from rollout.engine.sizing import REQUEST_TOKENS, overview_tokens
from train.durable import hosts
from train.settings import Run

Splits = dict[str, tuple[datasets.Record, ...]]


def world_pieces(limits: ProtocolSettings) -> tuple[str, ...]:
    """What is one token in the vocabulary that a world is given."""
    return (*world_text.PIECES, *recurring_texts(limits.make_tools()))


def world_vocabulary(limits: ProtocolSettings, model_path: str = "") -> Vocabulary:
    """The vocabulary of published weights, or the one that is made for a world."""
    if model_path:
        return tokenizer.load(local_folder(model_path, weights=False))
    return Vocabulary(build_tokenizer(world_pieces(limits)))


def prepare_world(run: Run, folder: pathlib.Path, check: Callable[[], None]) -> None:
    """Draws the videos into `folder/videos` and writes the records into `folder/records`, where they
    are not there yet. `check` is called for every video and may raise to stop.

    Raises ValueError where a text is longer than the protocol allows.
    """
    assert run.world is not None
    missing = not datasets.is_prepared(folder / "records")
    splits = world_records(run) if missing else {}
    with Progress("render videos", "video", shown=hosts.is_first()) as progress:

        def tell(done: int, total: int) -> None:
            progress.update(done, total)
            check()

        world.render(run.world, folder / "videos", tell)
    if missing:
        datasets.write_splits(folder / "records", splits)


def world_records(run: Run) -> Splits:
    """Questions, conversations with their lengths in tokens, and captions of the world, by split.

    Takes some seconds for a thousand videos. Raises ValueError where a text is longer than the
    protocol allows.
    """
    assert run.world is not None and run.text is not None, f"{run.name} has no world"
    rules = Protocol(world_vocabulary(run.protocol, run.model.path), run.protocol)
    videos = world.plan(run.world)
    train, heldout = world.of_split(videos, "train"), world.of_split(videos, "heldout")
    asked = {
        "questions": tuple(world_text.questions(train, run.text)),
        "heldout": tuple(world_text.questions(heldout, run.text)),
    }
    system = overview_tokens(rules, 0, 0, 0.0)
    longest: collections.Counter[str] = collections.Counter()
    for question in itertools.chain(*asked.values()):
        longest["text_tokens"] = max(
            longest["text_tokens"], system + len(rules.question(question).ids)
        )
    conversations, pinned = [], len(rules.pinned.ids)
    for conversation in (
        *world_text.main_conversations(train, run.text),
        *world_text.window_conversations(train, run.text, run.protocol),
    ):
        trajectory = render(conversation, rules, lambda _: run.frame_tokens)
        conversations.append(dataclasses.replace(conversation, tokens=len(trajectory.ids)))
        said = [s for s in trajectory.segments if s.author is not Author.PROMPT]
        answer = sum(len(s.ids) for s in said)
        if conversation.subagent:
            lengths = {"summary_tokens": answer}
        else:
            turn = max(len(s.ids) for s in said if s.author is Author.MODEL) - pinned
            # The prompt's last token stands in a rollout's row, too.
            lengths = {"trajectory_tokens": answer + 1, "turn_tokens": turn}
        longest |= {name: max(longest[name], tokens) for name, tokens in lengths.items()}
    _require_room(run, rules, longest)
    captions = tuple(world_text.captions(train, run.text))
    return {**asked, "conversations": tuple(conversations), "captions": captions}


def _require_room(run: Run, rules: Protocol, longest: collections.Counter[str]) -> None:
    times = range(0, world.SECONDS + 1, world.STEP)
    require_bounds(
        run, max(rules.measure_label(time) for time in times), len(rules.window((), 0).ids)
    )
    names = {"text_tokens": "the system turn and a question"}
    if run.sft is not None:
        names |= {
            "trajectory_tokens": "a demonstration",
            "turn_tokens": "a turn of a demonstration",
            "summary_tokens": "a sub-agent's report",
        }
    for name, what in names.items():
        limit = getattr(run.protocol, name)
        if longest[name] > limit:
            raise ValueError(
                f"protocol.{name}: {limit}; {what} may need {longest[name]}: give at least as many"
            )


def require_bounds(run: Run, label: int, request: int) -> None:
    """Raises ValueError where a frame's label or a sub-agent's request is longer than it is planned."""
    if label > run.protocol.label_tokens:
        raise ValueError(
            f"protocol.label_tokens: {run.protocol.label_tokens}; a frame's timestamp and marks take "
            f"{label} tokens in this tokenizer: give at least as many"
        )
    if request > REQUEST_TOKENS:
        raise ValueError(
            f"model.path: {run.model.path}; its tokenizer makes {request} tokens of a sub-agent's "
            f"request, and there is room for {REQUEST_TOKENS}: take the tokenizer of Qwen3-VL"
        )
