"""Writes a stand-in of the published training data: small, from a seed, in the published layout.

    FOLDER/annotations/*.parquet    rl rows of every kind; sft rows of four splits
    FOLDER/media/**/*.zip           videos and pictures, in archives by source

The rows have the published columns and file names (docs/reference.md, 5), and all of them can be
prepared. The texts are this project's own. Videos have four scenes of different colours, each with
a digit for a few seconds. Questions and demonstrations are about different videos.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from paravt_extras import published_rows
from paravt_extras.published_rows import (
    Message,
    call,
    conclude,
    question_row,
    say,
    show,
    think,
    with_options,
)
from paravt_jax.data.atomic import appearing
from paravt_jax.method.records import QuestionKind
from paravt_jax.world.videos import COLOURS, DIGITS, Scene, WorldSettings, encode, picture

_FRAMES = WorldSettings(size=64, digit_width=24, digit_height=40, jitter=8)
_STEP = 1  # seconds from one frame to the next
_SCENES = 4
_SCENE_SECONDS = range(5, 16)
# One question of each kind per scene.
_ASKED_VIDEOS = 8
_DEMONSTRATED_VIDEOS = 4
_DEMONSTRATIONS = 192
# Folders of the published media. Each becomes one archive.
_QUESTION_FOLDERS = ("selfqa", "museg/charades", "longvt_source/tvg_0")
_DEMONSTRATION_FOLDER = "longvt_source/selftrace_0"
_PICTURE_FOLDER = "longvt_source/videor1_0"
_RL_FILE = "paravt_rl_diverse_4k4.parquet"
_CHOICE, _GROUNDING, _OPEN = QuestionKind
_PICTURES = "paravt_sft_videor1_50k.parquet"
# By file: kinds of questions, and the least and the largest number of crops.
_SFT_FILES = {
    "paravt_sft_selftrace_15k3.parquet": ((_CHOICE, _OPEN), 2, 3),
    "paravt_sft_charades_12k4.parquet": ((_GROUNDING,), 1, 1),
    "paravt_sft_geminicot_4k8.parquet": ((_CHOICE,), 0, 0),
    _PICTURES: ((_OPEN,), 0, 0),
}


@dataclasses.dataclass(frozen=True)
class _Video:
    """A video of the stand-in.

    Attributes:
        path: Its path as the rows write it.
        scenes: Its scenes, each with a digit.
    """

    path: str
    scenes: tuple[Scene, ...]

    @property
    def picture(self) -> str:
        """Path of a picture of the first scene with its digit."""
        return f"{_PICTURE_FOLDER}/{pathlib.PurePosixPath(self.path).stem}.png"


def write_stand_in(folder: str | os.PathLike[str], seed: int) -> pathlib.Path:
    """Write 96 rl rows and 192 sft rows with their media, unless the folder exists.

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
    asked = [
        _plan_video(f"{_QUESTION_FOLDERS[n % len(_QUESTION_FOLDERS)]}/{n:03d}.mp4", [seed, 0, n])
        for n in range(_ASKED_VIDEOS)
    ]
    demonstrated = [
        _plan_video(f"{_DEMONSTRATION_FOLDER}/{n:03d}.mp4", [seed, 1, n])
        for n in range(_DEMONSTRATED_VIDEOS)
    ]
    _write_media(folder / "media", asked, demonstrated)

    annotations = folder / "annotations"
    annotations.mkdir()
    published_rows.write_questions(annotations / _RL_FILE, _rl_rows(asked, seed))
    splits = _sft_rows(demonstrated, seed)
    for name, conversations in splits.items():
        published_rows.write_conversations(annotations / name, conversations)


def _plan_video(path: str, seed: list[int]) -> _Video:
    """Plan a video of 20 to 60 seconds."""
    rng = np.random.default_rng(seed)
    colours = rng.permutation(list(COLOURS))
    digits = rng.permutation(len(DIGITS))
    ends = np.cumsum(rng.choice(_SCENE_SECONDS, _SCENES)).tolist()
    scenes = []
    for n, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        seconds = int(rng.integers(2, 5))  # for which the digit is shown
        first = int(rng.integers(start, end - seconds + 1))
        left, top = rng.integers(-_FRAMES.jitter, _FRAMES.jitter + 1, 2).tolist()
        scenes.append(
            Scene(
                start,
                end,
                str(colours[n]),
                int(digits[n]),
                first=first,
                last=first + seconds - _STEP,
                left=left + (_FRAMES.size - _FRAMES.digit_width) // 2,
                top=top + (_FRAMES.size - _FRAMES.digit_height) // 2,
            )
        )
    return _Video(path, tuple(scenes))


def _write_media(
    media: pathlib.Path, asked: Sequence[_Video], demonstrated: Sequence[_Video]
) -> None:
    """Write one archive per folder. Its members have the paths that the rows write."""
    members: dict[str, dict[str, bytes]] = {}
    for video in (*asked, *demonstrated):
        members.setdefault(os.path.dirname(video.path), {})[video.path] = _film(video)
    members[_PICTURE_FOLDER] = {video.picture: _still(video) for video in demonstrated}
    for name, files in members.items():
        archive = media / f"{name}.zip"
        archive.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(archive, "w") as packed:
            for member, content in files.items():
                # A ZipInfo has a fixed date. Otherwise the archive would depend on the time.
                packed.writestr(zipfile.ZipInfo(member), content)


def _film(video: _Video) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "video.mp4"
        encode(_FRAMES, video.scenes, file, _STEP)
        return file.read_bytes()


def _still(video: _Video) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture(_FRAMES, video.scenes[0], True)).save(content, "png")
    return content.getvalue()


# --- questions ---


def _rl_rows(videos: Sequence[_Video], seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, 2])
    asked = [(scene, kind) for kind in QuestionKind for scene in range(_SCENES)]
    orders = [rng.permutation(len(asked)).tolist() for _ in videos]
    rows = []
    for n in range(len(videos) * len(asked)):
        video = n % len(videos)
        scene, kind = asked[orders[video][n // len(videos)]]
        question, answer = _ask(videos[video].scenes[scene], kind, rng)
        rows.append(question_row(videos[video].path, question, kind, answer))
    return rows


def _ask(scene: Scene, kind: QuestionKind, rng: np.random.Generator) -> tuple[str, Any]:
    """Return a question about a scene, and its answer as the published rows give it."""
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        question = (
            f"When is a digit shown on the {scene.colour} background? "
            "Give the start and the end in seconds."
        )
        return question, list(_span(scene))
    question = f"Which digit is shown on the {scene.colour} background?"
    if kind is QuestionKind.OPEN_ENDED:
        return question, _word(scene)
    others = [digit for digit in DIGITS if digit != _word(scene)]
    options = rng.permutation([_word(scene), *rng.permutation(others)[:3].tolist()]).tolist()
    return with_options(question, options), "ABCD"[options.index(_word(scene))]


def _word(scene: Scene) -> str:
    assert scene.digit is not None
    return DIGITS[scene.digit]


def _span(scene: Scene) -> tuple[float, float]:
    """Start and end of the time in which the digit is shown, in seconds."""
    return float(scene.first), float(scene.last + _STEP)


# --- demonstrations ---


def _sft_rows(videos: Sequence[_Video], seed: int) -> dict[str, list[list[Message]]]:
    """Return the conversations by the name of their file. Splits take turns."""
    rng = np.random.default_rng([seed, 3])
    rows: dict[str, list[list[Message]]] = {name: [] for name in _SFT_FILES}
    for n in range(_DEMONSTRATIONS):
        name = list(rows)[n % len(rows)]
        video = videos[n // len(rows) % len(videos)]
        scene = video.scenes[int(rng.integers(_SCENES))]
        if name == _PICTURES:
            rows[name].append(_about_a_picture(video, rng))
            continue
        kinds, least, most = _SFT_FILES[name]
        others = [other for other in video.scenes if other is not scene]
        count = int(rng.integers(least, most + 1))
        order = rng.permutation(len(others))
        crops = [scene, *(others[n] for n in order)][:count]
        crops.sort(key=lambda crop: crop.start)
        kind = kinds[int(rng.integers(len(kinds)))]
        rows[name].append(_conversation(video, scene, kind, crops, rng))
    return rows


def _conversation(
    video: _Video,
    scene: Scene,
    kind: QuestionKind,
    crops: Sequence[Scene],
    rng: np.random.Generator,
) -> list[Message]:
    """Return a question about a scene, all crops in one turn, and the answer.

    The response to a single crop shows the window itself; those to several are reports in words.
    """
    question, answer = _ask(scene, kind, rng)
    start, end = _span(scene)
    seen = f"The {scene.colour} part shows {_word(scene)} from {start:g} to {end:g} s."
    asked = say("user", show(video.path), f"The video is {video.path}. {question}")
    answered = say("assistant", conclude(seen, answer))
    if not crops:
        return [say("system", published_rows.SYSTEM), asked, answered]
    thought = f"Some parts may be {scene.colour}. I look at {len(crops)} at once."
    calls = "\n".join(call(video.path, crop.start, crop.end) for crop in crops)
    shown = [show(video.path)] if len(crops) == 1 else []
    return [
        say("system", published_rows.SYSTEM_WITH_TOOL),
        asked,
        say("assistant", f"{think(thought)}{calls}"),
        *(say("tool", *shown, _report(crop)) for crop in crops),
        answered,
    ]


def _report(scene: Scene) -> str:
    start, end = _span(scene)
    seen = f"The digit {_word(scene)} stays from {start:g} to {end:g} s."
    return f"The background is {scene.colour}. {seen}"


def _about_a_picture(video: _Video, rng: np.random.Generator) -> list[Message]:
    scene = video.scenes[0]
    question, answer = _ask(scene, QuestionKind.OPEN_ENDED, rng)
    still = {"type": "image_url", "image_url": {"url": video.picture}}
    seen = f"The background is {scene.colour}, and the digit is {answer}."
    return [say("user", still, question), say("assistant", conclude(seen, answer))]
