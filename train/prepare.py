"""Prepares the data of a run: videos on disk, readable records, and the vocabulary.

Everything is made once. An interrupted preparation continues where it stopped, and a finished one
is only opened. The command prepares published data without training on it:
`python -m train.prepare --config=paravt_8b --data.media FOLDER`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from typing_extensions import TypedDict

from configs import RECIPES
from paravt_jax.data import datasets
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.file_sums import seal
from paravt_jax.data.frame_reader import PATIENCE, FrameReader, ReaderSettings
from paravt_jax.data.frames import VideoError
from paravt_jax.data.preparation import LEFT_OUT, open_prepared
from paravt_jax.data.published import Refused, require_in_video, split_of
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.data.stored_json import DamagedFileError, read_json
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from paravt_jax.progress import Progress
from paravt_jax.world.videos import WorldSettings
from paravt_jax.world.vocabulary import build_tokenizer, save_tokenizer, world_pieces
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
from train.published_data import DataSettings, hold_out, prepare_published
from train.published_model import copy_tokenizer
from train.settings import Run
from train.world_data import prepare_world, require_bounds

CHECKED = "checked_questions.json"
"""File in a run's folder: digest of your own questions, and the result of checking their videos."""

_NAMED = 10  # largest number of left-out questions, or of wrong spans, to print by name


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
        check: Called for every video; may raise an exception to stop.
        questions: Your own questions, on videos below `run.data.media`.

    Raises:
        ValueError: If the recipe has no data, or data that does not fit its settings.
        LeftOutError: If a larger share of rows or videos than `run.max_left_out` cannot be used.
        OSError: If another process prepares data in `run.data.folder`.
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
    return _open_world(run, run.world, folder)


def _published(
    run: Run, settings: DataSettings, folder: pathlib.Path, check: Callable[[], None]
) -> Data:
    summary = prepare_dataset(run, check)
    vocabulary = _copied_vocabulary(run, folder)
    prepared = open_prepared(pathlib.Path(settings.folder))
    questions, heldout = hold_out(tuple(prepared.questions), settings.heldout)
    # Unreadable videos that an earlier start of this run came across while decoding.
    noted = folder / UNREADABLE
    unreadable = {}
    if noted.exists():
        remedy = "delete it, and these videos are found again"
        unreadable = read_json(noted, dict[str, str], remedy)
    data = Data(
        root=prepared.root,
        vocabulary=vocabulary,
        questions=questions,
        heldout=heldout,
        conversations=prepared.conversations,
        lengths=prepared.lengths,
        videos=summary["kept"],
        sizes=_sizes_of(summary),
        unreadable=unreadable,
        digest=prepared.digest,
    )
    # SFT alone asks no questions, so their lengths do not matter to it.
    if run.rl is not None or data.heldout:
        data = _without_long_questions(run, data, summary["seconds"].get("most", 0.0))
    sources = count_rows(summary, _too_long(run, data, (*questions, *heldout)))
    if hosts.is_first():
        print(describe_rows(sources))
    require_rows(run, sources)
    return data


def _too_long(run: Run, data: Data, questions: Sequence[Question]) -> list[tuple[str, str]]:
    """Source and reason of each prepared row that is too long for the run.

    Args:
        run: The settings.
        data: The data of the run, without long questions.
        questions: All questions of the set.
    """
    used = {question.id for question in (*data.questions, *data.heldout)}
    found = [
        (split_of(question.id.rpartition(":")[0]), "longer than protocol.text_tokens")
        for question in questions
        if question.id not in used
    ]
    if run.sft is not None:
        found += [
            (data.conversations[number].source, "longer than sft.row_tokens")
            for number, length in enumerate(data.lengths)
            if length > run.sft.row_tokens
        ]
    return found


def _sizes_of(summary: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """The (height, width) of the videos of a prepared set, the most frequent first."""
    sizes = (name.split("x") for name in summary["sizes"])
    return tuple((int(height), int(width)) for width, height in sizes)


class _Checked(TypedDict):
    """What a run knows about the videos of your own questions."""

    digest: str
    longest: float
    """Duration of the longest, in seconds."""
    sizes: list[list[int]]
    """Their different (height, width), the most frequent first."""
    unreadable: dict[str, str]
    """Why videos cannot be read, by path."""


def _own_questions(
    run: Run,
    folder: pathlib.Path,
    check: Callable[[], None],
    questions: Sequence[Question] | None,
) -> Data:
    """Opens your own questions, passed from Python or read from `run.data.questions`.

    Questions on unreadable videos are left out, and these videos are printed.
    """
    settings = _check_own_settings(run, questions)
    root = pathlib.Path(settings.media).resolve()
    if questions is None:
        questions = read_questions(settings.questions, root)
    require_unique_ids(questions)
    digest = _digest(questions)

    file = folder / CHECKED  # from an earlier start, or from the first process of this run
    if file.exists():
        # Which questions are left out stays as it was found first.
        checked = read_json(file, _Checked, "restore it from a backup")
        if checked["digest"] != digest:
            source = settings.questions or "given from Python"
            raise ValueError(
                f"data.questions: {source}; the run in {folder} started with other questions: "
                "restore them, or choose another --run-dir"
            )
    else:
        checked = {"digest": digest, **_check_videos(root, questions, settings.processes, check)}
    unreadable = checked["unreadable"]
    readable = tuple(question for question in questions if question.video not in unreadable)
    training, heldout = hold_out(readable, settings.heldout)

    data = Data(
        root=root,
        vocabulary=_copied_vocabulary(run, folder),
        questions=training,
        heldout=heldout,
        videos=len({question.video for question in questions}),
        sizes=tuple((height, width) for height, width in checked["sizes"]),
        digest=digest,
    )
    data = _without_long_questions(run, data, checked["longest"])
    note_unreadable(run, folder, data, unreadable)
    # Written last: if this start fails, the next one checks the videos again. They may be repaired
    # by then.
    if hosts.is_first():
        write_atomically(file, json.dumps(checked, indent=1))
    return data


def _check_own_settings(run: Run, questions: Sequence[Question] | None) -> DataSettings:
    """Returns `run.data`, or raises ValueError if your own questions do not fit the settings."""
    settings = run.data
    if settings is None:
        raise ValueError(
            f"{run.name}: data is not set; "
            "your own questions need data.media, the folder of their videos"
        )
    run.require_no_demonstrations()
    if not pathlib.Path(settings.media).is_dir():
        raise ValueError(
            f"data.media: {settings.media}; no such folder: "
            "name the folder that contains the videos of your questions"
        )
    if questions is not None and settings.questions:
        raise ValueError(
            f"data.questions: {settings.questions}, and questions were also passed from Python; "
            "use only one of them"
        )
    return settings


def _digest(questions: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps(dataclasses.asdict(question)).encode())
    return digest.hexdigest()


def _check_videos(
    root: pathlib.Path, questions: Sequence[Question], processes: int, check: Callable[[], None]
) -> dict[str, Any]:
    """Return what a run has to know about its videos: the further fields of `_Checked`.

    Raises:
        ValueError: Questions ask for spans that are not in their videos. The message names the
            first ten by video.
    """
    asked = collections.defaultdict(list)
    for question in questions:
        asked[question.video].append(question)
    longest = 0.0
    sizes: collections.Counter[tuple[int, int]] = collections.Counter()
    unreadable: dict[str, str] = {}
    errors: list[str] = []
    with (
        Progress("check videos", "video", shown=hosts.is_first()) as progress,
        FrameReader(ReaderSettings(processes, PATIENCE)) as reader,
    ):
        for done, (path, info) in enumerate(reader.probe(root, sorted(asked)), 1):
            check()
            if isinstance(info, VideoError):
                unreadable[path] = info.reason
            else:
                errors += _wrong_spans(asked[path], info.duration)
                longest = max(longest, info.duration)
                sizes[info.height, info.width] += 1
            progress.update(done, len(asked))
    if len(errors) > _NAMED:
        errors[_NAMED:] = [f"and {len(errors) - _NAMED} more wrong spans"]
    if errors:
        raise ValueError("\n".join(errors))
    found = [size for size, _ in sizes.most_common()]
    return {"longest": longest, "sizes": found, "unreadable": unreadable}


def _wrong_spans(questions: Iterable[Question], duration: float) -> Iterator[str]:
    """Yield a line per question about a video of this duration whose answer earns no reward."""
    for question in questions:
        try:
            require_in_video(question, duration)
        except Refused as error:
            yield (
                f"data.questions: id {question.id!r} about {question.video}: {error.detail}; "
                "correct its answer, or leave it out"
            )


def _without_long_questions(run: Run, data: Data, longest: float) -> Data:
    """Leaves out questions that are too long for a prompt, and prints them.

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
    limit = run.protocol.text_tokens - system
    lengths = {
        question.id: len(rules.question(question).ids)
        for question in (*data.questions, *data.heldout)
    }
    training = tuple(q for q in data.questions if lengths[q.id] <= limit)
    heldout = tuple(q for q in data.heldout if lengths[q.id] <= limit)

    for split, before, after, needed in (
        ("training", data.questions, training, run.rl is not None),
        ("held-out", data.heldout, heldout, True),
    ):
        if needed and before and not after:
            shortest = min(lengths[question.id] for question in before)
            raise ValueError(
                f"protocol.text_tokens: {run.protocol.text_tokens}; the system turn takes {system} "
                f"tokens, and no {split} question fits beside it: give at least {system + shortest}"
            )
    too_long = [id for id, length in lengths.items() if length > limit]
    if too_long and hosts.is_first():
        named = ", ".join(f"{id} ({lengths[id]})" for id in too_long[:_NAMED])
        print(
            f"{len(too_long)} questions are left out because they are longer than the {limit} "
            f"tokens that protocol.text_tokens leaves for a question: {named}"
        )
    return dataclasses.replace(data, questions=training, heldout=heldout)


def prepare_dataset(run: Run, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Prepare the published data of a run, if it is not prepared yet.

    Args:
        run: The settings; `run.data` names the sources and the folder.
        check: Called for every chunk of rows; may raise an exception to stop.

    Returns:
        The summary of the prepared set, as in its `summary.json`.

    Raises:
        ValueError: If the recipe has no published data.
    """
    if run.data is None:
        raise ValueError(
            f"{run.name}: this recipe renders its own world and has no published data; "
            "name a recipe with published data, such as paravt_8b"
        )
    if run.data.questions:
        raise ValueError(
            f"data.questions: {run.data.questions}; "
            "your own questions need no preparation: pass them to train.run"
        )
    return prepare_published(run.data, run.protocol, run.frames, run.vision, run.model.path, check)


def _open_world(run: Run, world: WorldSettings, folder: pathlib.Path) -> Data:
    root = folder / "videos"
    tokenizer_folder = folder / "tokenizer"
    if run.model.path:
        copy_tokenizer(run.model.path, tokenizer_folder)
    elif not (tokenizer_folder / tokenizer.FILE).exists():
        save_tokenizer(build_tokenizer(world_pieces(run.protocol)), tokenizer_folder)
    _require_sealed(folder / "records")
    _require_sealed(tokenizer_folder)

    stored = {
        name: tuple(datasets.open_split(folder / "records", name))
        for name in ("questions", "heldout", "conversations", "captions")
    }
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
        vocabulary=tokenizer.load(tokenizer_folder),
        lengths=tuple(conversation.tokens for conversation in readable["conversations"]),
        videos=len(paths),
        sizes=((world.size, world.size),),
        **readable,
    )
    note_unreadable(run, folder, data, unreadable)
    return data


def _copied_vocabulary(run: Run, folder: pathlib.Path) -> Vocabulary:
    """Return the vocabulary of the run's model, whose tokenizer is copied to the run's folder."""
    copy_tokenizer(run.model.path, folder / "tokenizer")
    _require_sealed(folder / "tokenizer")
    return tokenizer.load(folder / "tokenizer")


def _require_sealed(folder: pathlib.Path) -> None:
    """Note the checksums of a folder that a run has made, or verify its files.

    Raises:
        DamagedFileError: A file has changed.
    """
    damage = seal(folder)
    if damage:
        raise DamagedFileError(
            f"{folder}/{damage[0]}; delete {folder}, and the same command makes it again"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, prog="python -m train.prepare")
    try:
        run = run.beginning()
        summary = prepare_dataset(run)
        assert run.data is not None
        sources = count_rows(summary)
        print(json.dumps(summary, indent=1))
        print(describe_rows(sources))
        print(
            f"{summary['kept']} of {summary['rows']} rows kept; "
            f"{pathlib.Path(run.data.folder) / LEFT_OUT} lists the other rows with reasons"
        )
        require_rows(run, sources)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
