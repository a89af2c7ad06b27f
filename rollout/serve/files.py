"""Files that clients bring, and the folder of videos that they may name.

Uploads and pictures lie in a folder that is deleted at the end, and each is deleted when nobody has
used it for `KEPT` seconds. A client reaches no other file of the machine.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import io
import pathlib
import secrets
import tempfile
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import PixelRules, ReadFrames, ReadTask, VideoError, VideoInfo
from rollout.serve.errors import ApiError

KEPT = 3600.0
"""Seconds for which an unused upload is kept."""

ANSWERED = 2700.0
"""Seconds after which no request still needs its pictures."""

PAIR = ".pair.png"
"""Ends the name of a file with two frames of a video."""

_CHUNK = 1 << 20  # bytes
_NOBODY = "nobody"  # stands for the client of what requests contain: nobody can name it


@dataclasses.dataclass
class Upload:
    """A file that a client brought."""

    id: str
    path: pathlib.Path
    name: str
    """As the client calls it."""
    client: str
    """Who may use it."""
    bytes: int = 0
    made: float = dataclasses.field(default_factory=time.time)
    """When it arrived, in seconds since the epoch."""
    used: float = dataclasses.field(default_factory=time.time)
    """When it was last used."""

    def as_json(self) -> dict[str, Any]:
        """Return the file as OpenAI's API describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.made),
            "expires_at": int(self.used + KEPT),
            "filename": self.name,
            "purpose": "user_data",
        }


class Picture(NamedTuple):
    """What the model alone sees at once: a picture, or two frames of a video, one below the
    other."""

    path: pathlib.Path
    tokens: int
    """Visual tokens."""
    time: float = 0.0
    """The middle of two frames, in seconds."""


@dataclasses.dataclass(frozen=True)
class FileLimits:
    """Limits of files. Sizes are in bytes."""

    video: int
    """Upper bound on a video."""
    minutes: float
    """Upper bound on its length."""
    uploads: int
    """Upper bound on all files that clients brought."""


class Files:
    """Uploads, pictures and allowed videos. All methods raise `ApiError` for what is refused.

    Args:
        reader: Opens files of strangers, in processes of its own.
        limits: Limits of files.
        videos: Folder of videos that clients may name; None: there is none.
    """

    def __init__(self, reader: FrameReader, limits: FileLimits, videos: pathlib.Path | None):
        self.limits = limits
        self._reader = reader
        self._videos = None if videos is None else videos.resolve(strict=True)
        self._temporary = tempfile.TemporaryDirectory(prefix="paravt-serve-")
        self._folder = pathlib.Path(self._temporary.name)
        self._uploads: dict[str, Upload] = {}

    def close(self) -> None:
        """Delete all that clients brought."""
        self._temporary.cleanup()

    async def upload(self, source: BinaryIO, name: str, client: str) -> tuple[Upload, VideoInfo]:
        """Keep a video, if it can be read."""
        id = f"file-{secrets.token_hex(12)}"
        # Its content says what kind of video it is.
        upload = self._uploads[id] = Upload(id, self._folder / f"{id}.mp4", name, client)
        try:
            await asyncio.to_thread(self._copy, source, upload)
            return upload, await self.probe(upload.path)
        except BaseException:
            self.delete(id, client)
            raise

    def find(self, id: str, client: str) -> Upload:
        """Return an upload of this client, which counts as used. A foreign one is not told apart
        from one that does not exist."""
        upload = self._uploads.get(id)
        if upload is None or upload.client != client:
            raise ApiError(404, f"file: {id[:60]!r} is unknown or has expired; upload it again")
        upload.used = time.time()
        return upload

    def delete(self, id: str, client: str) -> None:
        """Delete an upload. Episodes that are going on see an unreadable video."""
        self._drop(self.find(id, client))

    def expire(self) -> None:
        """Delete what was not used for a long time."""
        oldest = time.time() - KEPT
        # A list, because other threads add uploads.
        for upload in [upload for upload in [*self._uploads.values()] if upload.used < oldest]:
            self._drop(upload)

    async def video(self, url: str, client: str) -> pathlib.Path:
        """Return the path of a video: an upload, a data URL, or a file of the allowed folder."""
        if url in self._uploads and self._uploads[url].client == client:
            return self.find(url, client).path
        if url.startswith("data:"):
            data = await asyncio.to_thread(_decode, url, "video")
            path = await asyncio.to_thread(self._keep, data, ".mp4")
        else:
            path = self._allowed(url)
            if path.stat().st_size > self.limits.video:
                raise self._too_large()
        await self.probe(path)
        return path

    async def picture(self, url: str, rules: PixelRules) -> Picture:
        """Keep a picture at the size at which the model sees it.

        Args:
            url: Data URL.
            rules: How it is resized.
        """
        data = await asyncio.to_thread(_decode, url, "image")
        # Strangers' files are decoded in other processes.
        original = self._folder / f"original-{secrets.token_hex(12)}.png"
        writing = asyncio.create_task(asyncio.to_thread(original.write_bytes, data))
        try:
            await asyncio.shield(writing)
            pixels = (await self.read(ReadTask(str(original), (0,), rules))).frames[0]
        finally:
            # If the client leaves, the thread still writes.
            writing.add_done_callback(lambda _: original.unlink(missing_ok=True))
        path = await self._keep_pixels(pixels, ".png")
        height, width, _ = pixels.shape
        return Picture(path, height * width // rules.factor**2)

    async def pairs(
        self, path: pathlib.Path, count: int, rules_of: Callable[[int], PixelRules]
    ) -> tuple[Picture, ...]:
        """Keep frames of a video in pairs, which share a temporal patch of a native video.

        Args:
            path: The video.
            count: The most frames, spread evenly. Of a video that has no more, two per second are
                taken, as vLLM does.
            rules_of: How frames are resized, by their number.
        """
        info = await self.probe(path)
        rate = info.frames / max(info.duration, 1e-3)
        if info.frames > count:
            indices = np.linspace(0, info.frames - 1, count).astype(int)
        else:
            taken = min(max(int(2 * info.duration), 4), info.frames)
            indices = np.linspace(0, info.frames - 1, taken).round().astype(int)
        rules = rules_of(len(indices))
        pixels = (await self.read(ReadTask(str(path), tuple(indices.tolist()), rules))).frames
        times = indices / rate
        if len(pixels) % 2:
            pixels, times = np.concatenate([pixels, pixels[-1:]]), np.append(times, times[-1])
        _, height, width, _ = pixels.shape
        tokens = height * width // rules.factor**2
        pairs = pixels.reshape(-1, 2 * height, width, 3)
        paths = [await self._keep_pixels(pair, PAIR) for pair in pairs]
        middles = times.reshape(-1, 2).mean(1).tolist()
        return tuple(Picture(kept, tokens, time) for kept, time in zip(paths, middles, strict=True))

    async def film(self, urls: list[str], rules: PixelRules) -> pathlib.Path:
        """Keep pictures as a video of one frame per second, without loss."""
        pictures = await asyncio.gather(*[self.picture(url, rules) for url in urls])
        data = await asyncio.to_thread(_film, [picture.path for picture in pictures])
        return await asyncio.to_thread(self._keep, data, ".mkv")

    async def probe(self, path: pathlib.Path) -> VideoInfo:
        """Return what a video contains, if it is not too long."""
        info = (await self.read(ReadTask(str(path), (), None))).info
        minutes = info.duration / 60
        if minutes > self.limits.minutes:
            most = self.limits.minutes
            message = f"video: {minutes:.1f} minutes; at most {most:g} are accepted, cut it"
            raise ApiError(413, message, "video_too_long")
        return info

    async def read(self, task: ReadTask) -> ReadFrames:
        """Read frames of a file."""
        try:
            return await asyncio.wrap_future(self._reader.request(task))
        except VideoError as error:
            # Clients must not see paths of this machine.
            message = f"video: it cannot be read ({error.reason})".replace(error.path, "it")
            raise ApiError(422, message, "unreadable") from error

    # --- below ---

    def _drop(self, upload: Upload) -> None:
        upload.path.unlink(missing_ok=True)
        self._uploads.pop(upload.id, None)

    async def _keep_pixels(self, pixels: UInt8[np.ndarray, "h w 3"], suffix: str) -> pathlib.Path:
        """Keep a picture as it is. Equal ones have equal paths, so that they are encoded once."""
        buffer = io.BytesIO()
        picture = Image.fromarray(pixels)
        await asyncio.to_thread(picture.save, buffer, "PNG", compress_level=1)
        return await asyncio.to_thread(self._keep, buffer.getvalue(), suffix)

    def _keep(self, data: bytes, suffix: str) -> pathlib.Path:
        """Write bytes of a request to a file, which equal bytes share."""
        if len(data) > self.limits.video:
            raise self._too_large()
        id = f"data-{hashlib.sha256(data).hexdigest()}{suffix}"
        path = self._folder / id
        if not path.exists():
            self._require_room(len(data))
            part = path.with_suffix(f".{secrets.token_hex(4)}.part")
            try:
                part.write_bytes(data)
                part.rename(path)
            finally:  # the disk may be full
                part.unlink(missing_ok=True)
        self._uploads[id] = Upload(id, path, id, _NOBODY, len(data))
        return path

    def _copy(self, source: BinaryIO, upload: Upload) -> None:
        with upload.path.open("wb") as file:
            while chunk := source.read(_CHUNK):
                self._require_room(len(chunk))
                upload.bytes += len(chunk)
                if upload.bytes > self.limits.video:
                    raise self._too_large()
                file.write(chunk)

    def _require_room(self, size: int) -> None:
        # Pictures of requests that have long been answered make room for others.
        oldest = sorted([*self._uploads.values()], key=lambda upload: upload.used)
        left = self.limits.uploads - size - sum(upload.bytes for upload in oldest)
        answered = time.time() - ANSWERED
        for upload in oldest:
            if left < 0 and upload.used < answered and upload.client == _NOBODY:
                self._drop(upload)
                left += upload.bytes
        if left < 0:
            raise ApiError(429, "file: no room is left for uploads; delete some, or wait", retry=60)

    def _too_large(self) -> ApiError:
        most = self.limits.video / 2**20
        message = f"file: it is larger than {most:,.0f} MiB; shrink it"
        return ApiError(413, message, "file_too_large")

    def _allowed(self, url: str) -> pathlib.Path:
        """Return the path of a video in the allowed folder: `file://` with its path, or its path
        below the folder."""
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("", "file") or parts.netloc:
                message = f"video: {url[:60]!r}; the server fetches no addresses, upload it"
                raise ApiError(400, message)
            if self._videos is not None:
                # A link may lead out of the folder.
                name = unquote(parts.path) if parts.scheme else url
                path = (self._videos / name).resolve(strict=True)
                if path.is_relative_to(self._videos) and path.is_file():
                    return path
        except (OSError, ValueError, RuntimeError):
            pass  # no such file, or no name of a file
        raise ApiError(404, f"video: {url[:200]!r} is no upload of yours and no file of --videos")


def _film(paths: list[pathlib.Path]) -> bytes:
    """Return pictures as a video. Those of other sizes become as large as the first."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=1)
        stream.pix_fmt = "bgr0"
        stream.width, stream.height = Image.open(paths[0]).size
        for path in paths:
            picture = Image.open(path).resize((stream.width, stream.height))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return buffer.getvalue()


def _decode(url: str, kind: str) -> bytes:
    """Return the content of a data URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith(f"data:{kind}/") or not head.endswith(";base64"):
        raise ApiError(400, f"{kind}: {head[:60]!r}; give data:{kind}/...;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:  # also for characters beyond ASCII
        raise ApiError(400, f"{kind}: its base64 is damaged ({error})") from error
