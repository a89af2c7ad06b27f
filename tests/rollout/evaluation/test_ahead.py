"""The overviews of the next questions are requested ahead, each once."""

from __future__ import annotations

import shutil

import pytest

from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import ReadTask, VideoError
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.replicas import Queue, ReadAhead, units_of


@pytest.fixture
def folder(small_world, tmp_path):
    for number in range(6):
        source = small_world.folder / small_world.videos[number % 4].path
        shutil.copy(source, tmp_path / f"v{number}.mp4")
    (tmp_path / "v4.mp4").write_bytes(b"noise" * 100)
    return VideoFolder(tmp_path)


def queue_of(ahead: ReadAhead, *names: str) -> Queue:
    items = [
        Item(Question(str(n), name, "?", QuestionKind.OPEN_ENDED, "x"))
        for n, name in enumerate(names)
    ]
    return Queue(units_of(items, 2), ahead)


def test_overviews_are_requested_ahead_except_the_first(folder, late_reads):
    names = [f"v{n}.mp4" for n in (0, 1, 2, 3, 5)]
    late = []
    with FrameReader(ReaderSettings(workers=1, ready=3)) as reader:
        ahead = ReadAhead(reader, folder, frames=4, count=2)
        for item in queue_of(ahead, *names, "gone.mp4").items():
            before = late_reads()
            path = str(folder.root / item.question.video)
            read = reader.request(ReadTask(path, 4, reader.settings.rules))
            if item.question.video in names:
                assert len(read.result().frames) == 4
            late.append(late_reads() > before)
    assert late == [True, True, False, False, False, True], "the first two are taken at once"


def test_an_unreadable_file_is_an_error_when_it_is_asked_for(folder):
    with FrameReader(ReaderSettings(workers=1)) as reader:
        ahead = ReadAhead(reader, folder, frames=4, count=1)
        assert len(list(queue_of(ahead, "v0.mp4", "v4.mp4").items())) == 2
        task = ReadTask(str(folder.root / "v4.mp4"), 4, reader.settings.rules)
        with pytest.raises(VideoError, match=r"v4\.mp4"):
            reader.request(task).result()


def test_a_video_is_requested_once(folder, monkeypatch):
    requested: list[str] = []
    with FrameReader(ReaderSettings(workers=1)) as reader:
        monkeypatch.setattr(reader, "ahead", lambda path, frames: requested.append(path.name))
        ahead = ReadAhead(reader, folder, frames=4, count=1)
        names = ("v0.mp4", "v1.mp4", "v0.mp4", "v2.mp4", "v1.mp4")
        assert len(list(queue_of(ahead, *names).items())) == len(names)
    assert requested == ["v1.mp4", "v2.mp4"]
