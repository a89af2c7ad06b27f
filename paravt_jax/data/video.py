"""Lists and decodes the frames of video files.

Frames are numbered in order of presentation, whichever decoder reads them. Times count from the
first frame. A picture is a video of one frame.

Two decoders read the files. decord is fast, and exact for 8-bit H.264 and VP9 with closed GOPs in
mp4, mkv and webm. PyAV reads all other files and any file that decord cannot open. If decord is not
installed, PyAV reads every file.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import av
import av.error
import numpy as np
from av.container import InputContainer
from jaxtyping import Int64, UInt8
from PIL import Image, ImageOps

from paravt_jax.data.frames import (
    ReadFrames,
    ReadTask,
    VideoError,
    VideoInfo,
    carry_out,
    read_now,
    shown,
)
from paravt_jax.data.sizes import FrameRules

try:
    import decord
except ImportError:
    # decord has wheels for x86-64 Linux only.
    decord = None

# decord 0.6.0 reads these exactly. In other containers it returns wrong frames after a seek, and
# for other pixel formats slightly different colours.
_EXACT_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
_EXACT_CODECS = {"h264", "vp9", "libvpx-vp9"}
_EXACT_PIXELS = {"yuv420p"}
# Packets in these containers lack reliable timestamps, so all frames are decoded to list them.
_UNINDEXED = {"mpeg", "mpegts"}
_PICTURES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}

# PyAV 18 fails on metadata that is not UTF-8 unless told otherwise; PyAV 19 never does, and has no
# such option.
_OPEN_OPTIONS: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)

_Result = TypeVar("_Result")

if decord is not None:
    # Bad files are reported as VideoError, so decord need not print about them.
    decord.logging.set_level(decord.logging.QUIET)


@dataclasses.dataclass(frozen=True)
class _Index:
    """The frames of a stream, in order of presentation.

    `stamps` are timestamps in the stream's time base, `keys` the numbers of the keyframes. `decord`
    says whether decord reads the file exactly, `seekable` whether PyAV can seek to a timestamp.
    """

    info: VideoInfo
    stamps: Int64[np.ndarray, " frames"]
    keys: Int64[np.ndarray, " keys"]
    decord: bool
    seekable: bool


def probe(path: str | os.PathLike) -> VideoInfo:
    """List the frames of a file. Decodes nothing if the packets carry timestamps.

    Raises:
        VideoError: The file cannot be read.
    """
    if is_picture(path):
        height, width, _ = _picture(path).shape
        return VideoInfo(str(path), 1, 0.0, np.zeros(1), width, height)
    return _with_container(path, lambda container: _index(path, container)).info


def read(
    path: str | os.PathLike,
    indices: Sequence[int] | Int64[np.ndarray, " m"],
    rules: FrameRules | None = None,
) -> UInt8[np.ndarray, "m height width 3"]:
    """Decode frames of a file.

    Args:
        path: The file.
        indices: Frame numbers in any order; a number may occur several times.
        rules: How each frame is resized as soon as it is decoded, so that many large frames take
            little memory; None: not at all.

    Returns:
        The RGB pixels of the frames, in the order of `indices`.

    Raises:
        VideoError: The file cannot be read, or its frames are too thin to be resized.
        IndexError: `indices` is empty or contains a number that the file does not have.
    """
    wanted = np.asarray(indices, np.int64)
    if not wanted.size:
        raise IndexError(f"{path}: no frame requested; give at least one")
    if is_picture(path):
        if wanted.any():
            raise IndexError(f"{path}: frame {wanted.max()} requested; a picture has only frame 0")
        return np.repeat(_shown(path, _picture(path), rules)[None], len(wanted), axis=0)

    def decode(container: InputContainer) -> np.ndarray:
        index = _index(path, container)
        if wanted.min() < 0 or wanted.max() >= index.info.frames:
            raise IndexError(
                f"{path}: frames {wanted.min()} to {wanted.max()} requested; "
                f"it has {index.info.frames}"
            )
        pixels = None
        if index.decord:
            pixels = _read_decord(path, wanted, index, rules)
        if pixels is None:
            pixels = _read_av(path, container, wanted, index, rules)
        return pixels

    return _with_container(path, decode)


def fetch(task: ReadTask) -> ReadFrames:
    """Carry out a task. Raises VideoError if the file cannot be read."""
    return carry_out(task, probe, read)


def request(task: ReadTask) -> Future[ReadFrames]:
    """Carry out a task in the calling thread, without a time limit (see `FrameSource`)."""
    return read_now(lambda: fetch(task))


def is_picture(path: str | os.PathLike) -> bool:
    """Whether a file is a picture, judged by its name."""
    return pathlib.PurePath(path).suffix.lower() in _PICTURES


def on_white(image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
    """Return the RGB pixels of a picture, with transparent parts on a white background."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def _picture(path: str | os.PathLike) -> UInt8[np.ndarray, "h w 3"]:
    """Read a picture, rotated as its EXIF data says."""
    _require_file(path)
    # Pillow reports a broken PNG as SyntaxError.
    errors = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    try:
        with Image.open(path) as file:
            return on_white(ImageOps.exif_transpose(file))
    except errors as error:
        raise VideoError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _require_file(path: str | os.PathLike) -> None:
    file = pathlib.Path(path)
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:
        # For example, the name is too long, or the folder is not readable.
        reason = f"it cannot be opened ({error.strerror}); check the path and its permissions"
        raise VideoError(path, reason) from error
    if size is None:
        raise VideoError(path, "no such file")
    if not size:
        raise VideoError(path, "the file is empty")


def _with_container(path: str | os.PathLike, use: Callable[[InputContainer], _Result]) -> _Result:
    """Open the file for one call of `use`. Errors in the file become VideoErrors."""
    _require_file(path)
    # Open the file anew for every call: a reader that is passed to another thread or through a fork
    # can hang.
    try:
        with av.open(str(path), **_OPEN_OPTIONS) as container:
            return use(container)
    except (av.error.FFmpegError, OSError, RuntimeError) as error:
        raise VideoError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _stream(path: str | os.PathLike, container: InputContainer) -> av.VideoStream:
    # Of several video streams, take FFmpeg's "best" one, as decord does.
    stream = container.streams.best("video")
    if not isinstance(stream, av.VideoStream):
        raise VideoError(path, "it has no video stream")
    # PyAV creates no codec context where FFmpeg has no decoder for the stream.
    if stream.codec_context is None:
        raise VideoError(
            path,
            "the codec of its video has no decoder here; convert the file where there is one, for "
            "example to H.264 (ffmpeg -i OLD -c:v libx264 NEW.mp4)",
        )
    return stream


def _index(path: str | os.PathLike, container: InputContainer) -> _Index:
    stream = _stream(path, container)
    packets = _scan_packets(path, container, stream)
    stamps, durations = packets.stamps, packets.durations
    seekable = container.format.name not in _UNINDEXED and _are_distinct(stamps)
    if not seekable:
        stamps, durations = _scan_frames(container, stream)
    if not stamps or stream.time_base is None:
        raise VideoError(path, "it has no frames")

    # Packets come in decoding order: a B-frame follows the later frame that it refers to.
    unordered = np.array(stamps, np.int64)
    order = np.argsort(unordered, kind="stable")
    ordered = unordered[order]
    time_base = float(stream.time_base)
    last_duration = durations[order[-1]]
    if not last_duration:
        last_duration = _guess_duration(ordered, time_base)
    times = (ordered - ordered[0]) * time_base
    codec = stream.codec_context
    info = VideoInfo(
        path=str(path),
        frames=len(ordered),
        duration=float(times[-1] + last_duration * time_base),
        times=times,
        width=codec.width,
        height=codec.height,
    )
    keys = np.zeros(1, np.int64)
    if seekable:
        keys = np.flatnonzero(np.array(packets.keys)[order])
    exact = (
        container.format.name in _EXACT_CONTAINERS
        and codec.name in _EXACT_CODECS
        and codec.pix_fmt in _EXACT_PIXELS
    )
    return _Index(
        info, ordered, keys, decord=exact and seekable and not packets.open_gop, seekable=seekable
    )


def _are_distinct(stamps: Sequence[int | None]) -> bool:
    """Whether every packet has a timestamp of its own, so that timestamps identify frames."""
    return len(stamps) > 0 and None not in stamps and len(set(stamps)) == len(stamps)


def _guess_duration(stamps: Int64[np.ndarray, " frames"], time_base: float) -> int:
    """Guess the duration of the last frame: the median gap, or one second for a single frame."""
    if len(stamps) > 1:
        return int(np.median(np.diff(stamps)))
    return round(1 / time_base)


@dataclasses.dataclass
class _Packets:
    """The packets of a stream that are shown, in the order of the file."""

    stamps: list[int | None] = dataclasses.field(default_factory=list)
    durations: list[int] = dataclasses.field(default_factory=list)
    keys: list[bool] = dataclasses.field(default_factory=list)
    # Whether a frame follows a keyframe in the file but is shown before it. Such a frame refers to
    # the GOP before the keyframe, so decord decodes it wrongly after a seek to the keyframe.
    open_gop: bool = False


def _scan_packets(
    path: str | os.PathLike, container: InputContainer, stream: av.VideoStream
) -> _Packets:
    found = _Packets()
    key_stamp: int | None = None
    count = 0
    end = 0.0
    for packet in container.demux():
        # PyAV ends with an empty packet per stream, which only flushes the decoder.
        if not packet.size:
            continue
        if packet.pts is not None and packet.time_base is not None:
            packet_end = (packet.pts + (packet.duration or 0)) * packet.time_base
            end = max(end, float(packet_end))
        if packet.stream.index != stream.index:
            continue
        count += 1
        # An edit list may cut frames off. They are in the file, but no player shows them.
        if packet.is_discard:
            continue
        found.stamps.append(packet.pts)
        found.durations.append(packet.duration or 0)
        found.keys.append(packet.is_keyframe)
        if packet.is_keyframe:
            key_stamp = packet.pts
        elif key_stamp is not None and packet.pts is not None and packet.pts < key_stamp:
            found.open_gop = True
    _require_whole(path, container, stream, count, end)
    return found


def _require_whole(
    path: str | os.PathLike,
    container: InputContainer,
    stream: av.VideoStream,
    packets: int,
    end: float,
) -> None:
    """Raise VideoError if there are fewer packets, or an earlier end, than the header says."""
    # FFmpeg opens a truncated file without any error, so only this check finds it.
    # The headers of other containers are often wrong or empty.
    if container.format.name not in _EXACT_CONTAINERS:
        return
    if packets < stream.frames:
        raise VideoError(path, f"it is truncated: {packets} frames of {stream.frames}")
    expected_end = (container.duration or 0) / av.time_base
    if end < expected_end - max(0.5, 0.05 * expected_end):
        raise VideoError(path, f"it is truncated: it ends at {end:.1f} s of {expected_end:.1f} s")


def _scan_frames(container: InputContainer, stream: av.VideoStream) -> tuple[list[int], list[int]]:
    """Timestamps and durations from decoding every frame."""
    container.seek(0, backward=True)
    stamps: list[int] = []
    durations: list[int] = []
    for frame in container.decode(stream):
        stamp = frame.pts
        if stamp is None:
            # A frame without a timestamp starts when the one before it ends.
            stamp = stamps[-1] + max(durations[-1], 1) if stamps else 0
        stamps.append(stamp)
        durations.append(frame.duration or 0)
    return stamps, durations


def _shown(
    path: str | os.PathLike,
    frame: UInt8[np.ndarray, "h w 3"],
    rules: FrameRules | None,
) -> UInt8[np.ndarray, "y x 3"]:
    try:
        return shown(frame, rules)
    except ValueError as error:
        # The longer side is over 200 times the shorter one.
        raise VideoError(path, str(error)) from error


def _read_decord(
    path: str | os.PathLike,
    wanted: Int64[np.ndarray, " m"],
    index: _Index,
    rules: FrameRules | None,
) -> UInt8[np.ndarray, "m height width 3"] | None:
    """Decode with decord, or return None if it is missing or disagrees with the index."""
    if decord is None:
        return None
    try:
        reader = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=1)
        # If the counts differ, frame numbers mean different frames.
        if len(reader) != index.info.frames:
            return None
        # Read forwards: each step back costs decord a seek and a decoded GOP.
        forward, positions = np.unique(wanted, return_inverse=True)
        frames = [_shown(path, reader.get_batch([n]).asnumpy()[0], rules) for n in forward.tolist()]
        return np.stack(frames)[positions]
    except (RuntimeError, decord.DECORDError):
        return None


def _read_av(
    path: str | os.PathLike,
    container: InputContainer,
    wanted: Int64[np.ndarray, " m"],
    index: _Index,
    rules: FrameRules | None,
) -> UInt8[np.ndarray, "m height width 3"]:
    """Decode with PyAV: from keyframe to keyframe if the file is seekable, else in one pass."""
    stream = _stream(path, container)
    pending = np.unique(wanted).tolist()
    pictures: dict[int, np.ndarray] = {}
    decoded_sizes: set[tuple[int, ...]] = set()

    def keep(n: int, frame: av.VideoFrame) -> None:
        pixels = _upright(frame)
        decoded_sizes.add(pixels.shape)
        pictures[n] = _shown(path, pixels, rules)

    while pending:
        if index.seekable:
            # `backward` goes to the last keyframe at or before the timestamp.
            container.seek(int(index.stamps[pending[0]]), backward=True, stream=stream)
        else:
            container.seek(0, backward=True)
        found = _collect(container, stream, pending, index, keep)
        if not found and index.seekable:
            # The container's own seek table may be wrong. Decode once from the start.
            container.seek(int(index.stamps[0]), backward=True, stream=stream)
            found = _collect(container, stream, pending, index, keep)
        if not found:
            raise VideoError(path, f"frame {pending[0]} of {index.info.frames} cannot be decoded")
        pending = [n for n in pending if n not in pictures]
    if len(decoded_sizes) > 1:
        raise VideoError(path, "its frames have several sizes; encode it again with one size")
    return np.stack([pictures[n] for n in wanted.tolist()])


def _collect(
    container: InputContainer,
    stream: av.VideoStream,
    pending: list[int],
    index: _Index,
    keep: Callable[[int, av.VideoFrame], None],
) -> set[int]:
    """Decode from the current position until all pending frames are found or a seek is faster.

    Calls `keep` with each pending frame and its number. Returns the numbers.
    """
    found: set[int] = set()
    for n, frame in enumerate(container.decode(stream)):
        if index.seekable:
            # After a seek, counting says nothing. The timestamp identifies the frame.
            n = _frame_number(frame, index)
            if n is None:
                continue
        if n in pending:
            keep(n, frame)
            found.add(n)
        later = [m for m in pending if m > n and m not in found]
        if not later:
            break
        # A keyframe between here and the next wanted frame lets a seek skip the frames up to it.
        # If no frame has been found yet, the seek would lead back here, so decoding continues.
        skippable = np.any((index.keys > n + 1) & (index.keys <= later[0]))
        if found and index.seekable and skippable:
            break
    return found


def _frame_number(frame: av.VideoFrame, index: _Index) -> int | None:
    """The number of the frame with this timestamp, or None if the index has no such frame."""
    if frame.pts is None:
        return None
    n = int(np.searchsorted(index.stamps, frame.pts))
    if n == len(index.stamps) or index.stamps[n] != frame.pts:
        return None
    return n


def _upright(frame: av.VideoFrame) -> UInt8[np.ndarray, "height width 3"]:
    """The pixels as a player shows them. decord rotates frames itself, but PyAV does not."""
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    quarter_turns = (frame.rotation // 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, k=quarter_turns))
