"""Keeps packet indexes of video files in memory and on disk, so that each is built once.

On disk they lie in the user's cache folder, a file per video, or where $PARAVT_VIDEO_INDEXES says.
Any number of processes may use the folder, and it may be deleted at any time. If it cannot be
written, every process builds its own indexes and keeps them in memory.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import pathlib
import tempfile
import threading

from paravt_jax.data.media_files import permanent_name
from paravt_jax.data.user_folder import user_folder
from paravt_jax.data.video_index import VideoIndex

# Part of every digest. Change it whenever an index has other contents for the same file.
_VERSION = b"3"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Upper bound on indexes in memory, per process. One of a film of 100 minutes takes about 2 MiB.
_MEMORY_BYTES = 64 * 2**20


class _Memory:
    """Indexes in memory, with the identity of each file's content."""

    def __init__(self, limit: int):
        self._limit = limit
        self._bytes = 0
        # By name of the file, the least recently used first.
        self._known: collections.OrderedDict[str, tuple[str, VideoIndex]] = (
            collections.OrderedDict()
        )
        # Several threads of a process may read videos.
        self._lock = threading.Lock()

    def find(self, name: str, identity: str) -> VideoIndex | None:
        with self._lock:
            known = self._known.get(name)
            if known is None or known[0] != identity:
                return None
            self._known.move_to_end(name)
            return known[1]

    def keep(self, name: str, identity: str, index: VideoIndex) -> None:
        with self._lock:
            _, replaced = self._known.pop(name, (identity, None))
            if replaced is not None:
                self._bytes -= replaced.bytes
            self._known[name] = identity, index
            self._bytes += index.bytes
            while self._bytes > self._limit and len(self._known) > 1:
                _, (_, oldest) = self._known.popitem(last=False)
                self._bytes -= oldest.bytes

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._bytes = 0


_memory = _Memory(_MEMORY_BYTES)


def folder() -> pathlib.Path:
    """Where indexes are kept on disk."""
    named = os.environ.get("PARAVT_VIDEO_INDEXES")
    if named:
        return pathlib.Path(named)
    return user_folder() / "video-indexes"


def find(path: str | os.PathLike, identity: str) -> VideoIndex | None:
    """The index of a file whose content has this identity, or None if it has to be built."""
    name = permanent_name(path)
    index = _memory.find(name, identity)
    if index is None:
        index = _read(name, identity)
        if index is not None:
            _memory.keep(name, identity, index)
    return index


def keep(path: str | os.PathLike, identity: str, index: VideoIndex) -> None:
    """Keep the index of a file for this process and, if the folder can be written, for others."""
    name = permanent_name(path)
    _memory.keep(name, identity, index)
    body = index.to_bytes()
    # A read-only or full disk costs time, but no result.
    with contextlib.suppress(OSError):
        _replace(_file(name), _digest(identity, body) + body)


def forget() -> None:
    """Drop the indexes in memory."""
    _memory.clear()


def _replace(file: pathlib.Path, data: bytes) -> None:
    """Write a file that other processes may be reading and writing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            # mkstemp makes files that other users cannot read.
            os.fchmod(stream.fileno(), 0o644)
        os.replace(unfinished, file)
    except OSError:
        os.unlink(unfinished)
        raise


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
