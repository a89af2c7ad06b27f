"""What a video shows: the decoded frames decide, not the file's header.

Clips with known pictures and times (`tests.clips`). For each of them:
1. `probe` announces the size, the number of frames and the times at which a player shows them.
2. Every frame of every request has the announced size, and shows what a player shows at its time.
3. Times rise strictly.
4. ffmpeg, an independent player, agrees (marked parity).
"""

from __future__ import annotations

import pathlib
import re
import subprocess

import av
import av.error
import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError
from tests.clips import (
    CLIPS,
    LOSSLESS,
    ORIENTATIONS,
    RATE,
    add_cover,
    copy,
    number_in,
    turned,
    unordered,
    write,
)


@pytest.mark.parametrize("name", CLIPS)
def test_what_is_announced_is_what_is_shown(name, tmp_path):
    clip = CLIPS[name](tmp_path)
    info = video.probe(clip.path)
    assert (info.width, info.height) == clip.size
    assert info.frames == len(clip.numbers)
    np.testing.assert_allclose(info.times, clip.times, atol=clip.tolerance)
    assert (np.diff(info.times) > 0).all()
    assert info.duration >= info.times[-1]


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
@pytest.mark.parametrize("name", CLIPS)
def test_every_frame_has_the_announced_size_and_is_the_one_asked_for(name, decoder, tmp_path):
    if decoder == "decord":
        pytest.importorskip("decord")
    clip = CLIPS[name](tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(4):
        wanted = rng.integers(0, len(clip.numbers), 5).tolist()
        pixels = video.read(clip.path, wanted, decoder=decoder)
        assert pixels.shape[1:3] == clip.size[::-1]
        if not clip.turned:
            assert [number_in(frame) for frame in pixels] == [clip.numbers[n] for n in wanted]


@pytest.mark.parametrize("name", ORIENTATIONS)
def test_each_pixel_goes_where_the_display_matrix_says(name, tmp_path):
    shown = video.read(turned(tmp_path, name, ".mp4").path, [0])[0]
    stored = video.read(write(tmp_path / "stored.mp4", range(4), options=LOSSLESS), [0])[0]
    a, b, c, d = ORIENTATIONS[name]
    height, width = stored.shape[:2]
    for y, x in [(0, 0), (3, 50), (31, 63), (10, 20)]:
        column, row = a * x + c * y, b * x + d * y
        # Negative coordinates count from the other edge: the picture moves into view.
        column += (width - 1) * (a < 0) + (height - 1) * (c < 0)
        row += (width - 1) * (b < 0) + (height - 1) * (d < 0)
        assert shown[row, column].tolist() == stored[y, x].tolist()


def test_an_angle_between_quarter_turns_is_refused_by_name(tmp_path):
    path = write(tmp_path / "clip.mp4", range(4), matrix=(1, 1, -1, 1))
    with pytest.raises(VideoError, match="turned by 45 degrees.*encode it upright"):
        video.probe(path)


def test_sound_with_a_cover_picture_is_not_a_video(tmp_path):
    path = tmp_path / "podcast.mp4"
    with av.open(str(path), "w") as container:
        add_cover(container)
    with pytest.raises(VideoError, match="no video stream but a cover picture"):
        video.probe(path)


def test_a_clip_without_any_keyframe_is_refused_by_name(tmp_path):
    whole = write(tmp_path / "whole.mkv", range(9))
    path = copy([whole], tmp_path / "clip.mkv", skip=1)
    with pytest.raises(VideoError, match="none of its frames can be decoded; convert it"):
        video.probe(path)


def test_an_animation_is_not_taken_for_a_picture(tmp_path):
    pictures = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    pictures[0].save(tmp_path / "clip.webp", save_all=True, append_images=pictures[1:])
    with pytest.raises(VideoError, match="an animation; convert it to a video"):
        video.probe(tmp_path / "clip.webp")


def test_any_error_of_decord_leaves_the_file_to_pyav(tmp_path, monkeypatch):
    pytest.importorskip("decord")
    path = write(tmp_path / "clip.mp4", range(9))

    def fail(*_, **__):
        raise ZeroDivisionError("a fault that nobody has foreseen")

    monkeypatch.setattr("decord.VideoReader", fail)
    assert number_in(video.read(path, [3], decoder="decord")[0]) == 3


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_times_that_contradict_the_pictures_are_refused_by_name(suffix, tmp_path):
    with pytest.raises(VideoError, match="timestamps contradict the order of its pictures"):
        video.read(unordered(tmp_path, suffix), range(60))


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    for name in ("clip.mp4", "picture.png"):
        path = tmp_path / name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        with pytest.raises(VideoError, match="pointer of git-lfs.*git lfs pull"):
            video.probe(path)


def test_any_error_in_one_file_names_that_file(tmp_path, monkeypatch):
    path = write(tmp_path / "clip.mp4", range(9))
    video.probe(path)

    def fail(*_, **__):
        raise ZeroDivisionError("a fault that nobody has foreseen")

    monkeypatch.setattr(video, "resize", fail)
    with pytest.raises(VideoError, match="clip.mp4: .*ZeroDivisionError"):
        video.read(path, [3])


# --- ffmpeg ---


def shown_by_ffmpeg(path: pathlib.Path) -> tuple[list[float], np.ndarray]:
    """Times in seconds and RGB pixels of all frames that ffmpeg shows."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    command = [ffmpeg, "-threads", "1", "-i", str(path), "-an", "-fps_mode", "passthrough"]
    command += ["-vf", "format=rgb24,showinfo=checksum=0", "-f", "rawvideo", "-"]
    run = subprocess.run(command, capture_output=True)
    rows = re.findall(r"pts_time:(\S+) .*? s:(\d+)x(\d+)", run.stderr.decode(errors="replace"))
    times, widths, heights = zip(*rows, strict=True)
    # It scales all frames to the size of the first.
    width, height = int(widths[0]), int(heights[0])
    pixels = np.frombuffer(run.stdout, np.uint8).reshape(-1, height, width, 3)
    return [float(time) for time in times], pixels


@pytest.mark.parity
@pytest.mark.parametrize("name", CLIPS)
def test_ffmpeg_shows_the_same(name, tmp_path):
    clip = CLIPS[name](tmp_path)
    times, expected = shown_by_ffmpeg(clip.path)
    info = video.probe(clip.path)
    assert (info.frames, info.height, info.width) == expected.shape[:3]
    # Its clock begins at the first packet of any kind, and recordings meet by time of decoding.
    np.testing.assert_allclose(info.times, np.subtract(times, times[0]), atol=1.01 / RATE)
    pixels = video.read(clip.path, range(info.frames))
    # Scaled frames go through another filter.
    tolerance = 6 if name in ("call.webm", "call_vp8.webm", "joined_smaller") else 0.01
    difference = np.abs(pixels.astype(int) - expected).mean(axis=(1, 2, 3))
    assert difference.max() < tolerance
