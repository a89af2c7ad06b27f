"""The data of a run: a prepared set, else its sources; or the user's own questions."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

from huggingface_hub import constants

from paravt_extras.check import asking
from paravt_extras.check.asking import NoAccess, NoAnswer
from paravt_extras.check.finding import Finding, failed
from paravt_extras.check.subject import Subject
from paravt_extras.check.weights import access_remedy
from paravt_jax.data import sources
from paravt_jax.data.archives import ArchiveError, find_archives, mark_of
from paravt_jax.data.hub import is_hub_id
from paravt_jax.data.preparation import PLAN, WORK, read_plan
from paravt_jax.data.question_files import read_questions
from paravt_jax.method import tokenizer
from paravt_jax.progress import size
from train.left_out import count_rows, require_enough
from train.published_data import (
    DataSettings,
    find_prepared,
    hold_out,
    reading_of,
)

_TABLES = ("*.parquet",)
_MEDIA = sources.MEDIA_PATTERNS


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of published data, as far as it can be seen from here."""

    found: str
    """Where it is."""
    fetch: float
    """Bytes to download."""
    folder: pathlib.Path
    """Where the download goes."""
    unpack: float
    """Estimate of the bytes that its archives take unpacked."""


def data(subject: Subject) -> list[Finding]:
    """Whether the data of the run are prepared or can be prepared."""
    run = subject.run
    if run.data is None:
        if run.world is not None:
            return []
        needed = "data or world"
        return [Finding("data", "none", needed, "use a recipe with one of them", "error")]
    settings = run.data
    if settings.questions:
        return [_questions(subject, settings)]
    try:
        finished, finding = _prepared(subject, settings)
    except ValueError as error:
        return [failed("data", error)]
    if finished:
        return [finding]
    annotations = _source(subject, "annotations", lambda: find_annotations(subject, settings))
    return [finding, annotations, _source(subject, "media", lambda: find_media(subject, settings))]


def is_prepared(subject: Subject) -> bool:
    """Whether nothing has to be fetched. False for a set that does not fit the settings."""
    settings = subject.run.data
    if settings is None or settings.questions:
        return True
    try:
        return _prepared(subject, settings)[0]
    except ValueError:
        return False


def _questions(subject: Subject, settings: DataSettings) -> Finding:
    """Checks the user's own questions and the folder of their videos."""
    if not pathlib.Path(settings.media).is_dir():
        needed = "the folder of the questions' videos"
        found = f"data.media: {settings.media}, no such folder"
        return Finding("data", found, needed, "--data.media FOLDER", "error")
    try:
        questions = read_questions(settings.questions, settings.media)
        subject.run.require_no_demonstrations()
        hold_out(tuple(questions), settings.heldout)
    except (OSError, ValueError) as error:
        return failed("data", error)
    missing = sum(
        not (pathlib.Path(settings.media) / question.video).exists() for question in questions
    )
    found = f"{len(questions)} questions in {settings.questions}"
    if not missing:
        return Finding("data", found)
    remedy = f"copy the videos to {settings.media}; questions without a video are left out"
    return Finding("data", f"{found}, {missing} without their video", "", remedy, "warning")


def _prepared(subject: Subject, settings: DataSettings) -> tuple[bool, Finding]:
    """Whether there is a finished set for this run, and what was found.

    Raises:
        ValueError: The set was prepared with other settings.
    """
    run = subject.run
    folder = pathlib.Path(settings.folder)
    duration = "minutes" if run.rehearse else "minutes to hours"
    needed = f"a prepared set, which the run makes; this takes {duration}"
    # The set of a rehearsal is cut like the rest of it, so no other command prepares it.
    remedy = ""
    if not run.rehearse:
        remedy = f"python -m train.prepare --config=RECIPE{_flags(settings)}"
    if not (folder / PLAN).exists():
        begun = any(folder.glob(WORK))
        part = ", a preparation has begun" if begun else ""
        return False, Finding("data", f"{folder}: not prepared{part}", needed, remedy, "warning")
    plan = read_plan(folder)
    root = pathlib.Path(plan["root"])
    if not root.is_dir():
        found = f"{folder}: prepared, but its media are gone from {root}"
        return True, Finding("data", found, f"{root} on every host", "mount or restore it", "error")
    vocabulary = _tokenizer_folder(run.model.path)
    if vocabulary is None:
        found = f"{folder}: prepared; its settings are compared once the tokenizer is here"
        return True, Finding("data", found)
    reading = reading_of(settings, run.protocol, run.frames, run.vision, vocabulary)
    summary = find_prepared(settings, reading)
    if summary is None:
        found = f"{folder}: prepared from other sources"
        remedy = f"--data.folder of another folder, or the sources of {folder / 'sources.json'}"
        return False, Finding("data", found, "the same sources", remedy, "warning")
    try:
        require_enough(count_rows(summary), settings.max_left_out, folder)
    except ValueError as error:
        return True, failed("data", error)
    return True, Finding("data", f"{folder}: prepared, {summary['kept']} rows")


def _tokenizer_folder(path: str) -> pathlib.Path | None:
    """The folder of the model's tokenizer, if it is on this machine."""
    folder: pathlib.Path | None = pathlib.Path(path)
    if folder is not None and not folder.is_dir() and is_hub_id(path):
        folder = asking.cached_snapshot(path, "model")
    return folder if folder is not None and (folder / tokenizer.FILE).is_file() else None


def _flags(settings: DataSettings) -> str:
    """The flags of the sources and the folder that are not the defaults."""
    names = ("annotations", "media", "folder")
    changed = [name for name in names if getattr(settings, name) != getattr(DataSettings(), name)]
    return "".join(f" --data.{name} {getattr(settings, name)}" for name in changed)


def _source(subject: Subject, name: str, find: Callable[[], Source]) -> Finding:
    """The finding about one source."""
    address = getattr(subject.run.data, name)
    command = f"hf download --repo-type dataset {address}"
    try:
        source = find()
    except NoAccess as error:
        page = f"{constants.ENDPOINT}/datasets/{address}"
        remedy = access_remedy(page, command)
        return Finding(name, f"{address}: {error}", "a token with access", remedy, "error")
    except NoAnswer as error:
        remedy = f"{command}\nor copy its files here, and give --data.{name} FOLDER"
        if "://" in address:
            remedy = f"check the address and the credentials, or give --data.{name} FOLDER"
        needed = "gigabytes: not known without an answer"
        return Finding(name, f"{address}: {error}", needed, remedy, "error")
    except ModuleNotFoundError as error:
        extra = "s3" if address.startswith("s3://") else "gcs"
        remedy = f"pip install -e '.[{extra}]'"
        return Finding(name, f"{address}: {error}", "its fsspec package", remedy, "error")
    except FileNotFoundError as error:
        return failed(name, error)
    needed = []
    if source.fetch:
        needed.append(f"{size(source.fetch)}, which the run downloads")
    if source.unpack:
        needed.append(f"about {size(source.unpack)} unpacked (an estimate)")
    found = f"{address}: {source.found}"
    if not source.fetch:
        return Finding(name, found, "; ".join(needed))
    remedy = "the run copies it" if "://" in address else command
    return Finding(name, found, "; ".join(needed), remedy, "warning")


def find_annotations(subject: Subject, settings: DataSettings) -> Source:
    """Looks for the tables. Raises NoAccess, NoAnswer, FileNotFoundError, ModuleNotFoundError."""
    target = pathlib.Path(settings.folder) / "annotations"
    return _find(subject, settings.annotations, _TABLES, target)


def find_media(subject: Subject, settings: DataSettings) -> Source:
    """Looks for videos, pictures and archives; see `find_annotations`."""
    return _find(subject, settings.media, _MEDIA, pathlib.Path(settings.folder) / "media")


def _find(
    subject: Subject, address: str, patterns: tuple[str, ...], target: pathlib.Path
) -> Source:
    """Looks for a source in a bucket, in a local folder or on the hub.

    Args:
        subject: The run.
        address: The source, as the settings name it.
        patterns: Patterns of file names.
        target: Where files of a bucket are copied to; archives are unpacked to its namesake.
    """
    if "://" in address:
        files = asking.matching(subject.asked.answer(asking.ask_bucket, address), patterns)
        missing = {
            name: count for name, count in files.items() if not _is_copied(target / name, count)
        }
        place = f"{len(files)} files in the bucket"
        fetch, folder = float(sum(missing.values())), target
    elif pathlib.Path(address).expanduser().is_dir():
        files = _local_files(pathlib.Path(address).expanduser(), patterns)
        place, fetch, folder = "a local folder", 0.0, target
    elif is_hub_id(address):
        found = subject.asked.answer(asking.ask_hub, address, "dataset")
        files = asking.matching(found.files, patterns)
        here = asking.download(address, "dataset", found, patterns)
        place = f"{size(here.present)} of {size(here.total)} in the hub's cache"
        fetch, folder = float(here.missing), asking.cache_folder(address, "dataset")
    else:
        raise FileNotFoundError(
            f"{address}: neither a folder nor a hub id (owner/name); give one of these, or draw "
            "scenes with python -m paravt_extras.scenes --out data/scenes"
        )
    if not files:
        raise FileNotFoundError(f"{address}: no {', '.join(patterns)}; give the folder of them")
    try:
        archives = find_archives(files)
    except ArchiveError as error:
        raise FileNotFoundError(str(error)) from error
    packed = sum(archive.size for archive in archives if not mark_of(archive, target).exists())
    return Source(place, fetch, folder, float(packed))


def _is_copied(file: pathlib.Path, count: int) -> bool:
    return file.is_file() and file.stat().st_size == count


def _local_files(folder: pathlib.Path, patterns: tuple[str, ...]) -> dict[str, int]:
    """The first matching file of a folder with media, or all its archives or tables.

    A folder of unpacked media has hundreds of thousands of files. Archives beside media are taken
    to be unpacked, as in `sources.media_root`.
    """
    found: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for name in asking.matching(dict.fromkeys(names, 0), patterns):
            path = pathlib.Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if name.lower().endswith(sources.MEDIA):
                return {relative: path.stat().st_size}
            found[relative] = path.stat().st_size
    return found
