"""Supervision: which ends of a command are followed by another start, and when it gives up."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paravt_extras.supervise import SuperviseSettings, main
from paravt_jax.processes.progress import PROGRESS_FILE
from tests.processes import ROOT

# Does what the lines of a script say, one line per start; the last line repeats.
FAKE = f"""
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
starts = folder / "starts"
starts.open("a").write("x")
number = len(starts.read_text())
lines = (folder / "script").read_text().splitlines()
for word in lines[min(number, len(lines)) - 1].split():
    kind, _, value = word.partition(":")
    if kind == "exit":
        sys.exit(int(value))
    elif kind == "signal":
        signal.signal(int(value), signal.SIG_DFL) if int(value) != 9 else None
        os.kill(os.getpid(), int(value))
    elif kind == "note":
        open(os.environ["{PROGRESS_FILE}"], "a").write(value + chr(10))
    elif kind == "sleep":
        time.sleep(float(value))
"""
QUICK = ["--pause", "0.01", "--longest-pause", "0.02"]


class Fake:
    """A command that ends as a script says."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def command(self, *script: str) -> list[str]:
        (self.folder / "script").write_text("\n".join(script))
        return [sys.executable, "-S", "-c", FAKE, str(self.folder)]

    def supervised(self, *script: str, flags: list[str] | None = None) -> int:
        """The exit code of the supervisor, in a process of its own."""
        flags = QUICK if flags is None else flags
        arguments = ["-m", "paravt_extras.supervise", *flags, "--", *self.command(*script)]
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        self.lines = done.stderr.splitlines()
        return done.returncode

    @property
    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text()) if file.exists() else 0


@pytest.fixture
def fake(tmp_path) -> Fake:
    return Fake(tmp_path)


@pytest.mark.parametrize("end", ["exit:70", "exit:75", "signal:9", "signal:6", "exit:137"])
def test_an_end_that_a_restart_may_mend_is_followed_by_another_start(fake, end):
    assert fake.supervised(end, "exit:0") == 0
    assert fake.starts == 2
    again, done = fake.lines
    assert again.endswith("without progress; starting again in 0.01 s (1 of 5)")
    assert done.startswith("supervise: done after ")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exit:0", 0),
        ("exit:1", 1),
        ("exit:2", 2),
        ("exit:130", 130),
        ("exit:143", 143),
        ("signal:15", 143),
        ("signal:2", 130),
    ],
)
def test_other_ends_are_final(fake, end, code):
    assert fake.supervised(end) == code
    assert fake.starts == 1
    assert len(fake.lines) == 1


def test_lack_of_memory_is_suspected(fake):
    assert fake.supervised("signal:9", "exit:1") == 1
    assert fake.lines[0].startswith("supervise: killed by SIGKILL (out of memory?) after ")


def test_further_codes_may_be_named(fake):
    assert fake.supervised("exit:143", "exit:0", flags=[*QUICK, "--restart-on", "143"]) == 0
    assert fake.starts == 2


def test_it_gives_up_after_failures_without_progress(fake):
    assert fake.supervised("exit:70", flags=[*QUICK, "--failures", "2"]) == 70
    assert fake.starts == 3
    assert fake.lines[-1].endswith("given up after 2 ends without progress")


def test_the_pause_doubles_up_to_a_bound_and_progress_resets_it(fake):
    script = ["exit:75", "exit:75", "exit:75", "note:rl-1 exit:75", "note:rl-1 exit:75", "exit:0"]
    flags = ["--pause", "0.01", "--longest-pause", "0.03"]
    assert fake.supervised(*script, flags=flags) == 0
    pauses = [line.partition("starting again in ")[2] for line in fake.lines[:-1]]
    assert pauses == [
        "0.01 s (1 of 5)",
        "0.02 s (2 of 5)",
        "0.03 s (3 of 5)",
        # Step 1 is new in the fourth start, and no longer in the fifth.
        "0.01 s (1 of 5)",
        "0.02 s (2 of 5)",
    ]


def test_a_start_that_lasted_is_progress(fake):
    flags = [*QUICK, "--failures", "1", "--lasted", "3"]
    assert fake.supervised("exit:70", "sleep:4 exit:70", "exit:70", "exit:70", flags=flags) == 70
    assert fake.starts == 3
    assert ", with progress; " in fake.lines[1]


def test_a_hang_is_killed(fake):
    script = ["note:rl-1 sleep:0.6 note:rl-2 sleep:600", "exit:0"]
    assert fake.supervised(*script, flags=[*QUICK, "--hang", "2"]) == 0
    assert fake.starts == 2
    assert fake.lines[0].startswith("supervise: no progress for 2 s, killed after ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["running", "pausing"])
def test_a_signal_goes_on_to_the_command_which_is_not_started_again(fake, number, moment):
    script, pause = {"running": ("sleep:60", "0.01"), "pausing": ("exit:70", "60")}[moment]
    command = fake.command(script)
    arguments = [
        "-m",
        "paravt_extras.supervise",
        "--pause",
        pause,
        "--longest-pause",
        "60",
        "--",
        *command,
    ]
    started = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    deadline = time.monotonic() + 60
    while not fake.starts:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if moment == "pausing":
        assert "starting again in 60 s" in started.stderr.readline()
    # The fake command may not have reached its sleep; the signal ends it all the same.
    os.kill(started.pid, number)
    assert started.wait(60) == 128 + number
    assert started.stderr.read().splitlines()[-1].endswith("; not started again")
    assert fake.starts == 1


def test_a_command_that_does_not_exist_is_one_line(capfd):
    assert main(["--", "/no/such/program"]) == 2
    assert "/no/such/program cannot be started" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--failures", "0", "--", "true"], "failures: 0; give at least 1"),
        (["--pause", "-1", "--", "true"], "pause: -1.0; give 0 or more seconds"),
        (["true"], ""),
        ([], "no command; give one behind --"),
    ],
)
def test_mistakes_on_the_command_line_are_code_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_settings_have_defaults_that_let_processes_meet_again():
    # Processes of several hosts wait for each other for 5 minutes.
    assert SuperviseSettings().longest_pause < 300 / 2
