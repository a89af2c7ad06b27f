"""The small world as data: made once, continued after an interruption, bad videos left out."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest

from paravt_jax.data.stored_json import DamagedFileError
from paravt_jax.method.conversations import render
from train.left_out import UNREADABLE, LeftOutError
from train.prepare import prepare
from train.settings import Run
from train.world_data import world_records


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
    assert json.loads((data.root.parent / UNREADABLE).read_text()) == {}


def test_rl_can_train_on_some_kinds_of_questions(road):
    chosen = road.data.of_kinds(("mcq",))
    assert 0 < len(chosen.questions) < len(road.data.questions)
    assert {question.kind for question in chosen.questions} == {"mcq"}
    assert chosen.heldout == road.data.heldout
    assert road.data.of_kinds(()) == road.data
    with pytest.raises(ValueError, match=r"rl.kinds: oe; none of \d+ questions"):
        road.data.of_kinds(("oe",))


def test_preparing_again_makes_nothing_anew(road, folder):
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != UNREADABLE]
    before = [file.stat().st_mtime_ns for file in files]
    again = prepare(road.run, folder)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert again.questions == road.data.questions
    assert again.conversations == road.data.conversations


def test_an_interrupted_preparation_goes_on(road, folder):
    (folder / "videos" / "world.json").unlink()
    (folder / "videos" / "heldout" / "0001.mp4").unlink()
    shutil.rmtree(folder / "records")
    shutil.rmtree(folder / "tokenizer")
    kept = (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns
    again = prepare(road.run, folder)
    assert again.heldout == road.data.heldout
    assert again.vocabulary.size == road.data.vocabulary.size
    assert (folder / "videos" / "train" / "0000.mp4").stat().st_mtime_ns == kept


def test_missing_empty_and_truncated_videos_are_left_out_and_named(road, folder, capsys):
    videos = folder / "videos" / "train"
    (videos / "0000.mp4").unlink()
    (videos / "0001.mp4").write_bytes(b"")
    whole = (videos / "0002.mp4").read_bytes()
    (videos / "0002.mp4").write_bytes(whole[: len(whole) // 2])
    data = prepare(dataclasses.replace(road.run, max_left_out=0.5), folder)
    bad = {f"train/000{n}.mp4" for n in range(3)}
    assert set(data.unreadable) == bad
    assert json.loads((folder / UNREADABLE).read_text()) == data.unreadable
    assert data.unreadable["train/0000.mp4"] == "missing"
    assert data.unreadable["train/0001.mp4"].startswith("0 bytes instead of")
    for records in (data.questions, data.captions):
        assert records and bad.isdisjoint(record.video for record in records)
    clips = [clip.path for conversation in data.conversations for clip in conversation.clips]
    assert clips and bad.isdisjoint(clips)
    assert data.heldout == road.data.heldout
    assert "3 videos cannot be read" in capsys.readouterr().out


def test_a_video_with_a_flipped_bit_is_left_out_and_named(road, folder):
    """FFmpeg may read it without an error, as another picture."""
    file = folder / "videos" / "train" / "0000.mp4"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    data = prepare(dataclasses.replace(road.run, max_left_out=0.5), folder)
    assert set(data.unreadable) == {"train/0000.mp4"}


@pytest.mark.parametrize("part", ["records", "tokenizer"])
def test_records_and_tokenizer_with_a_flipped_bit_are_refused(road, folder, part):
    sums = folder / part / "sums.json"
    name = sorted(json.loads(sums.read_text()))[-1]
    content = bytearray((folder / part / name).read_bytes())
    content[-2] ^= 1
    (folder / part / name).write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"{part}/{name}: checksum is wrong; delete"):
        prepare(road.run, folder)


def test_too_many_bad_videos_stop_the_run_and_are_named(road, folder):
    for n in range(2):
        (folder / "videos" / "train" / f"000{n}.mp4").write_bytes(b"")
    with pytest.raises(LeftOutError) as error:
        prepare(road.run, folder)
    for part in (
        "2 of 8",
        "train/0000.mp4",
        "train/0001.mp4",
        "max_left_out: 0.1",
        "--max-left-out",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("field", "tokens"),
    [
        ("text_tokens", 25),
        ("trajectory_tokens", 40),
        ("turn_tokens", 8),
        ("summary_tokens", 4),
    ],
)
def test_a_limit_that_is_too_small_for_the_worlds_texts_is_refused_before_anything_is_made(
    road, tmp_path, field, tokens
):
    with pytest.raises(ValueError, match=rf"^protocol\.{field}: {tokens};") as error:
        prepare(with_limit(road.run, field, tokens), tmp_path)
    assert not list(tmp_path.iterdir())
    # The message names the smallest limit that works.
    (enough,) = re.findall(r"give at least (\d+)$", str(error.value))
    with pytest.raises(ValueError, match=field):
        prepare(with_limit(road.run, field, int(enough) - 1), tmp_path)
    world_records(with_limit(road.run, field, int(enough)))


def with_limit(run: Run, field: str, tokens: int) -> Run:
    return dataclasses.replace(run, protocol=dataclasses.replace(run.protocol, **{field: tokens}))


def test_a_recipe_without_data_is_refused(road, tmp_path):
    with pytest.raises(ValueError, match="data nor world"):
        prepare(dataclasses.replace(road.run, world=None, text=None), tmp_path)
