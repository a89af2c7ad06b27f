"""Video files: every frame under its number, by either decoder, and every kind of bad file."""

from __future__ import annotations

import itertools
import pathlib

import av
import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import video
from paravt_jax.data.frames import (
    PixelRules,
    VideoError,
    VideoInfo,
    join,
    overview_indices,
    window_indices,
)
from paravt_jax.world import videos as world
from tests.clips import write

FOR_DECORD = (
    "syn_60s_30fps_bframes.mp4",
    "syn_h264_opengop.mkv",
    "syn_hevc_opengop.mp4",
    "syn_vfr.mkv",
    "syn_vfr.mp4",
    "syn_vp9.webm",
)
LARGE = PixelRules(max_pixels=602_112)
NOT_FOR_DECORD = ("syn_mpeg2.mpg", "syn_mpeg4.avi", "syn_odd_size.mkv", "syn_ts.ts")


def drawn_number(frame: np.ndarray) -> int:
    """The number that a synthetic clip shows: 16 black or white blocks in the top quarter."""
    height, width = frame.shape[:2]
    number = 0
    for bit in range(16):
        centre = frame[height // 8, int((bit + 0.5) * width / 16)]
        number |= int(centre.mean() > 128) << bit
    return number


def info_of(times) -> VideoInfo:
    times = np.asarray(times, np.float64)
    return VideoInfo(len(times), float(times[-1] + 1), times, 32, 32)


def test_probe_lists_a_world_video(small_world):
    info = video.probe(small_world.folder / small_world.videos[0].path)
    assert (info.frames, info.duration, info.width, info.height) == (world.FRAMES, 128.0, 32, 32)
    assert info.times.tolist() == list(range(0, 128, 2))


def test_frames_come_in_the_order_asked_for(small_world):
    path = small_world.folder / small_world.videos[0].path
    everything = video.read(path, range(64))
    order = [63, 3, 40, 3, 0]
    assert everything.dtype == np.uint8
    assert everything.shape == (64, 32, 32, 3)
    np.testing.assert_array_equal(video.read(path, order), everything[order])


def test_a_decoder_that_is_not_installed_is_refused(small_world, monkeypatch):
    monkeypatch.setattr(video, "decord", None)
    with pytest.raises(ValueError, match="decoder: decord.*pip install"):
        video.read(small_world.folder / small_world.videos[0].path, [0], decoder="decord")


@pytest.mark.parametrize("wanted", [[64], [-1]])
def test_frames_that_do_not_exist_are_refused(small_world, wanted):
    with pytest.raises(VideoError, match="frame"):
        video.read(small_world.folder / small_world.videos[0].path, wanted)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"these are words, not pictures\n" * 50, "decoded .*; fetch or convert it again"),
        (bytes(range(256)) * 40, "decoded"),
    ],
)
def test_every_bad_file_is_a_video_error(tmp_path, content, reason):
    path = tmp_path / "bad.mp4"
    if content is not None:
        path.write_bytes(content)
    for use in (video.probe, lambda p: video.read(p, [0])):
        with pytest.raises(VideoError, match=reason) as caught:
            use(path)
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "codec", "mark"),
    [
        ("clip.mp4", "libx264", b"avc1"),
        ("clip.mkv", "libx264", b"MPEG4/ISO/AVC"),
        ("clip.avi", "mpeg4", b"FMP4"),
    ],
)
def test_an_unknown_codec_is_refused_with_a_remedy(tmp_path, name, codec, mark):
    path = write(tmp_path / name, range(10), codec)
    path.write_bytes(path.read_bytes().replace(mark, b"z" * len(mark)))
    for use in (video.probe, lambda p: video.read(p, [0])):
        with pytest.raises(VideoError, match="codec.*H.264"):
            use(path)


@pytest.mark.parametrize("name", ["end.mp4", "front.mp4", "clip.mkv"])
@pytest.mark.parametrize("share", [0.02, 0.4, 0.8])
def test_truncated_files_are_refused(tmp_path, name, share):
    muxer = {"movflags": "faststart"} if name == "front.mp4" else {}
    path = write(tmp_path / name, range(100), muxer=muxer)
    assert video.probe(path).frames == 100
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(VideoError):
        video.probe(path)


@pytest.mark.parametrize(
    ("rules", "size", "tokens"),
    [
        (PixelRules(), (720, 1280), 45),
        (LARGE, (720, 1280), 576),
        (LARGE, (360, 640), 220),
    ],
)
def test_tokens_of_known_frames(rules, size, tokens):
    assert rules.tokens(*size) == tokens


@pytest.mark.parametrize("rules", [PixelRules(), LARGE])
def test_no_ordinary_frame_has_more_tokens_than_the_bound(rules):
    sides = range(60, 2000, 67)
    for height, width in itertools.product(sides, sides):
        if max(height, width) <= 3.5 * min(height, width):
            assert rules.tokens(height, width) <= rules.most_tokens
    assert rules.most_tokens < 1.5 * rules.tokens(720, 1280)


def test_an_overview_spans_the_video():
    assert overview_indices(128, 4).tolist() == [0, 42, 85, 127]
    assert overview_indices(3, 8).tolist() == [0, 1, 2]
    assert overview_indices(10, 1).tolist() == [0]
    assert overview_indices(10, 10).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, 16), list(range(16))),
        ((16, 32), list(range(16, 32))),
        ((112, 128), list(range(112, 128))),
        ((112, 500), list(range(112, 128))),
        ((-4, 2), [0, 1]),
        ((3.2, 7.9), [4, 5, 6, 7]),
        ((0, 128), list(range(0, 128, 8))),
        # Between two frames: the one on screen.
        ((5.2, 5.6), [5]),
        ((127.5, 128), [127]),
        ((400, 500), [127]),
    ],
)
def test_window_indices_at_one_frame_a_second(window, expected):
    assert window_indices(info_of(range(128)), *window).tolist() == expected


def test_window_indices_follow_timestamps_not_the_average_rate():
    info = info_of([0.0, 0.1, 0.2, 0.3, 5.0, 6.0, 7.0, 7.5, 30.0])
    assert window_indices(info, 0, 8).tolist() == [0, 3, 4, 5, 6]
    assert window_indices(info, 10, 20).tolist() == [7]
    fast = info_of(np.arange(3000) / 30)
    assert window_indices(fast, 10, 20, fps=2, limit=16).size == 16
    assert window_indices(fast, 10, 14).tolist() == [300, 330, 360, 390]


@pytest.mark.parametrize("window", [(5, 5), (6, 5), (float("nan"), 5)])
def test_impossible_windows_are_refused(window):
    with pytest.raises(ValueError, match="window"):
        window_indices(info_of(range(10)), *window)


@pytest.mark.parametrize("name", FOR_DECORD + NOT_FOR_DECORD)
def test_both_decoders_give_exactly_the_frames_asked_for(assets, name, monkeypatch):
    path = assets / "videos/synthetic" / name
    wanted = np.random.default_rng(0).permutation(video.probe(path).frames)[:24]
    assert [drawn_number(frame) for frame in video.read(path, wanted)] == wanted.tolist()
    decord = pytest.importorskip("decord")
    if name in FOR_DECORD:
        # Nothing else reads it.
        monkeypatch.setattr(av, "open", None)
    else:
        monkeypatch.setattr(decord, "VideoReader", None)
    found = video.read(path, wanted, decoder="decord")
    assert [drawn_number(frame) for frame in found] == wanted.tolist()


@pytest.mark.parametrize(
    ("name", "frames", "duration", "shape"),
    [
        ("bottle_40s_h264_bframes_cc-by.mp4", 1189, 39.85, (360, 640)),
        ("car_30s_h264_12.5fps_cc-by.mp4", 377, 30.16, (432, 768)),
        ("asl_bird_2s_h264_startpts_cc-by.mkv", 63, 2.1, (480, 640)),
        # The better of two video streams.
        ("nasa_13013.mp4", 390, 13.0, (270, 480)),
        ("av1_video.mkv", 125, 5.0, (360, 640)),
        ("h265_video.mp4", 10, 1.0, (128, 128)),
        ("h264_10bits.mp4", 30, 1.0, (200, 200)),
        # Recorded sideways, shown upright.
        ("video_90.mov", 3, 0.1, (568, 320)),
        ("unordered.mov", 4, 0.12, (50, 50)),
    ],
)
def test_real_clips(assets, name, frames, duration, shape):
    path = assets / "videos" / name
    info = video.probe(path)
    assert info.frames == frames
    assert info.times[0] == 0
    assert info.duration == pytest.approx(duration, abs=0.04)
    wanted = [frames - 1, 0, frames // 2]
    assert video.read(path, wanted).shape == (3, *shape, 3)


def test_damage_in_the_middle_is_found_when_it_is_read(assets):
    path = assets / "videos/corrupted.mp4"
    with pytest.raises(VideoError, match="decoded"):
        video.read(path, range(video.probe(path).frames))


# --- files from strangers ---


@pytest.fixture
def elsewhere(tmp_path) -> pathlib.Path:
    """A video that other files refer to."""
    (tmp_path / "elsewhere").mkdir()
    return write(tmp_path / "elsewhere" / "private.mp4", range(10))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "list.m3u8",
            "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXT-X-VERSION:3\n#EXTINF:5,\n{}\n#EXT-X-ENDLIST\n",
        ),
        ("list.mp4", "ffconcat version 1.0\nfile '{}'\n"),
    ],
)
def test_a_playlist_opens_no_other_file(tmp_path, elsewhere, name, content):
    path = tmp_path / name
    path.write_text(content.format(elsewhere))
    with pytest.raises(VideoError, match="none of mov, mp4, matroska"):
        video.probe(path)


def test_a_picture_is_opened_in_the_listed_formats_only(tmp_path):
    path = tmp_path / "drawing.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    with pytest.raises(VideoError, match="none of BMP, JPEG, PNG, WEBP"):
        video.probe(path)


def test_a_picture_is_upright_and_on_white(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    exif = Image.Exif()
    # A quarter turn to the left, which the EXIF orientation 6 reverses.
    exif[0x0112] = 6
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(video.read(tmp_path / "turned.png", [0])[0], pixels)
    Image.new("RGBA", (64, 48)).save(tmp_path / "clear.png")
    assert (video.read(tmp_path / "clear.png", [0]) == 255).all()


def test_frames_that_are_too_large_are_not_decoded(tmp_path):
    path = tmp_path / "large.png"
    Image.new("1", (9_000, 9_000)).save(path)
    with pytest.raises(VideoError, match="9000 x 9000 pixels; at most 67,108,864"):
        video.probe(path)


def test_a_name_or_a_link_leads_to_no_file_outside_the_folder(tmp_path, elsewhere):
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "link.mp4").symlink_to(elsewhere)
    (root / "folder").symlink_to(elsewhere.parent)
    (root / "inner" / "own.mp4").write_bytes(elsewhere.read_bytes())
    (root / "alias.mp4").symlink_to("inner/own.mp4")
    for name in ("link.mp4", "folder/private.mp4", "../elsewhere/private.mp4", str(elsewhere)):
        with pytest.raises(VideoError, match=f"it is at {elsewhere}, outside {root}"):
            join(root, name)
    for name in ("", "a\0.mp4", "https://host/a.mp4"):
        with pytest.raises(VideoError, match="no such file"):
            video.probe(join(root, name))
    # The hub's cache links a data set's files to their blobs.
    snapshot = tmp_path / "datasets--owner--name" / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "datasets--owner--name" / "blobs" / "hash"
    blob.parent.mkdir()
    blob.write_bytes(elsewhere.read_bytes())
    (snapshot / "a.mp4").symlink_to(blob)
    assert video.probe(join(snapshot, "a.mp4")).frames == 10
    (tmp_path / "linked").symlink_to(root)
    for folder in (root, tmp_path / "linked"):
        assert video.probe(join(folder, "alias.mp4")).frames == 10
