"""`rollout.ask`: questions about a file, from Python and with the command."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from paravt_jax.data import video as decoder
from paravt_jax.data.frames import VideoError
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import (
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    Question,
    QuestionKind,
    StopReason,
    Trajectory,
    Turn,
)
from rollout import ask
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.ask import Assistant
from rollout.engine.engine import Engine
from rollout.engine.requests import run
from rollout.engine.runner import ModelRunner
from rollout.engine.settings import EngineSizes

PROTOCOL = ProtocolSettings(max_calls=2, turn_tokens=8, summary_tokens=4, trajectory_tokens=40)
TEXT = "What number is shown in the scene that starts at 8 s?"


@pytest.fixture(scope="module")
def assistant(small_model, small_vocabulary) -> Assistant:
    return Assistant(small_model, small_vocabulary, PROTOCOL, FrameSettings(batch=8))


def test_an_answer_is_the_episode_that_training_would_play(
    assistant, small_model, small_vocabulary, small_world
):
    path = small_world.videos[0].path
    episode = assistant.ask(small_world.folder / path, TEXT, EpisodeSettings(4, 0.7), seed=5)
    features = FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=8),
        small_world.folder,
        source=decoder,
    )
    engine = Engine(
        small_model,
        features,
        EngineSizes(
            row_lengths=(320,), prefill_lengths=(64, 192), slots=2, rows_per_prefix=2, pages=60
        ),
    )
    question = Question("q", path, TEXT, QuestionKind.OPEN_ENDED, "")
    (expected,) = run(
        engine,
        [
            play(
                Environment(Protocol(small_vocabulary, PROTOCOL), features),
                question,
                EpisodeSettings(4, 0.7),
                5,
            )
        ],
    )
    np.testing.assert_array_equal(episode.trajectory.ids, expected.trajectory.ids)
    assert episode.stop is expected.stop
    assert len(episode.trajectory.frames) == 4
    assert episode.turns[0].text


@pytest.fixture
def engines(monkeypatch) -> list[Engine]:
    """The engines that are made during the test."""
    made = []
    init = Engine.__init__

    def recorded_init(self, *arguments):
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(Engine, "__init__", recorded_init)
    return made


@pytest.fixture
def new_assistant(small_model, small_vocabulary) -> Assistant:
    """An assistant that has made no engine yet."""
    return Assistant(small_model, small_vocabulary, PROTOCOL, FrameSettings(batch=8))


@pytest.mark.usefixtures("unchecked")
def test_unreadable_videos_and_bad_questions_are_refused(assistant, small_world, tmp_path):
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    for name in ("noise.mp4", "absent.mp4"):
        with pytest.raises(VideoError, match=name):
            assistant.ask(tmp_path / name, TEXT)
    with pytest.raises(ValueError, match="question: .* tokens .* 512"):
        assistant.ask(small_world.folder / small_world.videos[0].path, "why? " * 2000)
    with pytest.raises(ValueError, match="question: .*empty"):
        assistant.ask(small_world.folder / small_world.videos[0].path, " \n")


def test_after_an_interrupt_the_same_question_has_the_same_answer(
    new_assistant, engines, small_world, monkeypatch
):
    """Ctrl-C in a notebook, in any part of the engine, loses none of its pages."""
    video = small_world.folder / small_world.videos[0].path
    ask = functools.partial(new_assistant.ask, video, TEXT, EpisodeSettings(4, 0.7), seed=5)
    wanted = ask()
    (engine,) = engines

    def interrupted(*_):
        raise KeyboardInterrupt

    for method in ("prefill", "decode"):
        engine.forget()
        for _ in range(3):  # if pages were lost, there would be none left the third time
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(ModelRunner, method, interrupted)
                ask()
        np.testing.assert_array_equal(ask().trajectory.ids, wanted.trajectory.ids)


# The command


@pytest.fixture
def command(assistant, monkeypatch, capsys):
    """command(*argv) runs it with the module's assistant; returns exit code, stdout and stderr."""
    monkeypatch.setattr(ask.Assistant, "load", lambda source, protocol, **fields: assistant)

    def start(*argv):
        code = ask.main(argv)
        said = capsys.readouterr()
        return code, said.out, said.err

    return start


def test_the_command_prints_the_episode_and_writes_its_page(command, small_world, tmp_path):
    video = str(small_world.folder / small_world.videos[0].path)
    code, out, err = command(
        "--model",
        "m",
        "--video",
        video,
        TEXT,
        "--frames",
        "4",
        *("--option", "seven", "--option", "four"),
        "--html",
        str(tmp_path / "page.html"),
    )
    page = (tmp_path / "page.html").read_text()
    assert code == 0
    assert err.startswith("answering; ") and err.count("\n") == 1
    assert out.startswith("--- turn 1\n<think>")
    assert "--- answer: none (the episode ended: truncated)" in out
    assert f"page: {tmp_path / 'page.html'}" in out
    assert page.startswith("<!doctype html>")
    assert all(word in page for word in (TEXT, "seven", "four"))
    assert page.count("data:image/png;base64,") == 4
    assert "<script" not in page
    assert "http:" not in page
    assert "https:" not in page


def test_an_episode_is_described_turn_by_turn(small_questions):
    crops = (
        CallOutcome(CropCall(0, 16.5), CallStatus.CLAMPED, " seven\n"),
        CallOutcome(None, CallStatus.MALFORMED, "error: no JSON"),
    )
    turns = (Turn("<think>\nlook\n</think>", crops), Turn("<answer>7</answer>"))
    episode = Episode(small_questions[0], 4, Trajectory(), turns, StopReason.ANSWERED, "7")
    assert list(ask.describe(episode)) == [
        "--- turn 1",
        "<think>\nlook\n</think>",
        "    crop 1, 0 to 16.5 s (clamped): seven",
        "    crop 2, no readable window (malformed): error: no JSON",
        "--- turn 2",
        "<answer>7</answer>",
        "--- answer: 7 (the episode ended: answered)",
    ]


def test_mistakes_are_one_line_each(command, small_world, tmp_path):
    video = str(small_world.folder / small_world.videos[0].path)
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "talk.srt").write_text("00:01 --> 00:02\nhello\n")
    for argv, message in (
        (("--video", str(tmp_path / "none.mp4"), TEXT), "none.mp4: no such file"),
        (("--video", str(tmp_path / "noise.mp4"), TEXT), "noise.mp4: it cannot be decoded"),
        (("--video", video, TEXT, "--html", str(tmp_path / "no" / "page.html")), "page.html"),
        (("--video", video, " "), "question: it is empty"),
        (("--video", video, TEXT, "--frames", "0"), "episode.frames: 0"),
        (
            ("--video", video, TEXT, "--subtitles", str(tmp_path / "talk.srt"), "--dispatch=none"),
            "--subtitles .*--dispatch none",
        ),
    ):
        code, out, err = command("--model", "m", *argv)
        # Some mistakes are found when the video is read.
        err = re.sub("^answering; .*\n", "", err)
        assert (
            (code, out) == (1, "") and re.match(f"error: .*{message}", err) and err.count("\n") == 1
        ), (argv, err)
