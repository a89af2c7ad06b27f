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
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from paravt_jax.data.any_path import AnyPath, any_path, is_bucket, user_folder
from paravt_jax.data.stored_settings import lock
from paravt_jax.processes import cluster, hosts
from train.durable import run_directory
from train.durable.bucket import Bucket, on_each
from train.durable.checkpoint_files import checkpoint_files
from train.durable.interrupts import Stopped
from train.durable.lease import NAME as LEASE
from train.durable.lease import Lease
from train.durable.mirror import FILES, Mirror
from train.durable.run_directory import RunDirectory, RunDirectoryError

_CONFIG = "config.json"
# An exported model is large, and only the first process looks whether it is there.
_EXPORTS = ("model/", "adapter/")


class Place:
    """A run in a folder on a disk.

    Args:
        path: The folder.

    Attributes:
        shown: The folder as the user knows it.
        folder: The folder.
        checkpoints: Holds one folder per phase.
    """

    def __init__(self, path: str | pathlib.Path):
        self.folder = pathlib.Path(path).absolute()
        self.shown = str(self.folder)
        self.checkpoints: AnyPath = self.folder / "checkpoints"

    def require_usable(self, config: dict[str, Any]) -> bool:
        """See `train.durable.run_directory.require_usable`. Changes nothing."""
        return run_directory.require_usable(self.folder, config)

    def claim(self, config: dict[str, Any], start: str, stack: contextlib.ExitStack) -> None:
        """Locks the run until `stack` closes. Only the first process calls it.

        Args:
            config: The run's settings.
            start: A run whose cold start is taken over; may be empty.
            stack: Gets what has to be closed.

        Raises:
            RunDirectoryError: The run is in use, or one of other settings.
        """
        stack.enter_context(RunDirectory(self.folder, config))
        if start:
            run_directory.take_over(start, self.folder, config)

    def require_shared(self) -> None:
        """Raises ValueError on every process if another one has a run elsewhere."""
        cluster.require_shared(self.folder)

    @property
    def programs(self) -> AnyPath:
        """A folder for compiled programs that all processes see."""
        return self.folder

    def push(self) -> None:
        """Returns when the files of the first process are durable."""

    def pull(self) -> None:
        """On the other processes, fetches the files of the first one."""

    def in_words(self, text: str) -> str:
        """A message with the paths that the user knows."""
        return text


class BucketPlace(Place):
    """A run in a bucket.

    Args:
        address: gs://BUCKET/FOLDER.
    """

    def __init__(self, address: str):
        self.shown = address.rstrip("/")
        self.checkpoints = any_path(self.shown) / "checkpoints"
        digest = hashlib.sha256(self.shown.encode()).hexdigest()[:16]
        # Processes on one machine do not share files here, as they do not on several machines.
        self._home = user_folder() / "runs" / f"{digest}-{hosts.process_index()}"
        self.folder = self._home / self.shown.rpartition("/")[2]
        self._lease: Lease | None = None

    @functools.cached_property
    def _bucket(self) -> Bucket:
        """The store, which needs credentials."""
        return Bucket(self.shown)

    @functools.cached_property
    def _mirror(self) -> Mirror:
        return Mirror(self._bucket, self.folder)

    def require_usable(self, config: dict[str, Any]) -> bool:
        with outline(self.shown) as folder:
            return run_directory.require_usable(folder, config)

    def claim(self, config: dict[str, Any], start: str, stack: contextlib.ExitStack) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(lock(self._home / ".lock"))
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"--run-dir {self.shown} is {error}: wait for it, stop it, or give another "
                "--run-dir."
            ) from error
        self._lease = stack.enter_context(Lease(self._bucket, self._owner()))
        self.require_usable(config)
        self._mirror.pull()
        stack.enter_context(RunDirectory(self.folder, config))
        self.push()
        if start:
            self._take_over(start, config)
            self.push()
        stack.push(self._push_at_end)

    def require_shared(self) -> None:
        hosts.require_same("run_dir", self.shown)

    @property
    def programs(self) -> AnyPath:
        return any_path(self.shown)

    def push(self) -> None:
        if self._lease is not None:
            self._lease.require()
            self._mirror.push()

    def pull(self) -> None:
        if not hosts.is_first():
            self._mirror.pull(lambda name: not name.startswith(_EXPORTS))

    def in_words(self, text: str) -> str:
        return text.replace(str(self.folder), self.shown)

    def _push_at_end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Pushes what was written since the last save, unless the run failed."""
        if kind is None or issubclass(kind, Stopped):
            self.push()

    def _owner(self) -> str:
        """The id of the local folder, which only one process can lock."""
        file = self._home / "owner"
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        return file.read_text()

    def _take_over(self, start: str, config: dict[str, Any]) -> None:
        """See `train.durable.run_directory.take_over`; the store copies the checkpoints."""
        require_cold_start(start, config)
        source = Bucket(start)
        names = run_directory.cold_start_files(config)
        files = tuple(f"{name}/" for name in names if not (self.folder / name).exists())
        with tempfile.TemporaryDirectory(dir=self._home) as temporary:
            copy = pathlib.Path(temporary)
            Mirror(source, copy).pull(lambda name: name.startswith(files))
            for name in names:
                # A name that exists is complete, so each appears at once.
                if (copy / name).exists():
                    (copy / name).rename(self.folder / name)
        for name in names:
            if not name.startswith("checkpoints/"):
                continue
            here = checkpoint_files(any_path(self.shown) / name)
            for step in checkpoint_files(any_path(start) / name).steps():
                if step not in here.steps():
                    _copy_checkpoint(self._bucket, source, f"{name}/{step}/")


def _copy_checkpoint(target: Bucket, source: Bucket, prefix: str) -> None:
    """Copies a checkpoint, which is complete when its last object is there."""
    names = list(source.list(prefix))
    last = f"{prefix}commit_success.txt"
    on_each(lambda name: target.copy(name, source, name), [n for n in names if n != last])
    target.copy(last, source, last)


def open_place(run_dir: str | pathlib.Path) -> Place:
    """The place of a run; `run_dir` is a folder or gs://BUCKET/FOLDER.

    Raises:
        ModuleNotFoundError: The package for it is missing.
    """
    return BucketPlace(str(run_dir)) if is_bucket(run_dir) else Place(run_dir)


def require_cold_start(start: str, config: dict[str, Any]) -> None:
    """See `train.durable.run_directory.require_cold_start`; `start` may be in a bucket."""
    if not is_bucket(start):
        run_directory.require_cold_start(start, config)
        return
    with outline(start) as folder:
        run_directory.require_cold_start(folder, config)


@contextlib.contextmanager
def outline(address: str) -> Iterator[pathlib.Path]:
    """A temporary folder that looks like a run in a bucket: all names, but empty files.

    Only config.json has its content. Folders of checkpoints are those that are complete. Errors of
    the block name the address.
    """
    bucket = Bucket(address)
    found = list(bucket.list())
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "run"
        folder.mkdir()
        if FILES in found:
            _outline_run(bucket, address, found, folder)
        else:
            # Not a run, or one that ended before it wrote anything.
            for name in {name.partition("/")[0] for name in found} - {LEASE, _CONFIG}:
                (folder / name).touch()
        try:
            yield folder
        except RunDirectoryError as error:
            raise RunDirectoryError(str(error).replace(str(folder), address)) from error


def _outline_run(bucket: Bucket, address: str, found: list[str], folder: pathlib.Path) -> None:
    for name in Mirror(bucket, folder).names():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if name == _CONFIG:
            bucket.read_to(name, file)
    phases = {name.split("/")[1] for name in found if name.startswith("checkpoints/")}
    for phase in phases:
        for step in checkpoint_files(any_path(address) / "checkpoints" / phase).steps():
            (folder / "checkpoints" / phase / str(step)).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def small_files(
    run_dir: str, wanted: Callable[[str], bool] = lambda name: not name.startswith(_EXPORTS)
) -> Iterator[pathlib.Path]:
    """A local folder with files of a run that may be going on elsewhere, to read.

    Args:
        run_dir: The run, in a folder or in a bucket.
        wanted: Whether to fetch the file of a name from a bucket; by default, all but exported
            models.
    """
    if not is_bucket(run_dir):
        yield pathlib.Path(run_dir)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / run_dir.rstrip("/").rpartition("/")[2]
        Mirror(Bucket(run_dir), folder).pull(wanted)
        yield folder
