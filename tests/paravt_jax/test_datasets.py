from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from paravt_jax.data import datasets
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Caption, Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world

_QUESTION = Question("q", "a.mp4", 'Où?\n"é" <|im_end|>', QuestionKind.OPEN_ENDED, "là", ())


def _records():
    videos = world.plan(world.WorldSettings(train_videos=4, heldout_videos=1))
    settings = world_text.TextSettings()
    return {
        "questions": [*world_text.questions(videos, settings), _QUESTION],
        "main": list(world_text.main_conversations(videos, settings)),
        "windows": list(world_text.window_conversations(videos, settings, ProtocolSettings())),
        "captions": list(world_text.captions(videos, settings)),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    datasets.write_splits(folder, _records())
    return folder


def test_what_is_read_is_what_was_prepared(prepared):
    for name, records in _records().items():
        split = datasets.open_split(prepared, name)
        assert len(split) == len(records)
        assert list(split) == records
        assert split[-1] == records[-1] and split[1:3] == tuple(records[1:3])


def test_types_come_back_whole():
    clip = Clip("a.mp4", (0, 3), (0.0, 6.0), 32, 48)
    turns = ChatTurn("user", (clip, "What?")), ChatTurn("assistant", (" nothing",))
    conversation = Conversation("d", "s", False, turns, 7, subagent=True)
    for record in (_QUESTION, conversation, Caption("a.mp4", 3.0, ("red", "two"))):
        again = datasets.decode(*datasets.encode(record))
        assert again == record and type(again) is type(record)
    with_words = dataclasses.replace(_QUESTION, subtitles=(Subtitle(0, 1, "a"),))
    assert datasets.decode(*datasets.encode(with_words)) == with_words
    assert "subtitles" not in datasets.encode(_QUESTION)[1], "sets prepared before stay valid"
    question = datasets.decode(*datasets.encode(_QUESTION))
    assert isinstance(question, Question) and isinstance(question.kind, QuestionKind)


def test_preparing_twice_writes_once_and_other_records_replace_it(tmp_path):
    records = _records()
    datasets.write_splits(tmp_path, {"questions": records["questions"]})
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.array_record*")}
    assert files
    datasets.write_splits(tmp_path, {"questions": records["questions"]})
    assert {path: path.stat().st_mtime_ns for path in files} == files
    datasets.write_splits(tmp_path, {"questions": records["questions"][:3]})
    assert list(datasets.open_split(tmp_path, "questions")) == records["questions"][:3]


def test_preparing_goes_on_after_an_interruption(tmp_path, monkeypatch):
    records = {"questions": _records()["questions"]}

    def killed(record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            datasets.Records, "_generate_examples", lambda self, records: map(killed, records)
        )
        with pytest.raises(KeyboardInterrupt):
            datasets.write_splits(tmp_path, records)
    with pytest.raises(ValueError, match="no prepared data"):
        datasets.open_split(tmp_path, "questions")
    datasets.write_splits(tmp_path, records)
    assert list(datasets.open_split(tmp_path, "questions")) == records["questions"]


def test_unknown_and_empty_splits_are_named(prepared, tmp_path):
    with pytest.raises(ValueError, match="'train'.*captions, main, questions, windows"):
        datasets.open_split(prepared, "train")
    with pytest.raises(ValueError, match="heldout"):
        datasets.write_splits(tmp_path, {"heldout": []})


def test_bad_videos_are_named_with_the_reason(small_world, tmp_path):
    paths = [v.path for v in small_world.videos]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((small_world.folder / path).read_bytes())
    assert datasets.check_videos(paths, tmp_path) == {}
    (tmp_path / paths[0]).unlink()
    (tmp_path / paths[2]).write_bytes(b"")
    progress = []
    bad = datasets.check_videos(paths, tmp_path, progress=lambda *step: progress.append(step))
    assert bad == {paths[0]: "no such file", paths[2]: "the file is empty"}
    assert progress == [(n, 4) for n in (1, 2, 3, 4)]


def test_every_kind_of_record_names_its_video():
    for records in _records().values():
        for record in records:
            shown = record.clips[0].path if isinstance(record, Conversation) else record.video
            assert datasets.video_of(record) == shown


def test_tensorflow_is_never_imported():
    code = "import sys; from paravt_jax.data import datasets, loader; raise SystemExit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
