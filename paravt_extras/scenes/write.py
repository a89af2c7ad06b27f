"""Writes the scenes to a folder: videos, questions, demonstrations, and what is known of them.

    FOLDER/settings.json             the settings, so that a folder never mixes two worlds
    FOLDER/media/train/0000.mp4      videos to train on; every fourth is for demonstrations
    FOLDER/media/heldout/0000.mp4    videos to evaluate on
    FOLDER/annotations/*.parquet     questions to train on and demonstrations, as published
    FOLDER/train.jsonl               the same questions as a file of your own questions
    FOLDER/heldout.jsonl             questions about the videos to evaluate on

Texts come last: a folder with questions has all of its videos.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import as_completed
from typing import Any

from tqdm import tqdm

from paravt_extras import published_format
from paravt_extras.scenes.ask import questions
from paravt_extras.scenes.demonstrate import demonstrations
from paravt_extras.scenes.film import encode
from paravt_extras.scenes.storyboard import SPLITS, SceneSettings, SceneVideo, plan_videos
from paravt_jax.data.stored import lock, require_same, write_atomically
from paravt_jax.data.workers import Workers
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts

SETTINGS = "settings.json"
MEDIA = "media"
ANNOTATIONS = "annotations"

_DEADLINE = 1800.0  # seconds for one video, on however busy a machine


def missing_videos(settings: SceneSettings, folder: pathlib.Path) -> tuple[SceneVideo, ...]:
    """Return the videos that a folder does not hold yet."""
    return tuple(v for v in plan_videos(settings) if not (folder / MEDIA / v.path).exists())


def write_scenes(settings: SceneSettings, folder: str | os.PathLike[str]) -> None:
    """Write the files that a folder lacks. An interrupted call can be repeated.

    Args:
        settings: The world.
        folder: Where to write.

    Raises:
        ValueError: The folder holds something else, or a number is too small.
        OSError: The disk is full, or another process writes to the folder.
        Stopped: SIGINT or SIGTERM came; the videos that are drawn stay.
    """
    folder = pathlib.Path(folder)
    _claim(settings, folder)
    with lock(folder / ".lock"):
        missing = missing_videos(settings, folder)
        videos = plan_videos(settings)
        try:
            _draw(missing, folder / MEDIA)
        finally:
            for unfinished in (folder / MEDIA).rglob("*.tmp"):
                unfinished.unlink()
        _write_texts(settings, videos, folder)


def _claim(settings: SceneSettings, folder: pathlib.Path) -> None:
    """Store the settings in a new folder, or compare them with those of an old one."""
    file = folder / SETTINGS
    wanted = dataclasses.asdict(settings)
    remedy = "Choose another folder, or remove this one."
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        require_same(f"{folder}: holds scenes with other settings", stored, wanted, remedy)
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: holds other files than scenes. {remedy}")
    for split in SPLITS:
        (folder / MEDIA / split).mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(wanted))


def _draw(missing: Sequence[SceneVideo], media: pathlib.Path) -> None:
    if not missing:
        return
    # One process per core draws.
    count = min(os.cpu_count() or 1, len(missing))
    draw = functools.partial(_draw_video, str(media))
    with Interrupts() as interrupts, Workers(draw, count, _DEADLINE) as pool:
        drawing = [pool.submit(video) for video in missing]
        with tqdm(as_completed(drawing), "draw", len(missing), unit="video") as bar:
            for future in bar:
                future.result()
                # Not `check`, which asks all processes: in a rehearsal only the first one draws.
                if (number := interrupts.asked()) is not None:
                    raise Stopped(number, "stopped; what is drawn stays")


def _draw_video(media: str, video: SceneVideo) -> None:
    encode(video, pathlib.Path(media) / video.path)


def _write_texts(
    settings: SceneSettings, videos: Sequence[SceneVideo], folder: pathlib.Path
) -> None:
    asked = {
        split: [
            each.question
            for video in videos
            if video.split == split and not video.demonstrated
            for each in questions(video, settings.seed)
        ]
        for split in SPLITS
    }
    shown = [
        conversation
        for video in videos
        if video.demonstrated
        for conversation in demonstrations(video, settings.seed)
    ]
    annotations = folder / ANNOTATIONS
    annotations.mkdir(exist_ok=True)
    records = [_published_record(question) for question in asked["train"]]
    published_format.write_questions(annotations / "paravt_rl_scenes.parquet", records)
    published_format.write_conversations(annotations / "paravt_sft_scenes.parquet", shown)
    for split, of_split in asked.items():
        lines = [json.dumps(_own_record(question)) + "\n" for question in of_split]
        write_atomically(folder / f"{split}.jsonl", "".join(lines))


def _own_record(question: Question) -> dict[str, Any]:
    """Return a question as a line of a file of your own questions."""
    record: dict[str, Any] = {"id": question.id, "video": question.video, "question": question.text}
    if question.options:
        record["options"] = question.options
    if question.evidence is not None:
        record["evidence"] = question.evidence
    return record | {"answer": _answer(question), "kind": question.kind.value}


def _published_record(question: Question) -> dict[str, Any]:
    text = published_format.with_options(question.text, question.options)
    return published_format.question_record(
        question.video, text, question.kind, _answer(question), question.evidence
    )


def _answer(question: Question) -> Any:
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return json.loads(question.answer)
    return question.answer
