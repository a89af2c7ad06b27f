"""Looks at everything that a run needs, before any work: the function `check`, and its output.

No item hides another. Each is looked at in a thread of its own, an exception becomes the item's
finding, and an item that takes too long is given up.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from paravt_extras.check import data, disk, loggers, machine, run_folder, weights
from paravt_extras.check.asking import Asked, started
from paravt_extras.check.finding import Finding, failed, in_one_line, summary, table
from paravt_extras.check.subject import Subject
from paravt_extras.slices import Devices, found_devices
from paravt_jax.data.stored_settings import as_json, require_same
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import TEMPORARY
from train.settings import Run

Item = Callable[[Subject], list[Finding]]

LIMIT = 10.0
"""Seconds that all items may take, which are looked at side by side."""
_SERVERS = 8.0  # seconds for all answers of servers
# With --check, seconds from the start: until all processes have joined, and until the end. A fast
# process has to wait for one that uses up `LIMIT` before it joins. With the start of Python, the
# table is there within 30 seconds.
_JOIN = 18.0
_END = 24.0
_STDOUT = 1  # the file descriptor

_BEFORE_JOINING: dict[str, Item] = {
    "versions": machine.versions,
    "code": machine.code,
    "weights": weights.weights,
    "data": data.data,
    "disk": disk.disk,
    "run directory": run_folder.run_directory,
    "resuming": run_folder.resuming,
    "loggers": loggers.loggers,
    "judge": loggers.judge,
    "videos": machine.videos,
}
# JAX fixes its list of devices at the first look, so these come after joining.
_ON_DEVICES: dict[str, Item] = {"devices": machine.devices, "host memory": machine.memory}
ITEMS = {**_ON_DEVICES, **_BEFORE_JOINING}
# Items that only matter with several hosts, which must agree on them.
_OF_SEVERAL = ("code",)


def check(
    run: Run, settings: dict[str, Any], folder: pathlib.Path, items: dict[str, Item] = ITEMS
) -> list[Finding]:
    """Look at everything that a run needs. Raises nothing, and changes nothing.

    With several processes, every one of them has to call this, and gets the findings of all.

    Args:
        run: The settings.
        settings: Those that define the run, as its folder stores them.
        folder: The run's folder.
        items: The functions that look, by the name of their item.
    """
    subject = Subject(run, settings, folder, Asked(_SERVERS), devices=_devices_of_all())
    return _together(look(subject, items), subject)


def look(subject: Subject, items: dict[str, Item], limit: float | None = None) -> list[Finding]:
    """The findings of this host, within `limit` seconds, else `LIMIT`; see `check` and `show`."""
    limit = LIMIT if limit is None else limit
    deadline = time.monotonic() + limit
    futures = {name: started(item, subject) for name, item in items.items()}
    findings = []
    for name, future in futures.items():
        findings += _result(name, future, deadline, limit)
    return findings


def _devices_of_all() -> Devices | None:
    """The devices of all processes that have joined; None if this one is alone.

    Processes compare their memory, each on its main thread: an item that is given up would compare
    it at another moment than the other processes do.
    """
    return found_devices() if hosts.process_count() > 1 else None


def _together(findings: list[Finding], subject: Subject) -> list[Finding]:
    """The findings of all processes, and whether they have one run and one folder."""
    if hosts.process_count() == 1:
        return [finding for finding in findings if finding.item not in _OF_SEVERAL]
    together = merged(hosts.gather(findings))
    same = same_settings(hosts.gather(subject.settings))
    return [*together, *same, run_folder.shared_directory(subject)]


def same_settings(found: Sequence[dict[str, Any]]) -> list[Finding]:
    """Whether all hosts were started with the same settings; names the fields that differ.

    Args:
        found: The settings of each host, in the order of their process indices.
    """
    findings = []
    for host, settings in enumerate(found):
        try:
            require_same(
                f"host {host} has other settings than host 0",
                as_json(found[0], "settings"),
                as_json(settings, "settings"),
                "Start every host with the same command, except for --hosts.index.",
            )
        except ValueError as error:
            findings.append(failed("settings", error))
    return findings or [Finding("settings", f"the same on {len(found)} hosts")]


def _result(
    name: str, future: concurrent.futures.Future[list[Finding]], deadline: float, limit: float
) -> list[Finding]:
    """The findings of an item, or what kept it from finding anything.

    An error of the check itself must not stop a run that may be healthy.
    """
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        if not future.done():
            needed = f"an answer within {limit:.0f} s"
            return [Finding(name, "could not be checked in time", needed, problem="warning")]
        error: BaseException = future.exception() or TimeoutError()
    except Exception as raised:
        error = raised
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return [Finding(name, f"could not be checked ({line[:300]})", problem="warning")]


def merged(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all hosts; where hosts differ, each finding names its hosts.

    Args:
        found: The findings of each host, in the order of their process indices.
    """
    by_finding: dict[str, dict[Finding, list[int]]] = {}
    for host, findings in enumerate(found):
        for finding in findings:
            same = by_finding.setdefault(finding.item, {}).setdefault(finding, [])
            same.append(host)
    rows = []
    for groups in by_finding.values():
        for finding, members in groups.items():
            if len(members) == len(found):
                rows.append(finding)
                continue
            text = f"{_named(members)}: {finding.found}"
            finding = dataclasses.replace(finding, found=text)
            if finding.must_agree and 0 not in members:
                needed = "the same as on host 0"
                remedy = finding.remedy or "install the same versions on every host"
                finding = dataclasses.replace(
                    finding, needed=needed, remedy=remedy, problem="error"
                )
            rows.append(finding)
    return rows


def _named(members: Sequence[int]) -> str:
    """Numbers of hosts as text: "host 3", "hosts 0-2, 5"."""
    spans: list[list[int]] = []
    for member in sorted(set(members)):
        if spans and member == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], member]
        else:
            spans.append([member])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"host {text}" if len(members) == 1 else f"hosts {text}"


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether the run would stop."""
    return any(finding.problem == "error" for finding in findings)


class NotReadyError(RuntimeError):
    """A run cannot start."""


class NoRoomError(NotReadyError):
    """A run cannot start, only because a disk is too full."""

    exit_code = TEMPORARY


def require_ready(run: Run, settings: dict[str, Any], folder: pathlib.Path) -> None:
    """Check a run that is about to start, and print what the user has to know.

    An error prints the whole table. Otherwise there is one line, or none for a small run without
    warnings.

    Raises:
        NotReadyError: Something is missing; its message is the first error.
    """
    findings = check(run, settings, folder)
    errors = [finding for finding in findings if finding.problem == "error"]
    if errors and hosts.is_first():
        print(table(findings), file=sys.stderr)
    if errors:
        only_room = all(finding.item == "disk" for finding in errors)
        kind = NoRoomError if only_room else NotReadyError
        raise kind(f"nothing was started: {in_one_line(errors)}")
    if hosts.is_first() and (run.model.size != "tiny" or any(x.problem for x in findings)):
        print(summary(findings), flush=True)


def show(run: Run, settings: dict[str, Any], folder: pathlib.Path, topology: str = "") -> int:
    """Check a run and print the table; for `--check`.

    Args:
        run: The settings.
        settings: Those that define the run, as its folder stores them.
        folder: The run's folder.
        topology: A TPU slice to check for, by its name; empty: the devices of this host.

    Returns:
        The exit code: 1 if the run would stop, else 0.
    """
    start = time.monotonic()
    subject = Subject(run, settings, folder, Asked(_SERVERS), topology)
    if topology:
        # The memory of the hosts of a slice is not known here.
        findings = look(subject, {"devices": machine.devices, **_BEFORE_JOINING})
        findings = [finding for finding in findings if finding.item not in _OF_SEVERAL]
        print(table(findings))
        return int(has_errors(findings))
    alone = look(subject, _BEFORE_JOINING)
    late = [_apart(f"not all processes joined within {_JOIN:.0f} s"), *map(_waiting, _ON_DEVICES)]
    try:
        text = table([*late, *alone])
        cluster.connect(run.hosts, start + _JOIN - time.monotonic(), text, _STDOUT)
        apart = []
    except Exception as error:
        apart = [_apart(str(error))]
    subject = dataclasses.replace(subject, devices=_devices_of_all())
    limit = min(LIMIT, start + _END - time.monotonic())
    findings = _together([*look(subject, _ON_DEVICES, limit), *alone], subject)
    if hosts.is_first():
        print(table([*apart, *findings]))
    return int(has_errors([*apart, *findings]))


def _waiting(item: str) -> Finding:
    found = "not looked at: JAX waits for the other processes"
    return Finding(item, found, problem="warning")


def _apart(found: str) -> Finding:
    return Finding("hosts", found, "all processes of the run", cluster.REMEDY, "error")
