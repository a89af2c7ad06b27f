"""Frames read ahead by other processes equal those that are read directly."""

from __future__ import annotations

import dataclasses
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import frame_reader, video
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings, ReadFrames, ReadTask
from paravt_jax.data.frames import VideoError, overview_indices, resize
from paravt_jax.data.sizes import smart_resize


@pytest.fixture(scope="module")
def reader():
    with FrameReader(ReaderSettings(workers=2)) as reader:
        yield reader


@pytest.fixture
def clip(small_world):
    return small_world.folder / small_world.videos[0].path


def read_directly(path, indices):
    info = video.probe(path)
    size = smart_resize(info.height, info.width, 784, 50_176, 32)
    return np.stack([resize(frame, size) for frame in video.read(path, indices)])


def test_frames_equal_those_of_video_read_and_resize(reader, clip):
    expected = read_directly(clip, [0, 60, 50])
    late = reader.late
    np.testing.assert_array_equal(reader.read(clip, [0, 60, 50]), expected)
    assert reader.late == late + 1
    reader.ahead(clip, [0, 50, 60, 7])
    np.testing.assert_array_equal(reader.read(clip, [0, 60, 50]), expected)
    assert reader.late == late + 1


def test_one_request_serves_a_probe_and_an_overview(reader, clip):
    late = reader.late
    reader.ahead(clip, 4)
    info = reader.probe(clip)
    expected = video.probe(clip)
    assert (info.frames, info.duration) == (expected.frames, expected.duration)
    np.testing.assert_array_equal(info.times, expected.times)
    indices = overview_indices(info.frames, 4)
    np.testing.assert_array_equal(reader.read(clip, indices), read_directly(clip, indices))
    assert reader.late == late


def test_each_of_several_requests_for_one_file_is_served(reader, clip):
    late = reader.late
    for indices in ([1, 2], [30, 31], [1, 2]):
        reader.ahead(clip, indices)
    for indices in ([30], [2, 1], [1, 2]):
        np.testing.assert_array_equal(reader.read(clip, indices), read_directly(clip, indices))
    assert reader.late == late
    reader.read(clip, [1])
    assert reader.late == late + 1


def test_forgotten_frames_are_read_again(reader, clip):
    late = reader.late
    reader.ahead(clip, [3])
    reader.forget()
    np.testing.assert_array_equal(reader.read(clip, [3]), read_directly(clip, [3]))
    assert reader.late == late + 1


def test_a_bad_file_is_an_error_when_it_is_read_and_not_before(reader, clip, tmp_path):
    whole = clip.read_bytes()
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.mp4").write_bytes(whole.replace(b"avc1", b"zzzz"))
    for path, reason in (
        (tmp_path / "gone.mp4", "no such file"),
        (tmp_path / "half.mp4", "half.mp4"),
        (tmp_path / "foreign.mp4", "codec"),
        (tmp_path / ("a" * 300), "name too long"),
    ):
        reader.ahead(path, [0])
        with pytest.raises(VideoError, match=reason):
            reader.read(path, [0])
        with pytest.raises(VideoError, match=reason):
            reader.probe(path)


def test_a_frame_that_does_not_exist_is_an_error_of_its_request_only(reader, clip):
    reader.ahead(clip, [10**6])
    assert reader.probe(clip).frames < 10**6
    with pytest.raises(IndexError):
        reader.read(clip, [10**6])
    reader.ahead(clip, [10**6])
    np.testing.assert_array_equal(reader.read(clip, [0]), read_directly(clip, [0]))


def test_a_shape_that_cannot_be_shown_is_a_bad_file(reader, tmp_path):
    Image.new("RGB", (900, 3)).save(tmp_path / "thin.png")
    with pytest.raises(VideoError, match="thin.png.*3 x 900"):
        reader.read(tmp_path / "thin.png", [0])


def read_or_hang(task: ReadTask) -> ReadFrames:
    """Stands for a decoder that hangs on one file."""
    if task.path.endswith("hangs.mp4"):
        time.sleep(300)
    return frame_reader.read_in_worker(task)


def test_a_file_beyond_its_deadline_is_a_bad_file(clip, tmp_path, monkeypatch):
    for name in ("hangs.mp4", "good.mp4"):
        shutil.copyfile(clip, tmp_path / name)
    # The worker process imports this function by its name, so the patch reaches it.
    monkeypatch.setattr(frame_reader, "read_in_worker", read_or_hang)
    with FrameReader(ReaderSettings(workers=1, deadline=5)) as reader:
        with pytest.raises(VideoError, match="5 s"):
            reader.read(tmp_path / "hangs.mp4", [0])
        # A new process reads the next file.
        assert len(reader.read(tmp_path / "good.mp4", [0])) == 1


def test_the_oldest_requests_are_dropped_beyond_the_limit(clip, tmp_path):
    paths = [tmp_path / f"{n}.mp4" for n in range(5)]
    for path in paths:
        shutil.copyfile(clip, path)
    with FrameReader(ReaderSettings(workers=1, ready=2)) as reader:
        for path in paths:
            reader.ahead(path, [0])
        late = []
        for path in paths:
            before = reader.late
            reader.read(path, [0])
            late.append(reader.late > before)
    assert late == [True, True, True, False, False]


@pytest.mark.parametrize("field", ["workers", "ready", "deadline"])
def test_impossible_settings_are_refused(field):
    with pytest.raises(ValueError, match=f"reader.{field}: 0"):
        dataclasses.replace(ReaderSettings(), **{field: 0})
