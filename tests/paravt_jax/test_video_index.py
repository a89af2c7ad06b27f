"""Packet indexes: frames equal a decode of the whole file, little is read, and indexes are kept.

What these tests guard:
1. Whatever the codec, container and keyframes, frame n is frame n of a decode of the whole file.
2. A request opens its file once, and reads what lies between keyframes and wanted frames.
3. An index is built once. A stale or damaged one is never used.
"""

from __future__ import annotations

import hashlib
import os
import pathlib

import av
import numpy as np
import pytest

from paravt_jax.data import video, video_index
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import PixelRules, ReadTask
from tests.clips import REORDERED, write

# Distances between keyframes, and B-frames that refer across them.
OPEN_GOP = {"x264-params": "open-gop=1:keyint=12:bframes=3:scenecut=0"}
# Pictures are refreshed column by column. Frames that are marked as keyframes are none.
REFRESH = {"x264-params": "intra-refresh=1:keyint=20:bframes=0"}
# Files in which every frame can be reached by a seek.
SEEKABLE = {
    "long_gop.mp4": ("libx264", {"g": "250", "bf": "3"}),
    "open_gop.mp4": ("libx264", OPEN_GOP),
    "open_gop.mkv": ("libx264", OPEN_GOP),
    "open_gop.flv": ("libx264", OPEN_GOP),
    "open_gop_hevc.mp4": ("libx265", {"x265-params": "open-gop=1:keyint=12:log-level=none"}),
    "every_frame_a_key.mp4": ("libx264", {"g": "1"}),
    "interlaced.mkv": ("libx264", {"x264-params": "interlaced=1:keyint=20"}),
    "mpeg4.mp4": ("mpeg4", {"g": "12", "bf": "2"}),
    "mpeg4.avi": ("mpeg4", {"g": "12"}),
    "mpeg2.mkv": ("mpeg2video", {"g": "12", "bf": "2"}),
    "hidden_frames.webm": ("libvpx", {"g": "30", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "vp9.webm": ("libvpx-vp9", {"g": "30", "deadline": "realtime", "cpu-used": "8"}),
    "wmv.asf": ("wmv2", {"g": "12"}),
}
# Files that have to be decoded from the start, at least for some frames.
UNSEEKABLE = {
    "refresh.mp4": ("libx264", REFRESH),
    "refresh.mkv": ("libx264", REFRESH),
    "h264.ts": ("libx264", {"g": "20", "bf": "2"}),
    "mpeg2.mpg": ("mpeg2video", {"g": "12", "bf": "2"}),
    "h264_bframes.avi": ("libx264", {"g": "20", "bf": "2"}),
    "mpeg4_bframes.avi": ("mpeg4", {"g": "12", "bf": "2"}),
}


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    """Every test begins without indexes, in memory and on disk."""
    monkeypatch.setenv("PARAVT_VIDEO_INDEXES", str(tmp_path / "indexes"))
    video_index.forget()
    return tmp_path / "indexes"


@pytest.fixture
def opens(monkeypatch) -> list[str]:
    """The files that PyAV opens to read."""
    found = []

    def recording(file, *rest, real=av.open, **options):
        if "w" not in rest:
            found.append(str(getattr(file, "name", file)))
        return real(file, *rest, **options)

    monkeypatch.setattr(av, "open", recording)
    return found


def remux(source: pathlib.Path, target: pathlib.Path, cut: int) -> pathlib.Path:
    """Copy a clip without its first `cut` frames: an edit list hides them."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        assert stream.average_rate is not None and stream.time_base is not None
        shift = round(cut / stream.average_rate / stream.time_base)
        for packet in old.demux(stream):
            if packet.size:
                assert packet.pts is not None and packet.dts is not None
                packet.pts -= shift
                packet.dts -= shift
                packet.stream = copy
                new.mux(packet)
    return target


def plain_decode(path: pathlib.Path) -> list[str]:
    """Hashes of all frames, in the order in which PyAV returns them when it decodes everything."""
    found = []
    with av.open(str(path), metadata_errors="replace") as container:
        for frame in container.decode(container.streams.best("video")):
            assert isinstance(frame, av.VideoFrame)
            pixels = frame.to_ndarray(format="rgb24")
            found.append(digest(np.rot90(pixels, (frame.rotation // 90) % 4)))
    return found


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def assert_random_requests_are_right(path: pathlib.Path, requests: int = 25, seed: int = 0) -> None:
    expected = plain_decode(path)
    assert video.probe(path).frames == len(expected)
    rng = np.random.default_rng(seed)
    for _ in range(requests):
        wanted = rng.integers(0, len(expected), int(rng.integers(1, 8))).tolist()
        found = [digest(pixels) for pixels in video.read(path, wanted)]
        assert found == [expected[n] for n in wanted], f"frames {wanted} of {path.name}"


# --- pixels ---


@pytest.mark.parametrize("name", SEEKABLE)
def test_frames_reached_by_seeks_are_those_of_a_plain_decode(name, tmp_path, opens):
    codec, options = SEEKABLE[name]
    path = write(tmp_path / name, range(100), codec, options=options)
    assert_random_requests_are_right(path)
    for n in range(100):
        opens.clear()
        video.read(path, [n])
        assert opens == [str(path)]


@pytest.mark.parametrize("name", UNSEEKABLE)
def test_where_seeks_are_wrong_frames_come_from_the_start(name, tmp_path):
    codec, options = UNSEEKABLE[name]
    assert_random_requests_are_right(write(tmp_path / name, range(100), codec, options=options))


@pytest.mark.parametrize("name", ["steps.mp4", "steps.mkv"])
def test_a_variable_frame_rate_makes_no_difference(name, tmp_path):
    steps = np.random.default_rng(0).integers(10, 200, 100)
    path = write(tmp_path / name, range(100), options=REORDERED, milliseconds=np.cumsum(steps))
    np.testing.assert_allclose(np.diff(video.probe(path).times), steps[1:] / 1000, atol=2e-3)
    assert_random_requests_are_right(path)


@pytest.mark.parametrize("cut", [3, 11])
def test_frames_that_an_edit_list_hides_are_not_counted(cut, tmp_path):
    whole = write(tmp_path / "whole.mp4", range(100), options=REORDERED)
    path = remux(whole, tmp_path / "cut.mp4", cut)
    assert video.probe(path).frames == 100 - cut
    assert_random_requests_are_right(path)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_false_marks_of_keyframes_are_found_out(codec, tmp_path):
    """Without a table of keyframes, every frame of an mp4 file counts as one."""
    path = write(tmp_path / "clip.mp4", range(100), codec)
    path.write_bytes(path.read_bytes().replace(b"stss", b"free"))
    assert_random_requests_are_right(path)


def every_clip(assets: pathlib.Path) -> list[pathlib.Path]:
    suffixes = {".avi", ".mkv", ".mov", ".mp4", ".mpg", ".ts", ".webm"}
    broken = {"audio_only.mp4", "corrupted.mp4"}
    files = (assets / "videos").rglob("*")
    return sorted(f for f in files if f.suffix in suffixes and f.name not in broken)


@pytest.mark.slow
def test_every_frame_of_every_clip_is_that_of_a_plain_decode(assets):
    for path in every_clip(assets):
        expected = plain_decode(path)
        # In pieces, so that many large frames fit in memory.
        for first in range(0, len(expected), 400):
            wanted = range(first, min(first + 400, len(expected)))
            for decoder in ("pyav", "decord"):
                found = [digest(pixels) for pixels in video.read(path, wanted, decoder=decoder)]
                assert found == expected[wanted.start : wanted.stop], (path.name, decoder)


# --- what is read ---


def test_an_overview_decodes_no_frame_twice_and_skips_what_it_can(tmp_path, monkeypatch):
    path = write(tmp_path / "clip.mp4", range(200))
    video.probe(path)
    decoded = []

    def recording(*arguments, real=video.decode):
        for frame in real(*arguments):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video, "decode", recording)
    video.read(path, [0, 101, 103, 199])
    assert len(decoded) == len(set(decoded)) <= 18


# --- the store ---


def test_an_index_is_built_once_for_all_processes(tmp_path, opens):
    path = write(tmp_path / "clip.mp4", range(100))
    first = video.probe(path)
    opens.clear()
    video_index.forget()
    again = video.probe(path)
    np.testing.assert_array_equal(first.times, again.times)
    assert (first.duration, first.width) == (again.duration, again.width)
    linked = tmp_path / "link.mp4"
    linked.symlink_to(path)
    video.probe(linked)
    assert not opens


def test_a_replaced_file_gets_a_new_index(tmp_path):
    path = write(tmp_path / "clip.mp4", range(30))
    assert video.probe(path).frames == 30
    os.replace(write(tmp_path / "other.mp4", range(20)), path)
    assert video.probe(path).frames == 20
    assert_random_requests_are_right(path, requests=3)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_index_is_built_again(damage, tmp_path, fresh_folder, opens):
    path = write(tmp_path / "clip.mp4", range(30))
    expected = video.probe(path)
    (kept,) = fresh_folder.iterdir()
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = {"cut": whole[:-9], "flip": bytes(flipped), "empty": b"", "other": b"x" * 400}
    kept.write_bytes(damaged[damage])
    opens.clear()
    video_index.forget()
    np.testing.assert_array_equal(video.probe(path).times, expected.times)
    assert opens
    assert len(kept.read_bytes()) == len(whole)


def test_many_processes_build_one_index(tmp_path, fresh_folder):
    path = write(tmp_path / "clip.mp4", range(100))
    expected = plain_decode(path)
    with FrameReader(workers=3) as reader:
        task = ReadTask(str(path), (5, 77), PixelRules())
        reads = [reader.request(task) for _ in range(6)]
        assert {read.result().info.frames for read in reads} == {100}
    assert len(list(fresh_folder.iterdir())) == 1
    video_index.forget()
    assert [digest(pixels) for pixels in video.read(path, [5, 77])] == [expected[5], expected[77]]


def test_a_user_without_a_home_reads_videos(tmp_path, monkeypatch):
    monkeypatch.delenv("PARAVT_VIDEO_INDEXES")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert video.probe(write(tmp_path / "a.mp4", range(3))).frames == 3
