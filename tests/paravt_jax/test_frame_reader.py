from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import frame_reader as frames
from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import VideoError, overview_indices, resize
from paravt_jax.data.sizes import smart_resize


@pytest.fixture(scope="module")
def reader():
    with FrameReader(ReaderSettings(workers=2)) as reader:
        yield reader


@pytest.fixture
def clip(small_world):
    return small_world.folder / small_world.videos[0].path


def plainly(path, indices):
    info = video.probe(path)
    size = smart_resize(info.height, info.width, 784, 50_176, 32)
    return np.stack([resize(frame, size) for frame in video.read(path, indices)])


def test_frames_are_those_of_video_read_and_resize(reader, clip):
    expected = plainly(clip, [0, 60, 50])
    late = reader.late
    np.testing.assert_array_equal(reader.read(clip, [0, 60, 50]), expected)
    assert reader.late == late + 1
    reader.ahead(clip, [0, 50, 60, 7])
    np.testing.assert_array_equal(reader.read(clip, [0, 60, 50]), expected)
    assert reader.late == late + 1


def test_an_overview_and_a_probe_come_from_one_reading(reader, clip):
    reader.ahead(clip, 4)
    late, info, expected = reader.late, reader.probe(clip), video.probe(clip)
    assert (info.frames, info.duration) == (expected.frames, expected.duration)
    np.testing.assert_array_equal(info.times, expected.times)
    indices = overview_indices(info.frames, 4)
    np.testing.assert_array_equal(reader.read(clip, indices), plainly(clip, indices))
    assert reader.late == late


def test_several_askings_for_one_file_are_each_served(reader, clip):
    late = reader.late
    for indices in ([1, 2], [30, 31], [1, 2]):
        reader.ahead(clip, indices)
    for indices in ([30], [2, 1], [1, 2]):
        np.testing.assert_array_equal(reader.read(clip, indices), plainly(clip, indices))
    assert reader.late == late
    reader.read(clip, [1])
    assert reader.late == late + 1


def test_what_was_forgotten_is_read_anew(reader, clip):
    late = reader.late
    reader.ahead(clip, [3])
    reader.forget()
    np.testing.assert_array_equal(reader.read(clip, [3]), plainly(clip, [3]))
    assert reader.late == late + 1


def test_a_bad_file_is_an_error_when_it_is_read_and_not_before(reader, clip, tmp_path):
    whole = clip.read_bytes()
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.mp4").write_bytes(whole.replace(b"avc1", b"zzzz"))
    for path, words in (
        (tmp_path / "gone.mp4", "no such file"),
        (tmp_path / "half.mp4", "half.mp4: it "),
        (tmp_path / "foreign.mp4", "codec of its video is unknown"),
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        reader.ahead(path, [0])
        with pytest.raises(VideoError, match=words):
            reader.read(path, [0])
        with pytest.raises(VideoError, match=words):
            reader.probe(path)
    reader.ahead(clip, [10**6])
    assert reader.probe(clip).frames < 10**6
    with pytest.raises(IndexError):
        reader.read(clip, [10**6])


def test_a_shape_that_cannot_be_shown_is_a_bad_file(reader, tmp_path):
    Image.new("RGB", (900, 3)).save(tmp_path / "thin.png")
    with pytest.raises(VideoError, match="longer side is at most 200 times the shorter"):
        reader.read(tmp_path / "thin.png", [0])


def read_but_hang(task):
    """The work of a reader's process, in which the decoder hangs on one file."""
    if task.path.endswith("hangs.mp4"):
        time.sleep(300)
    return frames._read(task)


def test_a_file_beyond_its_deadline_is_a_bad_one(clip, tmp_path, monkeypatch):
    """The next file is read as ever."""
    for name in ("hangs.mp4", "good.mp4"):
        shutil.copyfile(clip, tmp_path / name)
    monkeypatch.setattr(frames, "_read", read_but_hang)  # it reaches the process by its name
    with FrameReader(ReaderSettings(workers=1, deadline=5)) as reader:
        with pytest.raises(VideoError, match="longer than 5 s"):
            reader.read(tmp_path / "hangs.mp4", [0])
        assert len(reader.read(tmp_path / "good.mp4", [0])) == 1
        with pytest.raises(VideoError, match="no such file"):
            reader.read(tmp_path / "gone.mp4", [0])


def test_no_more_is_kept_ready_than_allowed(clip):
    with FrameReader(ReaderSettings(workers=1, ready=2)) as reader:
        for n in range(5):
            reader.ahead(clip.with_name(f"{n}.mp4"), [0])
        assert list(reader._asked) == [str(clip.with_name(f"{n}.mp4")) for n in (3, 4)]


@pytest.mark.parametrize("field", ["workers", "ready", "deadline"])
def test_settings_that_cannot_work_are_refused(field):
    with pytest.raises(ValueError, match=f"reader.{field}: 0"):
        ReaderSettings(**{field: 0})
