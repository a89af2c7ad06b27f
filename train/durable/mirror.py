"""The small files of a run in a bucket, and the local folder in which the run works on them.

A run reads and writes its local folder. `push` brings what changed to the bucket, `pull` makes the
folder equal to the bucket. A kill may come between any two writes, so their order is fixed:

    1. all files but the manifest of the run's history
    2. files.json, the names of all files; `pull` ignores objects that it does not name
    3. history.json, which names only files that are there
    4. files.json without those that are gone, and then these

Without 2, half of a folder that was being written, such as `model`, would look like all of it.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
from collections.abc import Callable

from paravt_jax.data.stored_json import parse_json
from train.durable.bucket import Bucket, Stored, on_each

FILES = "files.json"
_LAST = "history.json"
# Checkpoints and compiled programs are in the bucket only. The others belong to one machine.
_LOCAL = ("checkpoints", "compiled", "wandb")

_Stamp = tuple[int, int]  # time of the last change in ns, and bytes


class Mirror:
    """A folder below an address, and its local copy.

    Args:
        bucket: The address.
        folder: The local folder; it is created if needed.
    """

    def __init__(self, bucket: Bucket, folder: pathlib.Path):
        self._bucket = bucket
        self._folder = folder
        # The local files that are equal to those in the bucket.
        self._equal: dict[str, _Stamp] = {}
        # The names in files.json; None: it does not exist.
        self._names: list[str] | None = None

    def names(self) -> list[str]:
        """The names of all files in the bucket.

        Raises:
            DamagedFileError: files.json is damaged.
        """
        try:
            content, _ = self._bucket.read(FILES)
        except FileNotFoundError:
            self._names = None
            return []
        where = f"{self._bucket.address}/{FILES}"
        remedy = "restore it from a backup, or start anew with another --run-dir"
        names: list[str] = parse_json(content, where, list[str], remedy)
        self._names = names
        return list(names)

    def pull(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Makes the local folder equal to the bucket.

        An object that somebody deleted is like a file that somebody deleted.

        Args:
            wanted: Whether to fetch the file of a name; others are deleted.

        Raises:
            DamagedFileError: files.json is damaged.
            BucketError: A file cannot be fetched, or its checksum is wrong.
        """
        stored = self._bucket.list()
        names = {name for name in self.names() if name in stored and wanted(name)}
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in [file for file in self._folder.rglob("*") if not file.is_dir()]:
            if file.relative_to(self._folder).as_posix() not in names:
                file.unlink()
        # A folder means to a run that its files are complete. The deepest are listed last.
        for folder in sorted(self._folder.rglob("*"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

        def fetch(name: str) -> None:
            file = self._folder / name
            if not _holds(file, stored[name]):
                file.parent.mkdir(parents=True, exist_ok=True)
                self._bucket.read_to(name, file)

        on_each(fetch, names)
        self._equal = self._files()

    def push(self) -> None:
        """Brings the changes of the local folder to the bucket.

        Raises:
            BucketError: The store cannot be reached or written to.
        """
        files = self._files()
        changed = [name for name in files if files[name] != self._equal.get(name)]
        on_each(self._push_file, [name for name in changed if name != _LAST])
        gone = [name for name in self._equal if name not in files]
        self._name([*files, *gone])
        if _LAST in changed:
            self._push_file(_LAST)
        self._name([*files])
        on_each(self._bucket.delete, gone)
        self._equal = files

    def _name(self, names: list[str]) -> None:
        """Writes files.json, if it has other names."""
        if sorted(names) != self._names:
            self._names = None
            self._bucket.write(FILES, json.dumps(sorted(names), indent=0))
            self._names = sorted(names)

    def _push_file(self, name: str) -> None:
        self._bucket.write_from(name, self._folder / name)

    def _files(self) -> dict[str, _Stamp]:
        """The local files that belong to the bucket, too."""
        found = {}
        for top, folders, names in os.walk(self._folder):
            place = pathlib.Path(top)
            inside = place.relative_to(self._folder)
            # Hidden and .tmp: not complete yet.
            folders[:] = [n for n in folders if _is_shared(inside / n) and not n.endswith(".tmp")]
            for name in names:
                if _is_shared(inside / name) and not name.endswith(".tmp"):
                    status = (place / name).stat()
                    found[(inside / name).as_posix()] = (status.st_mtime_ns, status.st_size)
        return found


def _is_shared(name: pathlib.Path) -> bool:
    return not name.name.startswith(".") and name.as_posix() not in _LOCAL


def _holds(file: pathlib.Path, stored: Stored) -> bool:
    """Whether a local file has the content of an object."""
    try:
        if file.stat().st_size != stored.bytes:
            return False
    except FileNotFoundError:
        return False
    # It comes with google-cloud-storage, an extra.
    import google_crc32c

    crc = google_crc32c.Checksum()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc.update(block)
    return base64.b64encode(crc.digest()).decode() == stored.crc32c
