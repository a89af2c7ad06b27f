"""From the names of the published repositories to what a run learns from: questions, conversations, and these packed into rows.

Owns the settings of published data and the order of getting it: annotations, media, tokenizer, preparation. Refuses to begin before the
names of folders are known to be right. Invariant: the prepared set and the seed alone decide the rows.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from models.features import FrameSettings
from models.qwen3_vl.config import VisionConfig
from models.weights.folder import local_folder
from paravt_jax.data import preparation, sources
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frames import FrameReader, ReaderSettings
from paravt_jax.data.loader import Ahead, stream
from paravt_jax.data.local_path import require_local
from paravt_jax.data.packing import Packing, pack
from paravt_jax.data.row_reading import Reading
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Conversation, Question
from train.durable import hosts
from train.durable.metrics import Progress

_SOURCES = "sources.json"  # where a set's files came from, as they were named


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the published training data is and how it is read. Sources are a local folder, a hub id or a bucket path (gs://...)."""

    annotations: str = "ParaVT/ParaVT-Parquet"
    """Tables of rows."""
    media: str = "ParaVT/ParaVT-Source"
    """A local folder is taken as the root of the sentinel paths; archives are unpacked into FOLDER/media."""
    folder: str = "data/paravt"
    """Where the prepared set is, or is to be."""
    frames: int = 64
    """Frames of a video in a demonstration, at most."""
    fps: float = 1.0
    """Frames per second of a video in a demonstration."""
    row_tokens: int = 8192
    """Length of a packed row; a longer conversation is left out."""
    heldout: int = 64
    """Questions held out for the run's own evaluation, with all others on their videos."""
    workers: int = 0
    """Processes that prepare, and that read frames; 0: one a core."""
    deadline: float = 60.0
    """Seconds that a row, or the frames of a file, may take."""
    questions: str = ""
    """A file of your own questions (.jsonl or .csv) on videos in `media`, not `annotations`."""

    def __post_init__(self):
        for name, least in (("frames", 1), ("row_tokens", 1), ("heldout", 0), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"data.{name}: {getattr(self, name)}; give a whole number of at least {least}"
                )
        for name in ("fps", "deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"data.{name}: {getattr(self, name)}; give a number above 0")
        for name in ("annotations", "media", "folder"):
            if not getattr(self, name):
                raise ValueError(
                    f"data.{name}: empty; name a folder"
                    + (", a hub id or a bucket path" if name != "folder" else "")
                )
        require_local("data.folder", self.folder)

    @property
    def processes(self) -> int:
        return self.workers or os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class PublishedData:
    """A prepared set as a run sees it. `packing.rows` name conversations by number; relative paths lie under `root`."""

    root: pathlib.Path
    questions: tuple[Question, ...]
    heldout: tuple[Question, ...]
    conversations: Sequence[Conversation]
    packing: Packing
    summary: dict[str, Any]
    digest: str
    """A fingerprint of what was prepared: a run goes on with the same rows or not at all."""

    def row(self, numbers: Sequence[int]) -> tuple[Conversation, ...]:
        """The conversations of a packed row."""
        return tuple(self.conversations[n] for n in numbers)


def prepare_published(
    settings: DataSettings,
    limits: ProtocolSettings,
    frames: FrameSettings,
    vision: VisionConfig,
    model: str,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Prepares the set in `settings.folder`, or finds it there; returns its summary. `model` names the folder or hub id of the tokenizer.

    `check` is called at every chunk of rows and may raise to stop: the same call goes on. Raises FileNotFoundError and ValueError with
    what to do.
    """
    folder = pathlib.Path(settings.folder)
    reading = Reading(
        root="",
        tokenizer=str(local_folder(model, weights=False)),
        limits=_deciding(limits),
        frames=settings.frames,
        fps=settings.fps,
        longest=settings.row_tokens,
        min_pixels=frames.min_pixels,
        max_pixels=frames.max_pixels,
        factor=vision.patch_size * vision.spatial_merge_size,
    )
    asked, known = (
        json.dumps({"annotations": settings.annotations, "media": settings.media}),
        folder / _SOURCES,
    )
    if (
        known.exists()
        and known.read_text() == asked
        and (summary := preparation.known_summary(folder, reading)) is not None
    ):
        return summary  # what it was made from may be gone by now
    tables = preparation.find_tables(
        sources.fetch(settings.annotations, folder / "annotations", ["*.parquet"])
    )
    root = sources.media_root(settings.media, folder, _teller("unpack media", "archive", check))
    reading = dataclasses.replace(reading, root=str(root.resolve()))
    tell = _teller("prepare rows", "row", check)
    summary = preparation.prepare(
        tables, folder, reading, workers=settings.processes, deadline=settings.deadline, tell=tell
    )
    write_atomically(known, asked)
    return summary


def open_published(settings: DataSettings, seed: int) -> PublishedData:
    """The prepared set, its questions dealt to training and evaluation, its conversations packed in an order that the seed decides.

    Raises FileNotFoundError where nothing is prepared.
    """
    prepared = preparation.open_prepared(pathlib.Path(settings.folder))
    questions, heldout = _hold_out(tuple(prepared.questions), settings.heldout)
    order = np.random.default_rng([seed, 0x9AC4]).permutation(len(prepared.lengths))
    packing = pack([prepared.lengths[n] for n in order], settings.row_tokens)
    rows = tuple(tuple(int(order[n]) for n in row) for row in packing.rows)
    packing = dataclasses.replace(packing, rows=rows)
    return PublishedData(
        prepared.root,
        questions,
        heldout,
        prepared.conversations,
        packing,
        prepared.summary,
        prepared.digest,
    )


def open_questions(
    settings: DataSettings, questions: Sequence[Question], seconds: float
) -> PublishedData:
    """Your own questions, dealt to training and evaluation; there are no conversations.

    Videos lie below `settings.media`; `seconds` is the longest one's duration.
    """
    kept, heldout = _hold_out(tuple(questions), settings.heldout)
    text = json.dumps([dataclasses.asdict(question) for question in questions])
    return PublishedData(
        root=pathlib.Path(settings.media),
        questions=kept,
        heldout=heldout,
        conversations=(),
        packing=pack([], settings.row_tokens),
        summary={"seconds": {"most": seconds}},
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def _deciding(limits: ProtocolSettings) -> ProtocolSettings:
    """The limits that demonstrations are read by; those of rollouts alone are as ever, so that recipes share a set."""
    names = ("max_tool_turns", "max_calls", "summary_tokens", "crop_fps", "crop_frames")
    return ProtocolSettings(**{name: getattr(limits, name) for name in names})


def open_reader(settings: DataSettings, frames: FrameSettings, vision: VisionConfig) -> FrameReader:
    """What reads the frames of published files, at the size they are shown at. To be closed."""
    factor = vision.patch_size * vision.spatial_merge_size
    sizes = {"min_pixels": frames.min_pixels, "max_pixels": frames.max_pixels, "factor": factor}
    return FrameReader(
        ReaderSettings(workers=settings.processes, deadline=settings.deadline, **sizes)
    )


def row_stream(
    data: PublishedData, reader: FrameReader, seed: int, rows: int, depth: int = 2
) -> Ahead[tuple[tuple[int, ...], ...]]:
    """Endless batches of packed rows (numbers for `data.row`), the same in every process. Meanwhile `reader` reads the frames of this
    process's share of the next `depth` batches."""

    def start(batch: Sequence[Sequence[int]]) -> None:
        for numbers in batch[hosts.share_of(len(batch))]:
            for conversation in data.row(numbers):
                for clip in conversation.clips:
                    reader.ahead(data.root / clip.path, clip.indices)

    return Ahead(stream(data.packing.rows, seed, rows), depth, start)


def question_stream(
    data: PublishedData,
    reader: FrameReader,
    seed: int,
    prompts: int,
    budgets: Callable[[int], Sequence[int]],
    first: int,
    depth: int = 1,
) -> Ahead[tuple[Question, ...]]:
    """Endless batches of `prompts` questions, the same in every process. Meanwhile `reader` reads the overviews of this process's share
    of the next `depth` batches: `budgets(step)` says of how many frames, of step `first` and those after it."""
    steps = itertools.count(first)

    def start(batch: Sequence[Question]) -> None:
        asked = list(zip(batch, budgets(next(steps)), strict=True))
        for question, count in asked[hosts.share_of(len(asked))]:
            reader.ahead(data.root / question.video, count)

    return Ahead(stream(data.questions, seed, prompts), depth, start)


def _hold_out(
    questions: tuple[Question, ...], count: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Questions to train on, and at least `count` to evaluate with, whole videos at a time: the same ones whatever else is in the set."""
    by_video = collections.defaultdict(list)
    for question in questions:
        by_video[question.video].append(question)
    kept, heldout = dict(by_video), []
    for video in sorted(by_video, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if len(heldout) >= count:
            break
        heldout += kept.pop(video)
    if questions and not kept:
        raise ValueError(
            f"data.heldout: {count} of {len(questions)} questions, which leaves none to train on; hold fewer out"
        )
    return tuple(question for question in questions if question.video in kept), tuple(heldout)


def _teller(title: str, unit: str, check: Callable[[], None]) -> Callable[[int, int], None]:
    """Shows progress from the first thing that is done on."""
    shown: list[Progress] = []

    def tell(done: int, total: int) -> None:
        if not shown:
            shown.append(Progress(title, total, unit=unit))
        shown[0].update(done)
        if done == total:
            shown[0].close()
        check()

    return tell
