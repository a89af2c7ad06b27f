"""Overviews are read ahead in processes: the same pixels, in bounded memory."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError, overview_indices
from paravt_jax.data.sizes import PixelRules
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.ahead import ReadAhead
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.sharing import Deal, Peers, units_of

RULES = PixelRules(max_pixels=4096)


@pytest.fixture
def folder(small_world, tmp_path):
    for number in range(6):
        source = small_world.folder / small_world.videos[number % 4].path
        shutil.copy(source, tmp_path / f"v{number}.mp4")
    (tmp_path / "v4.mp4").write_bytes(b"noise" * 100)
    return VideoFolder(tmp_path)


def items(*names: str) -> list[Item]:
    return [
        Item(Question(str(n), name, "?", QuestionKind.OPEN_ENDED, "x"))
        for n, name in enumerate(names)
    ]


def test_pixels_are_the_same_and_only_overviews_are_read_ahead(folder, monkeypatch):
    direct: list[str] = []
    read = video.read

    def noting(path, indices, rules):
        direct.append(path.name)
        return read(path, indices, rules)

    monkeypatch.setattr(video, "read", noting)
    names = [f"v{n}.mp4" for n in (0, 1, 2, 3, 5)]
    deal = Deal(units_of(items(*names, "gone.mp4"), 2), Peers())
    with ReadAhead(folder, frames=4, rules=RULES, count=2) as ahead:
        for item in ahead.items(deal):
            if item.question.video == "gone.mp4":
                continue
            path = folder.root / item.question.video
            indices = overview_indices(ahead.probe(path).frames, 4).tolist()
            expected = read(path, indices, RULES)
            assert np.array_equal(ahead.read(path, indices, RULES), expected)
            # A crop of the same video, and the overview again.
            assert np.array_equal(ahead.read(path, [1], RULES), read(path, [1], RULES))
            assert len(ahead._requested) <= 2
    # The first two are taken at once; the others were requested before they were read.
    assert [direct.count(name) for name in names] == [2, 2, 1, 1, 1], "crops are read when asked"


def test_an_unreadable_file_is_the_same_error(folder):
    deal = Deal(units_of(items("v0.mp4", "v4.mp4"), 1), Peers())
    with ReadAhead(folder, frames=4, rules=RULES, count=1) as ahead:
        assert len(list(ahead.items(deal))) == 2
        with pytest.raises(VideoError, match=r"v4\.mp4"):
            ahead.probe(folder.root / "v4.mp4")


def test_questions_that_are_left_out_do_not_end_reading_ahead(folder):
    names = [f"v{n}.mp4" for n in (0, 4, 1, 2, 3, 5)]
    deal = Deal(units_of(items(*names), 1), Peers())
    with ReadAhead(folder, frames=4, rules=RULES, count=2) as ahead:
        requested: list[str] = []
        for _ in ahead.items(deal):  # nothing is read
            requested += [name for name in ahead._requested.values() if name not in requested]
    assert requested == names[2:], "the first two are taken at once"
    assert not ahead._requested
