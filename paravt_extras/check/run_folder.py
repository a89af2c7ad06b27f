"""The run's folder: whether this run may use it, how it resumes, and whether all hosts see it."""

from __future__ import annotations

import pathlib

from paravt_extras.check.finding import Finding, failed
from paravt_extras.check.subject import Subject, existing
from paravt_jax.processes import cluster, hosts
from train.durable.place import BucketPlace, require_cold_start
from train.durable.run_directory import RunDirectoryError

_ITEM = "run directory"


def run_directory(subject: Subject) -> list[Finding]:
    """Whether the folder is writable, free, and new or of this run."""
    findings = []
    try:
        place = subject.place
        continues = place.require_usable(subject.settings)
        state = "holds this run, which continues" if continues else "new"
        findings.append(Finding(_ITEM, f"{place.shown}: {state}"))
    except (RunDirectoryError, OSError) as error:
        findings.append(failed(_ITEM, error))
    if subject.run.start:
        findings.append(_start(subject))
    return findings


def _start(subject: Subject) -> Finding:
    """Whether the run whose cold start is reused has one, with the same settings."""
    try:
        require_cold_start(subject.run.start, subject.settings)
    except (RunDirectoryError, OSError) as error:
        return failed("start", error)
    return Finding("start", f"{subject.run.start}: has a cold start of these settings")


def resuming(subject: Subject) -> list[Finding]:
    """How a resumed run differs from an uninterrupted one; nothing if both are equal."""
    if not subject.run.plays_episodes or subject.run.frames.admission == "counted":
        return []
    found = "equals an uninterrupted run up to rounding"
    return [Finding("resuming", found, "bit for bit: --frames.admission=counted")]


def shared_directory(subject: Subject) -> Finding:
    """Whether all processes have the same run. Every process has to call this."""
    place = subject.place
    if not isinstance(place, BucketPlace):
        return _shared_folder(subject.folder)
    try:
        place.require_shared()
    except ValueError as error:
        remedy = "give all hosts the same --run-dir"
        return Finding("shared disk", str(error), "one run for all", remedy, "error")
    return Finding("shared disk", f"all hosts have {place.shown}")


def _shared_folder(folder: pathlib.Path) -> Finding:
    """Whether all processes see the same folder.

    The first process makes a file for a moment in the folder, or in the nearest one above it that
    exists, and the others look for it.
    """
    try:
        # Each process may name the folder by another path, so the first one tells how far up to go.
        levels = hosts.from_first(lambda: len(folder.parts) - len(existing(folder).parts))
        place = folder.parents[levels - 1] if levels else folder
        cluster.require_shared(place)
    except (ValueError, OSError, hosts.HostsError) as error:
        remedy = "mount one network disk on all hosts, or give a --run-dir on gs://"
        return Finding("shared disk", str(error), "one directory for all", remedy, "error")
    return Finding("shared disk", f"all hosts see {place}")
