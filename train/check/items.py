"""Looks at everything that a run needs, before any work: the function `check`, and its output.

No item hides another. Each is looked at in a thread of its own, an exception becomes the item's
finding, and an item that takes too long is given up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from train.check import data, disk, loggers, machine, run_folder, weights
from train.check.asking import Asked, started
from train.check.finding import Finding, summary, table
from train.check.subject import Subject, process_count
from train.durable import cluster, hosts
from train.settings import Run

Item = Callable[[Subject], list[Finding]]

# Seconds. Together with the start of Python, the table is there within 30.
_SERVERS = 9.0  # for all answers of servers
_ITEMS = 12.0  # for each item
_JOIN = 10.0  # for the other processes, with --check

_ON_DEVICES: dict[str, Item] = {"devices": machine.devices, "host memory": machine.memory}
_OTHERS: dict[str, Item] = {
    "versions": machine.versions,
    "code": machine.code,
    "settings": machine.settings,
    "weights": weights.weights,
    "data": data.data,
    "disk": disk.disk,
    "run directory": run_folder.run_directory,
    "loggers": loggers.loggers,
    "judge": loggers.judge,
    "videos": machine.videos,
}
ITEMS = {**_ON_DEVICES, **_OTHERS}


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
    subject = Subject(run, settings, folder, Asked(_SERVERS))
    deadline = time.monotonic() + _ITEMS
    futures = {name: started(item, subject) for name, item in items.items()}
    findings = []
    for name, future in futures.items():
        findings += _result(name, future, deadline)
    if process_count() == 1:
        return findings
    together = merged(hosts.gather(findings))
    return [*together, run_folder.shared_directory(folder)]


def _result(
    name: str, future: concurrent.futures.Future[list[Finding]], deadline: float
) -> list[Finding]:
    """The findings of an item, or what kept it from finding anything."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        if not future.done():
            needed = f"an answer within {_ITEMS:.0f} s"
            return [Finding(name, "could not be checked in time", needed, problem="warning")]
        error: BaseException = future.exception() or TimeoutError()
    except Exception as raised:
        error = raised
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return [Finding(name, line[:300], problem="error")]


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


def ready(run: Run, settings: dict[str, Any], folder: pathlib.Path) -> bool:
    """Check a run that is about to start, and print what the user has to know.

    An error prints the whole table. Otherwise there is one line, or none for a small run without
    warnings.

    Returns:
        Whether the run may start.
    """
    findings = check(run, settings, folder)
    if not hosts.is_first():
        return not has_errors(findings)
    if has_errors(findings):
        print(table(findings), file=sys.stderr)
        print("error: nothing was started; see the table", file=sys.stderr)
        return False
    if run.model.size != "tiny" or any(finding.problem for finding in findings):
        print(summary(findings), flush=True)
    return True


def show(run: Run, settings: dict[str, Any], folder: pathlib.Path) -> int:
    """Check a run and print the table; for `--check`.

    Returns:
        The exit code: 1 if the run would stop, else 0.
    """
    with _joining_in_time(run, settings, folder):
        try:
            cluster.connect(run.hosts)
            alone = []
        except Exception as error:
            alone = [_apart(str(error))]
    findings = [*alone, *check(run, settings, folder)]
    if hosts.is_first():
        print(table(findings))
    return int(has_errors(findings))


@contextlib.contextmanager
def _joining_in_time(run: Run, settings: dict[str, Any], folder: pathlib.Path) -> Iterator[None]:
    """Prints the table of this host alone, and ends the process, if the block takes too long.

    JAX would wait minutes for the other processes, and then abort this one.
    """

    def give_up() -> None:
        apart = _apart(f"not all processes joined within {_JOIN:.0f} s")
        unseen = [
            Finding(name, "not asked: devices come after joining", problem="warning")
            for name in _ON_DEVICES
        ]
        print(table([apart, *unseen, *check(run, settings, folder, _OTHERS)]), flush=True)
        os._exit(1)

    timer = threading.Timer(_JOIN, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _apart(found: str) -> Finding:
    remedy = "start the same command on every host; see --hosts.coordinator"
    return Finding("hosts", found, "all processes of the run", remedy, "error")
