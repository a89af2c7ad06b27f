"""Free space on every file system, against all that the run will still write there."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable

from paravt_extras.check import asking, sizes
from paravt_extras.check.asking import NoAccess, NoAnswer
from paravt_extras.check.data import Source, find_annotations, find_media, is_prepared
from paravt_extras.check.finding import Finding
from paravt_extras.check.subject import Subject, existing
from paravt_extras.check.weights import PATTERNS, to_download
from paravt_jax.data.any_path import is_bucket
from paravt_jax.data.buckets import cache_folder
from paravt_jax.data.frames import is_address
from paravt_jax.data.hub import is_hub_id
from paravt_jax.progress import size


@dataclasses.dataclass(frozen=True)
class Need:
    """What one step of the run will write."""

    step: str
    folder: pathlib.Path
    bytes: float | None
    """None: not known."""


def disk(subject: Subject) -> list[Finding]:
    """One finding per file system."""
    by_device: dict[int, list[Need]] = collections.defaultdict(list)
    for need in needs(subject):
        by_device[existing(need.folder).stat().st_dev].append(need)
    findings = []
    for group in by_device.values():
        mount = _mount(existing(group[0].folder))
        free = shutil.disk_usage(mount).free
        total = sum(need.bytes or 0.0 for need in group)
        named = ", ".join(
            f"{need.step} {'unknown' if need.bytes is None else size(need.bytes)}"
            for need in group
            if need.bytes is None or need.bytes >= 1e6
        )
        found = f"{size(free)} free on {mount}"
        needed = f"{size(total)}: {named}" if named else size(total)
        if total <= free:
            findings.append(Finding("disk", found, needed))
            continue
        remedy = f"free {size(total - free)} on {mount}, or use another disk: {_options(group)}"
        # The hosts of a slice have other disks than this one.
        problem = "warning" if subject.topology else "error"
        findings.append(Finding("disk", found, needed, remedy, problem))
    return findings


def needs(subject: Subject) -> list[Need]:
    """What every later step will write, without what is there already."""
    run, folder = subject.run, subject.folder
    found = [*_weights(subject), *_data(subject), *_checkpoints(subject)]
    model = folder / "model"
    if not model.exists():
        found.append(Need("export", model, sizes.model_bytes(run)))
    return found


def _checkpoints(subject: Subject) -> list[Need]:
    """What the phases will save: all that stays, and one that is complete before another goes.

    Nothing for a run in a bucket, which has no limit.
    """
    if is_bucket(subject.run.run_dir):
        return []
    found = []
    one_more = 0.0
    top = subject.folder / "checkpoints"
    for phase, saved in sizes.checkpoints(subject.run).items():
        place = top / phase
        if phase == "sft" and subject.run.start:
            found.append(_taken_over(pathlib.Path(subject.run.start) / "checkpoints/sft", place))
            continue
        steps = [int(path.name) for path in place.glob("*") if path.name.isdigit()]
        latest = max(steps, default=0)
        if latest >= saved.steps:
            continue
        in_all = len(steps) + saved.saves_after(latest)
        staying = min(in_all, saved.keep) * saved.bytes
        found.append(Need(f"checkpoints of {phase}", place, max(0.0, staying - _used(place))))
        if in_all > saved.keep:
            one_more = max(one_more, saved.bytes)
    return [*found, Need("checkpoint being written", top, one_more)]


def _taken_over(source: pathlib.Path, target: pathlib.Path) -> Need:
    """The cold start of another run, whose files get a second name if they are on the same disk."""
    linked = existing(source).stat().st_dev == existing(target).stat().st_dev
    count = 0.0 if target.exists() or linked else _used(source)
    return Need("checkpoints of sft (copied)", target, count)


def _weights(subject: Subject) -> list[Need]:
    path = subject.run.model.path
    if is_address(path):
        return _weights_in_a_bucket(subject, path)
    if not path or pathlib.Path(path).is_dir() or not is_hub_id(path):
        return []
    folder = asking.cache_folder(path, "model")
    try:
        missing = float(to_download(subject).missing)
    except (NoAnswer, NoAccess):
        missing = max(0.0, sizes.published_bytes(subject.run) - _used(folder / "blobs"))
    return [Need("weights", folder, missing)]


def _weights_in_a_bucket(subject: Subject, path: str) -> list[Need]:
    """Weights that are fetched from an address into the cache folder."""
    folder = cache_folder(path)
    try:
        files = subject.asked.answer(asking.ask_bucket, path)
    # The item "weights" says what is wrong.
    except (NoAnswer, ModuleNotFoundError):
        return [Need("weights", folder, None)]
    total = sum(asking.matching(files, PATTERNS).values())
    return [Need("weights", folder, max(0.0, total - _used(folder)))]


def _data(subject: Subject) -> list[Need]:
    settings = subject.run.data
    if settings is None or is_prepared(subject):
        return []
    found = []
    steps: tuple[tuple[str, Callable[[], Source]], ...] = (
        ("annotations", lambda: find_annotations(subject, settings)),
        ("media", lambda: find_media(subject, settings)),
    )
    folder = pathlib.Path(settings.folder)
    for step, find in steps:
        try:
            source = find()
        # The item "data" says what is wrong.
        except (NoAnswer, NoAccess, OSError, ModuleNotFoundError):
            found.append(Need(step, folder, None))
            continue
        found.append(Need(step, source.folder, source.fetch))
        found.append(Need(f"{step} unpacked (estimate)", folder, source.unpack))
    return found


def _used(folder: pathlib.Path) -> float:
    """Bytes of all files below a folder; 0 if there is none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            file = pathlib.Path(place) / name
            # A running process may remove files meanwhile.
            if file.is_file():
                total += file.stat().st_size
    return float(total)


def _mount(path: pathlib.Path) -> pathlib.Path:
    """The folder at which the file system of `path` is mounted."""
    path = path.resolve()
    device = path.stat().st_dev
    while path.parent != path and path.parent.stat().st_dev == device:
        path = path.parent
    return path


def _options(group: list[Need]) -> str:
    """The settings that move what is written to another disk."""
    options = {
        "weights": "HF_HOME",
        "annotations": "HF_HOME, --data.folder",
        "media": "HF_HOME, --data.folder",
        "checkpoints": "--run-dir, --checkpoints.keep",
        "checkpoint": "--run-dir",
    }
    names = [options.get(need.step.split()[0], "--run-dir") for need in group]
    return ", ".join(dict.fromkeys(", ".join(names).split(", ")))
