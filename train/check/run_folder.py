"""The run's folder: whether this run may use it, and whether all hosts see the same one."""

from __future__ import annotations

import pathlib

from train.check.finding import Finding, failed
from train.check.subject import Subject, existing
from train.durable import cluster, hosts
from train.durable.run_directory import RunDirectoryError, require_usable

_ITEM = "run directory"


def run_directory(subject: Subject) -> list[Finding]:
    """Whether the folder is writable, free, and new or of this run."""
    findings = []
    try:
        continues = require_usable(subject.folder, subject.settings)
        state = "holds this run, which continues" if continues else "new"
        findings.append(Finding(_ITEM, f"{subject.folder}: {state}"))
    except RunDirectoryError as error:
        findings.append(failed(_ITEM, error))
    start = subject.run.start
    if start and not (pathlib.Path(start) / "result.json").is_file():
        found = f"{start}: no finished run (result.json is missing)"
        remedy = "let that run finish first, or name another --start"
        findings.append(Finding("start", found, "a finished run", remedy, "error"))
    return findings


def shared_directory(folder: pathlib.Path) -> Finding:
    """Whether all processes see the same folder. Every process has to call this.

    The first process makes a file for a moment in the folder, or in the nearest one above it that
    exists, and the others look for it.
    """
    try:
        place = hosts.from_first(lambda: str(existing(folder)))
        cluster.require_shared(pathlib.Path(place))
    except (ValueError, OSError, hosts.HostsError) as error:
        remedy = "mount one network disk on all hosts, and give a --run-dir on it"
        return Finding("shared disk", str(error), "one directory for all", remedy, "error")
    return Finding("shared disk", f"all hosts see {place}")
