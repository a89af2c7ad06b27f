"""A stand-in of the published data: every row can be prepared, and a seed decides all of it."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import zipfile

import numpy as np
import pyarrow.parquet
import pytest

from configs.paravt_8b import paravt_8b
from paravt_extras.stand_in import write_stand_in
from paravt_jax.data import tokenizer_file, video
from train.data import hold_out
from train.prepare import prepare_set
from train.settings import DataSettings, ModelSettings


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return write_stand_in(tmp_path_factory.mktemp("stand-in") / "data", seed=3)


@pytest.fixture(scope="module")
def prepared(stand_in, small_vocabulary, tmp_path_factory):
    """The stand-in as the 8B recipe prepares it, and the summary."""
    folder = tmp_path_factory.mktemp("prepared")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    run = paravt_8b()
    settings = DataSettings(
        annotations=str(stand_in / "annotations"),
        media=str(stand_in / "media"),
        folder=str(folder / "set"),
    )
    model = ModelSettings(path=str(folder / "tokenizer"), size="8b")
    data_set = prepare_set(dataclasses.replace(run, model=model), settings, folder / "set")
    return data_set, data_set.summary


def contents(folder: pathlib.Path) -> dict[str, object]:
    """The rows of all tables, and the members of all archives."""
    members: dict[str, object] = {}
    for path in sorted(folder.rglob("*.parquet")):
        members[path.name] = pyarrow.parquet.read_table(path).to_pylist()
    for path in sorted(folder.rglob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            members[path.name] = archive.namelist()
    return members


def frames(folder: pathlib.Path, into: pathlib.Path) -> list[np.ndarray]:
    """All frames of the videos in the archive selfqa."""
    with zipfile.ZipFile(folder / "media/selfqa.zip") as archive:
        archive.extractall(into)
    files = sorted(into.rglob("*.mp4"))
    return [video.read(file, range(video.probe(file).frames)) for file in files]


def test_no_row_is_left_out_and_every_kind_of_row_is_there(prepared):
    data, summary = prepared
    kinds = collections.Counter(question.kind for question in data.questions)
    assert kinds == {"mcq": 32, "tvg": 32, "oe": 32}
    assert len(data.conversations) == 64
    assert len(summary["sources"]) == 4
    assert all(records.keys() == {"kept"} for records in summary["sources"].values())
    calls = [sum(turn.role == "tool" for turn in record.turns) for record in data.conversations]
    assert set(calls) == {0, 1, 2, 3}
    assert {clip.still for record in data.conversations for clip in record.clips} == {False, True}


def test_there_are_enough_questions_for_the_uncut_recipe_on_videos_of_their_own(prepared):
    data, _ = prepared
    run = paravt_8b()
    assert run.rl is not None
    training, heldout = hold_out(tuple(data.questions), run.evaluation.questions)
    assert len(heldout) >= run.evaluation.questions
    assert len(training) >= run.rl.prompts
    assert {record.video for record in training}.isdisjoint(record.video for record in heldout)
    shown = {clip.path for record in data.conversations for clip in record.clips}
    assert shown.isdisjoint(record.video for record in data.questions)


def test_frames_show_what_a_row_says(stand_in, prepared):
    data, _ = prepared
    grounding = [record for record in data.questions if record.kind == "tvg"]
    for question in grounding[:4]:
        start, end = map(int, json.loads(question.answer))
        path = data.root / question.video
        pixels = video.read(path, range(video.probe(path).frames)).astype(int)
        # The background is at the corner, and the digit is white.
        background = np.abs(pixels[:, 0, 0] - pixels[start // 2, 0, 0]).sum(axis=-1) < 10
        digit = (pixels.min(axis=-1) > 180).sum(axis=(1, 2)) > 100
        assert (2 * np.flatnonzero(background & digit)).tolist() == list(range(start, end, 2))


def test_a_seed_decides_all_rows_and_frames(stand_in, tmp_path):
    again = write_stand_in(tmp_path / "again", seed=3)
    other = write_stand_in(tmp_path / "other", seed=4)
    assert contents(again) == contents(stand_in)
    assert contents(other).keys() == contents(stand_in).keys()
    assert contents(other) != contents(stand_in)
    mine = frames(stand_in, tmp_path / "mine")
    same = frames(again, tmp_path / "same")
    for a, b in zip(mine, same, strict=True):
        np.testing.assert_array_equal(a, b)
    changed = frames(other, tmp_path / "changed")
    assert any(a.shape != b.shape or (a != b).any() for a, b in zip(mine, changed, strict=True))
