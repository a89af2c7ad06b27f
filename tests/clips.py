"""Small clips whose headers mislead, made here, with what a player shows of each."""

from __future__ import annotations

import dataclasses
import fractions
import pathlib
import struct
from collections.abc import Callable, Sequence

import av
import numpy as np
from av.container import OutputContainer
from av.stream import Disposition

RATE = 25
LOSSLESS = {"qp": "0"}
PLAIN = {"g": "10", "bf": "0"}
REORDERED = {"g": "10", "bf": "2"}
# Clockwise quarter turns as (a, b, c, d) of the display matrix. Columns grow to the right and rows
# downwards: (x, y) moves to (a x + c y, b x + d y).
ORIENTATIONS = {
    "upright": (1, 0, 0, 1),
    "right": (0, 1, -1, 0),
    "half": (-1, 0, 0, -1),
    "left": (0, -1, 1, 0),
}


@dataclasses.dataclass
class Clip:
    """A file and what a player shows of it.

    Attributes:
        numbers: The number drawn into each frame.
        times: Seconds at which each frame is shown.
        size: Width and height.
        turned: Whether a player turns the stored pictures.
        tolerance: Seconds by which announced times may differ: a clock may tick in milliseconds.
    """

    path: pathlib.Path
    numbers: Sequence[int]
    times: Sequence[float]
    size: tuple[int, int] = (64, 32)
    turned: bool = False
    tolerance: float = 2e-3


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
    milliseconds: Sequence[int] | np.ndarray = (),
) -> pathlib.Path:
    """Encode pictures at 25 frames per second, or at the given times."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=RATE, options=options or PLAIN)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv444p" if options == LOSSLESS else "yuv420p"
        a, b, c, d = (65536 * value for value in matrix)
        stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        if len(milliseconds):
            stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for count, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
            if len(milliseconds):
                frame.pts, frame.time_base = int(milliseconds[count]), fractions.Fraction(1, 1000)
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
    return Clip(path, range(4), at(4), size, turned=name != "upright")


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


def headless(
    folder: pathlib.Path, suffix: str, codec: str = "libx264", options: dict[str, str] = PLAIN
) -> Clip:
    """A clip cut between two keyframes, so that its first six frames cannot be decoded."""
    whole = write(folder / f"whole{suffix}", range(60), codec, options=options)
    path = copy([whole], folder / f"clip{suffix}", skip=4)
    return Clip(path, range(10, 60), at(50))


def call(folder: pathlib.Path, suffix: str, codec: str) -> Clip:
    """A call whose picture is smaller for a second."""
    parts = [
        write(folder / f"{n}{suffix}", range(25 * n, 25 * n + 25), codec, size)
        for n, size in enumerate([(64, 32), (32, 16), (64, 32)])
    ]
    path = copy(parts, folder / f"clip{suffix}", start=float)
    return Clip(path, range(75), at(75))


def joined(
    folder: pathlib.Path,
    second: tuple[int, int] = (64, 32),
    codec: str = "libx264",
    options: dict[str, str] = PLAIN,
    suffix: str = ".ts",
) -> Clip:
    """A long and a short recording of a transport or program stream, one after the other."""
    parts = [
        write(folder / f"a{suffix}", range(80), codec, options=options),
        write(folder / f"b{suffix}", range(80, 100), codec, second, options),
    ]
    path = folder / f"clip{suffix}"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return Clip(path, range(100), at(100))


def wrapped(folder: pathlib.Path, options: dict[str, str] = PLAIN) -> Clip:
    """A transport stream whose 33 bits of time run over after a second."""
    whole = write(folder / "whole.ts", range(60), options=options)
    path = copy([whole], folder / "clip.ts", start=lambda n: 2**33 / 90_000 - 2.4)
    return Clip(path, range(60), at(60))


def unordered(folder: pathlib.Path, suffix: str) -> pathlib.Path:
    """B-frames whose times of presentation are those of decoding, as raw streams are wrapped."""
    whole = write(folder / f"whole{suffix}", range(60), options={"g": "20", "bf": "2"})
    path = folder / f"clip{suffix}"
    with av.open(str(path), "w") as container, av.open(str(whole)) as old:
        stream = container.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(old.streams.video[0])):
            if packet.size:
                packet.pts = packet.dts = round(number / RATE / packet.time_base)
                packet.stream = stream
                container.mux(packet)
    return path


def refreshed(folder: pathlib.Path) -> Clip:
    """H.264 that refreshes columns in turn: a player cannot begin where keyframes are marked."""
    options = {"x264-params": "intra-refresh=1:keyint=10:bframes=0"}
    return Clip(write(folder / "clip.mp4", range(60), options=options), range(60), at(60))


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
    # Matroska stores an angle in place of a matrix.
    **{
        f"{name}.mkv": lambda folder, name=name: turned(folder, name, ".mkv")
        for name in ("right", "half", "left")
    },
    "trim_inside": lambda folder: trimmed(folder, 37, 20),
    "trim_start": lambda folder: trimmed(folder, 0, 30),
    "trim_end": lambda folder: trimmed(folder, 65, 35),
    "headless.mp4": lambda folder: headless(folder, ".mp4"),
    "headless.mkv": lambda folder: headless(folder, ".mkv"),
    "headless.ts": lambda folder: headless(folder, ".ts"),
    "headless_reordered.mkv": lambda folder: headless(folder, ".mkv", options=REORDERED),
    "headless_reordered.ts": lambda folder: headless(folder, ".ts", options=REORDERED),
    "headless.webm": lambda folder: headless(folder, ".webm", "libvpx-vp9"),
    "call.webm": lambda folder: call(folder, ".webm", "libvpx-vp9"),
    "joined": joined,
    "joined_smaller": lambda folder: joined(folder, (32, 16)),
    "wrapped": wrapped,
    "joined_reordered": lambda folder: joined(folder, options=REORDERED),
    "joined.mpg": lambda folder: joined(
        folder, codec="mpeg2video", options=REORDERED, suffix=".mpg"
    ),
    "covered": covered,
    "refreshed": refreshed,
}
