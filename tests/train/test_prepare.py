"""From a recipe to data: made once, gone on with, and bad videos left out by name."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest

from paravt_jax.method.conversations import render
from train.prepare import prepare
from train.settings import Run
from train.unreadable import UNREADABLE, UnreadableVideosError


@pytest.fixture
def folder(road, tmp_path):
    """A copy of a finished preparation."""
    shutil.copytree(road.data.root.parent, tmp_path / "run")
    return tmp_path / "run"


def test_what_a_run_learns_from(road):
    data, videos = (
        road.data,
        {
            f"{split}/{n:04d}.mp4"
            for split, count in (("train", 6), ("heldout", 2))
            for n in range(count)
        },
    )
    assert {str(p.relative_to(data.root)) for p in data.root.rglob("*.mp4")} == videos
    assert {q.video.split("/")[0] for q in data.questions} == {"train"} and {
        q.video.split("/")[0] for q in data.heldout
    } == {"heldout"}
    assert data.captions and data.unreadable == {}
    assert {c.subagent for c in data.conversations} == {True, False}
    assert data.lengths == tuple(
        len(render(c, road.environment.protocol, lambda clip: 1).ids) for c in data.conversations
    )
    assert json.loads((data.root.parent / UNREADABLE).read_text()) == {}


def test_preparing_again_makes_nothing_anew(road, folder):
    before = {
        p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != UNREADABLE
    }
    again = prepare(road.run, folder)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert again.questions == road.data.questions
    assert again.conversations == road.data.conversations


def test_an_interrupted_preparation_goes_on(road, folder):
    (folder / "videos" / "world.json").unlink()
    (folder / "videos" / "heldout" / "0001.mp4").unlink()
    shutil.rmtree(folder / "records")
    shutil.rmtree(folder / "tokenizer")
    kept = (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns
    again = prepare(road.run, folder)
    assert again.heldout == road.data.heldout and again.vocabulary.size == road.data.vocabulary.size
    assert (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns == kept


def test_missing_empty_and_truncated_videos_are_left_out_and_named(road, folder, capsys):
    videos = folder / "videos" / "train"
    (videos / "0000.mp4").unlink()
    (videos / "0001.mp4").write_bytes(b"")
    whole = (videos / "0002.mp4").read_bytes()
    (videos / "0002.mp4").write_bytes(whole[: len(whole) // 2])
    data = prepare(dataclasses.replace(road.run, unreadable_share=0.5), folder)
    bad = {f"train/000{n}.mp4" for n in range(3)}
    assert (
        set(data.unreadable) == bad
        and json.loads((folder / UNREADABLE).read_text()) == data.unreadable
    )
    assert (
        data.unreadable["train/0000.mp4"] == "no such file"
        and data.unreadable["train/0001.mp4"] == "the file is empty"
    )
    for records in (data.questions, data.captions):
        assert records and not {r.video for r in records} & bad
    assert data.conversations
    assert not {clip.path for c in data.conversations for clip in c.clips} & bad
    assert data.heldout == road.data.heldout
    assert "3 videos cannot be read" in capsys.readouterr().out


def test_too_many_bad_videos_end_it_by_name(road, folder):
    for n in range(2):
        (folder / "videos" / "train" / f"000{n}.mp4").write_bytes(b"")
    with pytest.raises(
        UnreadableVideosError,
        match=r"2 of 8 .*train/0000\.mp4: the file is empty; train/0001\.mp4.*--unreadable-share 0\.05",
    ):
        prepare(road.run, folder)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"text_tokens": 25}, "text_tokens: 25"),
        ({"label_tokens": 4}, "label_tokens: 4"),
        ({"trajectory_tokens": 40}, "trajectory_tokens: 40"),
        ({"turn_tokens": 8}, "turn_tokens: 8"),
        ({"summary_tokens": 4}, "summary_tokens: 4"),
    ],
)
def test_lengths_that_the_worlds_texts_do_not_keep_are_refused_before_anything_is_made(
    road, tmp_path, changed, field
):
    run = dataclasses.replace(road.run, protocol=dataclasses.replace(road.run.protocol, **changed))
    with pytest.raises(ValueError, match=rf"^protocol\.{field}; .*: give at least "):
        prepare(run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_length_that_a_refusal_names_is_enough(road, tmp_path):
    def allowing(tokens: int) -> Run:
        return dataclasses.replace(
            road.run, protocol=dataclasses.replace(road.run.protocol, trajectory_tokens=tokens)
        )

    with pytest.raises(ValueError, match=r"may need (\d+): give at least") as refused:
        prepare(allowing(40), tmp_path)
    least = int(re.findall(r"may need (\d+)", str(refused.value))[0])
    with pytest.raises(ValueError):
        prepare(allowing(least - 1), tmp_path)
    assert prepare(allowing(least), tmp_path).conversations == road.data.conversations


def test_a_recipe_without_data_is_refused(road, tmp_path):
    with pytest.raises(
        ValueError, match="small: neither data nor world is set; use a recipe with one of them"
    ):
        prepare(dataclasses.replace(road.run, world=None, text=None), tmp_path)
