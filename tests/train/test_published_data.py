"""The recipes of the published data: prepared by one command, opened by a run, packed and read ahead."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

from configs.paravt_8b import paravt_8b
from configs.sft import sft_8b
from paravt_jax import sources, tokenizer
from paravt_jax.frames import FrameReader, ReaderSettings
from paravt_jax.preparation import LEFT_OUT
from paravt_jax.records import Question, QuestionKind
from tests.paravt_jax.published_files import answered, called, rl_row, write_rl, write_sft
from train.prepare import UnreadableVideosError, main, prepare
from train.published_data import DataSettings, _hold_out, row_stream


@pytest.fixture(scope="module")
def files(small_world, small_vocabulary, tmp_path_factory):
    """Annotations of the small world's videos, one of which is not there, and a tokenizer's folder."""
    folder = tmp_path_factory.mktemp("published")
    paths = [v.path for v in small_world.videos]
    write_rl(folder / "annotations", [rl_row(paths[n % 4], f"<video>Question {n}?") for n in range(12)] + [rl_row("train/gone.mp4")])
    rows = [answered(paths[n % 4], f"What {'is it ' * n}?") if n % 2 else called(paths[n % 4], [(0, n + 1)]) for n in range(8)]
    write_sft(folder / "annotations", rows, "paravt_sft_charades_12k4.parquet")
    tokenizer.save(small_vocabulary.tokenizer, folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(files, small_world):
    folders = str(files / "annotations"), str(small_world.folder), str(files / "set")
    data, recipe = DataSettings(*folders, frames=4, row_tokens=2048, heldout=3, workers=1), sft_8b()
    model = dataclasses.replace(recipe.model, path=str(files / "tokenizer"))
    return dataclasses.replace(recipe, data=data, model=model, unreadable_share=0.2)


@pytest.fixture(scope="module")
def data(run, tmp_path_factory):
    return prepare(run, tmp_path_factory.mktemp("run"))


def test_a_run_opens_what_was_prepared(data, run, small_vocabulary, tmp_path, monkeypatch):
    assert data.vocabulary.size == small_vocabulary.size and data.published is not None
    assert len(data.questions) + len(data.heldout) == 12 and len(data.heldout) >= 3
    assert not {q.video for q in data.questions} & {q.video for q in data.heldout}
    packing = data.published.packing
    assert sorted(n for row in packing.rows for n in row) == list(range(8)) and not packing.left_out
    assert data.published.summary["reasons"] == {"missing video": 1}
    for row in packing.rows:
        assert sum(c.tokens for c in data.published.row(row)) <= 2048
    same = dataclasses.replace(run, protocol=dataclasses.replace(run.protocol, pin_think=False))
    assert prepare(same, tmp_path).questions == data.questions  # a recipe that differs in rollouts alone shares the set
    monkeypatch.setattr(sources, "fetch", None)
    assert prepare(run, tmp_path).questions == data.questions  # its sources may be gone
    with pytest.raises(ValueError, match="prepared otherwise.*\n  frames: 4 -> 5\n"):
        prepare(dataclasses.replace(run, data=dataclasses.replace(run.data, frames=5)), tmp_path)
    with pytest.raises(UnreadableVideosError, match=r"1 of 21 rows have files .*1 missing video.*left_out.jsonl.*--unreadable-share 0.01"):
        prepare(dataclasses.replace(run, unreadable_share=0.01), tmp_path)


def test_rows_come_in_order_with_their_frames_ahead_and_go_on_exactly(data, small_world):
    def fresh(reader):
        return row_stream(data.published, reader, seed=3, rows=1)

    with FrameReader(ReaderSettings(workers=1)) as reader:
        rows = fresh(reader)
        batches = list(itertools.islice(rows, 3))
        state = json.loads(json.dumps(rows.get_state()))
        expected = list(itertools.islice(rows, 4))
        again = fresh(reader)
        again.set_state(state)
        assert list(itertools.islice(again, 4)) == expected
        late = reader.late
        for (numbers,) in batches[:1]:
            for conversation in data.published.row(numbers):
                for clip in conversation.clips:
                    assert reader.read(small_world.folder / clip.path, clip.indices).shape[0] == len(clip.indices)
        assert reader.late == late


def test_held_out_questions_are_whole_videos_and_stay_the_same():
    questions = tuple(Question(f"{v}:{n}", f"{v}.mp4", "a", QuestionKind.OPEN_ENDED, "b") for v in range(20) for n in range(3))
    kept, heldout = _hold_out(questions, 7)
    assert len(heldout) == 9 and not {q.video for q in kept} & {q.video for q in heldout}
    assert _hold_out(questions[::-1], 7)[1] != () and {q.video for q in _hold_out(questions[::-1], 7)[1]} == {q.video for q in heldout}
    assert _hold_out(questions, 0) == (questions, ())
    assert _hold_out(questions[:3], 2) == (questions[:3], ())  # one video: it is trained on
    assert sorted(q.id for q in (*kept, *heldout)) == sorted(q.id for q in questions)


def test_the_command_prepares_and_prints_the_summary(data, run, files, capsys):
    arguments = ["--config=sft_8b", "--model.path", run.model.path, "--data.workers", "1"]
    for field in ("annotations", "media", "folder", "frames", "row_tokens"):
        arguments += [f"--data.{field.replace('_', '-')}", str(getattr(run.data, field))]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"20 of 21 rows kept; what is left out, and why: {files / 'set' / LEFT_OUT}" in out
    assert main([*arguments, "--data.frames", "8"]) == 1
    assert "prepared otherwise" in capsys.readouterr().err
    assert main(["--config=paravt_tiny"]) == 1
    assert "paravt_tiny: renders its own world" in capsys.readouterr().err


def test_the_large_recipes_start_from_the_published_data():
    for recipe in (sft_8b(), paravt_8b()):
        assert recipe.data == DataSettings() and recipe.model.path == "Qwen/Qwen3-VL-8B-Instruct"
    with pytest.raises(ValueError, match="give model.path"):
        dataclasses.replace(sft_8b(), model=dataclasses.replace(sft_8b().model, path=""))


IMPOSSIBLE = [("frames", 0), ("row_tokens", 0), ("heldout", -1), ("workers", -1), ("fps", 0), ("deadline", np.nan), ("media", "")]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_settings_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"data.{field}: "):
        DataSettings(**{field: value})
