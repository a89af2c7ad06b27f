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
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from paravt_jax.data.any_path import AnyPath, any_path, is_bucket, user_folder
from paravt_jax.data.stored_settings import lock
from paravt_jax.processes import cluster, hosts
from train.durable import run_directory
from train.durable.bucket import Bucket
from train.durable.bucket_files import BucketFiles
from train.durable.checkpoint_files import COMMITTED
from train.durable.interrupts import Stopped
from train.durable.lease import Lease
from train.durable.run_directory import RunDirectory, RunDirectoryError

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
        return BucketFiles(Bucket(self.shown), self.folder)

    def require_usable(self, config: dict[str, Any]) -> bool:
        """See `train.durable.run_directory.require_usable`. Changes nothing."""
        with _outline(self.shown) as folder:
            return run_directory.require_usable(folder, config)

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
        """On the other processes, fetch the files of the first one."""
        if self._in_bucket and not hosts.is_first():
            self._files.pull(_is_read)

    def in_words(self, text: str) -> str:
        """Return a message with the paths that the user knows."""
        return text.replace(str(self.folder), self.shown)

    def _claim_bucket(self, config: dict[str, Any], stack: contextlib.ExitStack) -> None:
        """Get the lease, and the files."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A frozen process that has lost its lease still works on these files.
            stack.enter_context(lock(self.folder.parent / ".lock"))
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"--run-dir {self.shown} is {error}: wait for it, stop it, or give another "
                "--run-dir."
            ) from error
        self._lease = stack.enter_context(Lease(Bucket(self.shown)))
        self.require_usable(config)
        self._files.pull()

    def _push_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Push what was written since the last save, unless the run failed."""
        if kind is None or issubclass(kind, Stopped):
            self.push()

    def _take_over(self, start: str, config: dict[str, Any]) -> None:
        """See `train.durable.run_directory.take_over`; a store copies the checkpoints."""
        names = run_directory.cold_start_files(config)
        missing = tuple(name for name in names if not (self.folder / name).exists())
        with _outline(start, lambda name: name.startswith(missing)) as source:
            run_directory.take_over(source, self.folder, config)
        if self._in_bucket:
            for name in names:
                if name.startswith("checkpoints/"):
                    _copy_checkpoints(f"{start.rstrip('/')}/{name}", f"{self.shown}/{name}")


def open_place(run_dir: str | pathlib.Path) -> Place:
    """Return the place of a run; see `Place`."""
    return Place(run_dir)


def require_cold_start(start: str, config: dict[str, Any]) -> None:
    """See `train.durable.run_directory.require_cold_start`; `start` may be in a bucket."""
    with _outline(start) as folder:
        run_directory.require_cold_start(folder, config)


def _is_read(name: str) -> bool:
    return not name.startswith(_EXPORTS)


@contextlib.contextmanager
def small_files(run_dir: str, wanted: Callable[[str], bool] = _is_read) -> Iterator[pathlib.Path]:
    """Yield a local folder with files of a run that may be going on elsewhere, to read.

    Args:
        run_dir: The run, in a folder or in a bucket.
        wanted: Whether to fetch the file of a name from a bucket; others become empty files.
    """
    if not is_bucket(run_dir):
        yield pathlib.Path(run_dir)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / run_dir.rstrip("/").rpartition("/")[2]
        BucketFiles(Bucket(run_dir), folder).pull(wanted)
        yield folder


@contextlib.contextmanager
def _outline(
    run_dir: str, wanted: Callable[[str], bool] = lambda name: False
) -> Iterator[pathlib.Path]:
    """Yield a folder that looks like a run, to see what it has.

    Of a run in a bucket, it has config.json, the names of other files without their content, and
    empty folders for complete checkpoints. Errors of the block name the address.

    Args:
        run_dir: The run, in a folder or in a bucket.
        wanted: Whether a file of a run in a bucket has its content.
    """
    with small_files(run_dir, lambda name: name == "config.json" or wanted(name)) as folder:
        for checkpoint in _complete_checkpoints(run_dir):
            (folder / checkpoint).mkdir(parents=True)
        try:
            yield folder
        except RunDirectoryError as error:
            raise RunDirectoryError(str(error).replace(str(folder), run_dir)) from error


def _complete_checkpoints(address: str) -> list[str]:
    """Return the names of the folders below an address that are complete checkpoints."""
    if not is_bucket(address):
        return []
    paths = [pathlib.PurePosixPath(name) for name in Bucket(address).list()]
    committed = [path.parent for path in paths if path.name == COMMITTED]
    return [str(folder) for folder in committed if folder.name.isdigit()]


def _copy_checkpoints(source: str, target: str) -> None:
    """Copy the complete checkpoints of a folder in a bucket that another one lacks."""
    for step in set(_complete_checkpoints(source)) - set(_complete_checkpoints(target)):
        Bucket(f"{target}/{step}").copy(Bucket(f"{source}/{step}"), last=COMMITTED)
