"""The files of a phase's checkpoints: which are complete, their checksums, and damaged ones.

On a disk and in a bucket these are done differently:

    on a disk                   gs://
    40.orbax-checkpoint-tmp-..  40/ without commit_success.txt      being written, or left by a kill
    40/                         40/ with commit_success.txt         complete
    40.damaged/                 40/ with damaged.txt, without it    set aside

A bucket has no rename. Both have sums.json, which is there when a checkpoint is complete. On a disk
it holds sums that were read back. In a bucket it holds those that the store computed when it
received the objects, so nothing is read back.
"""

from __future__ import annotations

import abc
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import TypedDict

from paravt_jax.data.any_path import AnyPath, is_bucket
from paravt_jax.data.file_sums import SUMS, find_damage, read_sums, write_sums
from paravt_jax.data.stored_json import DamagedFileError, parse_json
from train.durable.bucket import Bucket, DamagedObjectError, on_each

_COMMITTED = "commit_success.txt"
_MARK = "damaged.txt"


class CheckpointFiles(abc.ABC):
    """The files of the checkpoints in one folder.

    Attributes:
        aside: What `set_aside` does, in words.
    """

    aside: str

    @abc.abstractmethod
    def steps(self) -> list[int]:
        """The numbers of complete checkpoints, the newest first."""

    @abc.abstractmethod
    def clear_unfinished(self) -> None:
        """Remove what a dead process left of checkpoints that it did not complete."""

    @abc.abstractmethod
    def write_sums(self, step: int) -> None:
        """Write the sums of a checkpoint that is written, but not complete."""

    @abc.abstractmethod
    def damage(self, step: int, wanted: Callable[[list[str]], list[str]]) -> list[str] | None:
        """What is wrong with files of a checkpoint; None if it has no sums.

        Args:
            step: Its number.
            wanted: Chooses the files to read from their sorted names.

        Raises:
            DamagedFileError: The file of sums is damaged.
        """

    @abc.abstractmethod
    def set_aside(self, step: int, damage: str) -> None:
        """Keep a damaged checkpoint from being read, until its step is saved again."""

    def free(self) -> int | None:
        """Free bytes; None if that is not limited."""
        return None


def checkpoint_files(folder: AnyPath) -> CheckpointFiles:
    """The files of checkpoints in a folder on a disk, or in a bucket."""
    return _Objects(folder) if is_bucket(folder) else _Files(pathlib.Path(folder))


class _Files(CheckpointFiles):
    """On a disk."""

    aside = "renamed to NUMBER.damaged"

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def steps(self) -> list[int]:
        names = [path.name for path in self._folder.glob("*")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def clear_unfinished(self) -> None:
        for unfinished in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def write_sums(self, step: int) -> None:
        (unfinished,) = self._folder.glob(f"{step}.orbax-checkpoint-tmp*")
        files = [file for file in unfinished.glob("*/**/*") if file.is_file()]
        write_sums(unfinished, files)

    def damage(self, step: int, wanted: Callable[[list[str]], list[str]]) -> list[str] | None:
        folder = self._folder / str(step)
        sums = read_sums(folder)
        return None if sums is None else find_damage(folder, sums, wanted(sorted(sums)))

    def set_aside(self, step: int, damage: str) -> None:
        aside = self._folder / f"{step}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(step)).rename(aside)

    def free(self) -> int | None:
        return shutil.disk_usage(self._folder).free


class _Sum(TypedDict):
    """Length of an object, and its checksum."""

    bytes: int
    crc32c: str


class _Objects(CheckpointFiles):
    """In a bucket."""

    aside = f"marked by {_MARK}"

    def __init__(self, folder: AnyPath):
        self._bucket = Bucket(folder)

    def steps(self) -> list[int]:
        return sorted(self._steps_with(_COMMITTED), reverse=True)

    def clear_unfinished(self) -> None:
        kept = self._steps_with(_COMMITTED) | self._steps_with(_MARK)
        numbered = {name: name.partition("/")[0] for name in self._bucket.list()}
        on_each(
            self._bucket.delete,
            [n for n, step in numbered.items() if step.isdigit() and int(step) not in kept],
        )

    def write_sums(self, step: int) -> None:
        prefix = f"{step}/"
        found = {name.removeprefix(prefix): x for name, x in self._bucket.list(prefix).items()}
        # Orbax still writes into the checkpoint's own folder.
        sums = {name: stored._asdict() for name, stored in found.items() if "/" in name}
        self._bucket.write(f"{prefix}{SUMS}", json.dumps(sums))

    def damage(self, step: int, wanted: Callable[[list[str]], list[str]]) -> list[str] | None:
        name = f"{step}/{SUMS}"
        try:
            content, _ = self._bucket.read(name)
        except FileNotFoundError:
            # No version has written checkpoints to a bucket without them.
            return [f"{SUMS}: missing"]
        except DamagedObjectError as error:
            raise DamagedFileError(str(error)) from error
        where = f"{self._bucket.address}/{name}"
        remedy = "the files beside it cannot be verified"
        sums: dict[str, _Sum] = parse_json(content, where, dict[str, _Sum], remedy)
        stored = self._bucket.list(f"{step}/")
        damage: dict[str, str] = {}

        def look(name: str) -> None:
            found = stored.get(f"{step}/{name}")
            expected = sums[name]
            if found is None:
                damage[name] = "missing"
            elif found.bytes != expected["bytes"]:
                damage[name] = f"{found.bytes} bytes instead of {expected['bytes']}"
            elif found.crc32c != expected["crc32c"] or not self._reads(f"{step}/{name}"):
                damage[name] = "checksum is wrong"

        on_each(look, wanted(sorted(sums)))
        return [f"{name}: {damage[name]}" for name in sorted(damage)]

    def set_aside(self, step: int, damage: str) -> None:
        # In this order, a kill in between leaves a checkpoint that is found damaged again.
        self._bucket.write(f"{step}/{_MARK}", f"{damage}\n")
        self._bucket.delete(f"{step}/{_COMMITTED}")

    def _reads(self, name: str) -> bool:
        """Whether the content of an object has the store's checksum."""
        try:
            self._bucket.verify(name)
        except (DamagedObjectError, FileNotFoundError):
            return False
        return True

    def _steps_with(self, name: str) -> set[int]:
        """The checkpoints that have an object."""
        pairs = [found.partition("/") for found in self._bucket.list()]
        return {int(step) for step, _, rest in pairs if step.isdigit() and rest == name}
