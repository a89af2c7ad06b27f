"""Keeps packet indexes of video files in memory and on disk, so that each is built once.

On disk they lie in the user's cache folder, a file per video, or where $PARAVT_VIDEO_INDEXES says.
Any number of processes may use the folder, and it may be deleted at any time. If it cannot be
written, every process builds its own indexes and keeps them in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import uuid

from paravt_jax.data import video_index
from paravt_jax.data.any_path import user_folder
from paravt_jax.data.media_files import identity, permanent_name
from paravt_jax.data.video_index import VideoIndex

# Part of every digest. Change it whenever an index has other contents for the same file.
_VERSION = b"4"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Upper bound on indexes in memory, per process. A clip of a minute takes 24 KiB, a film 2 MiB.
_MOST_IN_MEMORY = 256


def folder() -> pathlib.Path:
    """Return where indexes are kept on disk."""
    named = os.environ.get("PARAVT_VIDEO_INDEXES")
    if named:
        return pathlib.Path(named)
    return user_folder() / "video-indexes"


def index_of(path: str | os.PathLike) -> VideoIndex:
    """Return the index of a file, which is built if its present content has none.

    Raises:
        VideoError: The file cannot be read.
    """
    return _index_of(os.fspath(path), permanent_name(path), identity(path))


def forget() -> None:
    """Drop the indexes in memory."""
    _index_of.cache_clear()


@functools.lru_cache(maxsize=_MOST_IN_MEMORY)
def _index_of(path: str, name: str, identity: str) -> VideoIndex:
    index = _read(name, identity)
    if index is None:
        index = video_index.build(path)
        body = index.to_bytes()
        # A read-only or full disk costs time, but no result.
        with contextlib.suppress(OSError):
            _replace(_file(name), _digest(identity, body) + body)
    return index


def _replace(file: pathlib.Path, data: bytes) -> None:
    """Write a file that other processes may be reading and writing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(name: str, identity: str) -> VideoIndex | None:
    try:
        data = _file(name).read_bytes()
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    # One check for an index of another content or version, and for a damaged one.
    if digest != _digest(identity, body):
        return None
    return VideoIndex.from_bytes(body)


def _file(name: str) -> pathlib.Path:
    return folder() / hashlib.sha256(os.fsencode(name)).hexdigest()


def _digest(identity: str, body: bytes) -> bytes:
    return hashlib.sha256(b"\n".join((_VERSION, identity.encode(), body))).digest()
