"""Lists and decodes the frames of video files.

Frames are numbered in order of presentation, whichever decoder reads them. Times count from the
first frame. A picture is a video of one frame.

An index per file (`video_index`) says when each frame is shown, and which keyframe it can be
decoded from. It is built when a file is first seen, and kept. From then on a request opens the file
once and reads only what it needs. If seeks in a file turn out to be wrong, it is decoded from its
start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

import av
import av.error
import numpy as np
from av.stream import Discard
from jaxtyping import Int64, UInt8
from PIL import Image, ImageOps

from paravt_jax.data import media_files
from paravt_jax.data.frames import (
    PixelRules,
    ReadFrames,
    ReadTask,
    VideoError,
    VideoInfo,
    carry_out,
    read_now,
    resize,
    shown,
)
from paravt_jax.data.video_index import VideoIndex, decode, index_of, video_stream

try:
    import decord

    # Bad files are reported as VideoError, so decord need not print about them.
    decord.logging.set_level(decord.logging.QUIET)
except ImportError:
    # decord has wheels for x86-64 Linux only.
    decord = None

Decoder = Literal["pyav", "decord"]

_PICTURES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}

# A seek costs about as much as reading and decoding this many frames.
_SEEK_FRAMES = 4


def probe(path: str | os.PathLike) -> VideoInfo:
    """List the frames of a file. Opens it only if its index is not known.

    Args:
        path: The file.

    Raises:
        VideoError: The file cannot be read.
    """
    if is_picture(path):
        height, width, _ = _picture(path).shape
        return VideoInfo(1, 0.0, np.zeros(1), width, height)
    return index_of(path).info()


def read(
    path: str | os.PathLike,
    indices: Sequence[int] | Int64[np.ndarray, " m"],
    rules: PixelRules | None = None,
    decoder: Decoder = "pyav",
) -> UInt8[np.ndarray, "m height width 3"]:
    """Decode frames of a file.

    Args:
        path: The file.
        indices: Frame numbers in any order; a number may occur several times.
        rules: How each frame is resized as soon as it is decoded, so that many large frames take
            little memory; None: not at all.
        decoder: Library that decodes. decord reads a file from its start, which takes long in
            films. It only gets files that it reads exactly, and PyAV the others. Of a video that
            changes its size on the way, it scales the frames of other sizes by its own filter.

    Returns:
        The RGB pixels of the frames, in the order of `indices`.

    Raises:
        VideoError: The file cannot be read, does not have these frames, or they are too thin to be
            resized.
        ValueError: The decoder is not installed.
    """
    require_decoder("decoder", decoder)
    ascending, positions = np.unique(np.asarray(indices, np.int64), return_inverse=True)
    numbers = ascending.tolist()
    index = None if is_picture(path) else index_of(path)
    count = 1 if index is None else index.frames
    if not 0 <= numbers[0] <= numbers[-1] < count:
        raise VideoError(
            path, f"frames {numbers[0]} to {numbers[-1]} are asked for, and it has {count}"
        )
    if index is None:
        return np.repeat(_picture(path, rules)[None], len(positions), axis=0)
    pixels = None
    if decoder == "decord":
        pixels = _read_decord(path, numbers, index, rules)
    if pixels is None and index.keys.size:
        pixels = _read_from_keyframes(path, numbers, index, rules)
    if pixels is None:
        pixels = _read_from_start(path, numbers, index, rules)
    return pixels[positions]


def require_decoder(field: str, decoder: Decoder) -> None:
    """Raise ValueError, naming `field`, if a decoder is not installed."""
    if decoder == "decord" and decord is None:
        raise ValueError(
            f"{field}: decord, which is not installed; pip install decord==0.6.0 (there are wheels "
            "for x86-64 Linux only), or give pyav"
        )


def fetch(task: ReadTask, decoder: Decoder = "pyav") -> ReadFrames:
    """Carry out a task. Raises VideoError if the file cannot be read."""
    return carry_out(task, probe, functools.partial(read, decoder=decoder))


def request(task: ReadTask) -> Future[ReadFrames]:
    """Carry out a task in the calling thread, without a time limit (see `FrameSource`)."""
    return read_now(lambda: fetch(task))


def ahead(task: ReadTask) -> None:
    """Do nothing: `request` reads in the calling thread."""


def is_picture(path: str | os.PathLike) -> bool:
    """Return whether a file is a picture, judged by its name."""
    return os.path.splitext(path)[1].lower() in _PICTURES


def _picture(
    path: str | os.PathLike, rules: PixelRules | None = None
) -> UInt8[np.ndarray, "h w 3"]:
    """Read a picture, rotated as its EXIF data says, with transparent parts on white."""
    with media_files.open_picture(path) as picture:
        image = ImageOps.exif_transpose(picture)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return shown(np.asarray(image.convert("RGB")), rules)


def _pixels(
    frame: av.VideoFrame, index: VideoIndex, rules: PixelRules | None
) -> UInt8[np.ndarray, "y x 3"]:
    """Return the pixels of a frame, upright. They are resized now: large ones fill the memory."""
    pixels = np.rot90(frame.to_ndarray(format="rgb24", threads=1), index.quarter_turns)
    # The picture of a call may change its size with the network's speed.
    return shown(resize(np.ascontiguousarray(pixels), (index.height, index.width)), rules)


def _read_from_keyframes(
    path: str | os.PathLike, numbers: list[int], index: VideoIndex, rules: PixelRules | None
) -> UInt8[np.ndarray, "m height width 3"] | None:
    """Decode each frame from the last keyframe before it.

    Returns:
        The frames, or None if the file's seek table or its marks of keyframes are wrong.
    """
    pixels = []
    with media_files.open_video(path) as container:
        stream = video_stream(path, container)
        for other in container.streams:
            # A seek goes back to the keyframes of all streams, and their data would be read as
            # well.
            if other.index != stream.index:
                other.discard = Discard.all
        frames: Iterator[av.VideoFrame] = iter(())
        reached = -1
        for n in numbers:
            key = index.key_before(n)
            # The first keyframe is not looked for: an edit list may hide it.
            is_past_key = key == index.keys[0]
            # Decode on, unless a later keyframe is nearer.
            if reached < 0 or key > index.stamps[min(reached + _SEEK_FRAMES, index.frames - 1)]:
                container.seek(key, backward=True, stream=stream)
                frames = decode(container, stream)
            else:
                is_past_key = True
            try:
                frame = _find(frames, int(index.stamps[n]), None if is_past_key else key)
            except av.error.FFmpegError:
                # A decoder that did not begin at a keyframe may fail. If the file is damaged,
                # decoding it from its start fails as well.
                return None
            if frame is None:
                return None
            pixels.append(_pixels(frame, index, rules))
            reached = n
    return np.stack(pixels)


def _find(frames: Iterator[av.VideoFrame], stamp: int, key: int | None) -> av.VideoFrame | None:
    """Return the next frame with a timestamp; None if it does not come.

    Args:
        frames: Frames that are decoded one after another.
        stamp: The timestamp.
        key: Timestamp of the keyframe that decoding has to begin with; None: any. An earlier
            keyframe may come first.
    """
    last = None
    for frame in frames:
        if frame.pts is None or frame.pts > stamp:
            return None
        # The timestamps may contradict the order of the pictures.
        if last is not None and frame.pts <= last:
            return None
        last = frame.pts
        # Frames that are shown before the keyframe may refer to frames before it.
        if key is not None and frame.pts >= key:
            # A mark of a keyframe may be wrong. Then the decoder does not return it as such.
            if frame.pts > key or not frame.key_frame:
                return None
            key = None
        if frame.pts == stamp:
            return frame
    return None


def _read_from_start(
    path: str | os.PathLike, numbers: list[int], index: VideoIndex, rules: PixelRules | None
) -> UInt8[np.ndarray, "m height width 3"]:
    """Decode a file from its start until all frames have been found."""
    wanted = set(numbers)
    pixels = []
    last = -1
    with media_files.open_video(path) as container:
        for count, frame in enumerate(decode(container, video_stream(path, container))):
            n = count
            if index.keys.size:
                n = -1 if frame.pts is None else int(np.searchsorted(index.stamps, frame.pts))
                # Such as a frame before the first keyframe.
                if n in (-1, index.frames) or index.stamps[n] != frame.pts:
                    continue
            if n <= last:
                raise VideoError(
                    path, "its timestamps contradict the order of its pictures; encode it again"
                )
            last = n
            if n in wanted:
                pixels.append(_pixels(frame, index, rules))
            if len(pixels) == len(numbers):
                return np.stack(pixels)
    raise VideoError(path, f"frame {numbers[len(pixels)]} of {index.frames} cannot be decoded")


def _read_decord(
    path: str | os.PathLike, numbers: list[int], index: VideoIndex, rules: PixelRules | None
) -> UInt8[np.ndarray, "m height width 3"] | None:
    """Decode with decord, or return None if it is not exact or disagrees with the index."""
    if decord is None or not index.for_decord:
        return None
    try:
        reader = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=1)
        # If the counts differ, frame numbers mean different frames.
        if len(reader) != index.frames:
            return None
        wanted = set(numbers)
        pixels = []
        # Neither seeks nor skips: they give wrong frames where frames refer across keyframes.
        for n in range(numbers[-1] + 1):
            frame = reader.next()
            if n in wanted:
                pixels.append(shown(frame.asnumpy(), rules))
        return np.stack(pixels)
    # Broad because PyAV then tells what is wrong with the file.
    except Exception:
        return None
