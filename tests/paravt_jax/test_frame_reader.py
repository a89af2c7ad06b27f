"""Frames read ahead by other processes equal those that are read directly."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import (
    PixelRules,
    ReadFrames,
    ReadTask,
    VideoError,
    overview_indices,
    resize,
)


@pytest.fixture(scope="module")
def reader():
    with FrameReader(workers=2) as reader:
        yield reader


@pytest.fixture
def clip(small_world):
    return small_world.folder / small_world.videos[0].path


def read_directly(path, indices):
    info = video.probe(path)
    size = PixelRules().size(info.height, info.width)
    return np.stack([resize(frame, size) for frame in video.read(path, indices)])


def task_of(path, wanted) -> ReadTask:
    return ReadTask(str(path), wanted if isinstance(wanted, int) else tuple(wanted), PixelRules())


def read(reader, path, indices):
    """Request frames, and wait for them."""
    found = reader.request(task_of(path, indices)).result()
    assert set(indices) <= set(found.indices)
    return found.frames[[found.indices.index(n) for n in indices]]


def probe(reader, path):
    return reader.request(task_of(path, ())).result().info


def test_frames_equal_those_of_video_read_and_resize(reader, clip, late_reads):
    expected = read_directly(clip, [0, 60, 50])
    late = late_reads()
    np.testing.assert_array_equal(read(reader, clip, [0, 60, 50]), expected)
    assert late_reads() == late + 1
    reader.ahead(task_of(clip, [0, 50, 60, 7]))
    np.testing.assert_array_equal(read(reader, clip, [0, 60, 50]), expected)
    assert late_reads() == late + 1


def test_one_request_serves_the_length_and_an_overview(reader, clip, late_reads):
    late = late_reads()
    reader.ahead(task_of(clip, 4))
    info = probe(reader, clip)
    expected = video.probe(clip)
    assert (info.frames, info.duration) == (expected.frames, expected.duration)
    np.testing.assert_array_equal(info.times, expected.times)
    found = reader.request(task_of(clip, 4)).result()
    assert list(found.indices) == overview_indices(info.frames, 4).tolist()
    np.testing.assert_array_equal(found.frames, read_directly(clip, found.indices))
    assert late_reads() == late


def test_a_short_video_is_read_whole(reader, clip):
    found = reader.request(ReadTask(str(clip), 4, PixelRules(), whole=10**6)).result()
    assert found.indices == tuple(range(found.info.frames))
    np.testing.assert_array_equal(found.frames, read_directly(clip, found.indices))


def test_each_of_several_requests_for_one_file_is_served(reader, clip, late_reads):
    late = late_reads()
    for indices in ([1, 2], [30, 31], [1, 2]):
        reader.ahead(task_of(clip, indices))
    for indices in ([30], [2, 1], [1, 2]):
        np.testing.assert_array_equal(read(reader, clip, indices), read_directly(clip, indices))
    assert late_reads() == late
    read(reader, clip, [1])
    assert late_reads() == late + 1


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
        reader.ahead(task_of(path, [0]))
        with pytest.raises(VideoError, match=reason):
            read(reader, path, [0])
        with pytest.raises(VideoError, match=reason):
            probe(reader, path)


def test_frames_that_do_not_exist_are_not_read(reader, clip):
    reader.ahead(task_of(clip, [10**6]))
    assert probe(reader, clip).frames < 10**6
    assert reader.request(task_of(clip, (0, 10**6))).result().indices == ()
    np.testing.assert_array_equal(read(reader, clip, [0]), read_directly(clip, [0]))


def test_a_shape_that_cannot_be_shown_is_a_bad_file(reader, tmp_path):
    Image.new("RGB", (900, 3)).save(tmp_path / "thin.png")
    with pytest.raises(VideoError, match="thin.png.*3 x 900"):
        read(reader, tmp_path / "thin.png", [0])


def read_or_hang(task: ReadTask, decoder: str) -> ReadFrames:
    """Stands for a decoder that hangs on one file."""
    if task.path.endswith("hangs.mp4"):
        time.sleep(300)
    return video.carry_out(task, video.probe, video.read)


@pytest.mark.slow
def test_a_file_beyond_its_deadline_is_a_bad_file(clip, tmp_path, monkeypatch):
    for name in ("hangs.mp4", "good.mp4"):
        shutil.copyfile(clip, tmp_path / name)
    # The worker process imports this function by its name, so the patch reaches it.
    monkeypatch.setattr(video, "fetch", read_or_hang)
    with FrameReader(workers=1, deadline=5) as reader:
        with pytest.raises(VideoError, match="5 s"):
            read(reader, tmp_path / "hangs.mp4", [0])
        # A new process reads the next file.
        assert len(read(reader, tmp_path / "good.mp4", [0])) == 1


def test_the_oldest_requests_are_dropped_beyond_the_limit(clip, tmp_path, late_reads):
    paths = [tmp_path / f"{n}.mp4" for n in range(5)]
    for path in paths:
        shutil.copyfile(clip, path)
    with FrameReader(workers=1, ready=2) as reader:
        for path in paths:
            reader.ahead(task_of(path, [0]))
        late = []
        for path in paths:
            before = late_reads()
            read(reader, path, [0])
            late.append(late_reads() > before)
    assert late == [True, True, True, False, False]
