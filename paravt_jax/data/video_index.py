"""The index of a video file: when each frame is shown, and which frames can be sought.

Building one reads the packets of the whole file, whose timestamps number the frames. Where these
are missing or repeat, the file is decoded and its frames are counted.

Indexes are kept on disk, in the user's cache folder or where $PARAVT_VIDEO_INDEXES says. Any number
of processes may use the folder, and it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from jaxtyping import Int64

from paravt_jax.data import media_files
from paravt_jax.data.any_path import user_folder
from paravt_jax.data.frames import VideoError, VideoInfo

_Stamps = Int64[np.ndarray, " frames"]
_Keys = Int64[np.ndarray, " keys"]

# Part of every name in the store. Change it whenever an index has other contents for the same file.
_VERSION = "6"
# Upper bound on indexes in memory, per process. A clip of a minute takes 24 KiB, a film 2 MiB.
_MOST_IN_MEMORY = 256
# Their headers tell truncated files. decord 0.6.0 has no exact timestamps in others.
_HEADED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
# In others, decord has slightly different colours.
_EXACT_PIXELS = {"yuv420p"}
# Packets in these containers, and B-frames in AVI, lack reliable timestamps. All frames are decoded
# to list them.
_UNTIMED = {"mpeg", "mpegts"}
_CONVERT = "ffmpeg -i OLD -c:v libx264 NEW.mp4"
# Pictures beside the video, not parts of it.
_COVERS = Disposition.attached_pic | Disposition.timed_thumbnails


@dataclasses.dataclass(frozen=True, eq=False)
class VideoIndex:
    """Frames of a video stream in the order of their timestamps.

    Attributes:
        stamps: Timestamps of the frames, in the stream's time base. They rise strictly.
        keys: Timestamps of the keyframes, from which decoding can begin. Empty if timestamps do not
            identify frames, which are counted from the start of the file instead.
        time_base: Seconds per unit of the timestamps.
        last_duration: Duration of the last frame, in the time base.
        width, height: Size at which all frames are shown, in pixels: that of the first one. Frames
            of other sizes are scaled to it.
        quarter_turns: Quarter turns, counter-clockwise, from the stored frames to the shown ones.
        for_decord: Whether decord, which reads from the start, returns the same frames.
    """

    stamps: Int64[np.ndarray, " frames"]
    keys: Int64[np.ndarray, " keys"]
    time_base: float
    last_duration: int
    width: int
    height: int
    quarter_turns: int
    for_decord: bool

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.stamps)

    def info(self) -> VideoInfo:
        """Return what callers know about the file."""
        times = (self.stamps - self.stamps[0]) * self.time_base
        return VideoInfo(
            frames=self.frames,
            duration=float(times[-1] + self.last_duration * self.time_base),
            times=times,
            width=self.width,
            height=self.height,
        )

    def key_before(self, n: int) -> int:
        """Return the timestamp of the last keyframe up to frame `n`."""
        return int(self.keys[np.searchsorted(self.keys, self.stamps[n], side="right") - 1])


# --- the store ---


def folder() -> pathlib.Path:
    """Return where indexes are kept on disk."""
    named = os.environ.get("PARAVT_VIDEO_INDEXES")
    return pathlib.Path(named) if named else user_folder() / "video-indexes"


def index_of(path: str | os.PathLike) -> VideoIndex:
    """Return the index of a file, which is built if its present content has none.

    Raises:
        VideoError: The file cannot be read.
    """
    name = f"{os.path.realpath(path)}\n{media_files.identity(path)}\n{_VERSION}"
    return _index_of(os.fspath(path), hashlib.sha256(os.fsencode(name)).hexdigest())


def forget() -> None:
    """Drop the indexes in memory."""
    _index_of.cache_clear()


@functools.lru_cache(maxsize=_MOST_IN_MEMORY)
def _index_of(path: str, digest: str) -> VideoIndex:
    name = f"{digest}.npz"
    # A damaged index is built again: the zip inside has checksums. Broad because damage raises
    # errors of every kind in the libraries.
    with contextlib.suppress(Exception), np.load(folder() / name, allow_pickle=False) as stored:
        fields = {name: array if array.ndim else array.item() for name, array in stored.items()}
        return VideoIndex(**fields)
    index = _build(path)
    # A read-only or full disk costs time, but no result.
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as unfinished:
            whole = pathlib.Path(unfinished, name)
            np.savez_compressed(whole, **dataclasses.asdict(index))
            os.replace(whole, folder() / name)
    return index


# --- building ---


def video_stream(path: str | os.PathLike, container: InputContainer) -> av.VideoStream:
    """Return the video stream to read.

    Raises:
        VideoError: There is none, no decoder for it, or its frames are too large.
    """
    # Of several video streams, take FFmpeg's "best" one, as decord does.
    stream = container.streams.best("video")
    if not _is_video(stream):
        stream = next(filter(_is_video, container.streams.video), None)
    if not isinstance(stream, av.VideoStream):
        cover = " but a cover picture" if container.streams.video else ""
        raise VideoError(path, f"it has no video stream{cover}")
    # PyAV creates no codec context where FFmpeg has no decoder for the stream.
    if stream.codec_context is None:
        raise VideoError(
            path,
            "the codec of its video has no decoder here; convert the file where there is one, for "
            f"example to H.264 ({_CONVERT})",
        )
    media_files.require_size(path, stream.codec_context.width, stream.codec_context.height)
    # A frame may be larger than the file's header says.
    stream.codec_context.options = {"max_pixels": str(media_files.MOST_PIXELS)}
    return stream


def _is_video(stream: object) -> bool:
    return isinstance(stream, av.VideoStream) and not Disposition(stream.disposition) & _COVERS


def decode(container: InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """Decode all frames of a file that was just opened, in order of presentation.

    Packets before the first frame may fail: they refer to frames that were cut off.
    """
    begun = False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if begun:
                raise
            continue
        begun = begun or bool(frames)
        yield from frames


class _Packet(NamedTuple):
    """A packet of the video stream.

    Attributes:
        stamp: When its frame is shown, in the time base of the stream.
        duration: How long it is shown; 0 if that is not known.
        is_key: Whether decoding can begin here.
        is_shown: False if an edit list cuts the frame off.
    """

    stamp: int | None
    duration: int
    is_key: bool
    is_shown: bool


def _build(path: str) -> VideoIndex:
    """Read all packets of a file, and decode it if their timestamps do not identify its frames.

    Raises:
        VideoError: The file has no frames, or is truncated.
    """
    packets: list[_Packet] = []
    first: av.VideoFrame | None = None
    end = 0.0
    with media_files.open_video(path) as container:
        stream = video_stream(path, container)
        for packet in container.demux():
            is_own = packet.stream.index == stream.index
            if is_own and first is None:
                with contextlib.suppress(av.error.InvalidDataError):
                    first = next(iter(stream.decode(packet)), None)
            # PyAV ends with an empty packet per stream, which only flushes the decoder.
            if not packet.size:
                continue
            duration = packet.duration or 0
            if is_own:
                shown = not packet.is_discard
                packets.append(_Packet(packet.pts, duration, packet.is_keyframe, shown))
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + duration) * packet.time_base))
        _require_expanded(path, container, stream, len(packets), end)
        if first is None or stream.time_base is None:
            raise VideoError(path, f"none of its frames can be decoded; convert it ({_CONVERT})")
        if first.rotation % 90:
            raise VideoError(
                path,
                f"it is to be shown turned by {-first.rotation} degrees, and only quarter turns "
                "are read; encode it upright (ffmpeg -i OLD NEW.mp4)",
            )
        time_base = float(stream.time_base)
        is_timed = _is_timed(container, stream, packets)
        keys = np.zeros(0, np.int64)
        if is_timed:
            stamps, durations, keys = _of_packets(packets)
        else:
            rate = float(stream.average_rate or stream.guessed_rate or 25)
            stamps, durations = _of_frames(path, 1 / (rate * time_base))
        usual = int(np.median(np.diff(stamps))) if len(stamps) > 1 else round(1 / time_base)
        turns = first.rotation // 90 % 4
        width, height = (first.height, first.width) if turns % 2 else (first.width, first.height)
        return VideoIndex(
            stamps=stamps,
            keys=keys,
            time_base=time_base,
            last_duration=int(durations[-1]) or max(1, usual),
            width=width,
            height=height,
            quarter_turns=turns,
            for_decord=(
                is_timed
                and not turns
                and container.format.name in _HEADED
                and stream.codec_context.pix_fmt in _EXACT_PIXELS
                and stream == container.streams.best("video")
            ),
        )


def _is_timed(
    container: InputContainer, stream: av.VideoStream, packets: Sequence[_Packet]
) -> bool:
    """Return whether the timestamps of packets identify the frames."""
    lacks_times = container.format.name in _UNTIMED or (
        container.format.name == "avi" and bool(stream.codec_context.has_b_frames)
    )
    stamps = {packet.stamp for packet in packets}
    has_key = any(packet.is_key for packet in packets)
    return not lacks_times and has_key and None not in stamps and len(stamps) == len(packets)


def _require_expanded(
    path: str, container: InputContainer, stream: av.VideoStream, packets: int, end: float
) -> None:
    """Raise VideoError if there are fewer packets, or an earlier end, than the header says."""
    # FFmpeg opens a truncated file without any error, so only this check finds it.
    # The headers of other containers are often wrong or empty.
    if container.format.name not in _HEADED:
        return
    # The header counts samples that an edit list hides; FFmpeg's own table does not.
    expected = min(stream.frames, len(stream.index_entries))
    if packets < expected:
        raise VideoError(path, f"it is truncated: {packets} frames of {expected}")
    expected_end = (container.duration or 0) / av.time_base
    # A header without a table of frames has their duration.
    if not expected and end < expected_end - max(0.5, 0.05 * expected_end):
        raise VideoError(path, f"it is truncated: it ends at {end:.1f} s of {expected_end:.1f} s")


def _of_packets(packets: Sequence[_Packet]) -> tuple[_Stamps, _Stamps, _Keys]:
    """Return the timestamps and durations of the frames, and the timestamps of keyframes."""
    stamps = np.array([packet.stamp for packet in packets], np.int64)
    is_key = np.array([packet.is_key for packet in packets])
    # Frames before the first keyframe refer to frames that were cut off.
    first = int(np.argmax(is_key))
    is_frame = np.array([packet.is_shown for packet in packets]) & (stamps >= stamps[first])
    is_frame[:first] = False
    durations = np.array([packet.duration for packet in packets], np.int64)
    # Packets come in decoding order: a B-frame follows the later frame that it refers to.
    order = np.argsort(stamps[is_frame])
    return stamps[is_frame][order], durations[is_frame][order], np.sort(stamps[is_key])


def _of_frames(path: str, usual: float) -> tuple[_Stamps, _Stamps]:
    """Decode a file, and return the timestamps and durations of its frames.

    The decoder knows the order of frames better than a file whose timestamps contradict it. Then
    all frames are shown for the same time, `usual`.
    """
    with media_files.open_video(path) as container:
        frames = decode(container, video_stream(path, container))
        known = [(frame.pts, frame.duration or 0) for frame in frames]
    stamps = [stamp for stamp, _ in known if stamp is not None]
    if len(stamps) == len(known) and (np.diff(stamps) > 0).all():
        return np.array(stamps, np.int64), np.array([duration for _, duration in known], np.int64)
    stamps = np.arange(len(known)) * max(1, round(usual))
    return stamps, np.zeros(len(known), np.int64)
