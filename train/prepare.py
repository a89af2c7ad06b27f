"""From a recipe to what a run learns from: videos on disk, records that can be read, and the vocabulary.

Owns the order in which these are made and the report of videos that cannot be read. Everything is made once: an interrupted
preparation goes on, a finished one is only opened. As a command it prepares published data and does no more:
`python -m train.prepare --config=sft_8b --data.media FOLDER`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from configs import RECIPES
from paravt_jax.data import datasets, video
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frames import VideoError
from paravt_jax.data.preparation import LEFT_OUT, PLAN, open_prepared
from paravt_jax.data.published import Reason
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.progress import Progress
from paravt_jax.world.vocabulary import build_tokenizer, save_tokenizer
from rollout.engine.sizing import overview_tokens
from train.cli import parse
from train.data import Data
from train.durable import hosts
from train.published_data import DataSettings, hold_out, prepare_published
from train.published_model import copy_tokenizer
from train.settings import Run
from train.unreadable import UNREADABLE, UnreadableVideosError, note_unreadable
from train.world_data import prepare_world, require_bounds, world_pieces

CHECKED = "checked_questions.json"
"""In a run's folder: the digest of your own questions, and what the check of their videos found."""


def prepare(
    run: Run,
    folder: pathlib.Path,
    check: Callable[[], None] = lambda: None,
    questions: Sequence[Question] | None = None,
) -> Data:
    """The data of `run`, made in `folder` where it is not there yet. `check` is called for every video and may raise to stop.

    `questions` are your own, on videos below `run.data.media`. Published data is made in
    `run.data.folder`, where other runs find it. Raises ValueError for a recipe without any data,
    UnreadableVideosError where more videos than allowed cannot be read.
    """
    if questions is not None or (run.data is not None and run.data.questions):
        return _own_questions(run, folder, check, questions)
    if run.data is not None:
        return _published(run, run.data, folder, check)
    if run.world is None or run.text is None:
        raise ValueError(
            f"{run.name}: neither data nor world is set; use a recipe with one of them"
        )
    prepare_world(run, folder, check)
    return _open_world(run, folder)


def _published(
    run: Run, settings: DataSettings, folder: pathlib.Path, check: Callable[[], None]
) -> Data:
    summary = prepare_dataset(run, check)
    counts = {
        reason: summary["reasons"].get(reason, 0)
        for reason in (Reason.MISSING, Reason.UNREADABLE, Reason.SLOW)
    }
    if sum(counts.values()) > run.unreadable_share * summary["rows"]:
        named, set_folder = (
            ", ".join(f"{count} {reason}" for reason, count in counts.items()),
            pathlib.Path(settings.folder),
        )
        raise UnreadableVideosError(
            f"{sum(counts.values())} of {summary['rows']} rows have files that cannot be read ({named}), see {set_folder / LEFT_OUT}. "
            f"Put them back, delete {set_folder / PLAN} and prepare again, or allow a larger share than "
            f"--unreadable-share {run.unreadable_share:g}."
        )
    copy_tokenizer(run.model.path, folder / "tokenizer")
    prepared, noted = open_prepared(pathlib.Path(settings.folder)), folder / UNREADABLE
    questions, heldout = hold_out(tuple(prepared.questions), settings.heldout)
    data = Data(
        root=prepared.root,
        vocabulary=tokenizer.load(folder / "tokenizer"),
        questions=questions,
        heldout=heldout,
        conversations=prepared.conversations,
        lengths=prepared.lengths,
        videos=summary["kept"],
        unreadable=json.loads(noted.read_text()) if noted.exists() else {},
        digest=prepared.digest,
    )
    if run.rl is not None or data.heldout:
        data = _with_room(run, data, summary["seconds"].get("most", 0.0))
    return data


def _own_questions(
    run: Run,
    folder: pathlib.Path,
    check: Callable[[], None],
    questions: Sequence[Question] | None,
) -> Data:
    """Your own questions, given or read from `run.data.questions`. Videos that cannot be read are
    left out by name."""
    settings = run.data
    if settings is None:
        raise ValueError(
            f"{run.name}: data is not set; your own questions need data.media, the folder of their videos"
        )
    if run.sft is not None:
        raise ValueError(
            f"sft: {type(run.sft).__name__}; your own questions have no demonstrations: set sft to None"
        )
    root = pathlib.Path(settings.media).resolve()
    if not root.is_dir():
        raise ValueError(
            f"data.media: {settings.media}; no such folder: give the one that holds the videos of your questions"
        )
    if questions is not None and settings.questions:
        raise ValueError(
            f"data.questions: {settings.questions}, and questions were given from Python as well; give one of them"
        )
    if questions is None:
        questions = read_questions(settings.questions, root)
    require_unique_ids(questions)
    found = hashlib.sha256()
    for question in questions:
        found.update(json.dumps(dataclasses.asdict(question)).encode())
    digest = found.hexdigest()
    paths = sorted({question.video for question in questions})
    file = folder / CHECKED
    if file.exists():  # by an earlier start, or by the first process of this run
        checked = json.loads(file.read_text())
        if checked["digest"] != digest:
            where = settings.questions or "given from Python"
            raise ValueError(
                f"data.questions: {where}; {folder} was begun with other questions; put those "
                "back, or name another --run-dir"
            )
    else:
        checked = {"digest": digest, **_check_videos(root, paths, check)}
    unreadable = checked["unreadable"]
    readable = tuple(question for question in questions if question.video not in unreadable)
    kept, heldout = hold_out(readable, settings.heldout)
    copy_tokenizer(run.model.path, folder / "tokenizer")
    data = Data(
        root=root,
        vocabulary=tokenizer.load(folder / "tokenizer"),
        questions=kept,
        heldout=heldout,
        videos=len(paths),
        digest=digest,
    )
    data = _with_room(run, data, checked["longest"])
    note_unreadable(run, folder, data, unreadable)
    if hosts.is_first():
        write_atomically(file, json.dumps(checked, indent=1))
    return data


def _check_videos(
    root: pathlib.Path, paths: Sequence[str], check: Callable[[], None]
) -> dict[str, Any]:
    """Which videos cannot be read, by path with the reason, and the seconds of the longest."""
    longest, unreadable = 0.0, dict[str, str]()
    with Progress("check videos", "video", shown=hosts.is_first()) as progress:
        for done, path in enumerate(paths, 1):
            check()
            try:
                longest = max(longest, video.probe(root / path).duration)
            except VideoError as error:
                unreadable[path] = error.reason
            progress.update(done, len(paths))
    return {"longest": longest, "unreadable": unreadable}


def _with_room(run: Run, data: Data, last: float) -> Data:
    """`data` without the questions that are too long for a prompt; these are named. `last`: the
    latest time of a frame, in seconds. ValueError where none is left, to train on or to evaluate with."""
    rules = Protocol(data.vocabulary, run.protocol)
    require_bounds(run, rules.measure_label(last), len(rules.window((), 0).ids))
    system = overview_tokens(rules, 0, 0, 0.0)
    room = run.protocol.text_tokens - system
    lengths = {
        question.id: len(rules.question(question).ids)
        for question in (*data.questions, *data.heldout)
    }
    kept, heldout = (
        tuple(q for q in questions if lengths[q.id] <= room)
        for questions in (data.questions, data.heldout)
    )
    if run.rl is not None and not data.questions:
        raise ValueError(
            "data: it has no question to train on; give rl rows in data.annotations, or questions on videos that can be read"
        )
    for what, before, after in (
        ("training", data.questions, kept),
        ("held-out", data.heldout, heldout),
    ):
        if before and not after and (run.rl is not None or what == "held-out"):
            shortest = min(lengths[question.id] for question in before)
            raise ValueError(
                f"protocol.text_tokens: {run.protocol.text_tokens}; the system turn takes {system} tokens, and no {what} "
                f"question fits beside it: give at least {system + shortest}"
            )
    long = [id for id, length in lengths.items() if length > room]
    if long and hosts.is_first():
        named = ", ".join(f"{id} ({lengths[id]})" for id in long[:10])
        print(
            f"{len(long)} questions are left out; they have more than the {room} tokens of protocol.text_tokens: {named}"
        )
    return dataclasses.replace(data, questions=kept, heldout=heldout)


def prepare_dataset(run: Run, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The summary of the published data as `run` reads it, prepared where it is not yet. ValueError for a recipe that uses none."""
    if run.data is None:
        raise ValueError(
            f"{run.name}: renders its own world while it runs; name a recipe with published data, such as sft_8b"
        )
    if run.data.questions:
        raise ValueError(
            f"data.questions: {run.data.questions}; your own questions need no preparation: give them to train.run"
        )
    return prepare_published(run.data, run.protocol, run.frames, run.vision, run.model.path, check)


def _open_world(run: Run, folder: pathlib.Path) -> Data:
    root, tokenizer_folder = folder / "videos", folder / "tokenizer"
    if run.model.path:
        copy_tokenizer(run.model.path, tokenizer_folder)
    elif not (tokenizer_folder / tokenizer.FILE).exists():
        save_tokenizer(build_tokenizer(world_pieces(run.protocol)), tokenizer_folder)
    names = ("questions", "heldout", "conversations", "captions")
    stored = {name: tuple(datasets.open_split(folder / "records", name)) for name in names}
    paths = tuple(
        dict.fromkeys(
            datasets.video_of(record) for records in stored.values() for record in records
        )
    )
    with Progress("check videos", "video", shown=hosts.is_first()) as progress:
        unreadable = datasets.check_videos(paths, root, progress.update)
    splits: dict[str, Any] = {
        name: tuple(r for r in records if datasets.video_of(r) not in unreadable)
        for name, records in stored.items()
    }
    data = Data(
        root=root,
        vocabulary=tokenizer.load(tokenizer_folder),
        lengths=tuple(conversation.tokens for conversation in splits["conversations"]),
        videos=len(paths),
        **splits,
    )
    note_unreadable(run, folder, data, unreadable)
    return data


def main(argv: list[str] | None = None) -> int:
    """The command's exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, prog="python -m train.prepare")
    try:
        summary = prepare_dataset(run)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        return 130
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    assert run.data is not None
    print(json.dumps(summary, indent=1))
    print(
        f"{summary['kept']} of {summary['rows']} rows kept; what is left out, and why: {pathlib.Path(run.data.folder) / LEFT_OUT}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
