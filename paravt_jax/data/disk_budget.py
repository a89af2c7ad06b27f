"""Fetches media within a disk budget: archive by archive, and only the files that rows name.

Each archive is fetched into a hidden folder, unpacked into the media folder, which verifies it, and
deleted. The largest goes first, while little is kept, because that takes the least disk. The
process can be killed at any moment: an archive is marked as unpacked before it is deleted, and the
next call continues its download.

    FOLDER/.fetched/   the archive, or the files, that are being fetched
    FOLDER/media/      the files that rows name
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Set

from paravt_jax.data.archives import (
    Archive,
    ArchiveError,
    Selection,
    find_archives,
    inside,
    mark_of,
    on_disk,
    unpack,
    zip_contents,
)
from paravt_jax.data.remote_files import RemoteFiles, one_line
from paravt_jax.processes.exit_codes import TEMPORARY
from paravt_jax.progress import size

_FETCHED = ".fetched"
_LOOSE = "loose"
# Files outside of archives that are fetched by one request to the hub's client.
_BATCH = 256
# What the hub's client keeps beside a download: in all, and for each file.
_CLIENT = 2**20
_CLIENT_FILE = 2**14
# Bytes of a name in a folder, at most.
_NAME = 256

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|TB)")
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


class DamagedDownloadError(ArchiveError):
    """An archive is damaged; its copy is deleted, so that it is fetched again."""

    exit_code = TEMPORARY


def parse_size(field: str, text: str) -> int:
    """The bytes that a text such as 200GB or 1.5 TB names.

    Raises:
        ValueError: It names none. The message names `field`.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"{field}: {text!r}; give a number above 0 with MB, GB or TB, as in 200GB")
    return int(float(match[1]) * _UNITS[match[2]])


def used(folder: pathlib.Path) -> int:
    """Bytes that the files of a folder take on disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            # A file that is being written may get its final name meanwhile.
            try:
                total += on_disk(os.lstat(os.path.join(place, name)).st_size)
            except FileNotFoundError:
                continue
    return total


@dataclasses.dataclass(frozen=True)
class Task:
    """An archive to fetch."""

    archive: Archive
    keeps: int
    """Bytes on disk of its files that rows name. Of a tar, whose contents cannot be listed, all."""


@dataclasses.dataclass(frozen=True)
class MediaPlan:
    """What has to be fetched of a source, and how much disk that takes."""

    loose: Mapping[str, int]
    """Bytes of the files outside of archives that rows name, by relative name."""
    tasks: tuple[Task, ...]
    """Archives with files that rows name, the largest first."""
    fetched: bool
    """Whether archives are copied to this disk before they are unpacked."""

    @property
    def staying(self) -> int:
        """Bytes on disk of all that rows name."""
        loose = sum(_kept(count) for count in self.loose.values())
        return loose + sum(task.keeps for task in self.tasks)

    @property
    def peak(self) -> int:
        """Largest bytes on disk while files and archives are fetched one after another."""
        kept = sum(_kept(count) for count in self.loose.values())
        peak = kept + _CLIENT + _BATCH * _CLIENT_FILE if self.loose else kept
        for task in self.tasks:
            kept += task.keeps
            peak = max(peak, kept + self.copied(task))
        return peak

    def copied(self, task: Task) -> int:
        """Bytes on disk of an archive while it is unpacked."""
        if not self.fetched:
            return 0
        count = len(task.archive.parts)
        return task.archive.size + count * (on_disk(1) + _CLIENT_FILE) + _CLIENT


def plan_media(
    files: RemoteFiles, names: Set[str], media: Sequence[str], fetched: bool
) -> MediaPlan:
    """Choose the files to fetch. Of zips, only the tables of contents are read.

    Args:
        files: The source.
        names: Relative paths of the files that rows name.
        media: Endings of the names of media.
        fetched: As in `MediaPlan`.

    Raises:
        ArchiveError: A part of an archive is missing, or it has no table of contents.
        ConnectionError: A table of contents cannot be fetched.
    """
    archives = find_archives(files.sizes)
    parts = {part for archive in archives for part in archive.parts}
    loose = {
        name: count
        for name, count in files.sizes.items()
        if name in names and name not in parts and name.lower().endswith(tuple(media))
    }
    tasks = [_task(files, archive, names) for archive in archives]
    tasks.sort(key=lambda task: -task.archive.size)
    return MediaPlan(loose, tuple(task for task in tasks if task.keeps), fetched)


def _task(files: RemoteFiles, archive: Archive, names: Set[str]) -> Task:
    # Broad because the hub's client and every file system raise errors of their own kinds.
    try:
        contents = zip_contents(archive, files.sizes, files.open)
    except ArchiveError:
        raise
    except Exception as error:
        raise ConnectionError(
            f"{archive.name}: its table of contents cannot be read ({one_line(error)}); check the "
            "network and repeat the command"
        ) from error
    if contents is None:
        return Task(archive, _kept(archive.size))
    return Task(archive, sum(_kept(n) for name, n in contents.items() if name in names))


def _kept(count: int) -> int:
    """Bytes on disk of a file with so many bytes, and of its name in a folder."""
    return on_disk(count) + _NAME


def require_budget(
    plan: MediaPlan, budget: int | None, folder: pathlib.Path, reserve: Mapping[str, int]
) -> None:
    """Refuse a plan that does not fit into the budget, or onto the disk.

    Args:
        plan: The media.
        budget: Bytes that `folder` may take on disk; None: no limit.
        folder: Where all of it goes.
        reserve: Bytes that the rest takes, by what it is.

    Raises:
        ValueError: The budget is too small.
        OSError: The disk has not enough room.
    """
    rest = sum(reserve.values())
    needed = plan.peak + rest
    largest = max(plan.tasks, key=lambda task: task.archive.size, default=None)
    others = "".join(f", {size(count)} of {what}" for what, count in reserve.items())
    must = (
        f"{size(plan.staying + rest)} must stay ({size(plan.staying)} of videos and pictures that "
        f"rows name{others})"
    )
    if plan.fetched and largest is not None:
        must += (
            f", and while archives are unpacked, of which {largest.archive.name} is the largest "
            f"({size(largest.archive.size)}), {size(needed)} are needed"
        )
    if budget is not None and needed > budget:
        unit = "GB" if needed >= 10**10 else "MB"
        least = math.ceil(needed / _UNITS[unit])
        raise ValueError(f"--disk: {size(budget)} for {folder}; {must}: give {least}{unit} or more")
    present = used(folder)
    free = shutil.disk_usage(folder).free
    if needed - present > free:
        raise OSError(
            f"data.folder: {folder}: {size(free)} are free, and {must}: free "
            f"{size(needed - present - free)}, or name a folder on another disk"
        )


def fetch_media(
    files: RemoteFiles,
    plan: MediaPlan,
    names: Set[str],
    folder: pathlib.Path,
    budget: int | None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> pathlib.Path:
    """Fetch what rows name, and return its folder, `folder`/media.

    Args:
        files: The source.
        plan: What to fetch of it.
        names: As in `plan_media`.
        folder: Where everything goes. An interrupted call in it is continued.
        budget: Bytes that `folder` may take on disk; None: no limit.
        tell: Called with the megabytes that are done, and all. It may raise to interrupt.

    Raises:
        ArchiveError: An archive is damaged, or must not be unpacked. It is deleted.
        OSError: A file cannot be fetched, or the disk is full.
        ValueError: The budget does not suffice.
    """
    root = folder / "media"
    root.mkdir(parents=True, exist_ok=True)
    # Files that a killed call was writing. Nobody else writes: the folder is locked.
    for unfinished in root.rglob(".*.partial"):
        unfinished.unlink()
    selection = Selection(names)
    waiting = [task for task in plan.tasks if not mark_of(task.archive, root, selection).exists()]
    in_flight = _place(folder, waiting[0].archive) if waiting else None
    _delete_fetched(folder, in_flight)

    loose = sum(plan.loose.values())
    total = loose + sum(task.archive.size for task in plan.tasks)
    done = total - sum(task.archive.size for task in waiting)
    _fetch_loose(files, plan, folder, root, budget)
    tell(round(done / 1e6), round(total / 1e6))
    for task in waiting:
        _fetch_archive(files, plan, task, selection, folder, budget)
        done += task.archive.size
        tell(round(done / 1e6), round(total / 1e6))
    return root


def _place(folder: pathlib.Path, archive: Archive) -> pathlib.Path:
    """The folder into which an archive is fetched."""
    return folder / _FETCHED / mark_of(archive, folder).name


def _delete_fetched(folder: pathlib.Path, keep: pathlib.Path | None = None) -> None:
    for place in (folder / _FETCHED).glob("*"):
        if place != keep:
            shutil.rmtree(place)


def _require_left(
    folder: pathlib.Path, budget: int | None, others: int, more: int, what: str
) -> None:
    """Raise ValueError if `more` bytes do not fit into the budget beside `others` in the folder."""
    if budget is not None and others + more > budget:
        raise ValueError(
            f"--disk: {size(budget)} for {folder}, which has {size(others)} beside {what} "
            f"({size(more)}): delete what is not needed there, or give more"
        )


def _fetch_loose(
    files: RemoteFiles,
    plan: MediaPlan,
    folder: pathlib.Path,
    root: pathlib.Path,
    budget: int | None,
) -> None:
    """Fetch the files outside of archives, several at a time."""
    missing = [
        name
        for name, count in sorted(plan.loose.items())
        if not (root / name).is_file() or (root / name).stat().st_size != count
    ]
    if missing:
        more = sum(on_disk(plan.loose[name]) for name in missing)
        _require_left(folder, budget, used(folder), more, f"{len(missing)} files to fetch")
    for start in range(0, len(missing), _BATCH):
        batch = missing[start : start + _BATCH]
        place = files.fetch(batch, folder / _FETCHED / _LOOSE)
        for name in batch:
            target = inside(root, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place / name, target)
        _delete_fetched(folder)


def _fetch_archive(
    files: RemoteFiles,
    plan: MediaPlan,
    task: Task,
    selection: Selection,
    folder: pathlib.Path,
    budget: int | None,
) -> None:
    """Fetch an archive, unpack it, and delete it."""
    archive = task.archive
    place = _place(folder, archive)
    others = used(folder) - used(place)
    _require_left(folder, budget, others, plan.copied(task), archive.name)
    source = files.fetch(archive.parts, place)
    if budget is not None:
        selection = dataclasses.replace(selection, room=budget - used(folder))
    try:
        unpack([archive], source, folder / "media", selection=selection)
    except ArchiveError as error:
        if not plan.fetched:
            raise
        shutil.rmtree(place)
        raise DamagedDownloadError(
            f"{error}. The copy is deleted; the same command fetches it again"
        ) from error
    _delete_fetched(folder)
