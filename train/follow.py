"""Starts a run in a process of its own and shows how it goes, in a notebook for example.

    from IPython.display import HTML, display
    from train.follow import follow

    view = display(HTML(), display_id=True)
    follow(["--config=paravt_tiny"], "runs/mine", lambda page: view.update(HTML(page)))

The run does not depend on the process that follows it: if that one ends, the run goes on, and the
same call follows it again. An interrupt (Ctrl-C, or the stop button of a notebook) stops the run
after its current step, which is saved, and the same call continues it. A second
one ends it at once.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from paravt_jax.data.stored_settings import holder_of
from train.report.live import live_page

EVERY = 5.0
"""Seconds between two looks at the run."""

_COMMAND = (sys.executable, "-m", "train.run")
_LOCK = ".lock"
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

    Its output is in the file `run_dir`.log.

    Args:
        arguments: What follows `python -m train.run`, without --run-dir.
        run_dir: The run's folder.
        show: Called with an HTML page whenever the run has something new.
        every: Seconds between two looks at the run.

    Raises:
        RunError: The run failed, or an interrupt stopped it.
    """
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
    if interrupts:
        raise RunError(f"stopped; the same call continues the run. Its output: {log}")
    if not process.has_succeeded():
        raise RunError(_reason(log))


class _Run:
    """The process of a run: started here, or found running."""

    def __init__(self, folder: pathlib.Path, log: pathlib.Path, arguments: Sequence[str]):
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        holder = holder_of(folder / _LOCK)
        if holder:
            self._id = int(holder)
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

    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return bool(holder_of(self._folder / _LOCK))

    def has_succeeded(self) -> bool:
        """Of a process that has ended."""
        if self._child is not None:
            return self._child.returncode == 0
        return (self._folder / "result.json").exists()

    def signal(self, number: int) -> None:
        if self.is_running():
            os.kill(self._id, number)


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
