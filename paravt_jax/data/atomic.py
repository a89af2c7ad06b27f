"""Writes text files and folders so that a crash never leaves a partial one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


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
    """Return a hidden folder to fill. It becomes `folder` if the block succeeds, and is deleted if
    not.

    So `folder` is always complete, even if the process is killed. A killed writer leaves its hidden
    folder behind, which the next writer of the same folder deletes: there must be only one at a
    time.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        # Contents first, then names: after a power failure, `folder` must not exist without its
        # contents.
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        os.replace(temporary, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
