"""Writes text files and folders so that a crash never leaves a partial one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

# Seconds after which a writer has certainly locked the folder it created.
_LOCK_GRACE = 60.0


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Replace the contents of `file` with `text` in UTF-8. Readers see the old text or the new one.

    The text first goes to a file of the same name plus ".tmp" in the same folder, which must exist.
    """
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        # Without the fsync a power cut could leave the new name pointing at an empty file: the
        # rename may reach the disk before the data does.
        os.fsync(stream.fileno())
    os.replace(unfinished, file)


@contextlib.contextmanager
def appearing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A hidden folder to fill. It becomes `folder` if the block succeeds, and is deleted if not.

    So `folder` is always complete, even if the process is killed. A killed writer leaves its hidden
    folder behind; the next writer of the same folder deletes those older than a minute. Live
    writers hold a lock on theirs. On a file system without locks nothing is deleted.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    suffix = ".partial"
    for path in folder.parent.iterdir():
        middle = path.name[len(prefix) : -len(suffix)]
        ours = path.name == f"{prefix}{middle}{suffix}" and "." not in middle
        if ours and _abandoned(path):
            # Another writer may be deleting the same folder.
            shutil.rmtree(path, ignore_errors=True)
    temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix, suffix=suffix))
    lock = os.open(temporary, os.O_RDONLY)
    try:
        # The kernel releases the lock when the process dies. OSError: a file system without locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        # mkdtemp makes folders that others cannot read.
        temporary.chmod(0o755)
        # Contents first, then names: after a power failure, `folder` must not exist without its
        # contents.
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        os.replace(temporary, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _abandoned(path: pathlib.Path) -> bool:
    """Whether the writer of a hidden folder is dead. False if that cannot be determined."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A live writer may not have locked its new folder yet.
        return time.time() - os.fstat(descriptor).st_mtime > _LOCK_GRACE
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
