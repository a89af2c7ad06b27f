"""What a video shows: the decoded frames decide, not the file's header.

Every clip is made here, with known pictures and times. For each of them:
1. `probe` announces the size, the number of frames and the times at which a player shows them.
2. Every frame of every request has the announced size, and shows what a player shows at its time.
3. Times rise strictly.
4. ffmpeg, an independent player, agrees (marked parity).
"""

from __future__ import annotations

import dataclasses
import fractions
import pathlib
import re
import struct
import subprocess
from collections.abc import Callable, Sequence

import av
import numpy as np
import pytest
from av.container import OutputContainer
from av.stream import Disposition

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError

RATE = 25
LOSSLESS = {"qp": "0"}
# Clockwise quarter turns after a mirror image, as (a, b, c, d) of the display matrix. Columns grow
# to the right and rows downwards: (x, y) moves to (a x + c y, b x + d y).
ORIENTATIONS = {
    "upright": (1, 0, 0, 1),
    "right": (0, 1, -1, 0),
    "half": (-1, 0, 0, -1),
    "left": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "mirrored_right": (0, 1, 1, 0),
    "mirrored_half": (1, 0, 0, -1),
    "mirrored_left": (0, -1, -1, 0),
}


@dataclasses.dataclass
class Clip:
    """A file and what a player shows of it.

    Attributes:
        numbers: The number drawn into each frame.
        times: Seconds at which each frame is shown.
        size: Width and height.
    """

    path: pathlib.Path
    numbers: Sequence[int]
    times: Sequence[float]
    size: tuple[int, int] = (64, 32)


def picture(number: int, size: tuple[int, int] = (64, 32)) -> np.ndarray:
    """A picture that shows a number in eight grey blocks, brighter to the right and below."""
    width, height = size
    rows = np.linspace(0, 40, height, dtype=np.uint8)[:, None]
    bits = [(number >> bit) & 1 for bit in range(8)]
    columns = np.repeat(bits, -(-width // 8))[:width].astype(np.uint8) * 160 + 20
    shade = np.linspace(0, 30, width, dtype=np.uint8)
    return np.repeat((rows + columns + shade)[:, :, None], 3, axis=2)


def number_in(pixels: np.ndarray) -> int:
    """The number that a picture of any size shows."""
    height, width = pixels.shape[:2]
    centres = [int((bit + 0.5) * width / 8) for bit in range(8)]
    return sum(int(pixels[height // 2, x].mean() > 128) << bit for bit, x in enumerate(centres))


def write(
    path: pathlib.Path,
    numbers: Sequence[int],
    codec: str = "libx264",
    size: tuple[int, int] = (64, 32),
    options: dict[str, str] | None = None,
    matrix: tuple[int, int, int, int] = (1, 0, 0, 1),
    muxer: dict[str, str] | None = None,
) -> pathlib.Path:
    """Encode pictures at 25 frames per second."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=RATE, options=options or {"g": "10", "bf": "0"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv444p" if options == LOSSLESS else "yuv420p"
        a, b, c, d = (65536 * value for value in matrix)
        stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        for number in numbers:
            frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def copy(
    sources: Sequence[pathlib.Path],
    target: pathlib.Path,
    start: Callable[[int], float] = lambda n: 0.0,
    skip: int = 0,
) -> pathlib.Path:
    """Write the packets of files one after another, file n with its clock at `start(n)` seconds.

    The first `skip` packets are left out.
    """
    with av.open(str(target), "w") as new:
        stream = None
        for n, source in enumerate(sources):
            with av.open(str(source)) as old:
                stream = stream or new.add_stream_from_template(old.streams.video[0])
                for count, packet in enumerate(old.demux(old.streams.video[0])):
                    if packet.size and count >= skip:
                        assert packet.pts is not None and packet.dts is not None
                        shift = round(start(n) / packet.time_base)
                        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                        packet.stream = stream
                        new.mux(packet)
    return target


def at(count: int, start: float = 0.0) -> list[float]:
    return [start + n / RATE for n in range(count)]


def turned(folder: pathlib.Path, name: str, suffix: str) -> Clip:
    path = write(folder / f"clip{suffix}", range(4), options=LOSSLESS, matrix=ORIENTATIONS[name])
    size = (32, 64) if ORIENTATIONS[name][0] == 0 else (64, 32)
    return Clip(path, range(4), at(4), size)


def trimmed(folder: pathlib.Path, first: int, count: int) -> Clip:
    """A trim by edit list alone, as QuickTime writes it: all samples stay in the file."""
    path = write(folder / "clip.mp4", range(100))
    data = bytearray(path.read_bytes())
    movie, media, track, edit = (data.find(name) for name in (b"mvhd", b"mdhd", b"tkhd", b"elst"))
    (movie_scale,) = struct.unpack_from(">I", data, movie + 16)
    (media_scale,) = struct.unpack_from(">I", data, media + 16)
    length = round(count / RATE * movie_scale)
    struct.pack_into(">I", data, movie + 20, length)
    struct.pack_into(">I", data, track + 24, length)
    struct.pack_into(">II", data, edit + 12, length, round(first / RATE * media_scale))
    path.write_bytes(data)
    return Clip(path, range(first, first + count), at(count))


def headless(folder: pathlib.Path, suffix: str, codec: str, shown_from: int = 10) -> Clip:
    """A clip cut between two keyframes, so that its first six frames cannot be decoded."""
    whole = write(folder / f"whole{suffix}", range(60), codec)
    path = copy([whole], folder / f"clip{suffix}", skip=4)
    numbers = range(shown_from, 60)
    return Clip(path, numbers, at(len(numbers), (shown_from - 4) / RATE))


def call(folder: pathlib.Path, suffix: str, codec: str) -> Clip:
    """A call whose picture is smaller for a second."""
    parts = [
        write(folder / f"{n}{suffix}", range(25 * n, 25 * n + 25), codec, size)
        for n, size in enumerate([(64, 32), (32, 16), (64, 32)])
    ]
    path = copy(parts, folder / f"clip{suffix}", start=float)
    return Clip(path, range(75), at(75))


def joined(folder: pathlib.Path, second: tuple[int, int] = (64, 32)) -> Clip:
    """Two recordings of a transport stream, one after the other."""
    parts = [
        write(folder / "a.ts", range(40)),
        write(folder / "b.ts", range(40, 100), size=second),
    ]
    path = folder / "clip.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return Clip(path, range(100), at(100))


def restarted(folder: pathlib.Path) -> Clip:
    """Matroska whose clusters count from zero again after two seconds."""
    path = folder / "clip.mkv"
    options = {"g": "50", "bf": "0"}
    write(path, range(100), options=options, muxer={"cluster_time_limit": "1990"})
    data = path.read_bytes()
    # The element of a cluster's time in milliseconds: its id, its size, and two bytes.
    assert data.count(b"\xe7\x82\x07\xd0") == 1
    path.write_bytes(data.replace(b"\xe7\x82\x07\xd0", b"\xe7\x82\x00\x00"))
    return Clip(path, range(100), at(100))


def far_ahead(folder: pathlib.Path) -> Clip:
    parts = [write(folder / "a.ts", range(40)), write(folder / "b.ts", range(40, 100))]
    path = copy(parts, folder / "clip.ts", start=lambda n: 500.0 * n)
    return Clip(path, range(100), at(100))


def wrapped(folder: pathlib.Path) -> Clip:
    """A transport stream whose 33 bits of time run over after a second."""
    whole = write(folder / "whole.ts", range(60))
    path = copy([whole], folder / "clip.ts", start=lambda n: 2**33 / 90_000 - 2.4)
    return Clip(path, range(60), at(60))


def below_zero(folder: pathlib.Path) -> Clip:
    whole = write(folder / "whole.mkv", range(30))
    path = copy([whole], folder / "clip.mkv", start=lambda n: -0.4)
    return Clip(path, range(30), at(30))


def coarse(folder: pathlib.Path) -> Clip:
    """Frames that come faster than the container's clock ticks: pairs have one time."""
    path = folder / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=2000, options={"bf": "0"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.codec_context.time_base = fractions.Fraction(1, 2000)
        for number in range(20):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = number, fractions.Fraction(1, 2000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Clip(path, range(20), [n / 2000 for n in range(20)])


def covered(folder: pathlib.Path) -> Clip:
    """A video beside a cover picture that is larger."""
    path = folder / "clip.mp4"
    whole = write(folder / "whole.mp4", range(10))
    with av.open(str(path), "w") as container, av.open(str(whole)) as old:
        stream = container.add_stream_from_template(old.streams.video[0])
        add_cover(container)
        for packet in old.demux(old.streams.video[0]):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
    return Clip(path, range(10), at(10))


def add_cover(container: OutputContainer) -> None:
    cover = container.add_stream("mjpeg", rate=1)
    assert isinstance(cover, av.VideoStream)
    cover.width, cover.height, cover.pix_fmt = 320, 320, "yuvj420p"
    cover.disposition = Disposition.attached_pic
    container.mux(cover.encode(av.VideoFrame(320, 320, "yuvj420p")))
    container.mux(cover.encode(None))


CLIPS: dict[str, Callable[[pathlib.Path], Clip]] = {
    **{
        f"{name}{suffix}": lambda folder, name=name, suffix=suffix: turned(folder, name, suffix)
        for name in ORIENTATIONS
        for suffix in (".mp4", ".mov")
    },
    "trim_inside": lambda folder: trimmed(folder, 37, 20),
    "trim_start": lambda folder: trimmed(folder, 0, 30),
    "trim_end": lambda folder: trimmed(folder, 65, 35),
    "headless.mp4": lambda folder: headless(folder, ".mp4", "libx264"),
    "headless.mkv": lambda folder: headless(folder, ".mkv", "libx264"),
    "headless.ts": lambda folder: headless(folder, ".ts", "libx264"),
    "headless.webm": lambda folder: headless(folder, ".webm", "libvpx-vp9"),
    "call.webm": lambda folder: call(folder, ".webm", "libvpx-vp9"),
    "call_vp8.webm": lambda folder: call(folder, ".webm", "libvpx"),
    "joined": joined,
    "joined_smaller": lambda folder: joined(folder, (32, 16)),
    "restarted": restarted,
    "far_ahead": far_ahead,
    "wrapped": wrapped,
    "below_zero": below_zero,
    "coarse": coarse,
    "covered": covered,
}


@pytest.mark.parametrize("name", CLIPS)
def test_what_is_announced_is_what_is_shown(name, tmp_path):
    clip = CLIPS[name](tmp_path)
    info = video.probe(clip.path)
    assert (info.width, info.height) == clip.size
    assert info.frames == len(clip.numbers)
    # A clock may tick in milliseconds, and a recording may begin a frame after the one before it.
    np.testing.assert_allclose(info.times, clip.times, atol=1.01 / RATE)
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
        if "right" not in name and "left" not in name and "half" not in name and name[0] != "m":
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

    monkeypatch.setattr(video, "upright", fail)
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
    # In Matroska, ffmpeg passes the jump on.
    if name != "restarted":
        np.testing.assert_allclose(info.times, times, atol=1.01 / RATE)
    pixels = video.read(clip.path, range(info.frames))
    # Scaled frames go through another filter.
    tolerance = 6 if name in ("call.webm", "call_vp8.webm", "joined_smaller") else 0.01
    difference = np.abs(pixels.astype(int) - expected).mean(axis=(1, 2, 3))
    assert difference.max() < tolerance
