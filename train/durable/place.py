"""Where a run lives: in a folder, or in a bucket with a local folder for its small files.

    run_dir      small files, the exported model               checkpoints
    a folder     in it                                         in it
    gs://...     ~/.cache/paravt-jax/runs/DIGEST-PROCESS/NAME  gs://.../checkpoints

The rest of a run works on `Place.folder`, and calls `push` where files have to be durable. On a
disk they are durable when they are written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from paravt_jax.data.any_path import AnyPath, any_path, is_bucket, user_folder
from paravt_jax.processes import cluster, hosts
from train.durable import run_directory
from train.durable.bucket import BucketFiles, copy_checkpoint
from train.durable.interrupts import Stopped
from train.durable.lease import Lease
from train.durable.run_directory import RunDirectory, lock_run

# An exported model is large, and only the first process looks whether it is there.
_EXPORTS = ("model/", "adapter/")


class Place:
    """A run in a folder, or in a bucket.

    Args:
        run_dir: A folder, or gs://BUCKET/FOLDER.

    Attributes:
        shown: The folder or the address, as the user knows it.
        folder: Holds the small files.
        checkpoints: Holds one folder per phase.
        programs: A folder for compiled programs that all processes see.

    Raises:
        ModuleNotFoundError: The package for an address is missing.
    """

    def __init__(self, run_dir: str | pathlib.Path):
        self.programs: AnyPath = any_path(run_dir)
        self.shown = str(self.programs).rstrip("/")
        self.checkpoints: AnyPath = self.programs / "checkpoints"
        self.folder = pathlib.Path(self.shown)
        self._in_bucket = is_bucket(run_dir)
        if self._in_bucket:
            digest = hashlib.sha256(self.shown.encode()).hexdigest()[:16]
            # Processes on one machine do not share files here, as they do not on several machines.
            home = user_folder() / "runs" / f"{digest}-{hosts.process_index()}"
            self.folder = home / self.shown.rpartition("/")[2]
        self._lease: Lease | None = None

    @functools.cached_property
    def _files(self) -> BucketFiles:
        """The small files in the bucket, which needs credentials."""
        return BucketFiles(self.shown, self.folder)

    def require_usable(self, config: dict[str, Any]) -> bool:
        """See `train.durable.run_directory.require_usable`."""
        return run_directory.require_usable(self.programs, config)

    def claim(self, config: dict[str, Any], start: str, stack: contextlib.ExitStack) -> None:
        """Lock the run until `stack` closes. Only the first process calls it.

        Args:
            config: The run's settings.
            start: A run whose cold start is taken over; may be empty.
            stack: Gets what has to be closed.

        Raises:
            RunDirectoryError: The run is in use, or one of other settings.
        """
        if self._in_bucket:
            self._claim_bucket(config, stack)
        stack.enter_context(RunDirectory(self.folder, config))
        self.push()
        if start:
            self._take_over(start, config)
            self.push()
        stack.push(self._push_at_end)

    def require_shared(self) -> None:
        """Raise ValueError on every process if another one has a run elsewhere."""
        if self._in_bucket:
            hosts.require_same("run_dir", self.shown)
        else:
            cluster.require_shared(self.folder)

    def push(self) -> None:
        """Return when the files of the first process are durable."""
        if self._lease is not None:
            self._lease.require()
            self._files.push()

    def pull(self) -> None:
        """Fetch the files of the first process on the other processes."""
        if self._in_bucket and not hosts.is_first():
            self._files.pull(_is_read)

    def in_words(self, text: str) -> str:
        """Return a message with the paths that the user knows."""
        return text.replace(str(self.folder), self.shown)

    def _claim_bucket(self, config: dict[str, Any], stack: contextlib.ExitStack) -> None:
        """Get the lease, and the files."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # A frozen process that has lost its lease still works on these files.
        stack.enter_context(lock_run(self.folder.parent / ".lock", self.shown))
        self._lease = stack.enter_context(Lease(self.shown))
        self.require_usable(config)
        self._files.pull()

    def _push_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Push what was written since the last save, unless the run failed."""
        if kind is None or issubclass(kind, Stopped):
            self.push()

    def _take_over(self, start: str, config: dict[str, Any]) -> None:
        """Copy the data and the cold start of another run, so that this one begins with RL.

        Folders and checkpoints that are already there stay.
        """
        run_directory.require_cold_start(start, config)
        folders = run_directory.cold_start_folders(config)
        missing = tuple(name for name in folders if not (self.folder / name).exists())
        with small_files(start, lambda name: name.startswith(missing)) as source:
            for name in missing:
                _copy_folder(source / name, self.folder / name, shutil.copy2)
        for name in run_directory.cold_start_checkpoints(config):
            if self._in_bucket:
                copy_checkpoint(f"{start.rstrip('/')}/{name}", f"{self.shown}/{name}")
            else:
                _copy_folder(pathlib.Path(start) / name, self.folder / name, _link_or_copy)


def _is_read(name: str) -> bool:
    return not name.startswith(_EXPORTS)


@contextlib.contextmanager
def small_files(run_dir: str, wanted: Callable[[str], bool] = _is_read) -> Iterator[pathlib.Path]:
    """Yield a local folder with files of a run that may be going on elsewhere, to read.

    Args:
        run_dir: The run, in a folder or in a bucket.
        wanted: Whether to fetch the file of a name from a bucket.
    """
    if not is_bucket(run_dir):
        yield pathlib.Path(run_dir)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / run_dir.rstrip("/").rpartition("/")[2]
        BucketFiles(run_dir, folder).pull(wanted)
        yield folder


def _copy_folder(
    source: pathlib.Path, target: pathlib.Path, copy: Callable[[str, str], object]
) -> None:
    """Copy a folder unless the target exists, which is complete even after a kill."""
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, copy_function=copy)
    unfinished.rename(target)


def _link_or_copy(source: str, target: str) -> None:
    """Make a second name for a file, which takes no space, or a copy on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
