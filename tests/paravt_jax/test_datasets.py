"""Records on disk: read back as they were written, whole or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paravt_jax.data import datasets
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world

QUESTION = Question("q", "a.mp4", 'Où?\n"é" <|im_end|>', QuestionKind.OPEN_ENDED, "là", ())


@pytest.fixture(scope="module")
def records():
    videos = world.plan(world.WorldSettings(train_videos=4, heldout_videos=1))
    settings = world_text.TextSettings()
    return {
        "questions": [*world_text.questions(videos, settings), QUESTION],
        "main": list(world_text.main_conversations(videos, settings)),
        "windows": list(world_text.window_conversations(videos, settings, ProtocolSettings())),
        "captions": list(world_text.captions(videos, settings)),
    }


@pytest.fixture(scope="module")
def prepared(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    datasets.write_splits(folder, records)
    return folder


def test_records_are_read_back_as_they_were_written(records, prepared):
    splits = datasets.open_splits(prepared)
    assert splits.keys() == records.keys()
    for name, expected in records.items():
        split = splits[name]
        assert len(split) == len(expected)
        assert list(split) == expected
        assert split[-1] == expected[-1]


def test_tensorflow_is_never_imported():
    code = (
        "import sys\n"
        "from paravt_jax.data import datasets, loader\n"
        "raise SystemExit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_records_replace_those_of_a_folder(records, tmp_path):
    questions = records["questions"]
    datasets.write_splits(tmp_path, {"questions": questions})
    datasets.write_splits(tmp_path, {"questions": questions[:3]})
    assert list(datasets.open_splits(tmp_path)["questions"]) == questions[:3]


def test_an_interrupted_split_is_written_again(records, tmp_path):
    def interrupted():
        yield from questions[:2]
        raise KeyboardInterrupt

    questions = records["questions"]
    datasets.write_splits(tmp_path, {"questions": questions[:5]})
    with pytest.raises(KeyboardInterrupt):
        datasets.write_splits(tmp_path, {"questions": interrupted()})
    assert not datasets.is_prepared(tmp_path)
    datasets.write_splits(tmp_path, {"questions": questions})
    assert list(datasets.open_splits(tmp_path)["questions"]) == questions
