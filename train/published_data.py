"""Fetches the published training data and prepares it as questions and conversations."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from models.config import VisionConfig
from models.features import FrameSettings
from models.weights.folder import local_folder
from paravt_jax.checks import require_above, require_at_least
from paravt_jax.data import preparation, sources
from paravt_jax.data.any_path import require_local
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.row_reading import Reading
from paravt_jax.data.stored_settings import lock
from paravt_jax.data.video import Decoder, require_decoder
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question
from paravt_jax.processes import hosts
from paravt_jax.progress import Progress

_LOCK = ".lock"  # held while the set is made


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Published training data, from local folders, Hugging Face ids or bucket paths (gs://...)."""

    annotations: str = "ParaVT/ParaVT-Parquet"
    """Source of the annotations, Parquet tables."""
    media: str = "ParaVT/ParaVT-Source"
    """Source of videos and pictures; archives are unpacked into FOLDER/media."""
    folder: str = "data/paravt"
    """Local folder of the prepared data set."""
    frames: int = 64
    """Largest number of frames per video in a demonstration; up to that, one per second."""
    heldout: int = 64
    """Smallest number of questions to hold out for evaluation. A video is held out as a whole."""
    workers: int = 0
    """Number of processes that prepare rows and read frames; 0: one per core."""
    deadline: float = 60.0
    """Time limit for preparing a row or reading a file's frames, in seconds."""
    decoder: Decoder = "pyav"
    """Library that decodes frames; the pixels are equal. decord needs local files."""
    questions: str = ""
    """File of your own questions (JSON or CSV), on videos in `media`; replaces `annotations`."""

    def __post_init__(self):
        require_at_least("data", self, 1, "frames")
        require_at_least("data", self, 0, "heldout", "workers")
        require_above("data", self, 0, "deadline")
        for name in ("annotations", "media"):
            if not getattr(self, name):
                raise ValueError(
                    f"data.{name}: empty; give a folder, a Hugging Face id or a bucket path"
                )
        if not self.folder:
            raise ValueError("data.folder: empty; give a local folder")
        require_local("data.folder", self.folder)
        require_decoder("data.decoder", self.decoder)

    @property
    def processes(self) -> int:
        """Number of processes that prepare rows and read frames."""
        return self.workers or os.cpu_count() or 1


def prepare_published(
    settings: DataSettings,
    limits: ProtocolSettings,
    frames: FrameSettings,
    vision: VisionConfig,
    model: str,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Prepare the published data in `settings.folder`, if it is not prepared yet.

    Args:
        settings: Sources, folder, and how rows are read.
        limits: Limits of the protocol that conversations have to respect.
        frames: Sizes at which frames are shown.
        vision: The vision tower, which decides how many tokens a frame takes.
        model: Folder or Hugging Face id of the tokenizer.
        check: Called for every chunk of rows; may raise an exception to stop. The next call
            continues where it stopped.

    Returns:
        The summary of the prepared set, as in its `summary.json`.

    Raises:
        FileNotFoundError: If a source has no annotations or media.
        ValueError: If the folder contains a set that was prepared with other settings.
        OSError: If another process prepares data in the folder.
    """
    reading = Reading(
        root="",  # known when the media are there
        tokenizer=str(local_folder(model, weights=False)),
        limits=_shared_limits(limits),
        frames=settings.frames,
        rules=frames.rules(vision),
        crop_rules=frames.rules(vision, crop=True),
        annotations=settings.annotations,
        media=settings.media,
    )
    folder = pathlib.Path(settings.folder)
    # The sources of a finished set are not looked at. They may have been deleted since.
    summary = preparation.known_summary(folder, reading)
    if summary is not None:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder / _LOCK)
    except BlockingIOError as error:
        raise OSError(
            f"data.folder: {folder} is {error}, which prepares data in it: wait for it, stop it, "
            "or name another --data.folder"
        ) from error
    with held:
        # Another process may have finished the set since the first look.
        summary = preparation.known_summary(folder, reading)
        return summary or _prepare(settings, reading, check)


def _prepare(settings: DataSettings, reading: Reading, check: Callable[[], None]) -> dict[str, Any]:
    """Fetch the sources and prepare their rows; see `prepare_published`."""
    folder = pathlib.Path(settings.folder)
    annotations = sources.fetch(settings.annotations, folder / "annotations", ["*.parquet"])
    tables = preparation.find_tables(annotations)
    with Progress("unpack media", "MB", shown=hosts.is_first()) as progress:
        root = sources.media_root(settings.media, folder, _reporting(progress, check))
    reading = dataclasses.replace(reading, root=str(root.resolve()))
    with Progress("prepare rows", "row", shown=hosts.is_first()) as progress:
        return preparation.prepare_rows(
            tables,
            folder,
            reading,
            workers=settings.processes,
            deadline=settings.deadline,
            tell=_reporting(progress, check),
        )


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


def open_reader(
    settings: DataSettings | None, frames: FrameSettings, vision: VisionConfig
) -> FrameReader:
    """Open the processes that read frames of videos; the caller closes the reader.

    Args:
        settings: Processes and time limit for published files; None: the small world.
        frames: How frames are resized.
        vision: The model's vision tower.
    """
    reading = ReaderSettings(
        rules=frames.rules(vision),
        crop_rules=frames.rules(vision, crop=True),
        whole=frames.batch,
    )
    if settings is not None:
        reading = dataclasses.replace(
            reading,
            workers=settings.processes,
            deadline=settings.deadline,
            decoder=settings.decoder,
        )
    return FrameReader(reading)


def hold_out(
    questions: tuple[Question, ...], count: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions into those to train on and at least `count` to evaluate with.

    All questions about a video go to the same split.

    Returns:
        The training questions, in their order, and the held-out questions.

    Raises:
        ValueError: If no question is left to train on.
    """
    by_video = collections.defaultdict(list)
    for question in questions:
        by_video[question.video].append(question)
    training_videos = set(by_video)
    heldout: list[Question] = []
    # The hash of a path does not depend on the rest of the set, so the choice stays stable when
    # videos are added.
    for video in sorted(by_video, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if len(heldout) >= count:
            break
        heldout += by_video[video]
        training_videos.remove(video)
    if questions and not training_videos:
        raise ValueError(
            f"data.heldout: {count} of {len(questions)} questions, which leaves none to train on; "
            "hold out fewer"
        )
    training = tuple(question for question in questions if question.video in training_videos)
    return training, tuple(heldout)


def _reporting(progress: Progress, check: Callable[[], None]) -> Callable[[int, int], None]:
    """Returns a callback that shows progress and then gives `check` a chance to stop."""

    def report(done: int, total: int) -> None:
        progress.update(done, total)
        check()

    return report
