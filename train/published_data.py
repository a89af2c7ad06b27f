"""From the names of the published repositories to a prepared set of questions and conversations.

Annotations are fetched first, then media and tokenizer; then rows are read.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from models.features import FrameSettings
from models.qwen3_vl.config import VisionConfig
from models.weights.folder import local_folder
from paravt_jax.data import preparation, sources
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.local_path import require_local
from paravt_jax.data.row_reading import Reading
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question
from paravt_jax.progress import Progress
from train.durable import hosts

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
    heldout: int = 64
    """Questions held out for the run's own evaluation, with all others on their videos."""
    workers: int = 0
    """Processes that prepare, and that read frames; 0: one a core."""
    deadline: float = 60.0
    """Seconds that a row, or the frames of a file, may take."""
    questions: str = ""
    """A file of your own questions (.jsonl or .csv) on videos in `media`, not `annotations`."""

    def __post_init__(self):
        for name, least in (("frames", 1), ("heldout", 0), ("workers", 0)):
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
    with Progress("unpack media", "archive", shown=hosts.is_first()) as progress:
        root = sources.media_root(settings.media, folder, _telling(progress, check))
    reading = dataclasses.replace(reading, root=str(root.resolve()))
    with Progress("prepare rows", "row", shown=hosts.is_first()) as progress:
        summary = preparation.prepare_rows(
            tables,
            folder,
            reading,
            workers=settings.processes,
            deadline=settings.deadline,
            tell=_telling(progress, check),
        )
    write_atomically(known, asked)
    return summary


def _deciding(limits: ProtocolSettings) -> ProtocolSettings:
    """The limits that demonstrations are read by; those of rollouts alone are as ever, so that recipes share a set."""
    names = (
        "max_tool_turns",
        "max_calls",
        "summary_tokens",
        "crop_fps",
        "crop_frames",
        "max_num_frames",
        "tools",
    )
    return ProtocolSettings(**{name: getattr(limits, name) for name in names})


def open_reader(settings: DataSettings, frames: FrameSettings, vision: VisionConfig) -> FrameReader:
    """What reads the frames of published files, at the size they are shown at. To be closed."""
    factor = vision.patch_size * vision.spatial_merge_size
    sizes = {"min_pixels": frames.min_pixels, "max_pixels": frames.max_pixels, "factor": factor}
    return FrameReader(
        ReaderSettings(workers=settings.processes, deadline=settings.deadline, **sizes)
    )


def hold_out(
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


def _telling(progress: Progress, check: Callable[[], None]) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        progress.update(done, total)
        check()

    return tell
