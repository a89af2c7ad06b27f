"""The fault matrix: whatever happens to one of two processes, both end with a code and one line.

1. The exit code is that of the table in docs/training.md.
2. The last line of stderr says what happened, and no stack of C++ or Python is printed. Only an
   unforeseen exception has a traceback, in the process that raised it.
3. Both end soon.
"""

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from paravt_jax.processes.exit_codes import FAILED, LOST, TEMPORARY

PROGRAM = str(pathlib.Path(__file__).with_name("faults_program.py"))
HEARTBEAT = 6  # seconds
GONE = r"error: another process of this run ended or cannot be reached \(.*\); start all of them .*"
STOPPED = r"stopped after PARA-GRPO 3/1000, which is saved; give the same command again"
DESTROYED = r"error: after PARA-GRPO 4/1000, w1 is not finite. All that is saved is finite, but .*"
# Fault: exit code and last line of the process that it happens to, and of the other one.
FAULTS = {
    "kill": (-signal.SIGKILL, None, LOST, GONE),
    "freeze": (LOST, GONE, LOST, GONE),
    "partition": (LOST, GONE, LOST, GONE),
    "terminate": (143, STOPPED, 143, STOPPED),
    "error": (FAILED, r"error: field: 3; give 4", LOST, GONE),
    "destroyed": (FAILED, DESTROYED, FAILED, DESTROYED),
    "bug": (LOST, r"error: unforeseen, KeyError .*", LOST, GONE),
    "full disk in a save": (TEMPORARY, r"error: saving a checkpoint .*", None, None),
}
# The process that it happens to. The first one is also the coordinator.
WHO = [
    # Only process 1 has a wire to cut: the other one is the coordinator.
    *((fault, 1 if fault == "partition" else number % 2) for number, fault in enumerate(FAULTS)),
    ("kill", 1),
]
STACK = re.compile(r"^Traceback|^ +@ +0x|^\*\*\* |^terminate called", re.MULTILINE)


def thaw(who: int):
    """Lets a frozen process go on when the other one has ended."""

    def disturb(processes: list[subprocess.Popen]) -> None:
        processes[1 - who].wait(120)
        os.kill(processes[who].pid, signal.SIGCONT)

    return disturb


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "who"), WHO)
def test_every_end_is_one_line(together, tmp_path, fault, who):
    start = time.monotonic()
    command = [PROGRAM, fault, str(who), str(tmp_path)]
    disturb = thaw(who) if fault == "freeze" else None
    ended = together(command, 2, devices=1, timeout=120, disturb=disturb, heartbeat=HEARTBEAT)
    code, line, other_code, other_line = FAULTS[fault]
    wanted = [(code, line), (other_code, other_line)]
    for process, (code, line) in zip((ended[who], ended[1 - who]), wanted, strict=True):
        print(f"--- code {process.code}\n{process.err[-3000:]}")
        if code in (LOST, None) and process.code == -signal.SIGABRT:
            # Its heartbeats failed before a collective did: JAX aborts it, with a stack.
            continue
        assert process.code == code or (code is None and process.code in (LOST, TEMPORARY))
        if line is not None:
            assert re.fullmatch(line, process.err.splitlines()[-1])
        if (fault, process) != ("bug", ended[who]):
            assert not STACK.search(process.err)
    assert time.monotonic() - start < 90
