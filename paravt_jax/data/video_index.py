"""The index of a video file: what it shows, and from where each frame can be decoded.

This is the one owner of a video's size, orientation, number of frames and times: headers are wrong
too often. Building an index reads the packets of the whole file once, and decodes its opening. If
packets lack timestamps, or these contradict the order in which the decoder returns frames, all
frames are decoded. `index_store` keeps the index.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from jaxtyping import Int64, UInt8

from paravt_jax.data import media_files
from paravt_jax.data.frames import VideoError, VideoInfo

# decord 0.6.0 reads these exactly. In other containers it returns wrong frames after a seek, and
# for other pixel formats slightly different colours.
_EXACT_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
_EXACT_CODECS = {"h264", "vp9", "libvpx-vp9"}
_EXACT_PIXELS = {"yuv420p"}
# Packets in these containers lack reliable timestamps, so all frames are decoded to list them.
_UNINDEXED = {"mpeg", "mpegts"}
_CONVERT = "ffmpeg -i OLD -c:v libx264 NEW.mp4"
# A seek costs about as much as reading and decoding this many packets.
_SEEK_PACKETS = 4
# Frames that are decoded to see whether their order is that of the packets' timestamps.
_OPENING = 32
# Another recording begins where the decoding time falls by more than this many seconds, or rises by
# more than these: in a transport or program stream, and elsewhere. These are FFmpeg's limits.
_JUMP_BACK = 0.1
_JUMP_AHEAD = 10.0
_ABSURD = 30 * 3600.0
# Fields of an index that rise from frame to frame.
_ARRAYS = ("stamps", "packets", "keys", "key_stamps")
# Largest difference from a quarter turn, in degrees. FFmpeg's tolerance.
_TOLERANCE = 1.0
# Pictures beside the video, not parts of it.
_COVERS = Disposition.attached_pic | Disposition.timed_thumbnails


class Orientation(NamedTuple):
    """How a stored frame becomes the shown one: rows and columns are exchanged, then reversed."""

    exchange: bool = False
    reverse_columns: bool = False
    reverse_rows: bool = False


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


def _no_numbers() -> Int64[np.ndarray, " 0"]:
    return np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class VideoIndex:
    """Frames of a video stream in order of presentation, and where to decode them from.

    Packets are numbered in the order of the file. The first packet counts as a keyframe: what is
    decoded from there is what a decoder of the whole file returns.

    Attributes:
        stamps: Timestamps of the frames, in the stream's time base. They rise strictly.
        start: Timestamp at which the video's clock is zero: that of the first packet that is shown,
            even if it cannot be decoded, because the file begins between two keyframes.
        packets: Number of each frame's packet. Empty if timestamps do not identify frames, so that
            frames are counted from the start of the file.
        keys: Numbers of the keyframes' packets. Empty if seeks are not possible.
        key_stamps: Timestamps of these packets.
        time_base: Seconds per unit of the timestamps.
        last_duration: Duration of the last frame, in the time base.
        size: Width and height at which all frames are shown, in pixels: those of the first one,
            turned as a player does. Frames of other sizes are scaled to it, as FFmpeg does.
        orientation: How all frames are turned; that of the first one.
        exact_in_decord: Whether decord returns the same frames.
    """

    stamps: Int64[np.ndarray, " frames"]
    start: int
    time_base: float
    last_duration: int
    size: tuple[int, int]
    orientation: Orientation
    packets: Int64[np.ndarray, " packets"] = dataclasses.field(default_factory=_no_numbers)
    keys: Int64[np.ndarray, " keys"] = dataclasses.field(default_factory=_no_numbers)
    key_stamps: Int64[np.ndarray, " keys"] = dataclasses.field(default_factory=_no_numbers)
    exact_in_decord: bool = False

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.stamps)

    def info(self, path: str | os.PathLike) -> VideoInfo:
        """Return what callers know about the file."""
        times = (self.stamps - self.start) * self.time_base
        return VideoInfo(
            path=str(path),
            frames=self.frames,
            duration=float(times[-1] + self.last_duration * self.time_base),
            times=times,
            width=self.size[0],
            height=self.size[1],
        )

    def frame_number(self, stamp: int | None) -> int | None:
        """Return the number of the frame with this timestamp, or None if there is no such frame."""
        if stamp is None:
            return None
        n = int(np.searchsorted(self.stamps, stamp))
        if n == self.frames or self.stamps[n] != stamp:
            return None
        return n

    def key_at(self, stamp: int | None) -> int | None:
        """Return the position in `keys` of the packet with this timestamp, or None if it is not
        there."""
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
        """Return whether frame `n` is right if decoding began at a keyframe.

        A frame that is shown before the keyframe may refer to frames before it, although it follows
        it in the file (an open GOP).
        """
        if key == 0:
            return True
        follows = self.keys[key] <= self.packets[n] and self.key_stamps[key] <= self.stamps[n]
        return bool(follows)

    def _key_before(self, n: int) -> int:
        """Return the last keyframe that frame `n` can be decoded from."""
        usable = (self.keys <= self.packets[n]) & (self.key_stamps <= self.stamps[n])
        usable[0] = True
        return int(np.flatnonzero(usable)[-1])

    def to_bytes(self) -> bytes:
        """Return the index in few bytes: most differences between neighbours are equal."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: np.diff(values[name], prepend=0) for name in _ARRAYS}
        file = io.BytesIO()
        np.savez_compressed(file, **values)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> VideoIndex:
        """Return the inverse of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            values = {name: file[name].tolist() for name in file.files if name not in _ARRAYS}
            values |= {name: np.cumsum(file[name]) for name in _ARRAYS}
        values["size"] = tuple(values["size"])
        values["orientation"] = Orientation(*values["orientation"])
        return cls(**values)


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
        for frame in _frames(packet, begun):
            begun = True
            yield frame


def _frames(packet: av.Packet, begun: bool) -> list[av.VideoFrame]:
    try:
        return packet.decode()
    except av.error.InvalidDataError:
        if begun:
            raise
        return []


def build(path: str | os.PathLike) -> VideoIndex:
    """Read all packets of a file, and decode it if their timestamps do not identify its frames.

    Raises:
        VideoError: The file has no frames, or is truncated.
    """
    with media_files.open_video(path) as container:
        stream = video_stream(path, container)
        found = _scan_packets(path, container, stream)
        if found.first is None or stream.time_base is None:
            raise VideoError(path, f"none of its frames can be decoded; convert it ({_CONVERT})")
        identified = container.format.name not in _UNINDEXED and found.identifies_frames
        # No frame is shown before one that precedes it in the file, though the codec reorders
        # frames: it may have nothing to reorder, or the timestamps may be wrong.
        doubtful = bool(stream.codec_context.has_b_frames) and _rises(found.shown_stamps)
        if identified and not doubtful:
            return _of_packets(path, container, stream, found)
    # A seek back to the start is not exact in every container.
    with media_files.open_video(path) as container:
        stream = video_stream(path, container)
        broadcast = container.format.name in _UNINDEXED
        frames = _scan_frames(container, stream, _JUMP_AHEAD if broadcast else _ABSURD)
        if identified and _rises(frames.stamps):
            return _of_packets(path, container, stream, found)
        return _of_frames(path, stream, frames, found)


def _of_packets(
    path: str | os.PathLike, container: InputContainer, stream: av.VideoStream, found: _Packets
) -> VideoIndex:
    """Return the index of a file whose packets tell when each frame is shown."""
    # Packets come in decoding order: a B-frame follows the later frame that it refers to.
    order = np.argsort(np.array(found.shown_stamps, np.int64))
    stamps = np.array(found.shown_stamps, np.int64)[order]
    packets = np.array(found.shown, np.int64)[order]
    lost = found.lost
    decoded = ~np.isin(stamps, lost)
    time_base = float(stream.time_base or 0)
    # Seeks are checked by the timestamps of packets, those of frames that are cut off included.
    keys = found.keys if _are_distinct(found.stamps) else []
    orientation, size = orientation_of(path, found.first_frame)
    codec = stream.codec_context
    exact = (
        container.format.name in _EXACT_CONTAINERS
        and codec.name in _EXACT_CODECS
        and codec.pix_fmt in _EXACT_PIXELS
        and stream == container.streams.best("video")
        and found.closed
        and not lost
        and orientation == Orientation()
    )
    return VideoIndex(
        stamps=stamps[decoded],
        start=int(stamps[0]),
        packets=packets[decoded],
        keys=np.array(keys, np.int64),
        key_stamps=np.array([found.stamps[key] for key in keys], np.int64),
        time_base=time_base,
        last_duration=found.shown_durations[order[-1]] or _usual_duration(stamps, time_base),
        size=size,
        orientation=orientation,
        exact_in_decord=exact,
    )


def _of_frames(
    path: str | os.PathLike, stream: av.VideoStream, frames: _Frames, found: _Packets
) -> VideoIndex:
    """Return the index of a file whose frames have to be counted from its start."""
    time_base = float(stream.time_base or 0)
    stamps = _in_order(frames.stamps, time_base)
    orientation, size = orientation_of(path, found.first_frame)
    return VideoIndex(
        stamps=stamps,
        start=min(int(stamps[0]), found.start),
        time_base=time_base,
        last_duration=frames.durations[-1] or _usual_duration(stamps, time_base),
        size=size,
        orientation=orientation,
    )


def _are_distinct(stamps: Sequence[int | None]) -> bool:
    """Return whether every packet has a timestamp of its own, so that timestamps identify
    frames."""
    return len(stamps) > 0 and None not in stamps and len(set(stamps)) == len(stamps)


def _rises(stamps: Sequence[int | None]) -> bool:
    """Return whether each timestamp is known and above the one before it."""
    return None not in stamps and bool((np.diff(np.array(stamps, np.int64)) > 0).all())


def _usual_duration(stamps: Int64[np.ndarray, " frames"], time_base: float) -> int:
    """Guess the duration of a frame: the median gap, or one second for a single frame."""
    if len(stamps) > 1:
        return max(1, int(np.median(np.diff(stamps))))
    return round(1 / time_base)


@dataclasses.dataclass
class _Packets:
    """The packets of a stream in the order of the file, and the frames that it begins with.

    Attributes:
        seconds: Seconds per unit of the timestamps.
        stamps: Timestamps of all packets.
        shown: Numbers of the packets that are shown.
        shown_stamps: Their timestamps.
        shown_durations: Their durations.
        keys: Numbers of the packets from which decoding can begin: the first, and keyframes.
        closed: Whether no frame after a keyframe refers to one before it, as far as H.264 tells.
            Otherwise decord decodes frames wrongly after a seek.
        jumps: Whether a keyframe is shown before a packet that precedes it in the file, or absurdly
            long after it. Then another recording begins there, or the mark of a keyframe is wrong.
        first: The first frame that the decoder returns.
        opening: Timestamps of the first frames, in the order in which the decoder returns them.
        opened: Whether these reach beyond the first keyframe, and suffice to see their order.
    """

    seconds: float
    stamps: list[int | None] = dataclasses.field(default_factory=list)
    shown: list[int] = dataclasses.field(default_factory=list)
    shown_stamps: list[int | None] = dataclasses.field(default_factory=list)
    shown_durations: list[int] = dataclasses.field(default_factory=list)
    keys: list[int] = dataclasses.field(default_factory=list)
    closed: bool = True
    jumps: bool = False
    first: av.VideoFrame | None = None
    opening: list[int | None] = dataclasses.field(default_factory=list)
    opened: bool = False
    _first_key: int | None = None
    _latest: int | None = None

    @property
    def first_frame(self) -> av.VideoFrame:
        """The first frame, of a file that has one."""
        assert self.first is not None, "no frame was decoded"
        return self.first

    @property
    def identifies_frames(self) -> bool:
        """Whether the packets' timestamps are those of the frames, each with its own."""
        return _are_distinct(self.shown_stamps) and not self.jumps and _rises(self.opening)

    @property
    def lost(self) -> list[int]:
        """Timestamps of shown packets that cannot be decoded: the file begins between keyframes."""
        decoded = set(self.opening)
        last = max(stamp for stamp in self.opening if stamp is not None)
        return [s for s in self.shown_stamps if s is not None and s < last and s not in decoded]

    @property
    def start(self) -> int:
        """The smallest timestamp of the packets up to the first keyframe; 0 if none has one."""
        count = 1 if self._first_key is None else self.shown_stamps.index(self._first_key) + 1
        return min((s for s in self.shown_stamps[:count] if s is not None), default=0)

    def add(self, packet: av.Packet) -> None:
        """Count a packet of the stream."""
        number = len(self.stamps)
        self.stamps.append(packet.pts)
        if number == 0 or (packet.is_keyframe and not packet.is_discard):
            self.keys.append(number)
        # An edit list may cut frames off. They are in the file, but no player shows them.
        if packet.is_discard:
            return
        self.shown.append(number)
        self.shown_stamps.append(packet.pts)
        self.shown_durations.append(packet.duration or 0)
        if packet.is_keyframe:
            self.closed = self.closed and _begins_anew(packet)
        if packet.pts is not None:
            self._compare(packet.pts, packet.is_keyframe)

    def _compare(self, stamp: int, is_key: bool) -> None:
        if self._latest is None:
            self._latest = stamp
        elif is_key:
            gap = (stamp - self._latest) * self.seconds
            self.jumps = self.jumps or not 0 < gap < _ABSURD
        if is_key and self._first_key is None:
            self._first_key = stamp
        self._latest = max(stamp, self._latest)

    def open(self, packet: av.Packet) -> None:
        """Decode a packet if the opening is not complete."""
        if self.opened:
            return
        try:
            frames = _frames(packet, begun=self.first is not None)
        except av.error.InvalidDataError:
            # Only requests for what is damaged fail.
            self.opened = True
            return
        for frame in frames:
            self.first = self.first or frame
            self.opening.append(frame.pts)
        if len(self.opening) >= _OPENING:
            last = self.opening[-1]
            self.opened = last is None or (self._first_key is not None and last >= self._first_key)


def _begins_anew(packet: av.Packet) -> bool:
    """Return whether a keyframe of H.264 is one after which no frame refers to those before (IDR).

    Keyframes of other codecs count as such.
    """
    codec = packet.stream.codec_context
    head = bytes(codec.extradata or b"")
    if codec.name != "h264" or head[:1] != b"\x01":
        return codec.name != "h264"
    # Units follow one another, each behind its size in as many bytes as the header says.
    width = (head[4] & 3) + 1
    data = bytes(packet)
    position = 0
    while position + width < len(data):
        if data[position + width] & 31 == 5:
            return True
        position += width + int.from_bytes(data[position : position + width], "big")
    return False


def _scan_packets(
    path: str | os.PathLike, container: InputContainer, stream: av.VideoStream
) -> _Packets:
    found = _Packets(float(stream.time_base or 0))
    end = 0.0
    for packet in container.demux():
        ours = packet.stream.index == stream.index
        # PyAV ends with an empty packet per stream, which only flushes the decoder.
        if packet.size and ours:
            found.add(packet)
        if ours:
            found.open(packet)
        if packet.size and packet.pts is not None and packet.time_base is not None:
            packet_end = (packet.pts + (packet.duration or 0)) * packet.time_base
            end = max(end, float(packet_end))
    _require_whole(path, container, stream, found, end)
    return found


def _require_whole(
    path: str | os.PathLike,
    container: InputContainer,
    stream: av.VideoStream,
    found: _Packets,
    end: float,
) -> None:
    """Raise VideoError if there are fewer packets, or an earlier end, than the header says."""
    # FFmpeg opens a truncated file without any error, so only this check finds it.
    # The headers of other containers are often wrong or empty.
    if container.format.name not in _EXACT_CONTAINERS:
        return
    # The header counts samples that an edit list hides; FFmpeg's own table does not.
    expected = min(stream.frames, len(stream.index_entries))
    if len(found.stamps) < expected:
        raise VideoError(path, f"it is truncated: {len(found.stamps)} frames of {expected}")
    expected_end = (container.duration or 0) / av.time_base
    # A header without a table of frames has their duration. Where the clock starts again, the last
    # time says nothing about it.
    known = expected or found.jumps
    if not known and end < expected_end - max(0.5, 0.05 * expected_end):
        raise VideoError(path, f"it is truncated: it ends at {end:.1f} s of {expected_end:.1f} s")


class _Frames(NamedTuple):
    """All frames of a stream, in the order in which the decoder returns them.

    Attributes:
        stamps: Their timestamps. The clock goes on where another recording begins.
        durations: Their durations; 0 where they are not known.
    """

    stamps: list[int | None]
    durations: list[int]


def _scan_frames(container: InputContainer, stream: av.VideoStream, ahead: float) -> _Frames:
    """Decode every frame; `ahead` is as in `_continued`."""
    found = _Frames([], [])
    for packet in _continued(container.demux(stream), float(stream.time_base or 0), ahead):
        for frame in _frames(packet, begun=bool(found.stamps)):
            found.stamps.append(frame.pts)
            found.durations.append(frame.duration or 0)
    return found


def _continued(packets: Iterator[av.Packet], time_base: float, ahead: float) -> Iterator[av.Packet]:
    """Let the clock of packets go on where another recording begins, as FFmpeg and players do.

    Times of decoding tell where that is: they rise, even if frames are shown in another order.

    Args:
        packets: Packets in the order of the file; their timestamps are changed.
        time_base: Seconds per unit of the timestamps.
        ahead: Seconds that times of decoding may jump ahead within a recording.
    """
    shift = 0
    before: int | None = None
    end = 0
    for packet in packets:
        if packet.dts is not None:
            gap = 0 if before is None else packet.dts - before
            if not -_JUMP_BACK <= gap * time_base <= ahead:
                shift += end - packet.dts
            else:
                gap = max(gap, 0)
            before = packet.dts
            end = before + (packet.duration or gap)
            packet.dts += shift
        if packet.pts is not None:
            packet.pts += shift
        yield packet


def _in_order(stamps: Sequence[int | None], time_base: float) -> Int64[np.ndarray, " frames"]:
    """Return the timestamps of frames in rising order, each above the one before it.

    The decoder knows the order of frames better than a file whose timestamps contradict it. A frame
    without a timestamp starts when the one before it ends.
    """
    known = np.array(sorted(stamp for stamp in stamps if stamp is not None), np.int64)
    usual = _usual_duration(known, time_base)
    filled: list[int] = []
    for stamp in stamps:
        if stamp is None:
            stamp = filled[-1] + usual if filled else 0
        filled.append(stamp)
    rising: list[int] = []
    for stamp in sorted(filled):
        # Two frames may have one time where the time base is coarse.
        rising.append(max(stamp, rising[-1] + 1) if rising else stamp)
    return np.array(rising, np.int64)


def orientation_of(
    path: str | os.PathLike, frame: av.VideoFrame
) -> tuple[Orientation, tuple[int, int]]:
    """Return how a player turns a frame, and the width and height at which it shows it.

    The frame's display matrix (a, b, u, c, d, v, x, y, w) moves the pixel at (x, y) to
    (a x + c y, b x + d y), in the notation of QuickTime's file format.

    Raises:
        VideoError: The matrix turns the frame by another angle than a quarter turn.
    """
    a, b, c, d = _matrix(frame)
    angle = math.degrees(math.atan2(math.hypot(b, c), math.hypot(a, d)))
    if _TOLERANCE < angle < 90 - _TOLERANCE:
        raise VideoError(
            path,
            f"it is to be shown turned by {math.degrees(math.atan2(b, a)):.0f} degrees, and only "
            "quarter turns are read; encode it upright (ffmpeg -i OLD NEW.mp4)",
        )
    if angle > 45:
        return Orientation(True, c < 0, b < 0), (frame.height, frame.width)
    return Orientation(False, a < 0, d < 0), (frame.width, frame.height)


def upright(frame: av.VideoFrame, orientation: Orientation) -> UInt8[np.ndarray, "height width 3"]:
    """Return the RGB pixels of a frame as a player shows them."""
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    if orientation.exchange:
        pixels = pixels.transpose(1, 0, 2)
    if orientation.reverse_columns:
        pixels = pixels[:, ::-1]
    if orientation.reverse_rows:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _matrix(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Return a, b, c and d of the display matrix, or those of the identity if there is none."""
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), "<i4").tolist()
    # Some recorders write zeros, which players take for the identity.
    return (a, b, c, d) if a * d - b * c else (1, 0, 0, 1)
