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
    scenes: list[Scene] = []
    start = 0
    for n in range(_SCENES):
        end = start + int(rng.choice(_SCENE_SECONDS))
        seconds = int(rng.integers(2, 5))  # for which the digit is shown
        first = int(rng.integers(start, end - seconds + 1))
        shift_x, shift_y = rng.integers(-_FRAMES.jitter, _FRAMES.jitter + 1, 2).tolist()
        scene = Scene(
            start,
            end,
            str(colours[n]),
            int(digits[n]),
            first=first,
            last=first + seconds - _STEP,
            left=shift_x + (_FRAMES.size - _FRAMES.digit_width) // 2,
            top=shift_y + (_FRAMES.size - _FRAMES.digit_height) // 2,
        )
        scenes.append(scene)
        start = end
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
    """A question about a scene, and its answer as the published rows give it."""
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
    """Conversations by the name of their file. Splits take turns."""
    splits = {
        "paravt_sft_selftrace_15k3.parquet": _with_parallel_calls,
        "paravt_sft_charades_12k4.parquet": _with_one_call,
        "paravt_sft_geminicot_4k8.parquet": _without_calls,
        "paravt_sft_videor1_50k.parquet": _about_a_picture,
    }
    rng = np.random.default_rng([seed, 3])
    names = list(splits)
    rows: dict[str, list[list[Message]]] = {}
    for n in range(_DEMONSTRATIONS):
        name = names[n % len(names)]
        video = videos[n // len(names) % len(videos)]
        scene = video.scenes[int(rng.integers(_SCENES))]
        rows.setdefault(name, []).append(splits[name](video, scene, rng))
    return rows


def _with_parallel_calls(video: _Video, scene: Scene, rng: np.random.Generator) -> list[Message]:
    """Two or three crops in one turn, with reports in words."""
    others = [other for other in video.scenes if other is not scene]
    count = int(rng.integers(1, 3))
    chosen = [scene, *(others[n] for n in rng.permutation(len(others))[:count])]
    chosen.sort(key=lambda each: each.start)
    kind = (QuestionKind.MULTIPLE_CHOICE, QuestionKind.OPEN_ENDED)[int(rng.integers(2))]
    question, answer = _ask(scene, kind, rng)
    thought = f"Some parts may be {scene.colour}. I look at {len(chosen)} of them at once."
    calls = "\n".join(call(video.path, each.start, each.end) for each in chosen)
    return [
        say("system", published_rows.SYSTEM_WITH_TOOL),
        say("user", show(video.path), f"{question} The video is {video.path}."),
        say("assistant", f"{think(thought)}{calls}"),
        *(say("tool", _report(each)) for each in chosen),
        say("assistant", conclude(f"The {scene.colour} part shows {_word(scene)}.", answer)),
    ]


def _with_one_call(video: _Video, scene: Scene, rng: np.random.Generator) -> list[Message]:
    """One crop whose response shows the window itself."""
    question, answer = _ask(scene, QuestionKind.TEMPORAL_GROUNDING, rng)
    start, end = _span(scene)
    thought = f"The {scene.colour} part runs from {scene.start} to {scene.end} s. I look closer."
    seen = f"The digit appears at {start:g} s and is gone at {end:g} s."
    return [
        say("system", published_rows.SYSTEM_WITH_TOOL),
        say("user", show(video.path), question),
        say("assistant", f"{think(thought)}{call(video.path, scene.start, scene.end)}"),
        say("tool", show(video.path), f"The window from {scene.start} to {scene.end} s."),
        say("assistant", conclude(seen, answer)),
    ]


def _without_calls(video: _Video, scene: Scene, rng: np.random.Generator) -> list[Message]:
    question, answer = _ask(scene, QuestionKind.MULTIPLE_CHOICE, rng)
    seen = f"The {scene.colour} part shows {_word(scene)}, which is option {answer}."
    return [
        say("system", published_rows.SYSTEM),
        say("user", show(video.path), question),
        say("assistant", conclude(seen, answer)),
    ]


def _about_a_picture(video: _Video, scene: Scene, rng: np.random.Generator) -> list[Message]:
    del scene  # every picture shows the first one
    question, answer = _ask(video.scenes[0], QuestionKind.OPEN_ENDED, rng)
    still = {"type": "image_url", "image_url": {"url": video.picture}}
    seen = f"The background is {video.scenes[0].colour}, and the digit is {answer}."
    return [
        say("user", still, question),
        say("assistant", conclude(seen, answer)),
    ]


def _report(scene: Scene) -> str:
    start, end = _span(scene)
    seen = f"The digit {_word(scene)} stays from {start:g} to {end:g} s."
    return f"The background is {scene.colour}. {seen}"
