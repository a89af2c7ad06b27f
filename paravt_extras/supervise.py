"""Starts a command again when it ends in a way that a restart may mend.

    python -m paravt_extras.supervise -- python -m train.run --config=paravt_8b

Any command can follow the `--`. It is started again after exit code 70 (lost contact with another
process, or an unforeseen failure), 75 (a full disk, an outage, a process that did not start in
time) and after a signal such as SIGKILL, for which lack of memory is the usual reason. After every
other code it is not: 0 is done, 1 and 2 need a change by you, and 130 and 143 (SIGINT, SIGTERM)
were asked for. `--restart-on 143` changes that for hosts that are preempted alone.

The pause before a restart doubles with each failure. A new step, a new evaluation, or a start that
lasted an hour is progress, and begins the count anew. SIGINT and SIGTERM go on to the command,
which is not started again.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType

import tyro

from paravt_jax.command_name import command_name
from paravt_jax.processes.exit_codes import LOST, TEMPORARY, USAGE
from paravt_jax.processes.progress import PROGRESS_FILE

_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_LOOK_EVERY = 0.2  # seconds
_SIGNALLED = 128  # added by shells to the number of the signal that ended a command


@dataclasses.dataclass(frozen=True)
class SuperviseSettings:
    """When a command is started again."""

    failures: int = 5
    """Number of ends in a row without progress after which to give up."""
    pause: float = 10.0
    """Seconds before the first restart; doubled for each further one without progress."""
    longest_pause: float = 120.0
    """Bound on the pause. Processes wait 5 minutes for each other, so stay well below that."""
    lasted: float = 3600.0
    """Seconds after which a start counts as progress, whatever it did."""
    hang: float = 0.0
    """Seconds without a new step or evaluation after which to kill the command; 0: never."""
    restart_on: tuple[int, ...] = ()
    """Further exit codes after which to start again."""

    def __post_init__(self):
        if self.failures < 1:
            raise ValueError(f"failures: {self.failures}; give at least 1")
        for name in ("pause", "longest_pause", "lasted", "hang"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; give 0 or more seconds")


@dataclasses.dataclass(frozen=True)
class _End:
    """How a start of the command ended.

    Attributes:
        code: Its exit code, or 128 plus the number of the signal that ended it.
        words: The same, to print.
        progress: Whether it did something that no earlier start had done.
    """

    code: int
    words: str
    progress: bool


class _Supervisor:
    def __init__(self, command: Sequence[str], settings: SuperviseSettings, folder: pathlib.Path):
        self._command = command
        self._settings = settings
        self._notes = folder / "progress"
        self._seen: set[str] = set()
        self._child: subprocess.Popen | None = None
        self._asked = 0  # the signal that this process received

    def run(self) -> int:
        """Start the command until there is no reason to start it again; returns its last code."""
        stops = set(_STOPS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            # By nohup, for this process and for the command.
            stops.remove(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._pass_on) for number in stops}
        try:
            return self._run()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        settings = self._settings
        failures = 0
        while True:
            end = self._start()
            if self._asked or not self._deserves(end.code):
                _say(f"{end.words}; not started again")
                return end.code
            failures = 1 if end.progress else failures + 1
            if failures > settings.failures:
                _say(f"{end.words}; given up after {settings.failures} ends without progress")
                return end.code
            pause = min(settings.pause * 2 ** (failures - 1), settings.longest_pause)
            made = "with progress" if end.progress else "without progress"
            _say(
                f"{end.words}, {made}; starting again in {pause:g} s "
                f"({failures} of {settings.failures})"
            )
            self._sleep(pause)
            if self._asked:
                _say("stopped; not started again")
                return _SIGNALLED + self._asked

    def _start(self) -> _End:
        start = time.monotonic()
        environment = dict(os.environ, **{PROGRESS_FILE: str(self._notes)})
        self._notes.write_text("")
        try:
            # A group of its own, which can be killed as a whole.
            self._child = subprocess.Popen(self._command, env=environment, start_new_session=True)
        except OSError as error:
            return _End(USAGE, f"{self._command[0]} cannot be started ({error})", False)
        if self._asked:
            # It came before there was a process to pass it on to.
            self._child.send_signal(self._asked)
        hung = self._wait(self._child)
        code = self._child.returncode
        self._child = None
        seconds = time.monotonic() - start
        new = self._noted() - self._seen
        self._seen |= new
        words = f"no progress for {self._settings.hang:g} s, killed" if hung else _in_words(code)
        return _End(
            code if code >= 0 else _SIGNALLED - code,
            f"{words} after {seconds:.0f} s",
            bool(new) or seconds >= self._settings.lasted > 0,
        )

    def _wait(self, child: subprocess.Popen) -> bool:
        """Wait for the end of the command; kills it, and returns True, if it hangs."""
        hang = self._settings.hang
        while True:
            try:
                child.wait(_LOOK_EVERY)
                return False
            except subprocess.TimeoutExpired:
                pass
            if hang and time.time() - self._notes.stat().st_mtime > hang:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return True

    def _noted(self) -> set[str]:
        return set(self._notes.read_text(encoding="utf-8").splitlines())

    def _deserves(self, code: int) -> bool:
        if code in self._settings.restart_on:
            return True
        if code - _SIGNALLED in signal.valid_signals():
            return code - _SIGNALLED not in _STOPS
        return code in (LOST, TEMPORARY)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._asked and time.monotonic() < end:
            time.sleep(min(_LOOK_EVERY, seconds))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        child = self._child
        if child is not None:
            child.send_signal(number)


def _in_words(code: int) -> str:
    if code == 0:
        return "done"
    if code > 0:
        return f"ended with code {code}"
    reason = " (out of memory?)" if -code == signal.SIGKILL else ""
    # Real-time signals have no names.
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}{reason}"


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def supervise(command: Sequence[str], settings: SuperviseSettings) -> int:
    """Run a command, and again while that may help.

    Args:
        command: The program and its arguments.
        settings: When to start it again.

    Returns:
        The exit code of its last start; 128 plus the signal's number if a signal ended it.
    """
    with tempfile.TemporaryDirectory(prefix="paravt-supervise-") as folder:
        return _Supervisor(command, settings, pathlib.Path(folder)).run()


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    program = command_name("python -m paravt_extras.supervise")
    cut = argv.index("--") if "--" in argv else len(argv)
    command = argv[cut + 1 :]
    if not command and not {"-h", "--help"} & set(argv):
        print(f"error: no command; give one behind --: {program} -- COMMAND", file=sys.stderr)
        return USAGE
    settings = tyro.cli(SuperviseSettings, args=argv[:cut], prog=program, description=__doc__)
    return supervise(command, settings)


if __name__ == "__main__":
    raise SystemExit(main())
