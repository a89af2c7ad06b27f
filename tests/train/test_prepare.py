"""The small world as data: made once, and refused if its texts are too long."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from paravt_jax.method.conversations import render
from train.prepare import LeftOutError, note_unreadable, prepare
from train.settings import Run


@pytest.fixture
def folder(road, tmp_path):
    """A copy of a finished preparation."""
    shutil.copytree(road.data.root.parent, tmp_path / "run")
    return tmp_path / "run"


def test_what_a_run_learns_from(road):
    data = road.data
    videos = {f"train/{n:04d}.mp4" for n in range(6)} | {f"heldout/{n:04d}.mp4" for n in range(2)}
    assert {str(path.relative_to(data.root)) for path in data.root.rglob("*.mp4")} == videos
    assert {question.video.split("/")[0] for question in data.questions} == {"train"}
    assert {question.video.split("/")[0] for question in data.heldout} == {"heldout"}
    assert data.captions
    assert {conversation.subagent for conversation in data.conversations} == {True, False}
    rendered = [render(c, road.environment.protocol, lambda clip: 1) for c in data.conversations]
    assert data.lengths == tuple(len(trajectory.ids) for trajectory in rendered)
    assert data.unreadable == {}


def test_new_unreadable_videos_are_named_once(road, capsys):
    data = dataclasses.replace(road.data, videos=1000, unreadable={})
    own = {"a.mp4": "cut"}
    note_unreadable(Run(name="own"), data, own)
    own["b.mp4"] = "gone"
    note_unreadable(Run(name="own"), data, own)
    note_unreadable(Run(name="own"), data, own)
    lines = capsys.readouterr().out.splitlines()
    assert [("a.mp4: cut" in line, "b.mp4: gone" in line) for line in lines] == [(1, 0), (0, 1)]
    with pytest.raises(LeftOutError, match=r"3 of 10 videos cannot be read; .*c\.mp4: empty"):
        note_unreadable(Run(name="own"), dataclasses.replace(data, videos=10), {"c.mp4": "empty"})


def test_preparing_again_makes_nothing_anew(road, folder):
    files = [p for p in folder.rglob("*") if p.is_file()]
    before = [file.stat().st_mtime_ns for file in files]
    again = prepare(road.run, folder)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert again.questions == road.data.questions
    assert again.conversations == road.data.conversations


def test_an_interrupted_preparation_goes_on(road, folder):
    (folder / "videos" / "heldout" / "0001.mp4").unlink()
    shutil.rmtree(folder / "records")
    shutil.rmtree(folder / "tokenizer")
    kept = (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns
    again = prepare(road.run, folder)
    assert again.heldout == road.data.heldout
    assert again.vocabulary.size == road.data.vocabulary.size
    assert (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns == kept


def test_a_limit_that_is_too_small_for_the_worlds_questions_is_refused_before_rendering(
    road, tmp_path
):
    protocol = dataclasses.replace(road.run.protocol, text_tokens=25)
    with pytest.raises(ValueError, match=r"protocol\.text_tokens.*\(25\)"):
        prepare(dataclasses.replace(road.run, protocol=protocol), tmp_path)
    assert not list(tmp_path.rglob("*.mp4"))
