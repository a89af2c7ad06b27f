"""Prepares the data of a run: records, and the vocabulary.

    published tables, or your own questions -> rows -> a prepared set -> `Data`
    the small world                         -> videos and records     -> `Data`

Everything is made once. An interrupted preparation continues where it stopped, and a finished one
is only opened. The command prepares published data without training on it:
`python -m train.prepare --config=paravt_8b --data.media FOLDER`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from configs import RECIPES
from models.weights.folder import local_folder
from paravt_jax.data import datasets
from paravt_jax.data.file_sums import require_sealed, seal
from paravt_jax.data.preparation import (
    LEFT_OUT,
    OWN,
    Summary,
    digest_of,
    known_summary,
    open_prepared,
    prepare_rows,
    rows_of_questions,
    rows_of_tables,
)
from paravt_jax.data.published import split_of
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.data.row_reading import Reading, read_row
from paravt_jax.data.sources import fetch, media_root
from paravt_jax.data.stored_json import read_json
from paravt_jax.data.stored_settings import lock
from paravt_jax.data.workers import Workers
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from paravt_jax.world.videos import WorldSettings
from paravt_jax.world.vocabulary import save_tokenizer, world_vocabulary
from rollout.engine.sizing import overview_tokens
from train.cli import parse
from train.data import Data
from train.left_out import (
    UNREADABLE,
    count_rows,
    describe_rows,
    note_unreadable,
    require_rows,
)
from train.published_data import DataSettings, hold_out
from train.published_model import copy_tokenizer
from train.settings import Run
from train.world_data import prepare_world, require_bounds


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
        check: Called for every row or video; may raise an exception to stop.
        questions: Your own questions, on videos below `run.data.media`.

    Raises:
        ValueError: If the recipe has no data, or data that does not fit its settings.
        LeftOutError: If a larger share of rows or videos than `run.max_left_out` cannot be used.
        OSError: If another process prepares data in `run.data.folder`.
    """
    if run.data is not None:
        return _prepare_rows(run, run.data, folder, check, questions)
    if questions is not None:
        raise ValueError(
            f"{run.name}: data is not set; "
            "your own questions need data.media, the folder of their videos"
        )
    if run.world is None or run.text is None:
        raise ValueError(
            f"{run.name}: neither data nor world is set; use a recipe with one of them"
        )
    prepare_world(run, folder, check)
    return _open_world(run, run.world, folder)


def _prepare_rows(
    run: Run,
    settings: DataSettings,
    folder: pathlib.Path,
    check: Callable[[], None],
    questions: Sequence[Question] | None,
) -> Data:
    """Prepare published rows or your own questions, and leave out those that are too long."""
    if questions is not None or settings.questions:
        questions = _own_questions(run, settings, questions)
    home = pathlib.Path(settings.folder) if questions is None else folder / OWN
    prepare_set(run, settings, home, check, questions)
    prepared = open_prepared(home)
    training, heldout = hold_out(tuple(prepared.questions), run.evaluation.questions)
    # Unreadable videos that an earlier start of this run came across while decoding.
    noted = folder / UNREADABLE
    unreadable = {}
    if noted.exists():
        remedy = "delete it, and these videos are found again"
        unreadable = read_json(noted, dict[str, str], remedy)
    sizes = (name.split("x") for name in prepared.summary["sizes"])
    data = Data(
        root=prepared.root,
        vocabulary=_copied_vocabulary(run, folder),
        questions=training,
        heldout=heldout,
        conversations=prepared.conversations,
        lengths=prepared.lengths,
        videos=len(prepared.questions) + len(prepared.conversations),
        sizes=tuple((int(height), int(width)) for width, height in sizes),
        unreadable=unreadable,
        digest=prepared.digest,
    )
    # SFT alone asks no questions, so their lengths do not matter to it.
    if run.rl is not None or data.heldout:
        data = _without_long_questions(run, data, prepared.summary["longest"])
    sources = count_rows(
        prepared.summary, _too_long(run, data, (*training, *heldout), questions is not None)
    )
    if hosts.is_first():
        print(describe_rows(sources))
    require_rows(run, sources, home)
    return data


def _own_questions(
    run: Run, settings: DataSettings, questions: Sequence[Question] | None
) -> Sequence[Question]:
    """Return your own questions, passed from Python or read from `run.data.questions`.

    Raises:
        ValueError: They do not fit the settings.
    """
    run.require_no_demonstrations()
    if not pathlib.Path(settings.media).is_dir():
        raise ValueError(
            f"data.media: {settings.media}; no such folder: "
            "name the folder that contains the videos of your questions"
        )
    if questions is None:
        return read_questions(settings.questions, settings.media)
    if settings.questions:
        raise ValueError(
            f"data.questions: {settings.questions}, and questions were also passed from Python; "
            "use only one of them"
        )
    require_unique_ids(questions)
    return questions


def prepare_set(
    run: Run,
    settings: DataSettings,
    folder: pathlib.Path,
    check: Callable[[], None] = lambda: None,
    questions: Sequence[Question] | None = None,
) -> Summary:
    """Prepare the rows of a run in a folder, if they are not prepared yet.

    Args:
        run: The settings.
        settings: Those of the data.
        folder: The folder of the set.
        check: Called after every archive and every row; may raise an exception to stop. The next
            call continues where it stopped.
        questions: Your own questions; None: the published data.

    Raises:
        FileNotFoundError: If a source has no annotations or media.
        ValueError: If the folder contains a set that was prepared with other settings.
        OSError: If another process prepares data in the folder.
    """
    reading = Reading(
        root="",  # known when the media are there
        tokenizer=str(local_folder(run.model.path, weights=False)),
        dialect=run.model.dialect,
        limits=_shared_limits(run.protocol),
        frames=settings.frames,
        rules=run.frames.rules(run.vision),
        crop_rules=run.frames.rules(run.vision, crop=True),
        annotations=settings.annotations if questions is None else digest_of(questions),
        media=settings.media,
    )
    # The sources of a finished set are not looked at. They may have been deleted since.
    summary = known_summary(folder, reading)
    if summary is not None:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder / ".lock")
    except BlockingIOError as error:
        raise OSError(
            f"data.folder: {folder} is {error}, which prepares data in it: wait for it, stop it, "
            "or prepare in another folder (--data.folder; for own questions, --run-dir)"
        ) from error
    with held:
        # Another process may have finished the set since the first look.
        summary = known_summary(folder, reading)
        if summary is not None:
            return summary
        if questions is None:
            annotations = fetch(settings.annotations, folder / "annotations", ["*.parquet"])
            rows = rows_of_tables(annotations)
            root = media_root(settings.media, folder, check)
        else:
            rows = rows_of_questions(questions)
            root = pathlib.Path(settings.media)
        reading = dataclasses.replace(reading, root=str(root.resolve()))
        read = functools.partial(read_row, reading)
        with Workers(read, settings.processes, settings.deadline) as pool:
            return prepare_rows(rows, folder, reading, pool, check)


def _shared_limits(limits: ProtocolSettings) -> ProtocolSettings:
    """Keep only the limits that affect conversations; the others get their defaults.

    Recipes that differ in limits of rollouts can then share a prepared set.
    """
    names = (
        "max_tool_turns",
        "max_calls",
        "summary_tokens",
        "crop_fps",
        "crop_frames",
        "tools",
    )
    return ProtocolSettings(**{name: getattr(limits, name) for name in names})


def _too_long(
    run: Run, data: Data, questions: Sequence[Question], own: bool
) -> list[tuple[str, str]]:
    """Return the source and the reason of each prepared row that is too long for the run.

    Args:
        run: The settings.
        data: The data of the run, without long questions.
        questions: All questions of the set.
        own: Whether they are your own.
    """
    used = {question.id for question in (*data.questions, *data.heldout)}
    too_long = [question.id for question in questions if question.id not in used]
    sources = [OWN if own else split_of(id.rpartition(":")[0]) for id in too_long]
    found = [(source, "longer than protocol.text_tokens") for source in sources]
    if run.sft is not None:
        found += [
            (conversation.source, "longer than sft.row_tokens")
            for conversation in data.conversations
            if conversation.tokens > run.sft.row_tokens
        ]
    return found


def _without_long_questions(run: Run, data: Data, longest: float) -> Data:
    """Leave out questions that are too long for a prompt.

    Args:
        run: The settings.
        data: The data, with all questions.
        longest: Duration of the longest video, in seconds; later timestamps take more tokens.

    Raises:
        ValueError: If no question is left to train on, or to evaluate with.
    """
    rules = Protocol(data.vocabulary, run.protocol)
    require_bounds(run, rules.measure_label(longest), len(rules.window((), 0).ids))
    if run.rl is not None and not data.questions:
        raise ValueError(
            "data: no question to train on; give rl rows in data.annotations, "
            "or questions on videos that can be read"
        )
    # `text_tokens` is the room for the system turn and the question together.
    system = overview_tokens(rules, 0, 0, 0.0)
    lengths = {
        question.id: system + len(rules.question(question).ids)
        for question in (*data.questions, *data.heldout)
    }
    limit = run.protocol.text_tokens
    training = tuple(q for q in data.questions if lengths[q.id] <= limit)
    heldout = tuple(q for q in data.heldout if lengths[q.id] <= limit)
    if (data.heldout and not heldout) or (run.rl is not None and not training):
        raise ValueError(
            f"protocol.text_tokens: {limit}; the system turn takes {system} tokens, and no "
            "question to train on, or to evaluate with, fits beside it: give at least "
            f"{min(lengths.values())}"
        )
    return dataclasses.replace(data, questions=training, heldout=heldout)


def _open_world(run: Run, world: WorldSettings, folder: pathlib.Path) -> Data:
    root = folder / "videos"
    tokenizer_folder = folder / "tokenizer"
    if run.model.path:
        copy_tokenizer(run.model.path, tokenizer_folder)
    elif not (tokenizer_folder / tokenizer.FILE).exists():
        save_tokenizer(world_vocabulary(run.protocol, run.model.dialect), tokenizer_folder)
    records = folder / "records"
    require_sealed(records, _remedy(records))
    require_sealed(tokenizer_folder, _remedy(tokenizer_folder))

    stored = {name: tuple(split) for name, split in datasets.open_splits(records).items()}
    paths = {datasets.video_of(record) for records in stored.values() for record in records}
    # What can be read without an error may still be another picture.
    damage = dict(line.split(": ", 1) for line in seal(root))
    unreadable = {path: what for path, what in damage.items() if path in paths}
    readable: dict[str, Any] = {
        name: tuple(record for record in records if datasets.video_of(record) not in unreadable)
        for name, records in stored.items()
    }
    data = Data(
        root=root,
        vocabulary=tokenizer.load(tokenizer_folder, run.model.dialect),
        lengths=tuple(conversation.tokens for conversation in readable["conversations"]),
        videos=len(paths),
        sizes=((world.size, world.size),),
        **readable | {"heldout": readable["heldout"][: run.evaluation.questions]},
    )
    note_unreadable(run, folder, data, unreadable)
    return data


def _copied_vocabulary(run: Run, folder: pathlib.Path) -> Vocabulary:
    """Return the vocabulary of the run's model, whose tokenizer is copied to the run's folder."""
    copy_tokenizer(run.model.path, folder / "tokenizer")
    require_sealed(folder / "tokenizer", _remedy(folder / "tokenizer"))
    return tokenizer.load(folder / "tokenizer", run.model.dialect)


def _remedy(folder: pathlib.Path) -> str:
    return f"delete {folder}, and the same command makes it again"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, prog="python -m train.prepare")
    try:
        if run.data is None or run.data.questions:
            raise ValueError(
                f"{run.name}: it has no published data to prepare; name a recipe with published "
                "data, such as paravt_8b (your own questions need no preparation: train on them)"
            )
        folder = pathlib.Path(run.data.folder)
        summary = prepare_set(run, run.data, folder)
        print(json.dumps(summary, indent=1))
        sources = count_rows(summary)
        print(describe_rows(sources))
        print(f"{folder / LEFT_OUT} lists the rows that are left out, with reasons")
        require_rows(run, sources, folder)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
