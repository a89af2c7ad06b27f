"""Opens media files.

Media come from strangers, and all of them are opened here. Decoders get open file objects and a
list of formats: a playlist (m3u8, ffconcat, DASH) would make FFmpeg open other files, and some
pictures (EPS) would make Pillow run a program. Whatever goes wrong becomes a `VideoError`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from collections.abc import Iterator
from typing import Any

import av
import av.error
from av.container import InputContainer
from PIL import Image, UnidentifiedImageError

from paravt_jax.data import foreign
from paravt_jax.data.frames import VideoError

_CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf")
_PICTURES = ("BMP", "JPEG", "PNG", "WEBP")
MOST_PIXELS = 1 << 26
"""Upper bound on the pixels of a frame. 8K (UHD) has half of them."""

# Names of formats that FFmpeg may take a file for, and of protocols that they may use: none.
_FFMPEG_LIMITS = {"format_whitelist": ",".join(_CONTAINERS), "protocol_whitelist": "none"}
# PyAV 18 fails on metadata that is not UTF-8 unless told otherwise; PyAV 19 never does, and has no
# such option.
_FFMPEG_OPTIONS: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)


def identity(path: str | os.PathLike) -> str:
    """Return what identifies the content of a file: its size, its inode and its modification time.

    Raises:
        VideoError: There is no such file, it is empty, or it cannot be opened.
    """
    try:
        about = os.stat(path)
    # ValueError: the name contains a NUL.
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise VideoError(path, "no such file") from error
    except OSError as error:
        reason = f"it cannot be opened ({error.strerror}); check the path and its permissions"
        raise VideoError(path, reason) from error
    if not stat.S_ISREG(about.st_mode):
        raise VideoError(path, "no such file")
    if not about.st_size:
        raise VideoError(path, "the file is empty")
    return f"{about.st_size} bytes, inode {about.st_ino}, {about.st_mtime_ns} ns"


@contextlib.contextmanager
def open_video(path: str | os.PathLike) -> Iterator[InputContainer]:
    """Open a video. Errors in the file become VideoErrors, also those of the caller's block."""
    # Open the file anew for every call: a reader that is passed to another thread or through a fork
    # can hang.
    with _video_errors(path), foreign.open_regular(path) as source:
        try:
            container = av.open(source, container_options=_FFMPEG_LIMITS, **_FFMPEG_OPTIONS)
        except av.error.ArgumentError as error:
            raise VideoError(path, f"it is none of {', '.join(_CONTAINERS)}; convert it") from error
        with container:
            yield container


@contextlib.contextmanager
def _video_errors(path: str | os.PathLike) -> Iterator[None]:
    """Whatever goes wrong while one file is read costs that file, not the run."""
    try:
        yield
    # A missing package concerns all files.
    except (VideoError, ModuleNotFoundError):
        raise
    # Broad because strangers' files find errors of every kind. Pillow alone raises SyntaxError in
    # PNG; struct.error, TypeError and AttributeError in EXIF data; DecompressionBombError.
    except Exception as error:
        # Python's MemoryError is for the worker process, which knows its limit. FFmpeg's comes from
        # sizes in a damaged file.
        if isinstance(error, MemoryError) and not isinstance(error, av.error.FFmpegError):
            raise
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is none of {', '.join(_PICTURES)}; convert it"
        else:
            # FFmpeg's own text has a long negative number and the path.
            text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            reason = f"it cannot be decoded ({text}); fetch or convert it again"
        raise VideoError(path, reason) from error


@contextlib.contextmanager
def open_picture(path: str | os.PathLike) -> Iterator[Image.Image]:
    """Open a picture. Errors in the file become VideoErrors, also those of the caller's block."""
    identity(path)
    with (
        _video_errors(path),
        warnings.catch_warnings(action="ignore"),  # of damaged EXIF data
        foreign.open_regular(path) as source,
        Image.open(source, formats=_PICTURES) as picture,
    ):
        require_size(path, picture.width, picture.height)
        # A phone's JPEG may hold a second picture, such as depth, which viewers do not show.
        if picture.format in ("PNG", "WEBP") and getattr(picture, "n_frames", 1) > 1:
            raise VideoError(path, "it is an animation; convert it to a video (ffmpeg, .mp4)")
        yield picture


def require_size(path: str | os.PathLike, width: int, height: int) -> None:
    """Raise VideoError if a frame of this size, in pixels, would take too much memory."""
    if width * height > MOST_PIXELS:
        raise VideoError(
            path,
            f"its frames have {width} x {height} pixels; at most {MOST_PIXELS:,} are read, so "
            "scale it down",
        )
