"""From a recipe to what a run learns from: videos on disk, records that can be read, and the vocabulary.

Owns the order in which these are made and the report of videos that cannot be read. Everything is made once: an interrupted
preparation goes on, a finished one is only opened.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

from configs.base import Run
from paravt_jax import datasets, protocol, tokenizer, world, world_text
from paravt_jax.records import Caption, Demonstration, Question
from paravt_jax.tokenizer import Vocabulary
from train.metrics import Progress
from train.run_directory import write_atomically

UNREADABLE = "unreadable_videos.json"


class UnreadableVideosError(Exception):
    """More videos than allowed cannot be read; names them."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run learns from. Videos' paths are relative to `root`; groups of demonstrations share video and overview."""

    root: pathlib.Path
    vocabulary: Vocabulary
    questions: tuple[Question, ...]
    heldout: tuple[Question, ...]
    demonstrations: tuple[tuple[Demonstration, ...], ...]
    windows: tuple[tuple[Demonstration, ...], ...]
    captions: tuple[Caption, ...]
    videos: int  # in all, unreadable ones included
    unreadable: dict[str, str]


def prepare(run: Run, folder: pathlib.Path, check: Callable[[], None] = lambda: None) -> Data:
    """The data of `run`, made in `folder` where it is not there yet. `check` is called for every video and may raise to stop.

    Raises ValueError for a recipe without a world, UnreadableVideosError where more videos than allowed cannot be read.
    """
    if run.world is None:
        raise ValueError(
            f"{run.name} cannot run yet: nothing reads the published data set in this version; use a recipe with a rendered world"
        )
    root = folder / "videos"
    with Progress("render videos", run.world.train_videos + run.world.heldout_videos, unit="video") as progress:

        def tell(done: int, _: int) -> None:
            progress.update(done)
            check()

        videos = world.render(run.world, root, tell)
    train, heldout = world.of_split(videos, "train"), world.of_split(videos, "heldout")
    if not datasets.is_prepared(folder / "records"):
        datasets.prepare(
            folder / "records",
            {
                "questions": tuple(world_text.questions(train, run.text)),
                "heldout": tuple(world_text.questions(heldout, run.text)),
                "demonstrations": tuple(world_text.main_demonstrations(train, run.text)),
                "windows": tuple((d,) for d in world_text.window_demonstrations(train, run.text)),
                "captions": tuple(world_text.captions(train, run.text)),
            },
        )
    return _open(run, folder, root)


def _open(run: Run, folder: pathlib.Path, root: pathlib.Path) -> Data:
    tokenizer_folder = folder / "tokenizer"
    if not (tokenizer_folder / tokenizer.FILE).exists():
        tokenizer.save(tokenizer.build((*world_text.PIECES, *protocol.recurring_texts())), tokenizer_folder)
    names = ("questions", "heldout", "demonstrations", "windows", "captions")
    stored = {name: tuple(datasets.open_split(folder / "records", name)) for name in names}
    paths = tuple(dict.fromkeys(datasets.video_of(record) for records in stored.values() for record in records))
    with Progress("check videos", len(paths), unit="video") as progress:
        unreadable = datasets.check_videos(paths, root, lambda done, _: progress.update(done))
    splits = {name: tuple(r for r in records if datasets.video_of(r) not in unreadable) for name, records in stored.items()}
    data = Data(root=root, vocabulary=tokenizer.load(tokenizer_folder), videos=len(paths), unreadable={}, **splits)
    note_unreadable(run, folder, data, unreadable)
    return data


def note_unreadable(run: Run, folder: pathlib.Path, data: Data, more: dict[str, str]) -> None:
    """Writes down, by name, the videos that cannot be read, those met while decoding (`more`) among them.

    Raises UnreadableVideosError where they are more than the allowed share.
    """
    known = len(data.unreadable)
    data.unreadable.update(more)
    write_atomically(folder / UNREADABLE, json.dumps(data.unreadable, indent=1))
    named = "; ".join(f"{path}: {reason}" for path, reason in sorted(data.unreadable.items())[:20])
    if len(data.unreadable) > known:
        print(f"{len(data.unreadable)} videos cannot be read and are left out, see {folder / UNREADABLE}: {named}")
    if len(data.unreadable) > run.unreadable_share * data.videos:
        raise UnreadableVideosError(
            f"{len(data.unreadable)} of {data.videos} videos cannot be read: {named}. Put them back (a rendered world: delete {data.root} "
            f"and it is drawn again), or allow a larger share than --unreadable-share {run.unreadable_share:g}."
        )
