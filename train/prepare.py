"""Prepares the data of a run: records, and the vocabulary.

    published tables, or your own questions -> examples -> a prepared set -> `Data`
    the small world                         -> videos and records     -> `Data`

Everything is made once. An interrupted preparation continues where it stopped, and a finished one
is only opened. The command prepares published data without training on it:
`python -m train.prepare --config=paravt_8b --data.media FOLDER`.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from configs import RECIPES
from models.weights.folder import local_folder
from paravt_jax.data import datasets, tokenizer_file
from paravt_jax.data.example_reading import ExampleReading
from paravt_jax.data.preparation import (
    LEFT_OUT,
    OWN,
    SET,
    Prepared,
    digest_of,
    examples_of_questions,
    examples_of_tables,
    open_prepared,
    prepare_examples,
)
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.data.sources import fetch, media_root, require_source
from paravt_jax.data.stored import lock, naming_full_disk
from paravt_jax.method.conversations import Clip, render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from paravt_jax.processes.cluster import run_command
from paravt_jax.processes.exit_codes import UserError
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world_videos
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.engine.settings import overview_tokens
from train.cli import parse
from train.data import Data, hold_out
from train.model_folder import copy_tokenizer
from train.settings import DataSettings, Run

_NAMED = 20  # largest number of videos to print by name


class LeftOutError(UserError):
    """More examples or videos than allowed are left out; the message names them."""


def prepare(
    run: Run,
    folder: pathlib.Path,
    check: Callable[[], None] = lambda: None,
    questions: Sequence[Question] | None = None,
) -> Data:
    """Prepare the data of a run, or open it if it is already prepared.

    Args:
        run: The settings. Published data is prepared in `run.data.folder`, so that several runs can
            share it.
        folder: The run's folder, where everything else goes.
        check: Called for every example or video; may raise an exception to stop.
        questions: Your own questions, on videos below `run.data.media`.

    Raises:
        ValueError: If the recipe has no data, or data that does not fit its settings.
        LeftOutError: If a larger share of examples or videos than allowed cannot be used.
        OSError: If another process prepares data in `run.data.folder`.
    """
    if run.data is not None:
        return _prepare_examples(run, run.data, folder, check, questions)
    if questions is not None or run.world is None or run.text is None:
        raise ValueError(
            f"{run.name}: data is not set; your own questions need data.media, the folder of their "
            "videos, and a run without them needs data or the small world"
        )
    return _prepare_world(run, run.world, run.text, folder, check)


def _prepare_world(
    run: Run,
    world: WorldSettings,
    texts: TextSettings,
    folder: pathlib.Path,
    check: Callable[[], None],
) -> Data:
    """Store the records of the small world, and render its videos."""
    if not run.model.path and not (folder / "tokenizer" / tokenizer_file.FILE).exists():
        tokenizer_file.save(world_vocabulary(run.protocol, run.model.dialect), folder / "tokenizer")
    vocabulary = _copied_vocabulary(run, folder)
    if not datasets.is_prepared(folder / "records"):
        datasets.write_splits(folder / "records", _world_records(run, world, texts, vocabulary))
    stored = datasets.open_splits(folder / "records")
    splits: dict[str, Any] = {name: tuple(split) for name, split in stored.items()}
    data = Data(
        root=folder / "videos",
        vocabulary=vocabulary,
        heldout=splits.pop("heldout")[: run.evaluation.questions],
        lengths=tuple(conversation.tokens for conversation in splits["conversations"]),
        videos=world.train_videos + world.heldout_videos,
        sizes=((world.size, world.size),),
        **splits,
    )
    # Texts come first: if they need more room, the run fails before it renders any video.
    too_long = _too_long(run, data)
    if too_long:
        reasons = " and ".join(sorted({*too_long.values()}))
        raise ValueError(
            f"{len(too_long)} texts of the small world are {reasons}; raise --protocol.text-tokens "
            f"({run.protocol.text_tokens}) or --sft.row-tokens"
        )
    videos = world_videos.plan(world)
    with tqdm(videos, "render videos", unit="video", disable=not hosts.is_first()) as bar:
        for video in bar:
            world_videos.render(world, video, data.root)
            check()
    return data


def _world_records(
    run: Run, world: WorldSettings, texts: TextSettings, vocabulary: Vocabulary
) -> dict[str, Sequence[datasets.Record]]:
    """Compose the records of the small world by split; takes some seconds for a thousand videos."""
    rules = Protocol(vocabulary, run.protocol)
    videos = world_videos.plan(world)
    training = world_videos.of_split(videos, "train")

    def frame_tokens(clip: Clip) -> int:
        return run.frame_tokens(clip.crop)

    return {
        "questions": [*world_text.questions(training, texts)],
        "heldout": [*world_text.questions(world_videos.of_split(videos, "heldout"), texts)],
        "conversations": [
            dataclasses.replace(written, tokens=len(render(written, rules, frame_tokens).ids))
            for written in (
                *world_text.main_conversations(training, texts),
                *world_text.window_conversations(training, texts, run.protocol),
            )
        ],
        "captions": [*world_text.captions(training, texts)],
    }


def _prepare_examples(
    run: Run,
    settings: DataSettings,
    folder: pathlib.Path,
    check: Callable[[], None],
    questions: Sequence[Question] | None,
) -> Data:
    """Prepare published data or your own questions, and leave out those that are too long."""
    if questions is not None:
        require_unique_ids(questions)
    elif settings.questions:
        questions = read_questions(settings.questions, settings.media)
    if questions is not None:
        run.require_no_demonstrations()
    home = pathlib.Path(settings.folder) if questions is None else folder / OWN
    prepared = prepare_set(run, settings, home, check, questions)
    summary = prepared.summary
    data = Data(
        root=prepared.root,
        vocabulary=_copied_vocabulary(run, folder),
        questions=tuple(prepared.questions),
        conversations=prepared.conversations,
        lengths=tuple(summary["lengths"]),
        videos=len(prepared.questions) + len(prepared.conversations),
        sizes=tuple((height, width) for height, width in summary["sizes"]),
        digest=prepared.digest,
    )
    too_long = _too_long(run, data)
    counts = {source: collections.Counter(n) for source, n in summary["sources"].items()}
    for id, reason in too_long.items():
        source = OWN if questions is not None else id.rpartition(":")[0]
        counts[source].update({"kept": -1, reason: 1})
    require_examples(run, counts, home)
    return _split(run, data, too_long)


def prepare_set(
    run: Run,
    settings: DataSettings,
    folder: pathlib.Path,
    check: Callable[[], None] = lambda: None,
    questions: Sequence[Question] | None = None,
) -> Prepared:
    """Prepare the examples of a run in a folder, or open them if they are prepared.

    Args:
        run: The settings.
        settings: Those of the data.
        folder: The folder of the set.
        check: Called after every archive and every example; may raise an exception to stop. The
            next call continues where it stopped.
        questions: Your own questions; None: the published data.

    Raises:
        FileNotFoundError: If a source has no annotations or media.
        ValueError: If the folder contains a set that was prepared with other settings.
        OSError: If another process prepares data in the folder.
    """
    reading = ExampleReading(
        root="",  # known when the media are there
        tokenizer=str(local_folder(run.model.path, weights=False)),
        dialect=run.model.dialect,
        limits=_shared_limits(run.protocol),
        frames=settings.frames,
        rules=run.frames.rules(run.model.config().vision),
        crop_rules=run.frames.rules(run.model.config().vision, crop=True),
        annotations=settings.annotations if questions is None else digest_of(questions),
        media=settings.media,
    )
    # The sources of a finished set are not looked at. They may have been deleted since.
    prepared = open_prepared(folder, reading)
    if prepared is not None:
        return prepared
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / ".lock"), naming_full_disk(folder):
        # Another process may have finished the set since the first look.
        prepared = open_prepared(folder, reading)
        if prepared is not None:
            return prepared
        if questions is None:
            annotations = fetch(settings.annotations, folder / "annotations", ["*.parquet"])
            examples = examples_of_tables(annotations)
            root = media_root(settings.media, folder, check)
        else:
            examples = examples_of_questions(questions)
            root = pathlib.Path(settings.media)
        reading = dataclasses.replace(reading, root=str(root.resolve()))
        return prepare_examples(examples, folder, reading, check)


def _shared_limits(limits: ProtocolSettings) -> ProtocolSettings:
    """Keep only the limits that affect conversations; the others get their defaults.

    Recipes that differ in limits of rollouts can then share a prepared set.
    """
    names = ("max_tool_turns", "max_calls", "summary_tokens", "crop_frames", "tools")
    return ProtocolSettings(**{name: getattr(limits, name) for name in names})


def _too_long(run: Run, data: Data) -> dict[str, str]:
    """Return why questions and conversations are too long for a prompt or a row, by id.

    Conversations that are longer than a row stay in the data, and are not packed.
    """
    rules = Protocol(data.vocabulary, run.protocol)
    too_long: dict[str, str] = {}
    # SFT alone asks no questions, so their lengths do not matter to it.
    if run.plays_episodes:
        # `text_tokens` is the room for the system turn and the question together.
        room = run.protocol.text_tokens - overview_tokens(rules, 0, 0, 0.0)
        for question in (*data.questions, *data.heldout):
            if len(rules.question(question).ids) > room:
                too_long[question.id] = "longer than protocol.text_tokens"
    if run.sft is not None:
        for number, tokens in enumerate(data.lengths):
            if tokens > run.sft.row_tokens:
                too_long[data.conversations[number].id] = "longer than sft.row_tokens"
    return too_long


def _split(run: Run, data: Data, too_long: Mapping[str, str]) -> Data:
    """Hold out questions, and leave out those that are too long.

    Raises:
        ValueError: No question is left to train on, or to evaluate with.
    """
    parts = hold_out(data.questions, run.evaluation.questions)
    training, heldout = (tuple(q for q in part if q.id not in too_long) for part in parts)
    if (parts[1] and not heldout) or (run.rl is not None and not training):
        raise ValueError(
            f"protocol.text_tokens: {run.protocol.text_tokens}; of {len(data.questions)} "
            "questions, none to train on, or to evaluate with, fits beside the system turn: give "
            "more, or give rl files in data.annotations"
        )
    return dataclasses.replace(data, questions=training, heldout=heldout)


def _copied_vocabulary(run: Run, folder: pathlib.Path) -> Vocabulary:
    """Return the vocabulary of the run's model, whose tokenizer is copied to the run's folder."""
    if run.model.path:
        copy_tokenizer(run.model.path, folder / "tokenizer")
    return tokenizer_file.load(folder / "tokenizer", run.model.dialect)


def require_examples(
    run: Run, sources: Mapping[str, Mapping[str, int]], folder: pathlib.Path
) -> None:
    """Print how many examples of each source are used, and why the others are not.

    Args:
        run: `max_left_out` is the limit of each source.
        sources: The examples of each source, by the reason why they are left out, or as `kept`.
        folder: The folder of the prepared set.

    Raises:
        LeftOutError: A source has lost a larger share of its examples than allowed.
    """
    lost = []
    for source, reasons in sources.items():
        counts = collections.Counter(reasons)
        total, kept = counts.total(), counts.pop("kept", 0)
        line = f"{source}: {kept:,} of {total:,} rows are used"
        if counts:
            why = (f"{n:,} {reason}" for reason, n in counts.most_common())
            line += f"; left out: {', '.join(why)}"
        if hosts.is_first():
            print(line)
        if total - kept > run.max_left_out * total:
            lost.append(line)
    if lost:
        raise LeftOutError(
            f"max_left_out: {run.max_left_out:g}; a larger share is left out of {'. '.join(lost)}. "
            f"See {folder / LEFT_OUT}; mend or remove these files, delete {folder / SET} and "
            "prepare again, or raise a limit that is named here, or allow a larger share with "
            "--max-left-out"
        )


def note_unreadable(run: Run, data: Data, own: dict[str, str]) -> None:
    """Add unreadable videos to `data.unreadable`, and print the new ones.

    All processes call it: they decode different videos, so each may know of other unreadable ones.

    Args:
        run: `max_left_out` is the limit.
        data: The data, whose list of unreadable videos is extended.
        own: Reasons of videos by path that this process could not decode.

    Raises:
        LeftOutError: The list exceeds the allowed share.
    """
    known = len(data.unreadable)
    for others in hosts.gather(own):
        data.unreadable.update(others)
    count = len(data.unreadable)
    new = list(data.unreadable.items())[known:]
    if not new:
        return
    named = "; ".join(f"{path}: {why}" for path, why in new[-_NAMED:])
    line = f"{count} of {data.videos} videos cannot be read; the new ones: {named}"
    if hosts.is_first():
        print(line)
    if count > run.max_left_out * data.videos:
        remedy = "Replace them" if run.world is None else f"Delete {data.root} to render it again"
        raise LeftOutError(
            f"max_left_out: {run.max_left_out:g}; {line}. {remedy}, or allow a larger share with "
            "--max-left-out"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, prog="python -m train.prepare")
    return run_command(lambda: _prepare_published(run))


def _prepare_published(run: Run) -> None:
    if run.data is None or run.data.questions:
        raise ValueError(
            f"{run.name}: it has no published data to prepare; name a recipe with published data, "
            "such as paravt_8b (your own questions need no preparation: train on them)"
        )
    folder = pathlib.Path(run.data.folder)
    if not (folder / SET).exists():
        # Before anything is downloaded.
        require_source(run.data.annotations)
        require_source(run.data.media)
    prepared = prepare_set(run, run.data, folder)
    print(f"{folder / LEFT_OUT} lists the rows that are left out, with reasons")
    require_examples(run, prepared.summary["sources"], folder)


if __name__ == "__main__":
    raise SystemExit(main())
