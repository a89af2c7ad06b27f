"""Video files: the frames that a file holds, and their pixels.

decord reads what it reads exactly (8-bit H.264 and VP9 with closed GOPs in mp4, mkv and webm). PyAV
reads everything else, whatever decord cannot open, and all files where decord is not installed. Each
call opens its file and closes it, since a decord reader that crosses threads or a fork hangs. A
picture is a video of one frame. Frame i is the i-th in order of presentation, whichever decoder reads
it, and its time counts from the first frame's.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import av
import av.error
import numpy as np
from av.container import InputContainer
from jaxtyping import Int64, UInt8
from PIL import Image, ImageOps

from paravt_jax.data.frames import VideoError, VideoInfo

try:
    import decord
except ImportError:  # there are wheels for x86-64 Linux only
    decord = None

# decord shows wrong frames after a seek in other containers, and other colours for other pixel formats (decord 0.6.0).
_EXACT_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
_EXACT_CODECS = {"h264", "vp9", "libvpx-vp9"}
_EXACT_PIXELS = {"yuv420p"}
_PICTURES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
_UNINDEXED = {
    "mpeg",
    "mpegts",
}  # packets of these lack reliable timestamps, so frames are counted by decoding all of them

# PyAV 18 fails on metadata that is not UTF-8 unless told otherwise; PyAV 19 never does, and has no
# such option.
_OPEN_OPTIONS: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)

_Result = TypeVar("_Result")

if decord is not None:
    decord.logging.set_level(decord.logging.QUIET)  # bad files are reported as VideoError


@dataclasses.dataclass(frozen=True)
class _Index:
    """The frames of a stream in order of presentation: their timestamps in the stream's time base, and which are keyframes."""

    info: VideoInfo
    stamps: Int64[np.ndarray, " frames"]
    keys: Int64[np.ndarray, " keys"]
    decord: bool
    seekable: bool


def probe(path: str | os.PathLike) -> VideoInfo:
    """Lists a file's frames, from its packets where they carry their times. Raises VideoError."""
    if is_picture(path):
        height, width, _ = _picture(path).shape
        return VideoInfo(str(path), 1, 0.0, np.zeros(1), width, height)
    return _guarded(path, lambda container: _index(path, container)).info


def read(
    path: str | os.PathLike, indices: Sequence[int] | Int64[np.ndarray, " m"]
) -> UInt8[np.ndarray, "m height width 3"]:
    """The pixels (RGB) of frames by number, in the order asked for. Raises VideoError; IndexError for a number the file lacks."""
    wanted = np.asarray(indices, np.int64)
    if not wanted.size:
        raise IndexError(f"{path}: no frame is asked for; give at least one")
    if is_picture(path):
        if wanted.any():
            raise IndexError(f"{path}: frame {wanted.max()} asked for, a picture has one, number 0")
        return np.repeat(_picture(path)[None], len(wanted), axis=0)

    def decode(container: InputContainer) -> np.ndarray:
        index = _index(path, container)
        if not 0 <= wanted.min() <= wanted.max() < index.info.frames:
            raise IndexError(
                f"{path}: frames {wanted.min()} to {wanted.max()} asked for, it has {index.info.frames}"
            )
        pixels = _read_decord(path, wanted, index) if index.decord else None
        return _read_av(path, container, wanted, index) if pixels is None else pixels

    return _guarded(path, decode)


def is_picture(path: str | os.PathLike) -> bool:
    """Whether a file is a picture, by its name."""
    return pathlib.PurePath(path).suffix.lower() in _PICTURES


def on_white(image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
    """The pixels (RGB) of a picture; what is transparent stands on white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def _picture(path: str | os.PathLike) -> UInt8[np.ndarray, "h w 3"]:
    """A picture turned as its file says, what is transparent on white. Raises VideoError."""
    _require_file(path)
    try:
        with Image.open(path) as file:
            return on_white(ImageOps.exif_transpose(file))
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # SyntaxError: a broken PNG
        raise VideoError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _require_file(path: str | os.PathLike) -> None:
    file = pathlib.Path(path)
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:  # such as a name that is too long, or a folder that may not be entered
        reason = f"it cannot be opened ({error.strerror}); check the path and its permissions"
        raise VideoError(path, reason) from error
    if size is None:
        raise VideoError(path, "no such file")
    if not size:
        raise VideoError(path, "the file is empty")


def _guarded(path: str | os.PathLike, use: Callable[[InputContainer], _Result]) -> _Result:
    """Opens the file for `use`; every way in which it can be bad becomes a VideoError."""
    _require_file(path)
    try:
        with av.open(str(path), **_OPEN_OPTIONS) as container:
            return use(container)
    except (av.error.FFmpegError, OSError, RuntimeError) as error:
        raise VideoError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _stream(path: str | os.PathLike, container: InputContainer) -> av.VideoStream:
    stream = container.streams.best("video")  # the one decord takes as well
    if not isinstance(stream, av.VideoStream):
        raise VideoError(path, "it has no video stream")
    if stream.codec_context is None:  # PyAV gives a stream without a decoder no context
        raise VideoError(
            path,
            "the codec of its video is unknown here; encode it again, for example as H.264 "
            "(ffmpeg -i OLD -c:v libx264 NEW.mp4), with a program that knows it",
        )
    return stream


def _index(path: str | os.PathLike, container: InputContainer) -> _Index:
    stream = _stream(path, container)
    packets = _scan_packets(path, container, stream)
    stamps, durations = packets.stamps, packets.durations
    seekable = (
        container.format.name not in _UNINDEXED
        and None not in stamps
        and len(set(stamps)) == len(stamps) > 0
    )
    if not seekable:
        stamps, durations = _scan_frames(container, stream)
    if not stamps or stream.time_base is None:
        raise VideoError(path, "it has no frames")
    unordered = np.array(stamps, np.int64)
    order = np.argsort(unordered, kind="stable")
    ordered, base = unordered[order], float(stream.time_base)
    last = durations[order[-1]] or (
        int(np.median(np.diff(ordered))) if len(ordered) > 1 else round(1 / base)
    )
    times = (ordered - ordered[0]) * base
    codec = stream.codec_context
    info = VideoInfo(
        str(path), len(ordered), float(times[-1] + last * base), times, codec.width, codec.height
    )
    keys = np.flatnonzero(np.array(packets.keys)[order]) if seekable else np.zeros(1, np.int64)
    exact = (
        container.format.name in _EXACT_CONTAINERS
        and codec.name in _EXACT_CODECS
        and codec.pix_fmt in _EXACT_PIXELS
    )
    return _Index(
        info, ordered, keys, decord=exact and seekable and not packets.open_gop, seekable=seekable
    )


@dataclasses.dataclass
class _Packets:
    """The shown packets of a stream in the order of the file. Open GOP: a frame is shown before the keyframe that it follows there."""

    stamps: list[int] = dataclasses.field(default_factory=list)
    durations: list[int] = dataclasses.field(default_factory=list)
    keys: list[bool] = dataclasses.field(default_factory=list)
    open_gop: bool = False


def _scan_packets(
    path: str | os.PathLike, container: InputContainer, stream: av.VideoStream
) -> _Packets:
    """Lists the packets and holds what is there against the header: a truncated file opens without complaint."""
    found, key, count, end = _Packets(), None, 0, 0.0
    for packet in container.demux():
        if not packet.size:
            continue
        if packet.pts is not None and packet.time_base is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index != stream.index:
            continue
        count += 1
        if packet.is_discard:
            continue
        found.stamps.append(packet.pts)  # type: ignore[arg-type]  # None where the container has no time for it: the caller looks
        found.durations.append(packet.duration or 0)
        found.keys.append(packet.is_keyframe)
        if packet.is_keyframe:
            key = packet.pts
        elif key is not None and packet.pts is not None and packet.pts < key:
            found.open_gop = True
    if container.format.name in _EXACT_CONTAINERS:  # the ones whose headers can be relied on
        promised = (container.duration or 0) / av.time_base
        if count < stream.frames:
            raise VideoError(path, f"it is truncated: {count} frames of {stream.frames}")
        if end < promised - max(0.5, 0.05 * promised):
            raise VideoError(path, f"it is truncated: it ends at {end:.1f} s of {promised:.1f} s")
    return found


def _scan_frames(container: InputContainer, stream: av.VideoStream) -> tuple[list[int], list[int]]:
    """Timestamps and durations from decoding every frame. One without a timestamp is taken to follow the one before it directly."""
    container.seek(0, backward=True)
    stamps: list[int] = []
    durations: list[int] = []
    for frame in container.decode(stream):
        stamps.append(
            frame.pts
            if frame.pts is not None
            else (stamps[-1] + max(durations[-1], 1) if stamps else 0)
        )
        durations.append(frame.duration or 0)
    return stamps, durations


def _read_decord(path: str | os.PathLike, wanted: np.ndarray, index: _Index) -> np.ndarray | None:
    """The frames by decord, or None where there is none, it cannot open the file, or it counts its frames otherwise."""
    if decord is None:
        return None
    try:
        reader = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=1)
        if len(reader) != index.info.frames:
            return None
        forward, back = np.unique(
            wanted, return_inverse=True
        )  # going back costs it a seek and a decoded GOP each time
        return reader.get_batch(forward.tolist()).asnumpy()[back]
    except (RuntimeError, decord.DECORDError):
        return None


def _read_av(
    path: str | os.PathLike, container: InputContainer, wanted: np.ndarray, index: _Index
) -> np.ndarray:
    """The frames by PyAV, in order of presentation: from keyframe to keyframe where the file has timestamps, else in one pass."""
    stream = _stream(path, container)
    pending = np.unique(wanted).tolist()
    pictures: dict[int, np.ndarray] = {}
    while pending:
        container.seek(
            int(index.stamps[pending[0]]) if index.seekable else 0,
            backward=True,
            stream=stream if index.seekable else None,
        )
        found = _collect(container, stream, pending, index)
        if not found and index.seekable:  # the container's own table led astray
            container.seek(int(index.stamps[0]), backward=True, stream=stream)
            found = _collect(container, stream, pending, index)
        if not found:
            raise VideoError(path, f"frame {pending[0]} of {index.info.frames} cannot be decoded")
        pictures |= found
        pending = [n for n in pending if n not in pictures]
    if len({picture.shape for picture in pictures.values()}) > 1:
        raise VideoError(path, "its frames have several sizes; encode it again with one size")
    return np.stack([pictures[n] for n in wanted.tolist()])


def _collect(
    container: InputContainer, stream: av.VideoStream, pending: list[int], index: _Index
) -> dict[int, np.ndarray]:
    """Decodes from where the container stands until nothing is pending, or a keyframe ahead is a shorter way to the next one."""
    found: dict[int, np.ndarray] = {}
    for n, frame in enumerate(container.decode(stream)):
        if index.seekable:
            n = int(np.searchsorted(index.stamps, frame.pts)) if frame.pts is not None else -1
            if not 0 <= n < len(index.stamps) or index.stamps[n] != frame.pts:
                continue
        if n in pending:
            found[n] = _upright(frame)
        ahead = [m for m in pending if m > n and m not in found]
        if not ahead or (
            found and index.seekable and np.any((index.keys > n + 1) & (index.keys <= ahead[0]))
        ):
            break
    return found


def _upright(frame: av.VideoFrame) -> np.ndarray:
    """The picture as a player shows it: decord turns rotated videos by itself, PyAV leaves it to the caller."""
    return np.ascontiguousarray(
        np.rot90(frame.to_ndarray(format="rgb24", threads=1), k=(frame.rotation // 90) % 4)
    )
