"""Starts a run in a process of its own and shows how it goes, in a notebook for example.

    from IPython.display import HTML, display
    from paravt_extras.follow import follow

    view = display(HTML(), display_id=True)
    follow(["--config=paravt_tiny"], "runs/mine", lambda page: view.update(HTML(page)))

The run does not depend on the process that follows it: if that one ends, the run goes on, and the
same call follows it again. An interrupt (Ctrl-C, or the stop button of a notebook) stops the run
after its current step, which is saved, and the same call continues it. A second one ends it at
once.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from paravt_extras.report.live import live_page
from paravt_jax.data.local_path import require_local
from paravt_jax.data.stored_settings import holder_of

EVERY = 5.0
"""Seconds between two looks at the run."""

_COMMAND = (sys.executable, "-m", "train.run")
_LOCK = ".lock"
_STOPPED = 130  # the exit code of a run that a signal has stopped
_SHOWN = 3  # lines of the run's output on the page
_TOLD = 12  # lines of the output of a run that failed without a message of its own


class RunError(RuntimeError):
    """The run has not finished; the message says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines in place of a traceback."""
        return [str(self)]


def follow(
    arguments: Sequence[str],
    run_dir: str | os.PathLike[str],
    show: Callable[[str], None],
    every: float = EVERY,
) -> None:
    """Start or continue a run, or find it running, and show it until it ends.

    Its output is in the file `run_dir`.log, and the id of its process in `run_dir`.pid.

    Args:
        arguments: What follows `python -m train.run`, without --run-dir. A run that goes on keeps
            those it was started with.
        run_dir: The run's folder.
        show: Called with an HTML page whenever the run has something new.
        every: Seconds between two looks at the run.

    Raises:
        RunError: The run failed, or an interrupt stopped it.
        ValueError: `run_dir` is an address such as gs://bucket/run.
    """
    require_local("run_dir", run_dir)
    folder = pathlib.Path(run_dir).absolute()
    log = folder.with_name(f"{folder.name}.log")
    process = _Run(folder, log, arguments)
    interrupts = 0
    last = ""
    while True:
        try:
            if not process.is_running():
                break
            page = live_page(folder, _lines(log)[-_SHOWN:])
            if page != last:
                show(page)
                last = page
            time.sleep(every)
        except KeyboardInterrupt:
            interrupts += 1
            process.signal(signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    show(live_page(folder))
    if process.has_succeeded():
        return
    if interrupts and process.was_stopped():
        raise RunError(f"stopped; the same call continues the run. Its output: {log}")
    raise RunError(_reason(log))


class _Run:
    """The process of a run: started here, or found running."""

    def __init__(self, folder: pathlib.Path, log: pathlib.Path, arguments: Sequence[str]):
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        # A run locks its folder only when it knows its devices. Its id is known from the start.
        started = folder.with_name(f"{folder.name}.pid")
        found = _find(folder, started)
        if found is not None:
            self._id = found
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*_COMMAND, *arguments, "--run-dir", str(folder)]
        with log.open("wb") as output:
            # In a session of its own, the run gets no signal that is meant for this process. A
            # notebook sends an interrupt to all processes of the kernel's group.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._id = self._child.pid
        started.write_text(str(self._id))

    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return _is_run(self._id)

    def has_succeeded(self) -> bool:
        """Of a process that has ended."""
        if self._child is not None:
            return self._child.returncode == 0
        return (self._folder / "result.json").exists()

    def was_stopped(self) -> bool:
        """Whether a process that has ended was stopped by a signal, as far as that is known."""
        if self._child is None:
            return True
        return self._child.returncode == _STOPPED or self._child.returncode < 0

    def signal(self, number: int) -> None:
        # It may end between the two lines.
        with contextlib.suppress(ProcessLookupError):
            if self.is_running():
                os.kill(self._id, number)


def _find(folder: pathlib.Path, started: pathlib.Path) -> int | None:
    """The id of the process that trains in `folder` already; None if there is none.

    Raises:
        RunError: Something else holds the folder, such as a run on another machine.
    """
    holder = holder_of(folder / _LOCK)
    ids = [holder, started.read_text() if started.exists() else ""]
    for text in ids:
        if text.isdigit() and _is_run(int(text)):
            return int(text)
    if holder:
        raise RunError(
            f"{folder} is in use by process {holder}, which is no run on this machine; follow it "
            "where it runs, or give another folder"
        )
    return None


def _is_run(process: int) -> bool:
    """Whether a process of this machine is a run. Ids of processes that ended are used again."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(process)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return _COMMAND[-1] in found.stdout


def _lines(log: pathlib.Path) -> list[str]:
    """The lines of a run's output. Of a progress bar, the last state counts."""
    # Not read_text, which takes a carriage return for the end of a line.
    text = log.read_bytes().decode("utf-8", errors="replace") if log.exists() else ""
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _reason(log: pathlib.Path) -> str:
    """Why a run failed: its message of an error, with the table of the check before it, if any."""
    lines = _lines(log)
    starts = [n for n, line in enumerate(lines) if re.match(r"error: |item +found", line)]
    first = starts[0] if starts else max(0, len(lines) - _TOLD)
    return "\n".join([*lines[first:], "", f"The whole output: {log}"])
