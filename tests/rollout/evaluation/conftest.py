"""A split over the small world's videos, and a player whose sampler follows a script."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from models.features import FrameFeatures, FrameSettings
from models.weights.hf import save
from paravt_jax.data import tokenizer_file, video
from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import CropCall
from rollout.agent.episode import Environment
from rollout.evaluation.benchmarks import Item, load
from rollout.evaluation.files import VideoFolder
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.split import SplitPlayer
from tests.rollout.evaluation import published

SRT = """\
1
00:00:01,000 --> 00:00:02,000
Hello <i>there</i>

2
00:01:05,500 --> 00:01:07,000
Good
bye
"""

PLAN = f"look closer\n</think>\n{render_call(CropCall(0, 16))}\n{render_call(CropCall(500, 516))}"
"""A first turn that asks for two windows, the second outside the video."""

LIMITS = ProtocolSettings(
    turn_tokens=64, summary_tokens=16, trajectory_tokens=256, text_tokens=1024, crop_frames=4
)

RECORDS = [
    published.videomme("1-1", "w0", "A"),
    published.videomme("1-2", "w0", "B", task_type="OCR Problems"),
    published.videomme("2-1", "w1", "C", duration="long"),
    published.videomme("3-1", "gone"),
    published.videomme("3-2", "gone"),
    published.videomme("4-1", "noise"),
]


@pytest.fixture(scope="session")
def videos(small_world, tmp_path_factory) -> pathlib.Path:
    """The split's videos: two good ones, the first with subtitles, and a file of noise."""
    root = tmp_path_factory.mktemp("videos")
    (root / "data").mkdir()
    for number in (0, 1):
        source = small_world.folder / small_world.videos[number].path
        shutil.copy(source, root / "data" / f"w{number}.mp4")
    (root / "data" / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    (root / "subtitle").mkdir()
    (root / "subtitle" / "w0.srt").write_text(SRT)
    return root


@pytest.fixture(scope="session")
def split(videos) -> pathlib.Path:
    """A folder with the split's questions and videos."""
    return published.write_split("videomme", videos, RECORDS)


@pytest.fixture(scope="session")
def items(split) -> tuple[Item, ...]:
    return load("videomme", str(split)).items


@pytest.fixture(scope="session")
def features(small_model, videos) -> FrameFeatures:
    return FrameFeatures(
        small_model.vision, small_model.config, FrameSettings(batch=16), videos, source=video
    )


@pytest.fixture
def player(scripted, small_vocabulary, features, videos) -> Callable[..., SplitPlayer]:
    """player(turns, **settings) plays with a sampler that says `turns`.

    `player.sampler` is the sampler of the last player that was made.
    """

    def make(turns, report=" seven from 8 to 10", scorer=None, **fields) -> SplitPlayer:
        defaults: dict[str, Any] = {
            "model": "m",
            "benchmark": "videomme",
            "k": 4,
            "protocol": LIMITS,
        }
        settings = BenchmarkSettings(**defaults | fields)
        environment = Environment(Protocol(small_vocabulary, settings.protocol), features)
        make.sampler = scripted(turns, report)
        folder = VideoFolder(videos, not settings.benchmark)
        return SplitPlayer(make.sampler, environment, settings, folder, scorer)

    return make


@pytest.fixture(scope="session")
def checkpoint(small_model, small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """The small model as a folder that the command takes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    save(small_model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"
