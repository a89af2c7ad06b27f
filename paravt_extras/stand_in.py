"""Writes a stand-in of the published training data: small, from a seed, in the published layout.

    FOLDER/annotations/*.parquet    questions of every kind; three splits of demonstrations
    FOLDER/media/**/*.zip           videos and pictures, in archives by source

The records have the published columns and file names (docs/reference.md, 5), and all of them can be
prepared. The texts are this project's own. The videos are those of the small world, in larger
frames. Questions and demonstrations are about different videos.
"""

from __future__ import annotations

import io
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from paravt_extras import published_format
from paravt_extras.published_format import (
    Message,
    call,
    conclude,
    question_record,
    say,
    show,
    think,
    with_options,
)
from paravt_jax.data.stored import appearing
from paravt_jax.method.records import QuestionKind
from paravt_jax.world.videos import (
    DIGITS,
    STEP,
    Scene,
    WorldSettings,
    WorldVideo,
    encode,
    picture,
    plan,
)

# Questions are about the training split, and demonstrations about the held-out one.
_QUESTION_VIDEOS = 8
_DEMONSTRATION_VIDEOS = 4
# Folders of the published media. Each becomes one archive.
_QUESTIONS = "selfqa"
_DEMONSTRATIONS = "longvt_source/selftrace_0"
_PICTURES = "longvt_source/videor1_0"


def write_stand_in(folder: str | os.PathLike[str], seed: int) -> pathlib.Path:
    """Write 96 questions and 64 demonstrations with their media, unless the folder exists.

    The folder appears when it is complete, so a killed call leaves nothing that looks like a set.

    Args:
        folder: Where to write `annotations` and `media`.
        seed: Decides all texts and frames.

    Returns:
        The folder.
    """
    folder = pathlib.Path(folder)
    if not (folder / "annotations").exists():
        with appearing(folder) as unfinished:
            _write(unfinished, seed)
    return folder


def _write(folder: pathlib.Path, seed: int) -> None:
    settings = WorldSettings(
        seed=seed,
        train_videos=_QUESTION_VIDEOS,
        heldout_videos=_DEMONSTRATION_VIDEOS,
        size=64,
        digit_width=24,
        digit_height=40,
        presence=1.0,
    )
    videos = plan(settings)
    asked, demonstrated = videos[:_QUESTION_VIDEOS], videos[_QUESTION_VIDEOS:]
    _pack(folder / "media", {_path(video): _film(settings, video) for video in videos})
    _pack(folder / "media", {_still_path(video): _still(settings, video) for video in demonstrated})

    rng = np.random.default_rng([seed, 2])
    questions = [
        _question(video, scene, kind, rng)
        for kind in QuestionKind
        for video in asked
        for scene in video.scenes
    ]
    splits: dict[str, list[list[Message]]] = {
        "selftrace_15k3": [
            _conversation(video, kind, video.scenes[n:][:3], rng)
            for kind in QuestionKind
            for video in demonstrated
            for n in range(len(video.scenes))
        ],
        "geminicot_4k8": [
            _conversation(video, kind, (), rng) for kind in QuestionKind for video in demonstrated
        ],
        "videor1_50k": [_about_a_picture(video, rng) for video in demonstrated],
    }
    annotations = folder / "annotations"
    annotations.mkdir()
    published_format.write_questions(annotations / "paravt_rl_diverse_4k4.parquet", questions)
    for name, conversations in splits.items():
        file = annotations / f"paravt_sft_{name}.parquet"
        published_format.write_conversations(file, conversations)


# --- media ---


def _path(video: WorldVideo) -> str:
    """Return the path of a video as the records write it."""
    folder = _QUESTIONS if video.split == "train" else _DEMONSTRATIONS
    return f"{folder}/{pathlib.PurePosixPath(video.path).name}"


def _still_path(video: WorldVideo) -> str:
    return f"{_PICTURES}/{pathlib.PurePosixPath(video.path).stem}.png"


def _pack(media: pathlib.Path, members: dict[str, bytes]) -> None:
    """Write one archive per folder. Its members have the paths that the records write."""
    for path, content in members.items():
        archive = media / f"{os.path.dirname(path)}.zip"
        archive.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(archive, "a") as packed:
            # A ZipInfo has a fixed date. Otherwise the archive would depend on the time.
            packed.writestr(zipfile.ZipInfo(path), content)


def _film(settings: WorldSettings, video: WorldVideo) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "video.mp4"
        encode(settings, video.scenes, file)
        return file.read_bytes()


def _still(settings: WorldSettings, video: WorldVideo) -> bytes:
    """Return a picture of the first scene with its digit."""
    content = io.BytesIO()
    Image.fromarray(picture(settings, video.scenes[0], True)).save(content, "png")
    return content.getvalue()


# --- texts ---


def _ask(scene: Scene, kind: QuestionKind, rng: np.random.Generator) -> tuple[str, Any]:
    """Return a question about a scene, and its answer as the published records give it."""
    where = f"on the {scene.colour} background?"
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        question = f"When is a digit shown {where} Give the start and the end in seconds."
        return question, list(_span(scene))
    question = f"Which digit is shown {where}"
    if kind is QuestionKind.OPEN_ENDED:
        return question, _word(scene)
    others = [digit for digit in DIGITS if digit != _word(scene)]
    options = rng.permutation([_word(scene), *rng.permutation(others)[:3].tolist()]).tolist()
    return with_options(question, options), "ABCD"[options.index(_word(scene))]


def _question(
    video: WorldVideo, scene: Scene, kind: QuestionKind, rng: np.random.Generator
) -> dict[str, Any]:
    text, answer = _ask(scene, kind, rng)
    return question_record(_path(video), text, kind, answer)


def _word(scene: Scene) -> str:
    assert scene.digit is not None
    return DIGITS[scene.digit]


def _span(scene: Scene) -> tuple[float, float]:
    """Return the start and the end of the time in which the digit is shown, in seconds."""
    return float(scene.first), float(scene.last + STEP)


def _seen(scene: Scene) -> str:
    first, last = _span(scene)
    return f"The {scene.colour} scene shows {_word(scene)} from {first:g} to {last:g} s."


def _conversation(
    video: WorldVideo, kind: QuestionKind, crops: Sequence[Scene], rng: np.random.Generator
) -> list[Message]:
    """Return a question about a scene, all crops in one turn, and the answer.

    The response to a single crop shows the window itself; those to several are reports in words.
    """
    scene = crops[0] if crops else video.scenes[0]
    question, answer = _ask(scene, kind, rng)
    asked = say("user", show(_path(video)), f"The video is {_path(video)}. {question}")
    answered = say("assistant", conclude(_seen(scene), answer))
    if not crops:
        return [say("system", published_format.SYSTEM), asked, answered]
    calls = "\n".join(call(_path(video), crop.start, crop.end) for crop in crops)
    shown = [show(_path(video))] if len(crops) == 1 else []
    return [
        say("system", published_format.SYSTEM_WITH_TOOL),
        asked,
        say("assistant", f"{think(f'I look at {len(crops)} windows at once.')}{calls}"),
        *(say("tool", *shown, _seen(crop)) for crop in crops),
        answered,
    ]


def _about_a_picture(video: WorldVideo, rng: np.random.Generator) -> list[Message]:
    question, answer = _ask(video.scenes[0], QuestionKind.OPEN_ENDED, rng)
    still = {"type": "image_url", "image_url": {"url": _still_path(video)}}
    seen = f"The background is {video.scenes[0].colour}, and the digit is {answer}."
    return [say("user", still, question), say("assistant", conclude(seen, answer))]
