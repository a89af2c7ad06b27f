"""The command that writes the scenes: what is in its folder, and what a stopped one leaves."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from configs.paravt_8b import paravt_8b
from paravt_extras.scenes import __main__ as command
from paravt_extras.scenes import ask, storyboard
from paravt_extras.scenes.write import missing_videos, write_scenes
from paravt_jax.data import tokenizer_file, video
from paravt_jax.data.question_files import read_questions
from paravt_jax.method.accuracy import accuracy
from train.data import hold_out
from train.prepare import prepare_set
from train.settings import DataSettings, ModelSettings

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = storyboard.SceneSettings(seed=1, videos=8, heldout=4, lines=320)


def put_videos(folder: pathlib.Path, settings: storyboard.SceneSettings, missing: int = 0) -> None:
    """Make all videos but some look finished, so that they are not drawn."""
    (folder / "media").mkdir(parents=True)
    for split in storyboard.SPLITS:
        (folder / "media" / split).mkdir()
    for each in storyboard.plan_videos(settings)[missing:]:
        (folder / "media" / each.path).write_bytes(b"drawn")


@pytest.fixture
def written(tmp_path):
    """A folder with all texts, and placeholders for videos."""
    folder = tmp_path / "scenes"
    write_settings(folder, SETTINGS)
    write_scenes(SETTINGS, folder)
    return folder


def write_settings(
    folder: pathlib.Path, settings: storyboard.SceneSettings, missing: int = 0
) -> None:
    put_videos(folder, settings, missing)
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))


def test_both_files_of_questions_are_read_like_files_of_your_own(written):
    for split, videos in (("train", 6), ("heldout", 4)):
        asked = {
            each.question.id: each.question
            for v in storyboard.plan_videos(SETTINGS)
            if v.split == split and not v.demonstrated
            for each in ask.questions(v, SETTINGS.seed)
        }
        read = read_questions(written / f"{split}.jsonl", written / "media")
        assert read == tuple(asked.values())
        assert len(read) == 8 * videos
        assert all(accuracy(question, question.answer) == 1 for question in read)


def test_a_folder_of_other_scenes_is_refused(written, capsys):
    arguments = ["--videos", "8", "--heldout", "4", "--lines", "320", "--seed"]
    assert command.main(["--out", str(written), *arguments, "2"]) == 1
    assert "seed: 1 -> 2" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("lines", "1080"), ("videos", "2"), ("heldout", "0")])
def test_a_bad_value_is_refused_in_one_line_before_anything_is_written(
    tmp_path, capsys, flag, value
):
    assert command.main(["--out", str(tmp_path / "x"), f"--{flag}", value]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "videos to draw" not in line]
    assert len(lines) == 1 and f"{flag}: {value}" in lines[0]
    assert not (tmp_path / "x").exists()


def files(folder: pathlib.Path) -> dict[str, int]:
    """Times of change of all videos."""
    return {str(f.relative_to(folder)): f.stat().st_mtime_ns for f in folder.rglob("*.mp4")}


@pytest.mark.slow
def test_a_stopped_command_leaves_whole_videos_and_goes_on(tmp_path):
    out = tmp_path / "scenes"
    # So many that a busy machine cannot draw all of them before the signals arrive.
    settings = storyboard.SceneSettings(seed=0, videos=12, heldout=1, lines=320)
    arguments = [sys.executable, "-m", "paravt_extras.scenes", "--out", str(out)]
    arguments += ["--videos", "12", "--heldout", "1", "--lines", "320"]
    drawn: dict[str, int] = {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
        while files(out).keys() <= drawn.keys() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=120) == code
        drawn = files(out)
        assert 1 <= len(drawn) < 13
        assert not (out / "annotations").exists() and not (out / "train.jsonl").exists()
        assert number == signal.SIGKILL or not list(out.rglob("*.tmp"))
    subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert {name: changed for name, changed in files(out).items() if name in drawn} == drawn
    assert not missing_videos(settings, out) and not list(out.rglob("*.tmp"))
    for each in storyboard.plan_videos(settings):
        info = video.probe(out / "media" / each.path)
        assert (info.frames, info.duration) == (each.frames, each.seconds)


@pytest.mark.slow
def test_the_recipes_prepare_every_row(tmp_path, small_vocabulary):
    """Questions and demonstrations as `paravt_8b` reads them, with four overview frames."""
    settings = storyboard.SceneSettings(seed=0, videos=8, heldout=1, lines=320)
    write_scenes(settings, tmp_path / "scenes")
    tokenizer_file.save(small_vocabulary, tmp_path / "tokenizer")
    run = paravt_8b()
    data = DataSettings(
        annotations=str(tmp_path / "scenes/annotations"),
        media=str(tmp_path / "scenes/media"),
        folder=str(tmp_path / "set"),
        frames=4,
    )
    tokenizer = str(tmp_path / "tokenizer")
    run = dataclasses.replace(run, model=ModelSettings(path=tokenizer, size="8b"))
    prepared = prepare_set(run, data, tmp_path / "set")
    assert (len(prepared.questions), len(prepared.conversations)) == (48, 16)
    for conversation in prepared.conversations:
        (clip,) = conversation.clips
        assert len(clip.indices) == 4
        text = str(conversation.turns[1].content[0])
        # The thought names the times that the prompt shows.
        assert all(f" at {time:.1f}" in text for time in clip.times)
    training, heldout = hold_out(tuple(prepared.questions), 8)
    assert {q.video for q in training}.isdisjoint({q.video for q in heldout})
