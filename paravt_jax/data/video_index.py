"""The packet index of a video file: which frames it has, and from where each can be decoded.

Building an index reads the packets of the whole file once and decodes nothing, unless they lack
timestamps. `index_store` keeps it.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from jaxtyping import Int64

from paravt_jax.data import media_files
from paravt_jax.data.frames import VideoError, VideoInfo

# decord 0.6.0 reads these exactly. In other containers it returns wrong frames after a seek, and
# for other pixel formats slightly different colours.
_EXACT_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
_EXACT_CODECS = {"h264", "vp9", "libvpx-vp9"}
_EXACT_PIXELS = {"yuv420p"}
# Packets in these containers lack reliable timestamps, so all frames are decoded to list them.
_UNINDEXED = {"mpeg", "mpegts"}
# A seek costs about as much as reading and decoding this many packets.
_SEEK_PACKETS = 4


class Run(NamedTuple):
    """Frames that are decoded in one go, from one keyframe.

    Attributes:
        key: Position of the keyframe in `VideoIndex.keys`.
        frames: Frame numbers, ascending.
        last: Number of the packet that completes the last of them.
    """

    key: int
    frames: list[int]
    last: int


@dataclasses.dataclass(frozen=True, eq=False)
class VideoIndex:
    """Frames of a video stream in order of presentation, and where to decode them from.

    Packets are numbered in the order of the file. The first packet counts as a keyframe: what is
    decoded from there is what a decoder of the whole file returns.

    Attributes:
        stamps: Timestamps of the frames, in the stream's time base.
        packets: Number of each frame's packet. Empty if timestamps do not identify frames, so that
            frames are counted from the start of the file.
        keys: Numbers of the keyframes' packets. Empty if seeks are not possible.
        key_stamps: Timestamps of these packets.
        time_base: Seconds per unit of the timestamps.
        last_duration: Duration of the last frame, in the time base.
        size: Width and height of a frame, in pixels.
        exact_in_decord: Whether decord returns the same frames.
    """

    stamps: Int64[np.ndarray, " frames"]
    packets: Int64[np.ndarray, " packets"]
    keys: Int64[np.ndarray, " keys"]
    key_stamps: Int64[np.ndarray, " keys"]
    time_base: float
    last_duration: int
    size: tuple[int, int]
    exact_in_decord: bool

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.stamps)

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in (self.stamps, self.packets, self.keys, self.key_stamps))

    def info(self, path: str | os.PathLike) -> VideoInfo:
        """What callers know about the file."""
        times = (self.stamps - self.stamps[0]) * self.time_base
        return VideoInfo(
            path=str(path),
            frames=self.frames,
            duration=float(times[-1] + self.last_duration * self.time_base),
            times=times,
            width=self.size[0],
            height=self.size[1],
        )

    def frame_number(self, stamp: int | None) -> int | None:
        """The number of the frame with this timestamp, or None if there is no such frame."""
        if stamp is None:
            return None
        n = int(np.searchsorted(self.stamps, stamp))
        if n == self.frames or self.stamps[n] != stamp:
            return None
        return n

    def key_at(self, stamp: int | None) -> int | None:
        """The position in `keys` of the packet with this timestamp, or None if it is not there."""
        if stamp is None:
            return None
        found = np.flatnonzero(self.key_stamps == stamp)
        return int(found[0]) if found.size else None

    def runs(self, wanted: Sequence[int]) -> list[Run]:
        """Split frame numbers, ascending and without repetition, into runs.

        A new run begins where a seek to a later keyframe skips enough packets.
        """
        runs: list[Run] = []
        for n in wanted:
            key = self._key_before(n)
            packet = int(self.packets[n])
            if runs and self.keys[key] <= runs[-1].last + _SEEK_PACKETS:
                run = runs[-1]
                runs[-1] = Run(run.key, [*run.frames, n], max(run.last, packet))
            else:
                runs.append(Run(key, [n], packet))
        return runs

    def decodes_from(self, key: int, n: int) -> bool:
        """Whether frame `n` is right if decoding began at a keyframe.

        A frame that is shown before the keyframe may refer to frames before it, although it follows
        it in the file (an open GOP).
        """
        if key == 0:
            return True
        follows = self.keys[key] <= self.packets[n] and self.key_stamps[key] <= self.stamps[n]
        return bool(follows)

    def _key_before(self, n: int) -> int:
        """The last keyframe that frame `n` can be decoded from."""
        usable = (self.keys <= self.packets[n]) & (self.key_stamps <= self.stamps[n])
        usable[0] = True
        return int(np.flatnonzero(usable)[-1])

    def to_bytes(self) -> bytes:
        """The index in few bytes: most differences between neighbours are equal."""
        file = io.BytesIO()
        scalars = [self.time_base, self.last_duration, *self.size, self.exact_in_decord]
        np.savez_compressed(
            file,
            scalars=np.array(scalars, np.float64),
            stamps=np.diff(self.stamps, prepend=0),
            packets=np.diff(self.packets, prepend=0),
            keys=np.diff(self.keys, prepend=0),
            key_stamps=np.diff(self.key_stamps, prepend=0),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> VideoIndex:
        """The inverse of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            time_base, duration, width, height, exact = file["scalars"].tolist()
            return cls(
                stamps=np.cumsum(file["stamps"]),
                packets=np.cumsum(file["packets"]),
                keys=np.cumsum(file["keys"]),
                key_stamps=np.cumsum(file["key_stamps"]),
                time_base=time_base,
                last_duration=int(duration),
                size=(int(width), int(height)),
                exact_in_decord=bool(exact),
            )


def video_stream(path: str | os.PathLike, container: InputContainer) -> av.VideoStream:
    """The video stream to read.

    Raises:
        VideoError: There is none, no decoder for it, or its frames are too large.
    """
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
    media_files.require_size(path, stream.codec_context.width, stream.codec_context.height)
    # A frame may be larger than the file's header says.
    stream.codec_context.options = {"max_pixels": str(media_files.MOST_PIXELS)}
    return stream


def build(path: str | os.PathLike, container: InputContainer) -> VideoIndex:
    """Read all packets of an open file, and decode it if they lack timestamps.

    Raises:
        VideoError: The file has no frames, or is truncated.
    """
    stream = video_stream(path, container)
    found = _scan_packets(path, container, stream)
    stamps, durations = found.shown_stamps, found.shown_durations
    identified = _has_reliable_stamps(container, stream, stamps)
    if not identified:
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

    none = np.zeros(0, np.int64)
    packets, keys, key_stamps = none, none, none
    if identified:
        packets = np.array(found.shown, np.int64)[order]
        # Seeks are checked by the timestamps of packets, those of frames that are cut off included.
        if _are_distinct(found.stamps):
            keys = np.array(found.keys, np.int64)
            key_stamps = np.array(found.stamps, np.int64)[keys]
    codec = stream.codec_context
    exact = (
        container.format.name in _EXACT_CONTAINERS
        and codec.name in _EXACT_CODECS
        and codec.pix_fmt in _EXACT_PIXELS
    )
    return VideoIndex(
        stamps=ordered,
        packets=packets,
        keys=keys,
        key_stamps=key_stamps,
        time_base=time_base,
        last_duration=last_duration,
        size=(codec.width, codec.height),
        exact_in_decord=exact and identified and not found.open_gop,
    )


def _has_reliable_stamps(
    container: InputContainer, stream: av.VideoStream, stamps: list[int | None]
) -> bool:
    """Whether the packets' timestamps are those of the frames, each with its own."""
    if container.format.name in _UNINDEXED or not _are_distinct(stamps):
        return False
    # AVI stores no times of presentation. FFmpeg derives some, but for H.264 with B-frames it takes
    # the order of the file, which cannot be the order of presentation.
    guessed = container.format.name == "avi" and stream.codec_context.has_b_frames
    return not (guessed and stamps == sorted(stamp for stamp in stamps if stamp is not None))


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
    """The packets of a stream, in the order of the file.

    Attributes:
        stamps: Timestamps of all packets.
        shown: Numbers of the packets that are shown.
        shown_stamps: Their timestamps.
        shown_durations: Their durations.
        keys: Numbers of the packets from which decoding can begin: the first, and keyframes.
        open_gop: Whether a frame follows a keyframe in the file but is shown before it. Such a
            frame refers to the GOP before the keyframe, so decord decodes it wrongly after a seek.
    """

    stamps: list[int | None] = dataclasses.field(default_factory=list)
    shown: list[int] = dataclasses.field(default_factory=list)
    shown_stamps: list[int | None] = dataclasses.field(default_factory=list)
    shown_durations: list[int] = dataclasses.field(default_factory=list)
    keys: list[int] = dataclasses.field(default_factory=list)
    open_gop: bool = False


def _scan_packets(
    path: str | os.PathLike, container: InputContainer, stream: av.VideoStream
) -> _Packets:
    found = _Packets()
    key_stamp: int | None = None
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
        number = len(found.stamps)
        found.stamps.append(packet.pts)
        if number == 0 or (packet.is_keyframe and not packet.is_discard):
            found.keys.append(number)
        # An edit list may cut frames off. They are in the file, but no player shows them.
        if packet.is_discard:
            continue
        found.shown.append(number)
        found.shown_stamps.append(packet.pts)
        found.shown_durations.append(packet.duration or 0)
        if packet.is_keyframe:
            key_stamp = packet.pts
        elif key_stamp is not None and packet.pts is not None and packet.pts < key_stamp:
            found.open_gop = True
    _require_whole(path, container, stream, len(found.stamps), end)
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


def _scan_frames(container: InputContainer, stream: Any) -> tuple[list[int], list[int]]:
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
