"""The small files of a run in a bucket, and the local folder in which the run works on them.

A run reads and writes its local folder. `push` brings what changed to the bucket, `pull` makes the
folder equal to the bucket. A kill may come between any two writes, so their order is fixed:

    1. all files but the manifest of the run's history
    2. files.json, the names of all files; `pull` ignores objects that it does not name
    3. history.json, which names only files that are there
    4. files.json without those that are gone, and then these are deleted

Without 2, half of a folder that was being written, such as `model`, would look like all of it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterable

from paravt_jax.data.stored_json import parse_json
from train.durable.bucket import Bucket
from train.durable.lease import NAME as LEASE

MANIFEST = "files.json"
_HISTORY = "history.json"
_REMEDY = "restore it from a backup, or start anew with another --run-dir"
# Checkpoints and compiled programs are in the bucket only. The others belong to one machine.
_ELSEWHERE = ("checkpoints", "compiled", "wandb")


class BucketFiles:
    """The small files below an address, and their local copy.

    Args:
        bucket: The address.
        folder: The local folder.
    """

    def __init__(self, bucket: Bucket, folder: pathlib.Path):
        self._bucket = bucket
        self._folder = folder
        # The local files that are equal to those in the bucket: time of the last change in ns, and
        # bytes.
        self._equal: dict[str, tuple[int, int]] = {}

    def pull(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Make the local folder equal to the bucket.

        An object that somebody deleted is like a file that somebody deleted.

        Args:
            wanted: Whether to fetch the file of a name; others become empty files.

        Raises:
            DamagedFileError: A file does not have its checksum.
            BucketError: The store cannot be reached.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        stored = self._bucket.list()
        if MANIFEST in stored:
            content = self._bucket.read(MANIFEST)
            where = f"{self._bucket.address}/{MANIFEST}"
            manifest = parse_json(content, where, list[str], _REMEDY)
            names = [name for name in manifest if name in stored]
            fetched = [name for name in names if wanted(name)]
        else:
            # Not a run, or one that was killed before it had more than its settings.
            names = [name for name in stored if name not in (LEASE, "config.json")]
            fetched = []
        for name in names:
            file = self._folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        self._bucket.download(fetched, self._folder)
        self._equal = self._files()

    def push(self) -> None:
        """Bring the changes of the local folder to the bucket.

        Raises:
            BucketError: The store cannot be reached or written to.
        """
        files = self._files()
        changed = [name for name in files if files[name] != self._equal.get(name)]
        gone = [name for name in self._equal if name not in files]
        self._bucket.upload([name for name in changed if name != _HISTORY], self._folder)
        if files.keys() - self._equal.keys():
            self._write_manifest([*files, *gone])
        if _HISTORY in changed:
            self._bucket.upload([_HISTORY], self._folder)
        if gone:
            self._write_manifest(files)
            self._bucket.delete(gone)
        self._equal = files

    def _write_manifest(self, names: Iterable[str]) -> None:
        self._bucket.write(MANIFEST, json.dumps(sorted(names), indent=0))

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the local files that belong to the bucket, too."""
        found = {}
        for file in self._folder.rglob("*"):
            name = file.relative_to(self._folder)
            # Hidden and .tmp: not complete yet.
            unfinished = any(part.startswith(".") or part.endswith(".tmp") for part in name.parts)
            if not unfinished and name.parts[0] not in _ELSEWHERE and file.is_file():
                status = file.stat()
                found[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return found
