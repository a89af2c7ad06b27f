"""Options of all benchmarks in one form; shuffling keeps the right answer right."""

from __future__ import annotations

import pytest

from rollout.evaluation.benchmarks import BrokenRecord, options_of
from rollout.evaluation.files import VideoFolder


@pytest.mark.parametrize("wrong", [None, [], ["one"], ["one", ""], ["one", None], "one"])
def test_missing_or_incomplete_options_are_refused(wrong):
    with pytest.raises(BrokenRecord):
        options_of(wrong)


@pytest.mark.parametrize("unused", [None, "", "N/A"])
def test_unused_options_are_dropped_only_at_the_end(unused):
    assert options_of(["one", "two", unused, unused]) == ("one", "two")
    # Without the gap, index 2 and letter C would name no option, or another one.
    with pytest.raises(BrokenRecord, match="missing before the last one"):
        options_of(["one", unused, "two"])


def test_videos_are_found_where_archives_put_them(tmp_path):
    paths = (
        *("data/a.mp4", "b.mp4", "part_1/c.mp4", "x/d.mp4", "y/d.mp4"),
        *("videos/Chemistry/7.mp4", "videos/Art/7.mp4", "videos/Art/8.mp4"),
    )
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    folder = VideoFolder(tmp_path)
    assert folder.find("data/a.mp4") == "data/a.mp4"
    # One folder less, and one more.
    assert folder.find("data/b.mp4") == "b.mp4"
    assert folder.find("c.mp4") == "part_1/c.mp4"
    assert folder.find("Chemistry/7.mp4") == "videos/Chemistry/7.mp4"
    # Two files have this name.
    assert folder.find("d.mp4") is None
    assert folder.find("videos/Art/7.mp4") == "videos/Art/7.mp4"
    # Another subject's.
    assert folder.find("videos/Biology/8.mp4") is None
    assert folder.find("videos/Art/9.mp4") is None
    with pytest.raises(FileNotFoundError, match="--data .*nowhere"):
        VideoFolder(tmp_path / "nowhere")
