"""Where a run that dies is kept: in a folder, or in a bucket that is served here."""

from __future__ import annotations

import pathlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from benchmarks.bucket_server import BUCKET, BucketServer
from benchmarks.killing import moments

# The run's folder in the bucket, a checkpoint in it, and the mark of a complete one.
_STORED = "run"
_CHECKPOINT = re.compile(r"run/checkpoints/\w+/\d+")
_COMMITTED = "commit_success.txt"


class Home(Protocol):
    """A place of a run.

    Attributes:
        address: What --run-dir names.
        variables: Environment variables for the run's processes.
    """

    address: str
    variables: Mapping[str, str]

    def exists(self) -> bool:
        """Whether there is anything of the run."""
        ...

    def files(self) -> pathlib.Path:
        """A folder with the run's files as they are now."""
        ...

    def moments(self, rng: np.random.Generator) -> dict[str, tuple[Callable[[], bool], float]]:
        """Moments of a death; see `benchmarks.killing.moments`."""
        ...

    def flip(self, name: str, bit: int) -> None:
        """Flip one bit of a file."""
        ...

    def restore(self, name: str, content: bytes) -> None:
        """Write a file as from a backup."""
        ...

    def move(self) -> None:
        """Go on on another machine, which has none of the run's local files."""
        ...

    def remove(self) -> None:
        """Remove the run."""
        ...


class OnDisk(Home):
    """A run in a folder, on a disk that all machines see."""

    variables: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: pathlib.Path):
        self.address = str(folder)
        self._folder = folder

    def exists(self) -> bool:
        return self._folder.exists()

    def files(self) -> pathlib.Path:
        return self._folder

    def moments(self, rng: np.random.Generator) -> dict[str, tuple[Callable[[], bool], float]]:
        return moments(self._folder, rng)

    def flip(self, name: str, bit: int) -> None:
        file = self._folder / name
        content = bytearray(file.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        # A new file: the old one may be shared with another run by a hard link.
        file.unlink()
        file.write_bytes(content)

    def restore(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)

    def move(self) -> None:
        pass

    def remove(self) -> None:
        shutil.rmtree(self._folder)


class InStore(Home):
    """A run in a bucket that this process serves.

    Args:
        folder: For a copy of the run, and for the files of its machines.
    """

    def __init__(self, folder: pathlib.Path):
        self.server = BucketServer()
        self.address = f"gs://{BUCKET}/{_STORED}"
        self._machine = folder / "machine"
        self._copy = folder / "run"
        self.variables = self.server.variables | {"XDG_CACHE_HOME": str(self._machine)}
        self.move()

    def exists(self) -> bool:
        return bool(self.server.names(_STORED))

    def files(self) -> pathlib.Path:
        shutil.rmtree(self._copy, ignore_errors=True)
        names = self.server.names(_STORED)
        for name in names:
            # A checkpoint without its mark is unfinished, as one with a temporary name on a disk.
            step = _CHECKPOINT.match(name)
            complete = step is None or f"{step[0]}/{_COMMITTED}" in names
            if complete:
                file = self._copy / name.removeprefix(f"{_STORED}/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(self.server.read(name))
        return self._copy

    def moments(self, rng: np.random.Generator) -> dict[str, tuple[Callable[[], bool], float]]:
        clock = time.monotonic() + rng.uniform(0, 25)
        complete = self._complete()
        metrics = self._metrics()
        return {
            "any time": (lambda: time.monotonic() > clock, 0.0),
            "while saving": (lambda: bool(self._steps() - self._complete()), rng.uniform(0, 0.2)),
            "after a save": (lambda: self._complete() != complete, rng.uniform(0, 1.5)),
            "after a push": (lambda: self._metrics() != metrics, rng.uniform(0, 1.5)),
        }

    def flip(self, name: str, bit: int) -> None:
        self.server.flip(f"{_STORED}/{name}", bit // 8, bit % 8)

    def restore(self, name: str, content: bytes) -> None:
        self.server.write(f"{_STORED}/{name}", content)

    def move(self) -> None:
        shutil.rmtree(self._machine, ignore_errors=True)

    def remove(self) -> None:
        for name in self.server.names(_STORED):
            self.server.delete(name)
        self.move()

    def _steps(self) -> set[str]:
        """The folders of checkpoints."""
        found = (_CHECKPOINT.match(name) for name in self.server.names(_STORED))
        return {step[0] for step in found if step is not None}

    def _complete(self) -> set[str]:
        end = f"/{_COMMITTED}"
        return {n.removesuffix(end) for n in self.server.names(_STORED) if n.endswith(end)}

    def _metrics(self) -> bytes:
        name = f"{_STORED}/metrics.jsonl"
        return self.server.read(name) if name in self.server.names(name) else b""
